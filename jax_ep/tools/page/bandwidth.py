"""The section on bandwidth: how long a stage takes, and how long it would have to."""

from jax_ep.tools.measurement import Ceilings, Exchange, Measurement
from jax_ep.tools.page import bars, lanes, units
from jax_ep.tools.page.document import Figure, Finding, Part, Section, Table
from jax_ep.tools.page.drawing import Drawing

_PHASES = {
    "issue": "issue: until the last send is out",
    "drain": "drain: until the last row has arrived",
    "epilogue": "epilogue: until the last row is in its place",
    "wait": "wait: for the last rank to call",
    "copy": "copy: the exchange itself",
}


def section(measurement: Measurement) -> Section:
    """Times against floors, then the phases of each stage that was stamped."""
    exchanges, ceilings = measurement.exchanges, measurement.ceilings
    parts: list[Part] = [
        Finding(_finding(exchanges)),
        _about(ceilings),
        _times(exchanges, ceilings),
    ]
    if any(exchange.logical_bytes for exchange in exchanges):
        parts.append(
            "Logical bandwidth, in the table, is the measure of DeepEP's published "
            "numbers: the rows that a rank receives, once for each token, its own "
            "among them, over the time. It is larger than what crosses the link. "
            "Theirs leaves the epilogue out of the time; this one has it in."
        )
    stamped = [exchange for exchange in exchanges if exchange.phases]
    if stamped:
        parts.append(_stamps(measurement, stamped))
        parts += map(_ranks, stamped)
    else:
        parts.append("The phases of the stages were not measured.")
    return Section("bandwidth", "Bandwidth", parts)


def bound(exchange: Exchange, ceilings: Ceilings) -> str:
    """Which of the ceilings sets the floor: "link out", "link in" or "memory"."""
    shares = {
        "link out": _over(exchange.egress_bytes, ceilings.egress),
        "link in": _over(exchange.ingress_bytes, ceilings.ingress),
        "memory": _over(exchange.memory_bytes, ceilings.memory),
    }
    return max(shares, key=lambda name: shares[name])


def _over(amount: int | None, rate: float | None) -> float:
    return amount / rate if amount is not None and rate else 0.0


def _finding(exchanges: list[Exchange]) -> str:
    floors = [(e, e.floor_seconds) for e in exchanges if e.floor_seconds is not None]
    if not floors:
        return "No floor is known, so these times stand alone."
    worst, floor = max(floors, key=lambda pair: pair[0].seconds - pair[1])
    over = worst.seconds - floor
    if over <= 0:
        return (
            "No stage takes longer than its floor, so the ceilings of this run are too "
            "low to judge it by."
        )
    fraction = units.percent(floor / worst.seconds)
    return (
        f"{worst.stage.capitalize()} loses most: {units.seconds(over)} over its floor "
        f"of {units.seconds(floor)}; it runs at {fraction} of the ceiling."
    )


def _about(ceilings: Ceilings | None) -> str:
    if ceilings is None:
        return "The machine's ceilings were not measured."
    memory = f"memory {units.rate(ceilings.memory)}, read plus written"
    if ceilings.egress is None or ceilings.ingress is None:
        return (
            f"Ceilings, measured in this run: {memory}. The ranks are devices of one "
            "process, so there is no link."
        )
    return (
        f"Ceilings, measured in this run by a kernel that only moves rows: link "
        f"{units.rate(ceilings.egress)} out and {units.rate(ceilings.ingress)} in per "
        f"rank, {memory}. The floor is the slowest of the bytes at these rates."
    )


def _times(exchanges: list[Exchange], ceilings: Ceilings | None) -> Figure:
    rows, cells = [], []
    for exchange in exchanges:
        floor, seconds = exchange.floor_seconds, exchange.seconds
        bounded = bound(exchange, ceilings) if ceilings and floor is not None else None
        if floor is None:
            pieces, note = [(seconds, "plain", "time")], "no floor known"
            if exchange.stage == "layout":
                note = "no floor: it exchanges counts, not rows"
        else:
            fraction = units.percent(floor / seconds)
            note = f"floor {units.seconds(floor)}, {fraction} of the ceiling"
            note += f" ({bounded})" if bounded else ""
            pieces = [(min(floor, seconds), "floor", f"floor {units.seconds(floor)}")]
            if seconds > floor:
                over = units.seconds(seconds - floor)
                pieces.append((seconds - floor, "excess", f"{over} over the floor"))
        rows.append(
            bars.Row(exchange.stage, units.seconds(seconds), pieces, note, floor)
        )
        cells.append(_cells(exchange, bounded))
    drawing = Drawing(
        "stages",
        "Time of one call, and its floor",
        "; ".join(f"{row.label} {row.value}, {row.note}" for row in rows),
        [("floor", "the floor"), ("excess", "over the floor")],
    )
    head = (
        "Stage", "Time", "Spread", "Floor", "Of the ceiling", "Bound by",
        "Out", "In", "Memory", "Link out", "Logical bandwidth",
    )  # fmt: skip
    return Figure(bars.draw(drawing, rows), Table(drawing.title, head, cells))


def _cells(exchange: Exchange, bounded: str | None) -> list[str]:
    floor, seconds = exchange.floor_seconds, exchange.seconds
    known = (exchange.egress_bytes, exchange.ingress_bytes, exchange.memory_bytes)
    out, logical = exchange.egress_bytes, exchange.logical_bytes
    return [
        exchange.stage,
        units.seconds(seconds),
        units.percent(exchange.spread),
        "–" if floor is None else units.seconds(floor),
        "–" if floor is None else units.percent(floor / seconds),
        bounded or "–",
        *("–" if amount is None else units.size(amount) for amount in known),
        "–" if out is None else units.rate(out / seconds),
        "–" if logical is None else units.rate(logical / seconds),
    ]


def _stamps(measurement: Measurement, stamped: list[Exchange]) -> str:
    costs = [
        f"{e.stage} {units.seconds(e.stamped_seconds)} instead of "
        f"{units.seconds(e.seconds)} ({e.stamped_seconds / e.seconds - 1:+.1%})"
        for e in stamped
        if e.stamped_seconds is not None
    ]
    clocks = (
        "The ranks share a clock."
        if measurement.about.get("platform") == "cpu"
        else "Each rank's clock is its own: every lane starts when that rank began, so "
        "compare within a lane."
    )
    cost = f" What it costs: {'; '.join(costs)}." if costs else ""
    return (
        "The pieces below come from a build that stamps the time at each rank; the "
        f"times above are without it.{cost} {clocks}"
    )


def _ranks(exchange: Exchange) -> Figure:
    phases = exchange.phases or []
    names = list(phases[0])
    rows, cells = [], []
    for rank, parts in enumerate(phases):
        at, spans = 0.0, []
        for name, length in parts.items():
            spans.append((at, at + length, _fill(name), name))
            at += length
        rows.append((f"rank {rank}", spans))
        cells.append(
            [f"rank {rank}", *map(units.seconds, parts.values()), units.seconds(at)]
        )
    slowest = max(range(len(phases)), key=lambda rank: sum(phases[rank].values()))
    total = sum(phases[slowest].values()) or 1.0
    shares = ", ".join(
        f"{name} {units.percent(length / total)}"
        for name, length in phases[slowest].items()
    )
    drawing = Drawing(
        f"phases-{exchange.stage.replace(' ', '-')}",
        f"{exchange.stage.capitalize()}, by rank: the longest is rank {slowest} "
        f"({shares})",
        "Each rank's time in pieces.",
        [(_fill(name), _PHASES.get(name, name)) for name in names],
    )
    table = Table(f"{exchange.stage} by rank", ("Rank", *names, "all"), cells)
    return Figure(lanes.draw(drawing, rows), table)


def _fill(phase: str) -> str:
    return phase if phase in _PHASES else "plain"
