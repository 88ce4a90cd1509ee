"""A column for each expert, the worst first: slots for each row."""

import math
from collections.abc import Sequence

from jax_ep.tools.page import units
from jax_ep.tools.page.drawing import SMALL, Box, Drawing, Rule, Text

GUTTER = 0.14  # of the width, for the scale
HEIGHT = 170  # pixels
LOGARITHMIC = 4.0  # from here on the scale doubles


def draw(drawing: Drawing, factors: Sequence[float], tips: Sequence[str]) -> Drawing:
    """Columns that stand on 1, where every slot holds a row.

    Args:
      drawing: what is drawn below.
      factors: slots over rows, descending, each at least 1.
      tips: a text for each; what the first says before a comma labels its column.
    """
    highest = max(factors[0], 1.25)
    doubling = highest > LOGARITHMIC
    scale = math.log2(highest) if doubling else highest - 1
    top = drawing.height + SMALL + 8
    bottom = top + HEIGHT

    def height(factor: float) -> float:
        above = math.log2(factor) if doubling else factor - 1
        return HEIGHT * above / scale

    for tick in _ticks(highest, doubling):
        y = bottom - height(tick)
        drawing.add(Rule(GUTTER, y, 1, y, "grid" if tick > 1 else "axis"))
        drawing.add(Text(GUTTER, y + 4, units.times(tick), "note", "end", -6))
    wide = (1 - GUTTER) / len(factors)
    for i, (factor, tip) in enumerate(zip(factors, tips, strict=True)):
        left = GUTTER + i * wide
        fill = "worst" if i == 0 else "plain"
        right = left + wide * (0.8 if len(factors) <= 64 else 1)
        drawing.add(
            Box(left, right, bottom - height(factor), height(factor), fill, tip)
        )
    drawing.add(
        Text(GUTTER, top - 6, f"{tips[0].partition(',')[0]}", "label"),
        Text(GUTTER, bottom + SMALL + 5, "worst expert", "note"),
        Text(1, bottom + SMALL + 5, "best expert", "note", "end"),
    )
    drawing.height = bottom + SMALL + 12
    return drawing


def _ticks(highest: float, doubling: bool) -> list[float]:
    if doubling:
        powers = int(math.log2(highest))
        return [2.0**i for i in range(0, powers + 1, 1 + powers // 6)]
    return [1 + tick for tick in units.ticks(highest - 1, 4)]
