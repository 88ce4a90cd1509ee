"""The ids that a benchmark runs on: made, or those of a recorded training run."""

import dataclasses
import warnings
from pathlib import Path

import numpy as np

from jax_ep import record
from jax_ep.tools.benchmark import routings
from jax_ep.tools.console import UserError

SEEDS = 8  # batches of a made routing


@dataclasses.dataclass(frozen=True)
class Replay:
    """Expert ids, batch by batch.

    Attributes:
      name: of the kind, or of the file and its layer.
      ids: `[steps, R, T, K]` int32; negative ones are masked.
      experts: E.
    """

    name: str
    ids: np.ndarray
    experts: int

    def demand(self) -> np.ndarray:
        """`[steps, E]`: rows that each expert is wanted for."""
        return np.stack(
            [
                np.bincount(
                    step[(step >= 0) & (step < self.experts)], minlength=self.experts
                )
                for step in self.ids
            ]
        )

    def typical(self) -> int:
        """The step whose busiest rank is the median one: times are taken of it."""
        ranks = self.ids.shape[1]
        busiest = self.demand().reshape(len(self.ids), ranks, -1).sum(2).max(1)
        return int(np.argsort(busiest, kind="stable")[(len(busiest) - 1) // 2])


def made(
    kind: str, *, ranks: int, tokens: int, topk: int, experts: int, steps: int | None
) -> Replay:
    """A kind of `routings.KINDS`, with a seed for each step.

    Raises:
      UserError: no such kind.
    """
    if kind not in routings.KINDS:
        raise UserError(
            f"routing (={kind}) must be {', '.join(routings.KINDS)}, or a recorded "
            "file."
        )
    # One-hot has nothing to draw.
    seeds = 1 if kind == "one-hot" else steps or SEEDS
    batches = [
        routings.make_ids(kind, ranks, tokens, topk, experts, seed)
        for seed in range(seeds)
    ]
    return Replay(kind, np.stack(batches), experts)


def recorded(
    path: Path, *, layer: str | None, ranks: int | None, steps: int | None
) -> Replay:
    """A recording of `jax_ep.record`.

    Args:
      path: of the file.
      layer: its name there; None is the first one.
      ranks: R, over which a step's tokens are split; None is that of the run.
      steps: at most so many, evenly spaced; None is all.

    Raises:
      UserError: it is no recording, or what was asked for is not in it.
      FileNotFoundError: no such file.
    """
    try:
        with warnings.catch_warnings():
            # That it was not closed; the name says so.
            warnings.simplefilter("ignore", UserWarning)
            recording = record.read(path)
        if not recording.steps:
            raise UserError(f"{path}: no step was recorded.")
        names = list(next(iter(recording)).topk_idx)
        layer = names[0] if layer is None else layer
        ids = record.ids(recording, layer=layer, num_ranks=ranks)
    except ValueError as error:
        raise UserError(str(error)) from None
    if steps is not None and steps < len(ids):
        ids = ids[np.linspace(0, len(ids) - 1, steps).round().astype(int)]
    name = f"{path.name}, layer {layer}"
    if not recording.is_complete:
        name += ", not closed"
    return Replay(name, ids, recording.metadata.num_experts)
