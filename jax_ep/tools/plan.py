"""`python -m jax_ep plan`: what an exchange will cost, before there is a machine."""

import contextlib
import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from jax_ep import sizing
from jax_ep.exchange import MAX_EXPERTS
from jax_ep.layout import MAX_TOPK
from jax_ep.tools import console, plan_view
from jax_ep.tools.console import UserError
from jax_ep.tools.models import MODELS, Model, find_model

FORMAT = "jax_ep plan 1"
ALIGNMENTS = (8, 16, 64, 128, 256)  # Of grouped GEMMs' row tiles.
_MAX_ROWS = 2**31 - 1  # Row numbers are int32.


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One stage on the way that `route` says: its bytes, least time and SMs."""

    name: str
    route: str
    traffic: sizing.Traffic
    bound: sizing.Bound
    seconds: float
    binds: str
    sms: int | None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a rank: of one layer, but for the workspace, which all share."""

    receive_rows: int
    receive: int
    dropless_rows: int
    dropless_receive: int
    handle: int
    workspace: int | None
    expert_weights: int | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is shown, and what `--json` prints."""

    model: Model
    shape: sizing.Shape
    dtype: str
    num_sms: int | None
    machine: sizing.Machine
    distinct_ranks: float
    exchanges: list[Exchange]
    memory: Memory
    rows_per_expert: float
    padding: dict[int, float]
    growth: list[sizing.Step]
    notes: list[str]


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help=f"A known model ({', '.join(MODELS)}); options override."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="R, ranks that share the experts.")] = 8,
    tokens: Annotated[int, typer.Option(help="T, tokens per rank.")] = 8192,
    hidden: Annotated[int | None, typer.Option(help="H.")] = None,
    experts: Annotated[int | None, typer.Option(help="E.")] = None,
    topk: Annotated[int | None, typer.Option(help="K.")] = None,
    expert_hidden: Annotated[
        int | None, typer.Option(help="F, for the memory of weights.")
    ] = None,
    groups: Annotated[
        int | None, typer.Option(help="Groups of group-limited routing.")
    ] = None,
    topk_groups: Annotated[
        int | None, typer.Option(help="Groups that a token may choose from.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="MoE layers.")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of rows: bfloat16, float16, float32; or float8 or mxfp8, which is "
            "wire= of dispatch alone: sums and the backward are bfloat16."
        ),
    ] = "bfloat16",
    capacity_factor: Annotated[
        float | None,
        typer.Option(help="Receive rows over T*K; left out, dropless."),
    ] = None,
    alignment: Annotated[int, typer.Option(help="A, expert alignment.")] = 1,
    machine: Annotated[
        str, typer.Option(help=f"{', '.join(sizing.MACHINES)}: rates of a GPU.")
    ] = "h200",
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs of an NVLink domain.")
    ] = None,
    link_rate: Annotated[
        float | None, typer.Option(help="GB/s out of a GPU over NVLink.")
    ] = None,
    nic_rate: Annotated[
        float | None, typer.Option(help="GB/s out of a GPU to other nodes.")
    ] = None,
    memory_rate: Annotated[
        float | None, typer.Option(help="GB/s of memory, read plus written.")
    ] = None,
    sms: Annotated[
        int | None, typer.Option(help="SMs for communication; bounds the time too.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture: FILE.png or FILE.svg.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Bytes, memory and least time of a model's expert exchange, from EP2 to EP2048.

    Needs no GPU. Routing is uniform, and times are lower bounds: bytes over rates.
    """
    if plot is not None:
        plan_view.check_picture(plot)
    with _refused():
        rates = _machine(machine, gpus_per_node, link_rate, nic_rate, memory_rate)
        if sms is not None and rates.sm_write_rate is None:
            raise UserError(
                f"--sms (={sms}) needs the rates of one SM, which were not measured on "
                f"{machine}."
            )
        found = make_plan(
            _model(
                model,
                hidden=hidden,
                experts=experts,
                topk=topk,
                expert_hidden=expert_hidden,
                n_group=groups,
                topk_group=topk_groups,
                layers=layers,
            ),
            ranks=ranks,
            tokens=tokens,
            dtype=dtype,
            capacity_factor=None if capacity_factor == -1 else capacity_factor,
            alignment=alignment,
            machine=rates,
            num_sms=sms,
        )
    if plot is not None:
        plan_view.draw(found, plot)
    if json:
        console.print_json({"format": FORMAT, **dataclasses.asdict(found)})
    else:
        plan_view.show(found)
        if plot is not None:
            console.console.print(
                f"Picture: {plot}", highlight=False, markup=False, soft_wrap=True
            )


@contextlib.contextmanager
def _refused():
    """What the package refuses, as a line without the name of its function."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UserError(re.sub(r"^jax_ep\.[\w.]+: ", "", str(error))) from None


def _model(name: str | None, **given: int | None) -> Model:
    """A known model, with what the options say otherwise."""
    values: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    # The others are checked where they are used. 0 is an expert without weights.
    for key, least in (("layers", 1), ("expert_hidden", 0)):
        if values.get(key, least) < least:
            option = "--" + key.replace("_", "-")
            raise UserError(f"{option} (={values[key]}) must be at least {least}.")
    if name is not None:
        return dataclasses.replace(find_model(name), **values)
    missing = [f"--{k}" for k in ("hidden", "experts", "topk") if k not in values]
    if missing:
        raise UserError(f"plan: give the name of a model, or {', '.join(missing)} too.")
    values = {"repository": "", "expert_hidden": 0, "layers": 1} | values
    return Model(**values)


def _machine(name, gpus_per_node, link_rate, nic_rate, memory_rate) -> sizing.Machine:
    if name not in sizing.MACHINES:
        raise UserError(
            f"--machine (={name}) must be one of {', '.join(sizing.MACHINES)}; its "
            "rates can be given by --link-rate, --nic-rate and --memory-rate."
        )
    found = sizing.MACHINES[name]
    given = dict(link_rate=link_rate, nic_rate=nic_rate, memory_rate=memory_rate)
    for key, rate in given.items():
        if rate is not None and not 0 < rate < math.inf:
            option = "--" + key.replace("_", "-")
            raise UserError(f"{option} (={rate:g}) must be positive, in GB/s.")
    values: dict[str, Any] = {k: v * 1e9 for k, v in given.items() if v is not None}
    if values:
        own = ", ".join(name.replace("_", " ") for name in values)
        values["source"] = f"{own} as given; {found.source}"
    if gpus_per_node is not None:
        values["domain_size"] = gpus_per_node
    return dataclasses.replace(found, **values)


def make_plan(
    model: Model,
    *,
    ranks: int,
    tokens: int,
    dtype: str,
    capacity_factor: float | None,
    alignment: int,
    machine: sizing.Machine,
    num_sms: int | None,
) -> Plan:
    """Everything that `plan` shows.

    Raises:
      ValueError: impossible shapes or rates, as of `jax_ep.sizing`.
    """
    routing = sizing.UniformRouting(
        model.experts, model.topk, model.n_group, model.topk_group
    )
    shape = sizing.Shape(
        routing, tokens, model.hidden, ranks, capacity_factor, alignment
    )
    dropless = dataclasses.replace(shape, capacity_factor=None)
    row = sizing.row_bytes(model.hidden, dtype)
    weights = None
    if model.expert_hidden:
        # Gate, up and down projections, two bytes a parameter.
        local = shape.num_slots // ranks
        weights = 3 * local * model.hidden * model.expert_hidden * 2
    memory = Memory(
        receive_rows=sizing.receive_rows(shape),
        receive=sizing.receive_bytes(shape, row),
        dropless_rows=sizing.receive_rows(dropless),
        dropless_receive=sizing.receive_bytes(dropless, row),
        handle=sizing.handle_bytes(shape),
        workspace=(
            sizing.workspace_bytes(ranks) if ranks <= sizing.MAX_RANKS else None
        ),
        expert_weights=weights,
    )
    padding = {
        multiple: sizing.expected_padding_amplification(
            dataclasses.replace(shape, expert_alignment=multiple)
        )
        for multiple in sorted({*ALIGNMENTS, alignment})
    }
    return Plan(
        model=model,
        shape=shape,
        dtype=dtype,
        num_sms=num_sms,
        machine=machine,
        distinct_ranks=sizing.distinct_ranks(routing, ranks),
        exchanges=_exchanges(shape, dtype, machine, num_sms),
        memory=memory,
        rows_per_expert=ranks * tokens * model.topk / shape.num_slots,
        padding=padding,
        growth=sizing.growth(
            shape,
            machine,
            ranks=sorted({*sizing.EP_RANKS, ranks}),
            dtype=dtype,
            num_sms=num_sms,
        ),
        notes=_notes(shape, memory, machine),
    )


def _exchanges(shape, dtype, machine, num_sms) -> list[Exchange]:
    """Every stage, forward and backward; over several domains also forwarded."""
    back = sizing.sums_dtype(dtype)
    domains = shape.num_ranks > machine.domain_size
    found = []
    for route in ("direct", "forwarded") if domains else ("direct",):
        over: dict[str, Any] = dict(
            domain_size=machine.domain_size, forward=route == "forwarded"
        )
        stages = {
            "layout": sizing.layout_traffic(shape, **over),
            "dispatch": sizing.dispatch_traffic(shape, dtype=dtype, **over),
            "combine": sizing.combine_traffic(shape, dtype=back, **over),
            "dispatch backward": sizing.combine_traffic(
                shape, dtype=back, weight_gradients=True, **over
            ),
            "combine backward": sizing.dispatch_traffic(
                shape, dtype=back, weights=False, **over
            ),
        }
        for name, traffic in stages.items():
            bound = sizing.time_bound(traffic, machine, num_sms=num_sms)
            fewest = None if name == "layout" else sizing.sms_to_fill(traffic, machine)
            found.append(
                Exchange(
                    name, route, traffic, bound, bound.seconds, bound.binds, fewest
                )
            )
    return found


def _notes(shape: sizing.Shape, memory: Memory, machine: sizing.Machine) -> list[str]:
    """What jax_ep cannot run of it."""
    notes = []
    ranks, domain = shape.num_ranks, machine.domain_size
    if ranks > min(domain, sizing.MAX_RANKS):
        notes.append(
            f"jax_ep runs one NVLink domain of at most {sizing.MAX_RANKS} ranks today: "
            f"{ranks} ranks in domains of {domain} are arithmetic, not a promise."
        )
    if shape.routing.num_topk > MAX_TOPK or shape.num_slots > MAX_EXPERTS:
        notes.append(
            f"jax_ep takes at most {MAX_TOPK} experts per token of {MAX_EXPERTS}."
        )
    if ranks > shape.routing.num_experts:
        notes.append(
            f"{ranks} ranks share {shape.routing.num_experts} experts: each has "
            f"{ranks // shape.routing.num_experts} replicas (jax_ep.plan_placement)."
        )
    expected = shape.tokens * shape.routing.num_topk
    if shape.capacity_factor is None and memory.receive_rows > 2 * expected:
        notes.append(
            f"The dropless receive buffer has {memory.receive_rows / expected:.1f} "
            "times the rows that uniform routing fills, and dispatch writes all of it, "
            "zeros included: --capacity-factor bounds it."
        )
    if memory.receive_rows > _MAX_ROWS:
        notes.append(
            f"{memory.receive_rows} receive rows are more than int32 numbers: jax_ep "
            "refuses them; give --capacity-factor."
        )
    return notes
