"""Bars to compare: a line of text, a bar in pieces, a line of detail, for each."""

import dataclasses
from collections.abc import Sequence

from jax_ep.tools.page.drawing import SMALL, TEXT, Box, Drawing, Rule, Text

BAR = 18  # pixels
GAP = 16


@dataclasses.dataclass(frozen=True)
class Row:
    """One bar.

    Attributes:
      label, value: texts above it, left and right.
      pieces: (length, fill, tip), one after the other.
      note: a text below it.
      mark: where a vertical mark crosses it, in the pieces' unit.
    """

    label: str
    value: str
    pieces: Sequence[tuple[float, str, str]]
    note: str = ""
    mark: float | None = None


def draw(drawing: Drawing, rows: Sequence[Row], top: float | None = None) -> Drawing:
    """All bars to one scale, that of the longest or of `top`."""
    longest = max(
        [sum(p[0] for p in r.pieces) for r in rows] + [r.mark or 0 for r in rows]
    )
    scale = top or longest or 1.0
    y = drawing.height
    for row in rows:
        drawing.add(
            Text(0, y + TEXT, row.label),
            Text(1, y + TEXT, row.value, "value", "end"),
        )
        y += TEXT + 7
        drawing.add(Rule(0, y + BAR + 0.5, 1, y + BAR + 0.5))
        end = 0.0
        for length, fill, tip in row.pieces:
            drawing.add(Box(end / scale, (end + length) / scale, y, BAR, fill, tip))
            end += length
        if row.mark is not None:
            at = min(row.mark / scale, 1)
            drawing.add(Rule(at, y - 4, at, y + BAR + 4, "bold"))
        y += BAR
        if row.note:
            y += SMALL + 5
            drawing.add(Text(0, y, row.note, "note"))
        y += GAP
    used = {piece[1] for row in rows for piece in row.pieces}
    drawing.key = [(fill, text) for fill, text in drawing.key if fill in used]
    drawing.height = y
    return drawing
