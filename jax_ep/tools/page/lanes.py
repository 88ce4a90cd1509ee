"""Lanes over an axis of time: the ranks of a stage, or the timeline of a step."""

from collections.abc import Collection, Sequence

from jax_ep.tools.page import units
from jax_ep.tools.page.drawing import SMALL, TEXT, WIDE, Box, Drawing, Rule, Text, fits

GUTTER = 0.16  # of the width, for the lanes' names
THICK, THIN = 22, 8  # pixels of a lane; thin are ranks where there are many
HALF = 16, 5  # pixels of a row of a lane of two
MANY = 16
EVERY = 8  # of these is named
AXIS = 26

Span = tuple[float, float, str, str]  # start, stop, fill, name


def draw(
    drawing: Drawing,
    lanes: Sequence[tuple[str, Sequence[Span]]],
    named: bool = False,
    below: Collection[str] = (),
) -> Drawing:
    """A lane for each (name, spans), from 0 to the last stop.

    Args:
      drawing: what is drawn below.
      lanes: names, and spans in seconds.
      named: whether a span's name is written into it where it has room.
      below: fills that have a second row, in lanes that have any of them: what runs
        beside something else is then seen below it.
    """
    end = max([stop for _, spans in lanes for _, stop, _, _ in spans], default=0) or 1
    crowded = len(lanes) > MANY
    start_of_lanes = len(drawing.marks)
    top = y = drawing.height
    ranks = 0
    y += 4 * crowded  # Room for the first name, which is taller than its lane.
    for name, spans in lanes:
        is_rank = name.startswith("rank ")
        thin = crowded and is_rank
        double = any(fill in below for _, _, fill, _ in spans)
        height = HALF[thin] if double else (THICK, THIN)[thin]
        whole = height * (1 + double)
        if not thin or ranks % EVERY == 0:
            middle = y + whole / 2 + TEXT / 2 - 2
            drawing.add(Text(0, y + TEXT - 3 if thin else middle, name))
        ranks += is_rank
        for start, stop, fill, what in spans:
            left, right = _across(start / end), _across(stop / end)
            at = y + height * (fill in below)
            tip = f"{name}, {what}: {units.seconds(stop - start)}"
            drawing.add(Box(left, right, at, height, fill, tip))
            if named and not thin and fits(what, right - left, WIDE):
                narrow = fits(what, right - left)
                kind = f"inside on-{fill}" + ("" if narrow else " wide")
                baseline = at + height / 2 + 4
                drawing.add(Text((left + right) / 2, baseline, what, kind, "middle"))
        y += whole + (2 if thin else 8)
    drawing.marks[start_of_lanes:start_of_lanes] = _axis(end, top, y)
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
