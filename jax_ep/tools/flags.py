"""Flags that several commands have, each with one name and one meaning.

The names are those of the package's arguments and of `MoEConfig`'s fields.
"""

import typer

from jax_ep.tools.console import UserError
from jax_ep.tools.models import MODELS

MODEL_HELP = f"A known model: {', '.join(MODELS)}."

MODEL = typer.Option(help=f"{MODEL_HELP} Other flags override.")
RANKS = typer.Option(help="R, ranks that share the experts.")
TOKENS = typer.Option(help="T, tokens per rank.")
HIDDEN = typer.Option(help="H.")
EXPERT_HIDDEN = typer.Option(help="F, of a routed expert.")
EXPERTS = typer.Option(help="E, over all ranks.")
TOPK = typer.Option(help="K, experts per token.")
ALIGNMENT = typer.Option(help="A, expert alignment in rows.")
NUM_SMS = typer.Option(help="SMs of the CUDA kernels.")
JSON = typer.Option("--json", help="JSON alone on standard output.")


def capacity_factor(text: str) -> float | None:
    """What `--capacity-factor` says; None is dropless.

    Raises:
      UserError: neither a number nor "none".
    """
    if text in ("none", "-1"):
        return None
    try:
        return float(text)
    except ValueError:
        raise UserError(
            f"--capacity-factor (={text}) must be a number, or none for dropless."
        ) from None
