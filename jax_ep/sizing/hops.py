"""The two hops of `dispatch_layout(domain_size=)`: rows, bytes, and time.

Hop 1 goes over the rails between NVLink domains, by XLA's all_to_all: Q rows from each
rank to each domain, wanted or not. Hop 2 is our exchange inside a domain, over what
arrived. All of it is arithmetic: no machine with several domains has measured it.
"""

import dataclasses
import functools

from jax_ep.sizing.bounds import Bound, Machine, time_bound
from jax_ep.sizing.memory import Shape, binomial, handle_bytes, receive_rows
from jax_ep.sizing.targets import positive, rank_probabilities
from jax_ep.sizing.traffic import (
    Traffic,
    ids_bytes,
    rail_bytes,
    row_bytes,
    sums_only,
    wire_bytes,
)


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Rows of a rank in two hops, where no receive buffer overflows: means over ranks.

    Attributes:
      places: Q, tokens that have room to a domain.
      sent: rows that leave over the NIC, `(D - 1) * Q`: exact.
      wanted: of these, rows that hold a token; expected, as all below.
      arrived: rows with a token that arrive, its own domain's included.
      kept: of all (token, k) slots, the share that has room.
      inside: rows that leave over NVLink, what arrived to the ranks of its experts.
    """

    places: int
    sent: int
    wanted: float
    arrived: float
    kept: float
    inside: float


def crossing(shape: Shape) -> Crossing:
    """Rows of two hops.

    With q the probability that a token goes to a given domain, a rank has binomially
    many tokens for it, n of T, and min(n, Q) have room.

    Args:
      shape: the exchange, of more than one domain.

    Raises:
      ValueError: one domain; domains over which the experts do not divide evenly.

    Source: one copy for each node is the node-limited routing of DeepSeek-V3 (report,
    section 3.2.2), and the hybrid mode of DeepEP.
    """
    num_domains, places = _several("crossing", shape), shape.places
    try:
        to_domain = rank_probabilities(shape.routing, num_domains)
    except ValueError:
        raise ValueError(
            f"jax_ep.sizing.crossing: the {num_domains} domains of {shape.domain_size} "
            f"ranks must divide num_experts (={shape.routing.num_experts}), or be a "
            "multiple of it."
        ) from None
    to_rank = rank_probabilities(shape.routing, shape.num_ranks)
    with_room = [_with_room(shape.tokens, q, places) for q in to_domain]
    domain = shape.num_ranks // num_domains
    # First come, first served by token: who has room says nothing of its experts.
    shares = [
        kept / (shape.tokens * q) for q, kept in zip(to_domain, with_room, strict=True)
    ]
    rows = shape.tokens * sum(
        q * shares[rank // domain] for rank, q in enumerate(to_rank)
    )
    arrived = sum(with_room)
    return Crossing(
        places=places,
        sent=(num_domains - 1) * places,
        wanted=arrived * (1 - 1 / num_domains),
        arrived=arrived,
        kept=sum(shares) / num_domains,
        inside=rows * (1 - 1 / domain),
    )


@functools.lru_cache(maxsize=4096)
def _with_room(trials: int, chance: float, most: int) -> float:
    """`E[min(n, most)]` of a binomial n."""
    if most >= trials or chance == 1:
        return min(trials * chance, most)
    total, weights = 0.0, 0.0
    for count, weight in binomial(trials, chance):
        weights += weight
        total += weight * min(count, most)
    return min(total / weights, trials * chance)


@dataclasses.dataclass(frozen=True)
class Hops:
    """Expected bytes of one stage by two hops, of one rank.

    Attributes:
      between: hop 1. Its `nic` is exact: the collective is dense.
      inside: hop 2.
      wanted: of `between.nic`, what belongs to a token that goes there.
      rail: over the NICs of a rail, the ranks with one place in each domain.
      boundary: out of a domain, over the NICs of all its ranks (and as many in).
    """

    between: Traffic
    inside: Traffic
    wanted: float
    rail: int
    boundary: int


@dataclasses.dataclass(frozen=True)
class HopsBound:
    """The least seconds of a stage's hops."""

    between: Bound
    inside: Bound

    @property
    def serial(self) -> float:
        """One hop after the other, as a stage runs."""
        return self.between.seconds + self.inside.seconds

    def chunked(self, chunks: int) -> float:
        """With a batch in so many equal parts, a part's hop beside another's.

        The slower hop without a break, and the faster one of one part; more where both
        want the same memory. The package does not split a batch: a program may.

        Raises:
          ValueError: fewer than one part.
        """
        positive("HopsBound.chunked", chunks=chunks)
        both = (self.between.seconds, self.inside.seconds)
        return max(both) + min(both) / chunks


def hops_bound(
    hops: Hops, machine: Machine, *, num_sms: int | None = None
) -> HopsBound:
    """The least times of a stage's hops, as `time_bound`; `num_sms` is of hop 2."""
    return HopsBound(
        time_bound(hops.between, machine),
        time_bound(hops.inside, machine, num_sms=num_sms),
    )


def layout_hops(shape: Shape) -> Hops:
    """Bytes of a layout: ids of Q tokens to each domain, and their slots back.

    Args:
      shape: the exchange, of more than one domain.

    Returns:
      Besides, all ranks add `2*R` counts; where rows may be dropped a domain's ranks
      tell each other `E` counts each. Neither is counted here.

    Raises:
      ValueError: as `crossing`.
    """
    rows, num_domains = crossing(shape), shape.num_domains
    domain, num_topk = shape.num_ranks // num_domains, shape.routing.num_topk
    num_ids = num_domains * rows.places * num_topk  # That arrive.
    memory = 4 * (2 * shape.tokens * num_topk + 5 * num_ids)
    link = (domain - 1) * ids_bytes(num_ids)
    inside = Traffic(
        "layout", link, 0, 4 * num_ids + 2 * link + handle_bytes(shape), 0, 0
    )
    return _hops(shape, rows, "layout", 2 * 4 * num_topk, memory, inside)


def dispatch_hops(
    shape: Shape, *, dtype: str = "bfloat16", weights: bool = True
) -> Hops:
    """Bytes of a dispatch, and of the backward of a combine.

    Args:
      shape: the exchange, of more than one domain.
      dtype: of the rows, see `row_bytes`.
      weights: whether the router's weights travel.

    Returns:
      Hop 1 packs D*Q rows, and the collective reads and writes as many; hop 2 reads
      those with a token, and is else as in `dispatch_traffic`.

    Raises:
      ValueError: as `crossing` and `row_bytes`.
    """
    rows, num_weights = crossing(shape), shape.routing.num_topk * bool(weights)
    across = rail_bytes(shape.hidden, dtype, num_weights)
    memory = (rows.arrived + 3 * shape.num_domains * rows.places) * across
    row = row_bytes(shape.hidden, dtype)
    link = rows.inside * wire_bytes(shape.hidden, dtype, num_weights)
    results = receive_rows(shape) * row
    inside = Traffic(
        "dispatch",
        link,
        0,
        rows.arrived * row + 2 * link + results,
        link + results,
        0,
    )
    return _hops(shape, rows, "dispatch", across, memory, inside)


def combine_hops(
    shape: Shape, *, dtype: str = "bfloat16", weight_gradients: bool = False
) -> Hops:
    """Bytes of a combine, and of the backward of a dispatch.

    Args:
      shape: the exchange, of more than one domain.
      dtype: of the rows, as in `combine_traffic`.
      weight_gradients: whether K numbers travel beside each row.

    Returns:
      Hop 2 adds a domain's rows into D*Q sums, which cross home; there those of a
      token are added.

    Raises:
      ValueError: as `crossing` and `combine_traffic`.
    """
    sums_only("combine_hops", dtype)
    rows, num_topk = crossing(shape), shape.routing.num_topk
    num_weights = num_topk * bool(weight_gradients)
    across = rail_bytes(shape.hidden, dtype, num_weights)
    sums = shape.num_domains * rows.places
    row = row_bytes(shape.hidden, dtype)
    memory = 2 * sums * across + (rows.arrived + shape.tokens) * row
    link = rows.inside * wire_bytes(shape.hidden, dtype, num_weights)
    read = shape.tokens * num_topk * rows.kept * row
    inside = Traffic(
        "combine",
        link,
        0,
        read + 2 * link + sums * row,
        link + sums * row,
        read + link,
    )
    return _hops(shape, rows, "combine", across, memory, inside)


def _hops(shape, rows, stage, across, memory, inside) -> Hops:
    sent = rows.sent * across
    between = Traffic(stage, 0, sent, memory, 0, 0)
    return Hops(
        between,
        inside,
        wanted=rows.wanted * across,
        rail=shape.num_domains * sent,
        boundary=shape.num_ranks // shape.num_domains * sent,
    )


def _several(where: str, shape: Shape) -> int:
    if shape.num_domains == 1:
        raise ValueError(
            f"jax_ep.sizing.{where}: domain_size (={shape.domain_size}) must be less "
            f"than num_ranks (={shape.num_ranks}): one domain has one hop."
        )
    return shape.num_domains
