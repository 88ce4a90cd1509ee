"""Colours and hatches, for the page and for the pictures.

A fill says what a box is: by lightness and hatching first, by colour second, so that
the charts hold in grey. Blue is communication, grey is compute, rust is what is lost.
"""

import dataclasses

LIGHT = {
    "surface": "#ffffff",
    "raised": "#f4f6f8",
    "ink": "#1b1f24",
    "muted": "#545d68",
    "line": "#cfd6dd",
    "link": "#174c8c",
    "link-soft": "#bcd6f2",
    "compute": "#8592a0",
    "compute-soft": "#e3e7eb",
    "loss": "#a8410f",
    "loss-soft": "#f7d9c8",
    "heat-0": "#e9eff7",
    "heat-1": "#d0dff1",
    "heat-2": "#b3cdeb",
    "heat-3": "#86b0df",
    "heat-4": "#558dcb",
    "heat-5": "#2f6bb0",
    "heat-6": "#164a85",
}
DARK = {
    "surface": "#14171b",
    "raised": "#1d2227",
    "ink": "#e8ebee",
    "muted": "#a9b3be",
    "line": "#3b434d",
    "link": "#6fadf2",
    "link-soft": "#223f61",
    "compute": "#5f6b78",
    "compute-soft": "#2a3037",
    "loss": "#f39763",
    "loss-soft": "#55301c",
    "heat-0": "#1b222b",
    "heat-1": "#22344a",
    "heat-2": "#2b4a6e",
    "heat-3": "#366395",
    "heat-4": "#4a82bf",
    "heat-5": "#74a8e0",
    "heat-6": "#b5d4f6",
}
HEAT_STEPS = 7


@dataclasses.dataclass(frozen=True)
class Fill:
    """What the inside of a box looks like.

    Attributes:
      base: name of a colour.
      edge: name of the colour of its outline and of the hatching.
      hatch: None, "diagonal", "dots", "horizontal" or "vertical".
    """

    base: str
    edge: str
    hatch: str | None = None

    @property
    def text(self) -> str:
        """Name of the colour of text on it."""
        return "surface" if self.base in ("link", "loss") else "ink"


FILLS = {
    "floor": Fill("link", "link"),
    "excess": Fill("loss-soft", "loss", "diagonal"),
    # The phases of a stage, darkest first.
    "issue": Fill("link", "link"),
    "drain": Fill("link-soft", "link", "diagonal"),
    "epilogue": Fill("surface", "link", "dots"),
    "wait": Fill("surface", "muted", "horizontal"),
    "copy": Fill("link", "link"),
    # The timeline.
    "communication": Fill("link", "link"),
    "compute": Fill("compute-soft", "compute", "vertical"),
    "independent": Fill("compute", "compute"),
    # Rows and the rest.
    "valid": Fill("compute", "compute"),
    "padding": Fill("loss-soft", "loss", "diagonal"),
    "plain": Fill("compute", "compute"),
    "whole": Fill("raised", "ink"),  # All of a step, of whatever kind.
    "worst": Fill("loss", "loss"),
    "last": Fill("surface", "ink"),
    **{f"heat-{i}": Fill(f"heat-{i}", "surface") for i in range(HEAT_STEPS)},
}
