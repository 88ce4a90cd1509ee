"""`python -m jax_ep`: see `jax_ep/tools/cli.py`."""

import importlib.util
import sys

from jax_ep.installed import pip_install

_MISSING = [
    name for name in ("rich", "typer") if importlib.util.find_spec(name) is None
]

if _MISSING:
    sys.exit(
        f"jax_ep: the command line needs {' and '.join(_MISSING)}: "
        f"{pip_install('tools')}."
    )

from jax_ep.tools.cli import main  # noqa: E402

main()
