"""A chart as boxes, rules and texts, from which both the page and the pictures come.

Across, positions are fractions of the chart's width; down, they are pixels. So a chart
fills a phone as it fills a screen, while its text keeps its size.
"""

import dataclasses

TEXT = 13  # pixels
SMALL = 12
CHARACTER = 7.2  # pixels, of an average character of TEXT
NARROWEST = 340  # pixels, of a chart on a phone
WIDE = 700  # pixels; texts of kind "wide" show from here on


@dataclasses.dataclass(frozen=True)
class Box:
    """A filled rectangle; `fill` is a name of `palette.FILLS`, `tip` shows on hover."""

    left: float
    right: float
    top: float
    height: float
    fill: str
    tip: str = ""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A straight line; `kind` is "grid", "axis", "mark" or "bold"."""

    left: float
    top: float
    right: float
    bottom: float
    kind: str = "grid"


@dataclasses.dataclass(frozen=True)
class Text:
    """One line of text on a baseline; `kind` is "label", "value", "note" or
    "inside", with "on-<fill>" and perhaps "wide" after it.

    Attributes:
      shift: pixels to the right of `left`.
      anchor: "start", "middle" or "end".
    """

    left: float
    baseline: float
    text: str
    kind: str = "label"
    anchor: str = "start"
    shift: float = 0


@dataclasses.dataclass
class Drawing:
    """One chart.

    Attributes:
      name: of its file and of its element.
      title: a line above it.
      summary: what a reader who cannot see it is told.
      key: (fill, meaning) of each fill that needs one.
      marks: what is drawn, in this order.
      height: pixels.
    """

    name: str
    title: str
    summary: str
    key: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    marks: list[Box | Rule | Text] = dataclasses.field(default_factory=list)
    height: float = 0

    def add(self, *marks: Box | Rule | Text) -> None:
        """Puts marks above those that are there."""
        self.marks += marks


def fits(text: str, width: float, chart: float = NARROWEST) -> bool:
    """Whether `text` has room in `width`, a fraction of a chart of `chart` pixels."""
    return len(text) * CHARACTER + 8 <= width * chart
