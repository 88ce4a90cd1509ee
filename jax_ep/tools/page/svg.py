"""A drawing as an SVG element of the page."""

from html import escape

from jax_ep.tools.page import palette
from jax_ep.tools.page.drawing import Box, Drawing, Rule

_HATCHES = {
    "diagonal": ("M-1,7 7,-1 M-1,1 1,-1 M5,7 7,5", 6),
    "dots": ("M1.5,2.5h2v2h-2z M4.5,5.5h2v2h-2z M4.5,-0.5h2v2h-2z", 6),
    "horizontal": ("M0,1.5h5", 5),
    "vertical": ("M2,0v5", 5),
}


def element(drawing: Drawing) -> str:
    """The chart: one picture to a screen reader, with its summary for a label."""
    label = escape(f"{drawing.title}. {drawing.summary}", quote=True)
    return "\n".join(
        [
            f'<svg class="chart" id="{drawing.name}" role="img" aria-label="{label}" '
            f'width="100%" height="{drawing.height:g}">',
            *map(_mark, drawing.marks),
            "</svg>",
        ]
    )


def swatch(fill: str) -> str:
    """A sample of a fill, for a key."""
    return (
        '<svg class="swatch" aria-hidden="true" width="22" height="14">'
        f'<rect class="{_class(fill)}" x="1" y="1" width="20" height="12"/></svg>'
    )


def patterns() -> str:
    """The hatches, once for the page. Not hidden by `display`: they would not paint."""
    parts = ['<svg class="patterns" aria-hidden="true" width="0" height="0"><defs>']
    for name, fill in palette.FILLS.items():
        if fill.hatch:
            path, cell = _HATCHES[fill.hatch]
            ink = "fill" if fill.hatch == "dots" else "stroke"
            parts.append(
                f'<pattern id="hatch-{name}" patternUnits="userSpaceOnUse" '
                f'width="{cell}" height="{cell}">'
                f'<rect width="{cell}" height="{cell}" fill="var(--{fill.base})"/>'
                f'<path d="{path}" {ink}="var(--{fill.edge})"/></pattern>'
            )
    return "".join(parts) + "</defs></svg>"


def _class(fill: str) -> str:
    return f"fill-{fill}"


def _mark(mark) -> str:
    if isinstance(mark, Box):
        tip = f"<title>{escape(mark.tip)}</title>" if mark.tip else ""
        return (
            f'<rect class="{_class(mark.fill)}" x="{_share(mark.left)}" '
            f'y="{mark.top:g}" width="{_share(max(mark.right - mark.left, 0))}" '
            f'height="{mark.height:g}">{tip}</rect>'
        )
    if isinstance(mark, Rule):
        return (
            f'<line class="{mark.kind}" x1="{_share(mark.left)}" y1="{mark.top:g}" '
            f'x2="{_share(mark.right)}" y2="{mark.bottom:g}"/>'
        )
    shift = f' dx="{mark.shift:g}"' if mark.shift else ""
    anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
    return (
        f'<text class="{mark.kind}" x="{_share(mark.left)}" y="{mark.baseline:g}"'
        f"{shift}{anchor}>{escape(mark.text)}</text>"
    )


def _share(value: float) -> str:
    return f"{value * 100:.3f}".rstrip("0").rstrip(".") + "%"
