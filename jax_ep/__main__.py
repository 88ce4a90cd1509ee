"""`jax_ep` and `python -m jax_ep`: see `jax_ep/tools/cli.py`."""

import importlib.util
import sys

from jax_ep.installed import pip_install


def main() -> None:
    """Runs the command line, or says what it lacks."""
    needed = ("rich", "typer")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"jax_ep: the command line needs {' and '.join(missing)}: "
            f"{pip_install('tools')}."
        )
    from jax_ep.tools import cli

    cli.main()


if __name__ == "__main__":
    main()
