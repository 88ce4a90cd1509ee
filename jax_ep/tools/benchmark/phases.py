"""From stamps to the phases of a measurement."""

import statistics
from collections.abc import Iterable

import numpy as np

from jax_ep.stamps import Stamps

# Whose kernel, or handler, a stage runs.
RUNS = {
    "layout": "layout",
    "dispatch": "dispatch",
    "combine": "combine",
    "dispatch backward": "combine",
    "combine backward": "dispatch",
}


def phases(stamps: Stamps) -> dict[str, float]:
    """Seconds of each phase of one call on one rank.

    On CPU devices "wait" for the last rank and "copy". On CUDA "issue" until the last
    send of any block, "drain" until the last arrival at any, "epilogue" until the last
    row is in its place. The three follow one another: what of a later phase is done
    while an earlier one goes on is hidden, and counts in neither.
    """
    if "arrived" in stamps.names:
        return {
            "wait": stamps.seconds("arrived", "began"),
            "copy": stamps.seconds("began", "ended"),
        }
    found, now = {}, int(_times(stamps, "began").min())
    for phase, name in (
        ("issue", "last_send"),
        ("drain", "last_arrival"),
        ("epilogue", "last_row"),
    ):
        # No block did this kind where there is but one rank.
        end = int(_times(stamps, name).max(initial=now))
        found[phase] = max(0, end - now) / 1e9
        now = max(now, end)
    return found


def _times(stamps: Stamps, name: str) -> np.ndarray:
    times = stamps.times[:, stamps.names.index(name)]
    return times[times > 0]


def median_phases(
    calls: Iterable[list[Stamps]], stage: str, num_ranks: int
) -> list[dict[str, float]] | None:
    """Of several calls of a stage: by rank, the median of each phase.

    Args:
      calls: the stamps that were read after each call.
      stage: as `Exchange.stage` names it.
      num_ranks: R; None is returned where a rank of them left no stamps.
    """
    by_rank: list[list[dict[str, float]]] = [[] for _ in range(num_ranks)]
    for stamps in calls:
        for each in stamps:
            if each.stage == RUNS[stage]:
                by_rank[each.rank].append(phases(each))
    if not all(by_rank):
        return None
    return [
        {name: statistics.median(call[name] for call in rank) for name in rank[0]}
        for rank in by_rank
    ]
