"""What `plan` shows: bytes, times, memory and notes of a model's exchange."""

import dataclasses

from jax_ep import sizing, two_hops
from jax_ep.exchange import MAX_EXPERTS, MAX_INT32
from jax_ep.layout import MAX_TOPK
from jax_ep.tools.models import Model

ALIGNMENTS = (8, 16, 64, 128, 256)  # Of grouped GEMMs' row tiles.


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One stage, every row straight to its rank: its bytes, least time and SMs."""

    name: str
    traffic: sizing.Traffic
    bound: sizing.Bound
    seconds: float
    binds: str
    sms: int | None


@dataclasses.dataclass(frozen=True)
class Hopped:
    """One stage by two hops: its bytes, and the least time, serial and in chunks."""

    name: str
    hops: sizing.Hops
    bound: sizing.HopsBound
    seconds: float
    chunked_seconds: float
    binds: tuple[str, str]
    sms: int | None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a rank: of one layer, but for the workspace, which all share.

    `relay` is one buffer of what crosses between domains; up to four are alive.
    """

    receive_rows: int
    receive: int
    dropless_rows: int
    dropless_receive: int
    relay_rows: int
    relay: int
    handle: int
    workspace: int | None
    expert_weights: int | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is shown, and what `--json` prints.

    Over several domains `hops` is what the package does, and `exchanges` a comparison.
    All bytes and times are arithmetic; `machine.origin` says which rates were measured.
    """

    model: Model
    shape: sizing.Shape
    dtype: str
    num_sms: int | None
    machine: sizing.Machine
    distinct_ranks: float
    exchanges: list[Exchange]
    crossing: sizing.Crossing | None
    hops: list[Hopped]
    chunks: int
    memory: Memory
    rows_per_expert: float
    padding: dict[int, float]
    growth: list[sizing.Step]
    notes: list[str]


def make_plan(
    model: Model,
    *,
    ranks: int,
    tokens: int,
    dtype: str,
    capacity_factor: float | None,
    alignment: int,
    network_capacity_factor: float | None,
    chunks: int,
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
    asked = sizing.Shape(
        routing,
        tokens,
        model.hidden,
        ranks,
        capacity_factor,
        alignment,
        machine.domain_size,
        network_capacity_factor,
    )
    shape = sizing.of_layer(asked, ranks, machine.domain_size)
    domain = ranks // shape.num_domains
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
        relay_rows=shape.num_domains * shape.places if shape.num_domains > 1 else 0,
        relay=sizing.relay_bytes(shape, row, num_weights=model.topk),
        handle=sizing.handle_bytes(shape),
        workspace=(
            sizing.workspace_bytes(domain) if domain <= sizing.MAX_RANKS else None
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
        crossing=sizing.crossing(shape) if shape.num_domains > 1 else None,
        hops=_hops(shape, dtype, machine, num_sms, chunks),
        chunks=chunks,
        memory=memory,
        rows_per_expert=ranks * tokens * model.topk / shape.num_slots,
        padding=padding,
        growth=sizing.growth(
            asked,
            machine,
            ranks=sorted({*sizing.EP_RANKS, ranks}),
            dtype=dtype,
            num_sms=num_sms,
        ),
        notes=_notes(shape, memory, machine),
    )


def _exchanges(shape, dtype, machine, num_sms) -> list[Exchange]:
    """Every stage, forward and backward."""
    back = sizing.sums_dtype(dtype)
    stages = {
        "layout": sizing.layout_traffic(shape),
        "dispatch": sizing.dispatch_traffic(shape, dtype=dtype),
        "combine": sizing.combine_traffic(shape, dtype=back),
        "dispatch backward": sizing.combine_traffic(
            shape, dtype=back, weight_gradients=True
        ),
        "combine backward": sizing.dispatch_traffic(shape, dtype=back, weights=False),
    }
    found = []
    for name, traffic in stages.items():
        bound = sizing.time_bound(traffic, machine, num_sms=num_sms)
        fewest = None if name == "layout" else sizing.sms_to_fill(traffic, machine)
        found.append(Exchange(name, traffic, bound, bound.seconds, bound.binds, fewest))
    return found


def _hops(shape, dtype, machine, num_sms, chunks) -> list[Hopped]:
    """The same by two hops; nothing of one domain."""
    if shape.num_domains == 1:
        return []
    back = sizing.sums_dtype(dtype)
    stages = {
        "layout": sizing.layout_hops(shape),
        "dispatch": sizing.dispatch_hops(shape, dtype=dtype),
        "combine": sizing.combine_hops(shape, dtype=back),
        "dispatch backward": sizing.combine_hops(
            shape, dtype=back, weight_gradients=True
        ),
        "combine backward": sizing.dispatch_hops(shape, dtype=back, weights=False),
    }
    found = []
    for name, hops in stages.items():
        bound = sizing.hops_bound(hops, machine, num_sms=num_sms)
        fewest = None if name == "layout" else sizing.sms_to_fill(hops.inside, machine)
        found.append(
            Hopped(
                name,
                hops,
                bound,
                bound.serial,
                bound.chunked(chunks),
                (bound.between.binds, bound.inside.binds),
                fewest,
            )
        )
    return found


def _notes(shape: sizing.Shape, memory: Memory, machine: sizing.Machine) -> list[str]:
    """What jax_ep cannot run of it, and what it is told better."""
    notes = []
    ranks, domain = shape.num_ranks, machine.domain_size
    if shape.num_domains > 1:
        notes += _notes_of_domains(shape)
    if min(ranks, domain) > sizing.MAX_RANKS:
        notes.append(
            f"Our kernels take at most {sizing.MAX_RANKS} ranks of an NVLink domain: "
            f"domains of {min(ranks, domain)} are arithmetic, not a promise."
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
    if shape.num_domains == 1:  # Else rows come from fewer ranks: see two_hops.
        spare = shape.num_slots // ranks * (shape.expert_alignment - 1)
        most = (MAX_INT32 - spare) // (ranks * shape.routing.num_topk)
        if shape.tokens > most:
            notes.append(
                "dispatch_layout numbers R*T*K rows in int32, whatever the capacity, "
                f"and refuses {shape.tokens} tokens a rank: send at most {most} in a "
                "call (parts of the batch one after another), or over fewer ranks."
            )
    elif memory.receive_rows > MAX_INT32:
        notes.append(
            f"{memory.receive_rows} receive rows are more than int32 numbers: jax_ep "
            "refuses them; give --capacity-factor."
        )
    return notes


def _notes_of_domains(shape: sizing.Shape) -> list[str]:
    """Several domains: that it is arithmetic, and room for what is not wanted."""
    notes = [
        f"{shape.num_domains} domains are domain_size={shape.domain_size}. Its bytes "
        "are those of the program; its times are arithmetic: no machine with several "
        "domains has measured them."
    ]
    crossing = sizing.crossing(shape)
    expected = crossing.arrived / shape.num_domains
    if crossing.kept < 0.9995:
        notes.append(
            f"{1 - crossing.kept:.1%} of the slots have no room between domains: they "
            "are dropped, or go in further rounds (dropless_fallback)."
        )
    elif crossing.places > 1.25 * expected:
        factor = two_hops.MANY_DOMAINS_FACTOR * expected / shape.expected_tokens
        notes.append(
            f"Of {crossing.places} rows to each domain {expected:.0f} are wanted: "
            f"--network-capacity-factor {factor:.3g}, with dropless_fallback, sends "
            "little else."
        )
    return notes
