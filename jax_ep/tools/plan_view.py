"""A plan for people: tables, a chart in the terminal, a picture in a file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from jax_ep.installed import pip_install
from jax_ep.sizing import EP_RANKS, MAX_RANKS, Bound
from jax_ep.tools.console import UserError, console, show_table

if TYPE_CHECKING:
    from jax_ep.tools.estimate import Plan

_PICTURES = (".png", ".svg")
_BAR = 40  # Characters of the longest bar, where the terminal has them.
_BESIDE_BAR = 18  # For "EP2048" and "1000.0 ms".
_RATES = {"link_rate": "NVLink", "nic_rate": "NIC", "memory_rate": "memory"}
_BINDS = {"link": "NVLink", "nic": "NIC", "memory": "memory", "sms": "SMs"}


def show(plan: Plan) -> None:
    """Prints the whole plan."""
    _heading(plan)
    tables = [_exchanges(plan), _memory(plan), _padding(plan), _growth(plan)]
    for table in [*_hops(plan), *tables]:
        show_table(table)
    _chart(plan)
    for note in plan.notes:
        console.print(f"[bold]Note:[/bold] {escape(note)}", highlight=False)


def _heading(plan: Plan) -> None:
    model, shape, machine = plan.model, plan.shape, plan.machine
    name = model.repository or "A MoE layer"
    groups = ""
    if model.n_group > 1:
        groups = f", {model.topk_group} of {model.n_group} groups"
    capacity = "dropless"
    if shape.capacity_factor is not None:
        capacity = f"capacity factor {shape.capacity_factor:g}"
    rates = [
        f"{shown} {getattr(machine, rate) / 1e9:g} ({machine.origin_of(rate)})"
        for rate, shown in _RATES.items()
    ]
    lines = [
        f"[bold]{escape(name)}[/bold]: H {model.hidden}, E {model.experts}, "
        f"K {model.topk}{groups}",
        f"{shape.num_ranks} ranks of {shape.tokens} tokens, {plan.dtype}, {capacity}, "
        f"alignment {shape.expert_alignment}; a token goes to "
        f"{plan.distinct_ranks:.2f} ranks",
        f"{machine.name}, GB/s: {', '.join(rates)}; {machine.domain_size} GPUs a node",
        f"[dim]Rates: {escape(machine.source)}.[/dim]",
        "[dim]Uniform routing. All bytes and times are arithmetic, times lower bounds, "
        "bytes over rates: latency and waits come on top.[/dim]",
    ]
    for line in lines:
        console.print(line, highlight=False)
    console.print()


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _exchanges(plan: Plan) -> Table:
    """Every row straight to its rank: of one domain, what the package does."""
    compared = ", straight to its rank: a comparison, which is not run"
    table = _table(
        f"One layer, per rank{compared if plan.hops else ''}",
        "stage",
        "NVLink MB",
        "NIC MB",
        "memory MB",
        "at least",
        "bound by",
        "SMs",
    )
    for found in plan.exchanges:
        of_bytes = found.name != "layout"  # Its time is not that of its bytes.
        table.add_row(
            found.name,
            _mb(found.traffic.link),
            _mb(found.traffic.nic),
            _mb(found.traffic.memory),
            _time(found.seconds) if of_bytes else "",
            _BINDS[found.binds] if of_bytes else "latency",
            "" if found.sms is None else str(found.sms),
        )
    times = {found.name: found.seconds for found in plan.exchanges}
    layers = f"{plan.model.layers} MoE layers"
    table.caption = f"{layers}: at least {_totals(plan, times)}.\n{_sms(plan)}"
    return table


def _hops(plan: Plan) -> list[Table]:
    """Two hops: their bytes and times, and what that is between domains."""
    if plan.crossing is None:
        return []
    shape, crossing = plan.shape, plan.crossing
    table = _table(
        f"One layer, per rank, by two hops: {shape.num_domains} domains of "
        f"{shape.domain_size}, room for {crossing.places} of {shape.tokens} tokens to "
        "each",
        "stage",
        "NIC MB",
        "NVLink MB",
        "memory MB",
        "hop 1",
        "hop 2",
        "at least",
        f"in {plan.chunks} parts",
        "SMs",
    )
    between = _table(
        "Between domains, out of each", "stage", "rank MB", "rail MB", "domain MB"
    )
    between.add_column("wanted", justify="right")
    for found in plan.hops:
        hops, bound = found.hops, found.bound
        between.add_row(
            found.name,
            *(_mb(part) for part in (hops.between.nic, hops.rail, hops.boundary)),
            f"{hops.wanted / hops.between.nic:.0%}",
        )
        times = [""] * 4
        if found.name != "layout":
            both = zip((bound.between, bound.inside), found.binds, strict=True)
            times = [f"{_time(hop.seconds)} {_BINDS[binds]}" for hop, binds in both]
            times += [_time(found.seconds), _time(found.chunked_seconds)]
        table.add_row(
            found.name,
            _mb(hops.between.nic),
            _mb(hops.inside.link),
            _mb(hops.between.memory + hops.inside.memory),
            *times,
            "" if found.sms is None else str(found.sms),
        )
    serial = _totals(plan, {found.name: found.seconds for found in plan.hops})
    split = _totals(plan, {found.name: found.chunked_seconds for found in plan.hops})
    table.caption = (
        f"{plan.model.layers} MoE layers: at least {serial}, a hop after the other.\n"
        f"In {plan.chunks} parts whose hops overlap, which the package does not make: "
        f"{split}.\n{_sms(plan)}"
    )
    between.caption = "A rail is the ranks with one place\nin each domain."
    return [table, between]


def _totals(plan: Plan, seconds: dict[str, float]) -> str:
    """Of all layers: sums over stages with a time of their own."""
    totals = {"forward": 0.0, "backward": 0.0}
    for name, time in seconds.items():
        if name != "layout":
            totals["backward" if name.endswith("backward") else "forward"] += time
    times = [f"{way} {_time(t * plan.model.layers)}" for way, t in totals.items()]
    return ", ".join(times)


def _sms(plan: Plan) -> str:
    if plan.machine.sm_write_rate is None or plan.machine.sm_add_rate is None:
        return f"SMs: rates of one SM of {plan.machine.name} were not measured."
    return "SMs: the fewest that do not hold the stage back."


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"


def _memory(plan: Plan) -> Table:
    table = _table("Memory, per rank", "what", "rows", "bytes")
    memory = plan.memory
    if plan.shape.capacity_factor is not None:
        table.add_row(
            f"receive buffer, capacity factor {plan.shape.capacity_factor:g}",
            str(memory.receive_rows),
            _size(memory.receive),
        )
    table.add_row(
        "receive buffer, dropless",
        str(memory.dropless_rows),
        _size(memory.dropless_receive),
    )
    if memory.relay:
        table.add_row(
            "what crosses between domains, up to four times",
            str(memory.relay_rows),
            _size(memory.relay),
        )
    table.add_row("handle", "", _size(memory.handle))
    if memory.expert_weights is not None:
        table.add_row(
            "experts' weights, 2 bytes each", "", _size(memory.expert_weights)
        )
    workspace = "-" if memory.workspace is None else _size(memory.workspace)
    table.add_row("workspace, once for all layers", "", workspace)
    return table


def _padding(plan: Plan) -> Table:
    table = _table(
        f"Padding: {plan.rows_per_expert:.4g} rows an expert",
        "alignment",
        "GEMM rows over rows with a token",
    )
    for alignment, amplification in plan.padding.items():
        table.add_row(str(alignment), f"{amplification:.3f}")
    return table


def _growth(plan: Plan) -> Table:
    table = _table(
        "Dispatch and combine as ranks grow, tokens per rank the same: straight to "
        "each rank, and by two hops",
        "\nranks",
        "ranks/\ntoken",
        "nodes/\ntoken",
        "direct\nNIC MB",
        "least\nms",
        "bound\nby",
        "2 hops\nNIC MB",
        "least\nms",
        "bound\nby",
    )
    for step in plan.growth:
        direct = step.direct
        row = [
            str(step.num_ranks),
            f"{step.distinct_ranks:.2f}",
            f"{step.distinct_domains:.2f}",
            f"{(direct.dispatch.nic + direct.combine.nic) / 1e6:.0f}",
            f"{direct.seconds * 1e3:.3g}",
            _slower(direct.dispatch_bound, direct.combine_bound),
        ]
        if (hops := step.hops) is not None:
            nic = hops.dispatch.between.nic + hops.combine.between.nic
            bounds = (hops.dispatch_bound, hops.combine_bound)
            row += [
                f"{nic / 1e6:.0f}",
                f"{hops.seconds * 1e3:.3g}",
                _slower(*(b for both in bounds for b in (both.between, both.inside))),
            ]
        table.add_row(*row)
    domain = min(plan.machine.domain_size, MAX_RANKS)
    table.caption = (
        f"Up to {domain} ranks, one NVLink domain, run as they are. More run with "
        f"domain_size={domain}, in two hops, which has not been timed on several real "
        "domains."
    )
    shown = {step.num_ranks for step in plan.growth}
    left_out = [str(ranks) for ranks in EP_RANKS if ranks not in shown]
    if left_out:
        table.caption += (
            f"\nLeft out: {', '.join(left_out)} ranks, over which {plan.model.experts} "
            f"experts or nodes of {plan.machine.domain_size} do not divide evenly."
        )
    return table


def _slower(*bounds: Bound) -> str:
    return _BINDS[max(bounds, key=lambda bound: bound.seconds).binds]


def _chart(plan: Plan) -> None:
    """Bars: one for rows sent direct, one below for two hops."""
    direct, hops = ("█", "░") if _unicode() else ("#", "-")
    longest = max(
        (
            max(step.direct.seconds, step.hops.seconds if step.hops else 0)
            for step in plan.growth
        ),
        default=0,
    )
    if not longest:
        return
    console.print(
        f"[bold]Dispatch and combine at least[/bold] ({direct} direct, {hops} "
        "two hops)",
        highlight=False,
    )
    room = max(1, min(_BAR, console.width - _BESIDE_BAR))
    for step in plan.growth:
        bars = [(direct, step.direct.seconds)]
        if step.hops is not None:
            bars.append((hops, step.hops.seconds))
        label = f"EP{step.num_ranks}"
        for mark, seconds in bars:
            bar = mark * max(1, round(room * seconds / longest))
            console.print(f"{label:>7} {bar} {_time(seconds)}", highlight=False)
            label = ""


def check_picture(path: Path) -> None:
    """Refuses what `draw` could not write, before anything is computed."""
    if path.suffix.lower() not in _PICTURES:
        raise UserError(f"--plot (={path}) must end in {' or '.join(_PICTURES)}.")
    if not path.parent.is_dir():
        raise UserError(f"--plot (={path}): there is no folder {path.parent}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"--plot needs matplotlib: {pip_install('tools')}.")


def draw(plan: Plan, path: Path) -> None:
    """Least times and targets over the number of ranks; readable without colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    times, targets = figure.subplots(1, 2)
    ranks = [step.num_ranks for step in plan.growth]
    many = [(step, step.hops) for step in plan.growth if step.hops is not None]
    times.plot(
        ranks,
        [step.direct.seconds * 1e6 for step in plan.growth],
        "ko-",
        label="direct",
    )
    targets.plot(
        ranks, [step.distinct_ranks for step in plan.growth], "ko-", label="ranks"
    )
    if many:
        times.plot(
            [step.num_ranks for step, _ in many],
            [hops.seconds * 1e6 for _, hops in many],
            "ks--",
            markerfacecolor="white",
            label="two hops",
        )
        targets.plot(
            [step.num_ranks for step, _ in many],
            [step.distinct_domains for step, _ in many],
            "ks--",
            markerfacecolor="white",
            label="nodes",
        )
    times.set_yscale("log")
    times.set_ylabel("dispatch + combine, at least (µs)")
    times.set_title("Lower bound of the time")
    targets.set_ylim(bottom=0)
    targets.set_ylabel("that a token goes to")
    targets.set_title("Targets of a token")
    for axes in (times, targets):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(n) for n in ranks], rotation=45)
        axes.set_xlabel("ranks")
        axes.axvline(
            plan.machine.domain_size, color="0.5", linestyle=":", label="one node"
        )
        axes.grid(alpha=0.3)
        axes.legend()
    name = plan.model.repository or f"H {plan.model.hidden}, E {plan.model.experts}"
    figure.suptitle(
        f"{name}: K {plan.model.topk}, {plan.shape.tokens} tokens per rank, "
        f"{plan.dtype}, {plan.machine.name}"
    )
    partial = path.with_name(path.name + ".partial")
    try:
        figure.savefig(partial, format=path.suffix[1:].lower())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _unicode() -> bool:
    return console.encoding.lower().startswith("utf")


def _time(seconds: float) -> str:
    if seconds < 10e-3:
        return f"{seconds * 1e6:.0f} {'µs' if _unicode() else 'us'}"
    return f"{seconds * 1e3:.1f} ms"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"
