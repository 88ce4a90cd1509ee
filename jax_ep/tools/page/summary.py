"""The first section: the seconds lost to each of the four."""

from jax_ep.tools.diagnosis import KINDS, Diagnosis
from jax_ep.tools.page import bars, units
from jax_ep.tools.page.document import Figure, Section, Table
from jax_ep.tools.page.drawing import Drawing

_MEANING = {
    "bandwidth": "dispatch and combine, over their floors",
    "padding": "the experts' work on rows that hold no token",
    "load": "the slowest rank's experts, over the mean rank's",
    "overlap": "the step, over one that hides all it can",
}


def section(diagnosis: Diagnosis) -> Section:
    """A bar for each, the one that holds the run back standing out."""
    rows, cells = [], []
    for kind in KINDS:
        lost = diagnosis.lost_seconds[kind]
        worst = kind == diagnosis.held_back_by
        value, share = "not measured", "–"
        if lost is not None:
            value = units.seconds(lost)
            if diagnosis.step_seconds:
                share = units.percent(lost / diagnosis.step_seconds)
                value += f", {share} of the step"
        fill = "worst" if worst else "plain"
        pieces = [(lost, fill, value)] if lost else []
        label = kind.capitalize() + (" – the most" if worst else "")
        rows.append(bars.Row(label, value, pieces, _MEANING[kind]))
        seconds = "not measured" if lost is None else units.seconds(lost)
        cells.append([kind, seconds, share, diagnosis.reasons[kind]])
    drawing = Drawing(
        "summary",
        "Time lost to each of the four",
        "; ".join(f"{row.label} {row.value}" for row in rows),
    )
    head = ("Lost to", "Time", "Of the step", "Why")
    figure = Figure(bars.draw(drawing, rows), Table(drawing.title, head, cells))
    return Section(
        "summary",
        "What holds this run back",
        [
            "Each bar is the time of one forward step that would go if this one thing "
            "were perfect. The four are measured apart and do not add up: a padded row "
            "may also be what makes a rank the last.",
            figure,
        ],
    )
