"""The section on overlap: serial, ideal and measured, and one step on a timeline."""

import re
from typing import Any

from jax_ep.tools.measurement import Measurement, Overlap, Span
from jax_ep.tools.page import bars, lanes, units
from jax_ep.tools.page.document import Figure, Finding, Part, Section, Table
from jax_ep.tools.page.drawing import Drawing
from jax_ep.tools.profile import shared_seconds, union

_FILLS = {"issue": "plain"}  # Not the fill of a stage's phase.
_KEY = {
    "communication": "communication, waiting for other ranks included",
    "compute": "compute",
    "issue": "host: issue",
    "wait": "host: wait",
}


def section(measurement: Measurement) -> Section:
    """What the step takes beside what it could take, and where its time is."""
    overlap = measurement.overlap
    if overlap is None:
        return Section("overlap", "Overlap", ["Overlap was not measured."])
    parts: list[Part] = [
        Finding(finding(overlap)),
        "A call of jax_ep is one operation on its device: nothing in it gives way half "
        "way. So today's single calls overlap nothing by themselves; only compute that "
        "needs no exchange (here a shared expert) can run beside one, and only if XLA "
        "puts it there.",
        _bars(overlap),
    ]
    if measurement.about.get("platform") == "cpu":
        parts.append(
            "CPU devices share the cores of one machine, and three programs start "
            "three times where one starts once: a small step can take less than its "
            "parts without any overlap."
        )
    if overlap.spans:
        seen = _seen(overlap.spans)
        if measurement.about.get("platform") == "gpu":
            seen += (
                " That step was compiled without CUDA graphs, so that its kernels keep "
                "their names: it shows their order, and may be longer than the bars."
            )
        parts.append(seen)
        parts.append(timeline(overlap.spans, "timeline", "One measured step"))
    else:
        parts.append("No timeline was recorded.")
    return Section("overlap", "Overlap", parts)


def finding(overlap: Overlap) -> str:
    """How much of what could be hidden is hidden."""
    could = overlap.serial_seconds - overlap.ideal_seconds
    hidden = overlap.serial_seconds - overlap.measured_seconds
    if could <= 0:
        return (
            "Nothing could be hidden: no compute here is independent of the exchange."
        )
    measured = units.seconds(overlap.measured_seconds)
    if hidden <= 0:
        return (
            f"Nothing is hidden of the {units.seconds(could)} that could be: the step "
            f"takes {measured}, its parts one after another "
            f"{units.seconds(overlap.serial_seconds)}."
        )
    if hidden >= could:
        return (
            f"The step takes {measured}, no longer than the ideal of "
            f"{units.seconds(overlap.ideal_seconds)}: nothing is lost here."
        )
    share = units.percent(hidden / could)
    return (
        f"The step takes {measured}, {units.seconds(hidden)} less than its parts one "
        f"after another: {share} of what full overlap would save."
    )


def _lane_order(lane: str) -> tuple:
    parts = re.split(r"(\d+)", lane)
    return lane != "host", [int(p) if p.isdigit() else p for p in parts]


def _seen(spans: list[Span]) -> str:
    """What the timeline itself shows, on the rank that communicates most."""
    found = []
    for lane in dict.fromkeys(span.lane for span in spans if span.lane != "host"):
        mine = [span for span in spans if span.lane == lane]
        # `union` asks for no more than a start and a stop.
        communication: Any = [span for span in mine if span.kind == "communication"]
        compute: Any = [span for span in mine if span.kind == "compute"]
        pieces = union(communication)
        beside = shared_seconds(pieces, union(compute))
        found.append((sum(stop - start for start, stop in pieces), beside, lane))
    if not found:
        return "The timeline shows the host alone."
    total, beside, lane = max(found)
    return (
        f"On the timeline, {lane} communicates for {units.seconds(total)}, for "
        f"{units.seconds(beside)} of it beside compute."
    )


def _bars(overlap: Overlap) -> Figure:
    communication = overlap.communication_seconds
    independent = overlap.independent_seconds
    experts = overlap.compute_seconds
    parts = [
        (communication, "communication", "communication"),
        (independent, "independent", "independent compute"),
        (experts, "compute", "experts"),
    ]
    pieces = [(t, fill, f"{name} {units.seconds(t)}") for t, fill, name in parts]
    ideal, measured = overlap.ideal_seconds, overlap.measured_seconds
    after = [(min(ideal, measured), "whole", f"ideal {units.seconds(ideal)}")]
    over = f"{units.seconds(ideal - measured)} under the ideal"
    if measured > ideal:
        over = f"{units.seconds(measured - ideal)} over the ideal"
        after.append((measured - ideal, "excess", over))
    hideable = min(communication, independent)
    rows = [
        bars.Row(
            "serial: one part after another",
            units.seconds(overlap.serial_seconds),
            pieces,
            f"exchange {units.seconds(communication)}, independent "
            f"{units.seconds(independent)}, experts {units.seconds(experts)}",
        ),
        bars.Row(
            "ideal: all hidden that can be",
            units.seconds(ideal),
            [(ideal, "whole", f"ideal {units.seconds(ideal)}")],
            f"{units.seconds(hideable)} of exchange and compute side by side",
        ),
        bars.Row("measured", units.seconds(measured), after, over, ideal),
    ]
    drawing = Drawing(
        "overlap-bars",
        "One step: serial, ideal, measured",
        "; ".join(f"{row.label} {row.value}" for row in rows),
        [
            ("communication", "exchange"),
            ("independent", "independent compute"),
            ("compute", "experts"),
            ("whole", "all of a step"),
            ("excess", "over the ideal"),
        ],
    )
    cells = [
        ["exchange alone", units.seconds(communication)],
        ["independent compute alone", units.seconds(independent)],
        ["experts alone", units.seconds(experts)],
        ["serial, their sum", units.seconds(overlap.serial_seconds)],
        ["ideal", units.seconds(ideal)],
        ["measured, all in one program", units.seconds(measured)],
    ]
    table = Table(drawing.title, ("Program", "Time"), cells)
    return Figure(bars.draw(drawing, rows), table)


def timeline(spans: list[Span], name: str, title: str) -> Figure:
    """A lane for the host and below it one for each rank, by number."""
    named: dict[str, list[Span]] = {}
    for lane in sorted({span.lane for span in spans}, key=_lane_order):
        named[lane] = [span for span in spans if span.lane == lane]
    kinds = [kind for kind in _KEY if any(span.kind == kind for span in spans)]
    drawing = Drawing(
        name,
        title,
        "; ".join(
            f"{lane}: " + ", ".join(dict.fromkeys(span.name for span in found))
            for lane, found in named.items()
        ),
        [(_FILLS.get(kind, kind), _KEY[kind]) for kind in kinds],
    )
    rows = [
        (lane, [(s.start, s.stop, _FILLS.get(s.kind, s.kind), s.name) for s in found])
        for lane, found in named.items()
    ]
    cells = [
        [s.lane, s.name, s.kind, units.seconds(s.start), units.seconds(s.stop),
         units.seconds(s.stop - s.start)]
        for s in spans
    ]  # fmt: skip
    head = ("Lane", "What", "Kind", "Start", "Stop", "Time")
    return Figure(
        lanes.draw(drawing, rows, named=True, below=("compute",)),
        Table(title, head, cells),
    )
