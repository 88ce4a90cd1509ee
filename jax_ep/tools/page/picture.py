"""A drawing as a PNG file, by matplotlib."""

from pathlib import Path

from jax_ep.tools.page.drawing import SMALL, TEXT, Box, Drawing, Rule
from jax_ep.tools.page.palette import FILLS, LIGHT

WIDTH = 900  # pixels of the page
RESOLUTION = 200  # dots per inch of the file; the page's pixels are 96 to the inch
MARGIN = 20
_HATCHES = {
    "diagonal": "/////",
    "dots": "....",
    "horizontal": "-----",
    "vertical": "|||",
}
_RULES = {"grid": ("line", 0.8), "axis": ("muted", 1), "bold": ("ink", 2.5)}


def save(drawing: Drawing, path: Path) -> None:
    """Writes the picture whole, or not at all."""
    # Not pyplot: a figure of its own touches no state of the process, and no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    head = 34 + (20 if drawing.key else 0)
    height = drawing.height + head + MARGIN
    figure = Figure(figsize=((WIDTH + 2 * MARGIN) / 96, height / 96), dpi=RESOLUTION)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-MARGIN, WIDTH + MARGIN), ylim=(drawing.height + MARGIN, -head))
    axes.set_axis_off()

    def box(left, top, width, height, fill):
        style = FILLS[fill]
        axes.add_patch(
            Rectangle(
                (left, top),
                width,
                height,
                facecolor=LIGHT[style.base],
                edgecolor=LIGHT[style.edge],
                hatch=_HATCHES.get(style.hatch or ""),
                linewidth=0.6,
            )
        )

    def write(left, baseline, text, size, color="ink", **options):
        options = {"ha": "left", "va": "baseline", **options}
        points = size * 72 / 96
        axes.text(left, baseline, text, fontsize=points, color=LIGHT[color], **options)

    write(0, -head + 20, drawing.title, TEXT + 2, fontweight="bold")
    at = 0.0
    for fill, meaning in drawing.key:
        box(at, -22, 20, 12, fill)
        write(at + 26, -12, meaning, SMALL)
        at += 50 + 7 * len(meaning)
    for mark in drawing.marks:
        if isinstance(mark, Box):
            left, right = mark.left * WIDTH, mark.right * WIDTH
            box(left, mark.top, max(right - left, 0), mark.height, mark.fill)
        elif isinstance(mark, Rule):
            color, width = _RULES[mark.kind]
            axes.plot(
                (mark.left * WIDTH, mark.right * WIDTH),
                (mark.top, mark.bottom),
                color=LIGHT[color],
                linewidth=width * 0.75,
                solid_capstyle="butt",
            )
        else:
            align = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
            kind = mark.kind.split()[0]
            write(
                mark.left * WIDTH + mark.shift,
                mark.baseline,
                mark.text,
                SMALL if kind in ("note", "inside") else TEXT,
                color=_ink(mark.kind),
                ha=align,
                fontweight="bold" if kind == "value" else "normal",
            )
    partial = path.with_name(path.name + ".partial")
    try:
        figure.savefig(partial, format="png", facecolor=LIGHT["surface"])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _ink(kind: str) -> str:
    if kind == "note":
        return "muted"
    on = kind.removesuffix(" wide").partition("on-")[2]
    return FILLS[on].text if on and FILLS[on].hatch is None else "ink"
