"""The first section: the seconds lost to each of the four, on the scale of a step."""

from jax_ep.tools.diagnosis import KINDS, Diagnosis
from jax_ep.tools.measurement import Measurement
from jax_ep.tools.page import bars, conditions, units
from jax_ep.tools.page.document import Figure, Finding, Part, Section, Table
from jax_ep.tools.page.drawing import Drawing

_MEANING = {
    "bandwidth": "dispatch and combine, over their floors",
    "padding": "the experts' work on rows that hold no token",
    "load": "the slowest rank's experts, over the mean rank's",
    "overlap": "the step, over one that hides all it can",
}


def section(diagnosis: Diagnosis, measurement: Measurement) -> Section:
    """A bar for each, the one that holds the run back standing out."""
    rows, cells = [], []
    step = diagnosis.step_seconds
    overlap = measurement.overlap
    if step and overlap is not None:  # The one is the other's measured time.
        whole = [(step, "whole", f"the step {units.seconds(step)}")]
        share = units.percent(min(1.0, overlap.compute_seconds / step))
        note = f"of which the experts alone {share}; all bars are to its scale"
        rows.append(bars.Row("The step", units.seconds(step), whole, note))
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
        name = "latency" if kind == "bandwidth" and diagnosis.is_latency else kind
        label = name.capitalize() + (" – the most" if worst else "")
        rows.append(bars.Row(label, value, pieces, _MEANING[kind]))
        seconds = "not measured" if lost is None else units.seconds(lost)
        cells.append(
            [name, seconds, share, diagnosis.reasons[kind], diagnosis.remedies[kind]]
        )
    drawing = Drawing(
        "summary",
        "Time lost to each of the four",
        "; ".join(f"{row.label} {row.value}" for row in rows),
    )
    head = ("Lost to", "Time", "Of the step", "Why", "What to try")
    figure = Figure(bars.draw(drawing, rows, step), Table(drawing.title, head, cells))
    parts: list[Part] = []
    if diagnosis.dropped:
        parts.append(
            Finding(
                f"{units.percent(diagnosis.dropped)} of the rows found no room in the "
                "receive buffers and were dropped: the times are of the rest."
            )
        )
    if (busy := conditions.busy_host(measurement)) is not None:
        parts.append(Finding(busy))
    if diagnosis.held_back_by is not None:
        parts.append(Finding(f"To try: {diagnosis.remedies[diagnosis.held_back_by]}"))
    if diagnosis.unexplained_seconds:
        parts.append(
            f"The step takes {units.seconds(diagnosis.unexplained_seconds)} more than "
            "its parts one after another. That is unexplained, and part of none of the "
            "four."
        )
    return Section(
        "summary",
        "What holds this run back",
        [
            *parts,
            "Each bar is the time of one forward step that would go if this one thing "
            "were perfect. The four are measured apart and do not add up: a padded row "
            "may also be what makes a rank the last.",
            figure,
        ],
    )
