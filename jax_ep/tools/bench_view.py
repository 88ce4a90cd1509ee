"""The tables that `bench` shows."""

import statistics

from rich.table import Table

from jax_ep.tools.console import console, show_table
from jax_ep.tools.diagnosis import KINDS, Diagnosis, diagnose, duration
from jax_ep.tools.measurement import Measurement
from jax_ep.tools.page.conditions import busy_host

# Two of the columns are sentences, which wrap.
LEAST_FOR_SENTENCES = 72


def show(found: Measurement) -> None:
    """Prints a measurement, and what it says."""
    layer, about = found.layer, found.about
    console.print(
        f"{about['device']}, R {layer.ranks}, T {layer.tokens}, K {layer.topk}, "
        f"E {layer.experts}, H {layer.hidden}, F {layer.expert_hidden}, "
        f"C {layer.capacity}, A {layer.expert_alignment}, {layer.dtype}; "
        f"routing {found.routing}",
        highlight=False,
    )
    show_table(exchanges(found))
    if (table := phases(found)) is not None:
        show_table(table)
    show_table(load(found))
    diagnosis = diagnose(found)
    show_table(lost(diagnosis), least=LEAST_FOR_SENTENCES)
    console.print(diagnosis.sentence, highlight=False)
    if (busy := busy_host(found)) is not None:
        console.print(busy, highlight=False)
    if "not measured" in about:
        console.print(f"Not measured: {about['not measured']}", highlight=False)


def exchanges(found: Measurement) -> Table:
    """A line for each stage: its time, and of the ceilings' speed."""
    table = Table(title="Exchanges: one call, device time", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for heading in ("time", "spread", "floor", "floor/time", "logical GB/s"):
        table.add_column(heading, justify="right")
    for each in found.exchanges:
        floor = each.floor_seconds
        table.add_row(
            each.stage,
            duration(each.seconds),
            f"{each.spread:.0%}",
            duration(floor) if floor else "",
            f"{floor / each.seconds:.0%}" if floor else "",
            f"{each.logical_bytes / each.seconds / 1e9:.1f}"
            if each.logical_bytes
            else "",
        )
    rates = found.ceilings
    if rates is not None:
        shown = dict(egress=rates.egress, ingress=rates.ingress, memory=rates.memory)
        table.caption = "ceilings, GB/s: " + ", ".join(
            f"{name} {rate / 1e9:.1f}" for name, rate in shown.items() if rate
        )
    return table


def phases(found: Measurement) -> Table | None:
    """A line for each stage with stamps: the slowest rank's phases."""
    stamped = [(each, each.phases) for each in found.exchanges if each.phases]
    if not stamped:
        return None
    table = Table(title="Phases, of the rank with the longest", title_justify="left")
    table.add_column("stage", no_wrap=True)
    names = list(stamped[0][1][0])
    for heading in (*names, "cost of stamps"):
        table.add_column(heading, justify="right")
    for each, ranks in stamped:
        table.add_row(
            each.stage,
            *(duration(max(rank[name] for rank in ranks)) for name in names),
            f"{each.stamped_seconds / each.seconds - 1:+.0%}"
            if each.stamped_seconds
            else "",
        )
    return table


def load(found: Measurement) -> Table:
    """A line for each rank."""
    table = Table(title="Load: each rank's experts, alone", title_justify="left")
    for heading in ("rank", "rows, median", "rows, most", "time, median", "last"):
        table.add_column(heading, justify="right")
    rows = list(zip(*found.load.rank_rows, strict=True))
    seconds = found.load.rank_seconds
    steps = len(found.load.rank_rows)
    last = [step.index(max(step)) for step in seconds or () if max(step) > min(step)]
    for rank, mine in enumerate(rows):
        times = [step[rank] for step in seconds or ()]
        table.add_row(
            str(rank),
            f"{statistics.median(mine):.0f}",
            str(max(mine)),
            duration(statistics.median(times)) if times else "",
            f"{last.count(rank)} of {steps}" if last else "",
        )
    dropped = sum(map(sum, found.load.dropped_rows))
    if dropped:
        table.caption = f"{dropped} rows were dropped in {steps} steps"
    return table


def lost(diagnosis: Diagnosis) -> Table:
    """The four."""
    table = Table(title="Lost per forward step", title_justify="left")
    table.add_column("to")
    table.add_column("time", justify="right")
    table.add_column("because")
    table.add_column("what to try")
    for kind in KINDS:
        seconds = diagnosis.lost_seconds[kind]
        is_latency = kind == "bandwidth" and diagnosis.is_latency
        table.add_row(
            "latency" if is_latency else kind,
            "" if seconds is None else duration(seconds),
            diagnosis.reasons[kind],
            diagnosis.remedies[kind],
        )
    return table
