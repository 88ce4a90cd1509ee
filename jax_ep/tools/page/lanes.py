"""Lanes over an axis of time: the ranks of a stage, or the timeline of a step."""

from collections.abc import Sequence

from jax_ep.tools.page import units
from jax_ep.tools.page.drawing import SMALL, TEXT, WIDE, Box, Drawing, Rule, Text, fits

GUTTER = 0.16  # of the width, for the lanes' names
THICK, THIN = 22, 8  # pixels; thin are ranks where there are many
MANY = 16
EVERY = 8  # of these is named
AXIS = 26

Span = tuple[float, float, str, str]  # start, stop, fill, name


def draw(
    drawing: Drawing, lanes: Sequence[tuple[str, Sequence[Span]]], named: bool = False
) -> Drawing:
    """A lane for each (name, spans), from 0 to the last stop.

    Args:
      drawing: what is drawn below.
      lanes: names, and spans in seconds.
      named: whether a span's name is written into it where it has room.
    """
    end = max([stop for _, spans in lanes for _, stop, _, _ in spans], default=0) or 1
    crowded = len(lanes) > MANY
    axis = len(drawing.marks)
    top = y = drawing.height
    ranks = 0
    y += 4 * crowded  # Room for the first name, which is taller than its lane.
    for name, spans in lanes:
        is_rank = name.startswith("rank ")
        thin = crowded and is_rank
        height = THIN if thin else THICK
        if not thin or ranks % EVERY == 0:
            drawing.add(Text(0, y + (TEXT - 3 if thin else TEXT + 3), name))
        ranks += is_rank
        for start, stop, fill, what in spans:
            left, right = _across(start / end), _across(stop / end)
            tip = f"{name}, {what}: {units.seconds(stop - start)}"
            drawing.add(Box(left, right, y, height, fill, tip))
            if named and not thin and fits(what, right - left, WIDE):
                narrow = fits(what, right - left)
                kind = f"inside on-{fill}" + ("" if narrow else " wide")
                drawing.add(Text((left + right) / 2, y + 15.5, what, kind, "middle"))
        y += height + (2 if thin else 8)
    drawing.marks[axis:axis] = _axis(end, top, y)  # Below the boxes.
    drawing.height = y + AXIS
    return drawing


def _across(share: float) -> float:
    return GUTTER + (1 - GUTTER) * share


def _axis(end: float, top: float, bottom: float) -> list[Rule | Text]:
    marks: list[Rule | Text] = []
    for tick in units.ticks(end, 4):
        at = _across(tick / end)
        # A label that would leave the chart stands left of its line.
        anchor = "middle" if tick / end < 0.9 else "end"
        marks.append(Rule(at, top, at, bottom))
        label = units.seconds(tick) if tick else "0"
        marks.append(Text(at, bottom + SMALL + 4, label, "note", anchor))
    marks.append(Rule(GUTTER, bottom, 1, bottom, "axis"))
    return marks
