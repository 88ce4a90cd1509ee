"""The section on padding: slots that are processed for each row that holds a token."""

import numpy as np

from jax_ep.tools.diagnosis import Diagnosis, amplification, padded
from jax_ep.tools.measurement import Measurement
from jax_ep.tools.page import bars, skyline, units
from jax_ep.tools.page.document import Figure, Finding, Part, Section, Table
from jax_ep.tools.page.drawing import Drawing

ALIGNMENTS = (1, 16, 64, 128, 256)  # of grouped GEMMs; 1 is no padding
MOST_ROWS = 512  # of a table


def section(measurement: Measurement, diagnosis: Diagnosis) -> Section:
    """Each expert's amplification, and what other alignments would cost."""
    alignment = measurement.layer.expert_alignment
    counts = np.array(measurement.load.expert_rows)
    factors = [
        (factor, expert)
        for expert, factor in enumerate(diagnosis.expert_amplification)
        if factor is not None
    ]
    factors.sort(key=lambda pair: (-pair[0], pair[1]))
    parts: list[Part] = [
        Finding(_finding(counts, alignment, diagnosis)),
        f"Every expert's group of rows ends on a multiple of the alignment, here "
        f"{alignment}: A_pad is slots processed over rows that hold a token. The more "
        "fragments, the more of it.",
    ]
    if factors:
        parts.append(_experts(counts, alignment, factors))
    idle = len(diagnosis.expert_amplification) - len(factors)
    if idle:
        experts = "expert" if idle == 1 else "experts"
        parts.append(f"{idle} {experts} without a row, not drawn.")
    if factors:
        parts.append(_alignments(counts, alignment))
    return Section("padding", "Padding", parts)


def _finding(counts: np.ndarray, alignment: int, diagnosis: Diagnosis) -> str:
    factor = diagnosis.amplification
    rows = int(counts.sum())
    slots = sum(padded(int(count), alignment) for count in counts.ravel())
    lost = diagnosis.lost_seconds["padding"]
    cost = "" if lost is None else f" It costs {units.seconds(lost)} a step."
    return (
        f"A_pad is {units.times(factor)}: {units.count(slots)} slots for "
        f"{units.count(rows)} rows, over {_steps(len(counts))}.{cost}"
    )


def _experts(counts: np.ndarray, alignment: int, factors: list) -> Figure:
    tips, cells = [], []
    for factor, expert in factors:
        rows = counts[:, expert]
        slots = sum(padded(int(count), alignment) for count in rows)
        total = int(rows.sum())
        tips.append(
            f"expert {expert}: {units.times(factor)}, {units.count(slots)} slots for "
            f"{units.count(total)} {'row' if total == 1 else 'rows'}"
        )
        name = f"expert {expert}"
        cells.append(
            [name, units.times(factor), units.count(total), units.count(slots)]
        )
    drawing = Drawing(
        "padding-experts",
        "Slots per row of each expert, the worst first",
        f"Worst: {tips[0]}. Best: {tips[-1]}.",
    )
    skyline.draw(drawing, [factor for factor, _ in factors], tips)
    caption = "A_pad of each expert"
    if len(cells) > MOST_ROWS:
        caption += f", the worst {MOST_ROWS}"
    head = ("Expert", "A_pad", "Rows", "Slots")
    return Figure(drawing, Table(caption, head, cells[:MOST_ROWS]))


def _alignments(counts: np.ndarray, alignment: int) -> Figure:
    flat = counts.ravel().tolist()
    rows, cells = [], []
    for other in sorted({*ALIGNMENTS, alignment}):
        factor = amplification(flat, other)
        here = other == alignment
        pieces = [(1.0, "valid", "rows that hold a token")]
        if factor > 1:
            pieces.append((factor - 1, "padding", f"{units.times(factor - 1)} padding"))
        label = f"alignment {other}" + (" – this run" if here else "")
        rows.append(bars.Row(label, units.times(factor), pieces))
        cells.append([f"{other}", units.times(factor)])
    drawing = Drawing(
        "padding-alignments",
        "The same rows at other alignments",
        "; ".join(f"{row.label} {row.value}" for row in rows),
        [("valid", "rows that hold a token"), ("padding", "padding")],
    )
    table = Table(drawing.title, ("Alignment", "A_pad"), cells)
    return Figure(bars.draw(drawing, rows), table)


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"
