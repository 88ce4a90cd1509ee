"""The section on load: rows and time of every rank, and who is last."""

import numpy as np

from jax_ep.tools.diagnosis import Diagnosis, Last, most_often_last
from jax_ep.tools.measurement import Measurement
from jax_ep.tools.page import heat, units
from jax_ep.tools.page.document import Figure, Finding, Part, Section, Table
from jax_ep.tools.page.drawing import Drawing

MOST_STEPS = 200  # of a table
_CASES = {
    "even": "The ranks end almost together: little to gain here.",
    "placement": "The last rank stays the same and has the most rows: place the "
    "experts otherwise, or give the hot ones replicas (jax_ep.plan_placement).",
    "device": "Rows are even and times are not: look at that device and its path "
    "first, not at the routing.",
    "routing": "The last rank changes, and the rows with it: the routing is uneven "
    "from step to step, which no fixed placement mends.",
    "unclear": "Rows do not explain who is last: compare more steps before "
    "anything is moved.",
}


def section(measurement: Measurement, diagnosis: Diagnosis) -> Section:
    """Two maps of the same steps: rows, then time."""
    load, last = measurement.load, diagnosis.last
    rows = np.array(load.rank_rows)
    parts: list[Part] = [Finding(_finding(rows, last, diagnosis))]
    if last is not None:
        parts.append(_CASES[last.case] + _correlation(last))
    if len(rows) > heat.MOST:
        parts.append(
            f"{len(rows)} steps are drawn in {heat.MOST} columns, each the mean of the "
            "steps in it; the mark is on the rank that was last most often."
        )
    parts.append(
        _map("load-rows", "Rows", rows, units.count, ("most", "the rank with the most"))
    )
    if load.rank_seconds is None:
        parts.append("The time of each rank's experts was not measured.")
    else:
        title = "Time of each rank's experts, without waiting for the others"
        parts.append(
            _map(
                "load-time",
                title,
                np.array(load.rank_seconds),
                units.seconds,
                ("last", "the last rank"),
            )
        )
    dropped = int(np.sum(load.dropped_rows))
    if dropped:
        share = units.percent(dropped / (rows.sum() + dropped))
        parts.append(
            f"{units.count(dropped)} rows ({share}) found no room in the receive "
            f"buffer of {units.count(measurement.layer.capacity)} rows and were "
            "dropped."
        )
    else:
        parts.append("No row was dropped.")
    return Section("load", "Load", parts)


def _finding(rows: np.ndarray, last: Last | None, diagnosis: Diagnosis) -> str:
    if not rows.any():
        return "No rank received a row."
    if last is None:
        mean = np.maximum(rows.mean(1), 1)
        over = float(np.median(rows.max(1) / mean)) - 1
        return f"The busiest rank has {units.percent(over)} more rows than the mean."
    steps, ranks = rows.shape
    lost = diagnosis.lost_seconds["load"] or 0.0
    if ranks == 1:
        return "There is one rank, so nobody waits for another."
    who = most_often_last(last).capitalize()
    if steps == 1:
        who += " in the one step that was measured"
    return (
        f"{who}: the others wait {units.seconds(lost)} for the last on average. The "
        f"busiest rank has {units.percent(last.row_imbalance)} more rows than the "
        f"mean, the slowest takes {units.percent(last.time_imbalance)} longer."
    )


def _correlation(last: Last) -> str:
    if last.correlation is None:
        return ""
    return (
        f" Correlation of rows and time, all steps and ranks: {last.correlation:.2f}."
    )


def _map(name: str, title: str, values: np.ndarray, show, words) -> Figure:
    steps, ranks = values.shape
    alike = values.max(axis=1) == values.min(axis=1)
    last = np.where(alike, -1, values.argmax(axis=1))
    often = np.bincount(last[~alike], minlength=ranks)
    drawing = Drawing(
        name,
        f"{title}, by rank and step",
        "; ".join(
            f"rank {rank}: mean {show(values[:, rank].mean())}, "
            f"{words[0]} in {often[rank]}"
            for rank in range(ranks)
        ),
    )
    heat.draw(drawing, values, last, show, words)
    cells = [
        [
            f"{step}",
            *(show(value) for value in values[step]),
            "all alike" if alike[step] else f"rank {last[step]}",
        ]
        for step in range(min(steps, MOST_STEPS))
    ]
    caption = drawing.title
    if steps > MOST_STEPS:
        caption += f", the first {MOST_STEPS} steps"
    head = ("Step", *(f"rank {rank}" for rank in range(ranks)), "Most")
    return Figure(drawing, Table(caption, head, cells))
