"""The command line: `doctor`, `plan`, `bench` and `report`."""

import platform
import sys
from typing import Annotated

import jax
import jaxlib.version
import typer

import jax_ep
from jax_ep.tools import console
from jax_ep.tools.bench import bench
from jax_ep.tools.doctor import doctor
from jax_ep.tools.plan import plan
from jax_ep.tools.report import report

app = typer.Typer(
    name="jax_ep",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(wanted: bool) -> None:
    """One line: ours, and those that decide what runs."""
    if not wanted:
        return
    parts = [
        f"jax_ep {jax_ep.__version__}",
        f"jax {jax.__version__}",
        f"jaxlib {jaxlib.version.__version__}",
        f"Python {platform.python_version()}",
    ]
    console.console.print(", ".join(parts), highlight=False, soft_wrap=True)
    raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="And those of JAX."
        ),
    ] = False,
) -> None:
    """Expert parallelism for JAX: is this machine fit for it, what will it cost,
    how fast is it, and what holds it back.
    """


for command in (doctor, plan, bench, report):
    app.command()(command)


def main() -> None:
    """Runs a command; what it refuses is one line and exit status 2."""
    try:
        app()
    except console.UserError as error:
        refuse(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        refuse(f"{error.filename}: {error.strerror}.")


def refuse(line: str) -> None:
    """Ends the program with one line on standard error."""
    console.errors.print(
        f"jax_ep: {line}", highlight=False, markup=False, soft_wrap=True
    )
    sys.exit(2)
