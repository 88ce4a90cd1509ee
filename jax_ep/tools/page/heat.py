"""A value of every rank at every step, darker for more, with the last rank marked."""

from collections.abc import Callable

import numpy as np

from jax_ep.tools.page.drawing import SMALL, TEXT, Box, Drawing, Text
from jax_ep.tools.page.palette import HEAT_STEPS

GUTTER = 0.16  # of the width, for the ranks' names
MARGIN = 0.2  # for what is said of each rank
MOST = 48  # columns that can be told apart on a phone
CELL, THIN = 22, 10  # pixels


def columns(values: np.ndarray) -> np.ndarray:
    """`[steps, R]` in at most MOST columns: means of consecutive steps."""
    parts = np.array_split(values, min(MOST, len(values)))
    return np.stack([part.mean(axis=0) for part in parts])


def draw(
    drawing: Drawing,
    values: np.ndarray,
    last: np.ndarray,
    show: Callable[[float], str],
    words: tuple[str, str],
) -> Drawing:
    """One row of cells for each rank.

    Args:
      drawing: what is drawn below.
      values: `[steps, R]`.
      last: `[steps]`, the rank with the most; -1 where all are alike.
      show: writes a value.
      words: what is said of a rank ("last"), and of the mark.
    """
    steps, ranks = values.shape
    cells = columns(values)
    parts = np.array_split(last, len(cells))
    counts = np.stack([np.bincount(part[part >= 0], minlength=ranks) for part in parts])
    lowest, highest = float(cells.min()), float(cells.max())
    cell = CELL if ranks <= 16 else THIN
    wide = (1 - GUTTER - MARGIN) / len(cells)
    # Room for the first name, which is taller than a thin row.
    top = drawing.height + 4 * (cell == THIN)
    for rank in range(ranks):
        y = top + rank * (cell + 1)
        if cell == CELL or rank % 8 == 0:
            drawing.add(
                Text(0, y + min(cell, TEXT) + (cell > TEXT) * 3, f"rank {rank}")
            )
            often = f"{words[0]} in {counts[:, rank].sum()}"
            drawing.add(
                Text(1, y + min(cell, TEXT) + (cell > TEXT) * 3, often, "value", "end")
            )
        for i, value in enumerate(cells[:, rank]):
            level = (value - lowest) / (highest - lowest) if highest > lowest else 0.0
            left = GUTTER + i * wide
            tip = f"rank {rank}, {_steps(parts, i)}: {show(float(value))}"
            fill = f"heat-{min(int(level * HEAT_STEPS), HEAT_STEPS - 1)}"
            drawing.add(Box(left, left + wide, y, cell, fill, tip))
            if counts[i, rank] and counts[i, rank] == counts[i].max():
                inset = wide * 0.28
                mark = Box(
                    left + inset, left + wide - inset, y + cell / 2 - 2.5, 5, "last"
                )
                drawing.add(mark)
    y = top + ranks * (cell + 1) + SMALL + 3
    drawing.add(Text(GUTTER, y, "step 0" if steps > 1 else "one step", "note"))
    if steps > 1:
        drawing.add(Text(1 - MARGIN, y, f"step {steps - 1}", "note", "end"))
    drawing.height = y + 8
    drawing.key = [
        ("heat-0", show(lowest)),
        (f"heat-{HEAT_STEPS // 2}", show((lowest + highest) / 2)),
        (f"heat-{HEAT_STEPS - 1}", show(highest)),
        ("last", words[1]),
    ]
    return drawing


def _steps(parts: list, column: int) -> str:
    first = sum(len(part) for part in parts[:column])
    count = len(parts[column])
    return f"step {first}" if count == 1 else f"steps {first} to {first + count - 1}"
