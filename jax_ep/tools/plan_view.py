"""A plan for people: tables, a chart in the terminal, a picture in a file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from jax_ep.installed import pip_install
from jax_ep.sizing import EP_RANKS
from jax_ep.tools.console import UserError, console

if TYPE_CHECKING:
    from jax_ep.tools.plan import Plan

_PICTURES = (".png", ".svg")
_BAR = 40  # Characters of the longest bar.
_BINDS = {"link": "NVLink", "nic": "NIC", "memory": "memory", "sms": "SMs"}


def show(plan: Plan) -> None:
    """Prints the whole plan."""
    _heading(plan)
    tables = [*_exchanges(plan), _memory(plan), _padding(plan), _growth(plan)]
    for table in tables:
        console.print(table)
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
    lines = [
        f"[bold]{escape(name)}[/bold]: H {model.hidden}, E {model.experts}, "
        f"K {model.topk}{groups}",
        f"{shape.num_ranks} ranks of {shape.tokens} tokens, {plan.dtype}, {capacity}, "
        f"alignment {shape.expert_alignment}; a token goes to "
        f"{plan.distinct_ranks:.2f} ranks",
        f"{machine.name}: NVLink {machine.link_rate / 1e9:g}, NIC "
        f"{machine.nic_rate / 1e9:g}, memory {machine.memory_rate / 1e9:g} GB/s, "
        f"{machine.domain_size} GPUs a node",
        f"[dim]Rates: {escape(machine.source)}.[/dim]",
        "[dim]Uniform routing. Times are lower bounds, bytes over rates: latency and "
        "waits come on top.[/dim]",
    ]
    for line in lines:
        console.print(line, highlight=False)
    console.print()


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _exchanges(plan: Plan) -> list[Table]:
    """A table for rows sent direct, and over several nodes one for a copy a node."""
    tables = []
    for route in dict.fromkeys(found.route for found in plan.exchanges):
        ways = ", one copy a node" if route == "forwarded" else ""
        table = _table(
            f"One layer, per rank{ways}",
            "stage",
            "NVLink MB",
            "NIC MB",
            "memory MB",
            "at least",
            "bound by",
            "SMs",
        )
        totals: dict[str, float] = {}
        for found in plan.exchanges:
            if found.route != route:
                continue
            measured = found.name != "layout"  # Its time is not that of its bytes.
            if measured:
                way = "backward" if found.name.endswith("backward") else "forward"
                totals[way] = totals.get(way, 0.0) + found.seconds
            table.add_row(
                found.name,
                f"{found.traffic.link / 1e6:.1f}",
                f"{found.traffic.nic / 1e6:.1f}",
                f"{found.traffic.memory / 1e6:.1f}",
                _time(found.seconds) if measured else "",
                _BINDS[found.binds] if measured else "latency",
                "" if found.sms is None else str(found.sms),
            )
        times = [f"{w} {_time(s * plan.model.layers)}" for w, s in totals.items()]
        table.caption = f"{plan.model.layers} MoE layers: at least {', '.join(times)}."
        tables.append(table)
    sms = "SMs: the fewest that do not hold the stage back."
    if plan.machine.sm_write_rate is None or plan.machine.sm_add_rate is None:
        sms = f"SMs: rates of one SM of {plan.machine.name} were not measured."
    tables[-1].caption = f"{tables[-1].caption}\n{sms}"
    return tables


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
        "Dispatch and combine as ranks grow, tokens per rank the same: direct, and one "
        "copy a node",
        "\nranks",
        "ranks/\ntoken",
        "nodes/\ntoken",
        "direct\nNIC MB",
        "least\nms",
        "bound\nby",
        "copies\nNIC MB",
        "least\nms",
        "bound\nby",
    )
    for step in plan.growth:
        row = [
            str(step.num_ranks),
            f"{step.distinct_ranks:.2f}",
            f"{step.distinct_domains:.2f}",
        ]
        routes = [step.direct]
        if step.num_domains > 1:
            routes.append(step.forwarded)
        for route in routes:
            bounds = (route.dispatch_bound, route.combine_bound)
            slower = max(bounds, key=lambda bound: bound.seconds)
            row += [
                f"{(route.dispatch.nic + route.combine.nic) / 1e6:.0f}",
                f"{route.seconds * 1e3:.3g}",
                _BINDS[slower.binds],
            ]
        table.add_row(*row)
    shown = {step.num_ranks for step in plan.growth}
    left_out = [str(ranks) for ranks in EP_RANKS if ranks not in shown]
    if left_out:
        table.caption = (
            f"Left out: {', '.join(left_out)} ranks, over which {plan.model.experts} "
            f"experts or nodes of {plan.machine.domain_size} do not divide evenly."
        )
    return table


def _chart(plan: Plan) -> None:
    """Bars: one for rows sent direct, one below for one copy a node."""
    direct, forwarded = ("█", "░") if _unicode() else ("#", "-")
    longest = max((step.direct.seconds for step in plan.growth), default=0)
    if not longest:
        return
    console.print(
        f"[bold]Dispatch and combine at least[/bold] ({direct} direct, {forwarded} one "
        "copy a node)",
        highlight=False,
    )
    for step in plan.growth:
        bars = [(direct, step.direct.seconds)]
        if step.num_domains > 1:
            bars.append((forwarded, step.forwarded.seconds))
        label = f"EP{step.num_ranks}"
        for mark, seconds in bars:
            bar = mark * max(1, round(_BAR * seconds / longest))
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
    many = [step for step in plan.growth if step.num_domains > 1]
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
            [step.num_ranks for step in many],
            [step.forwarded.seconds * 1e6 for step in many],
            "ks--",
            markerfacecolor="white",
            label="one copy a node",
        )
        targets.plot(
            [step.num_ranks for step in many],
            [step.distinct_domains for step in many],
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
