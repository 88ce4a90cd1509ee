"""The shapes of an exchange, its buffers, and what alignment adds."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from jax_ep import _ffi, two_hops
from jax_ep.axis import MAX_RANKS
from jax_ep.capacity import receive_capacity
from jax_ep.config import MoEConfig
from jax_ep.sizing.targets import UniformRouting, positive

_MAX_TOKENS = 2**31 - 1  # a dimension of an array whose indices are int32


@dataclasses.dataclass(frozen=True)
class Shape:
    """One exchange, as each of its ranks sees it.

    Attributes:
      routing: E, K and the router's groups.
      tokens: T, per rank.
      hidden: H.
      num_ranks: R, a divisor or a multiple of E (see `distinct_ranks`).
      capacity_factor: as in `MoEConfig`; None is dropless.
      expert_alignment: A.
      domain_size: G, ranks of an NVLink domain; None, or R and more, is one domain.
      network_capacity_factor: room between domains, as in `dispatch_layout`; None is
        room for all tokens.

    Raises:
      ValueError: a number below 1, tokens that no array can have, an R that does not
        fit E or G, a factor that `MoEConfig` or `dispatch_layout` refuses.
    """

    routing: UniformRouting
    tokens: int
    hidden: int
    num_ranks: int
    capacity_factor: float | None = None
    expert_alignment: int = 1
    domain_size: int | None = None
    network_capacity_factor: float | None = None

    def __post_init__(self):
        positive(
            "Shape",
            tokens=self.tokens,
            hidden=self.hidden,
            num_ranks=self.num_ranks,
            expert_alignment=self.expert_alignment,
        )
        if self.tokens > _MAX_TOKENS:
            raise ValueError(
                f"jax_ep.sizing.Shape: tokens (={self.tokens}) must be at most "
                f"{_MAX_TOKENS}."
            )
        experts = self.routing.num_experts
        if experts % self.num_ranks and self.num_ranks % experts:
            raise ValueError(
                f"jax_ep.sizing.Shape: num_ranks (={self.num_ranks}) must divide "
                f"num_experts (={experts}), or be a multiple of it (replicas)."
            )
        _config(self)
        num_domains_of(self.num_ranks, self.domain_size)
        factor = self.network_capacity_factor
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(
                f"jax_ep.sizing.Shape: network_capacity_factor (={factor}) must be "
                "positive and finite."
            )
        if factor is not None and round(factor * self.expected_tokens, 6) < 1:
            raise ValueError(
                f"jax_ep.sizing.Shape: network_capacity_factor (={factor}) must leave "
                f"room for a token: at least {1 / self.expected_tokens:.3g} with "
                f"{self.tokens} tokens."
            )

    @property
    def num_slots(self) -> int:
        """Places for experts over all ranks: E, or R where experts have replicas."""
        return max(self.routing.num_experts, self.num_ranks)

    @property
    def num_domains(self) -> int:
        """D; 1 is one NVLink domain, and no hop between."""
        return num_domains_of(self.num_ranks, self.domain_size)

    @property
    def expected_tokens(self) -> float:
        """Tokens of a rank that `dispatch_layout` expects to go to a domain.

        Of ungrouped routing; a router's groups are not known to it.
        """
        return self.tokens * two_hops.share_to_domain(
            self.num_slots, self.num_domains, self.routing.num_topk
        )

    @property
    def places(self) -> int:
        """Q, the tokens that a rank may send to a domain; T of one domain."""
        if self.num_domains == 1:
            return self.tokens
        return two_hops.room(
            self.network_capacity_factor, self.expected_tokens, self.tokens
        )


def num_domains_of(num_ranks: int, domain_size: int | None) -> int:
    """D = R/G, or 1 where a domain holds all ranks.

    Raises:
      ValueError: G that does not divide a larger R.
    """
    positive("Shape", num_ranks=num_ranks)
    if domain_size is None:
        return 1
    positive("Shape", domain_size=domain_size)
    if num_ranks <= domain_size:
        return 1
    if num_ranks % domain_size:
        raise ValueError(
            f"jax_ep.sizing.Shape: num_ranks (={num_ranks}) must be a multiple of "
            f"domain_size (={domain_size}), or at most that."
        )
    return num_ranks // domain_size


def _config(shape: Shape) -> MoEConfig:
    return MoEConfig(
        num_experts=shape.routing.num_experts,
        num_experts_per_tok=shape.routing.num_topk,
        hidden_size=shape.hidden,
        moe_intermediate_size=1,  # No buffer of an exchange depends on it.
        capacity_factor=shape.capacity_factor,
        expert_alignment=shape.expert_alignment,
    )


def receive_rows(shape: Shape) -> int:
    """Rows C of a rank's receive buffer.

    Args:
      shape: the exchange.

    Returns:
      `receive_capacity` of the layer, rounded down to a multiple of A as
      `dispatch_layout` does.
    """
    rows = receive_capacity(
        _config(shape), shape.tokens, shape.num_ranks, num_slots=shape.num_slots
    )
    assert rows is not None, "None is for no tokens, which Shape refuses."
    return rows // shape.expert_alignment * shape.expert_alignment


def receive_bytes(shape: Shape, row: int, *, weights: bool = True) -> int:
    """Bytes of a rank's receive buffer.

    Args:
      shape: the exchange.
      row: bytes of a row, see `row_bytes`.
      weights: whether the router's weights travel: one float32 a row.

    Returns:
      `C * row`, and 4 bytes a row for weights.
    """
    positive("receive_bytes", row=row)
    return receive_rows(shape) * (row + 4 * bool(weights))


def workspace_bytes(num_ranks: int) -> int:
    """Bytes of the symmetric workspace that each GPU of a communicator holds.

    Args:
      num_ranks: R, from 1 to 64.

    Returns:
      4 MiB, and for each rank a range of the ring, of 30 MiB, and slots for few tokens,
      of twice 4.25 MiB; from R = 7 on less of the former, beyond 8 of both, so that it
      all stays at 256 MiB. It does not depend on tokens or widths. CPU devices have
      none. The pages by which ranks agree on it are 2 MiB more, with two ranks or more.

    Raises:
      ValueError: R out of range.

    Source: `WorkspaceBytes` in ffi/cuda/workspace.h.
    """
    positive("workspace_bytes", num_ranks=num_ranks)
    if num_ranks > MAX_RANKS:
        raise ValueError(
            f"jax_ep.sizing.workspace_bytes: num_ranks (={num_ranks}) must be at most "
            f"{MAX_RANKS}."
        )
    return _ffi.workspace_bytes(num_ranks)


def handle_bytes(shape: Shape) -> int:
    """Bytes of a rank's `Handle`: what is kept from forward to backward of a layer.

    Args:
      shape: the exchange.

    Returns:
      Of int32: `slot` and `slot_rank` of T*K, `recv_slot` of R*T*K, three of L, two of
      R, and one number. Over D domains `recv_slot` is of G*D*Q*K, and its `Hop` has
      D*Q, T*D and twice D*Q*K.
    """
    slots = shape.tokens * shape.routing.num_topk
    num_local = shape.num_slots // shape.num_ranks
    numbers = 2 * slots + 3 * num_local + 2 * shape.num_ranks + 1
    if shape.num_domains == 1:
        return 4 * (numbers + shape.num_ranks * slots)
    num_ranks = shape.num_ranks // shape.num_domains
    places = shape.num_domains * shape.places
    numbers += (num_ranks + 2) * places * shape.routing.num_topk
    return 4 * (numbers + places + shape.tokens * shape.num_domains)


def relay_bytes(shape: Shape, row: int, *, num_weights: int = 0) -> int:
    """Bytes of a rank's buffer of what crosses between domains.

    Args:
      shape: the exchange.
      row: bytes of a row, see `row_bytes`.
      num_weights: float32 numbers that cross beside it, K in a dispatch with weights.

    Returns:
      `D*Q` rows; 0 of one domain. A dispatch has two, what it packs and what arrives,
      and so has a combine: up to four are alive in a step, beside the receive buffer.
    """
    positive("relay_bytes", row=row)
    if shape.num_domains == 1:
        return 0
    return shape.num_domains * shape.places * (row + 4 * num_weights)


def padding_amplification(counts: Iterable[int], alignment: int) -> float:
    """Rows of a grouped GEMM over rows that hold a token.

    Args:
      counts: rows of each expert, at least 0.
      alignment: A; each group takes a multiple of it, an empty one none.

    Returns:
      `sum(ceil(n/A) * A) / sum(n)`; 3.0 for 1, 1 and 126 rows at 128. 1.0 without rows.

    Raises:
      ValueError: a negative count, A below 1.
    """
    positive("padding_amplification", alignment=alignment)
    rows, padded = 0, 0
    for count in counts:
        if count < 0:
            raise ValueError(
                f"jax_ep.sizing.padding_amplification: counts (={count}) must be at "
                "least 0."
            )
        rows += int(count)
        padded += -(-int(count) // alignment) * alignment
    return padded / rows if rows else 1.0


def expected_padding_amplification(shape: Shape) -> float:
    """The amplification that uniform routing leads to, of expected rows.

    Args:
      shape: the exchange; A is its `expert_alignment`.

    Returns:
      `A * E[ceil(n/A)] / E[n]`, where the rows n of an expert are binomial: each of the
      R*T tokens has it among its K with probability K/E (K/R for a replica where
      R > E).
    """
    trials, alignment = shape.num_ranks * shape.tokens, shape.expert_alignment
    chance = shape.routing.num_topk / shape.num_slots
    mean = trials * chance
    if chance == 1:
        return padding_amplification([trials], alignment)
    weights, blocks = 0.0, 0.0
    for count, weight in binomial(trials, chance):
        weights += weight
        blocks += weight * -(-count // alignment)
    return alignment * blocks / weights / mean


def binomial(trials: int, chance: float) -> Iterator[tuple[int, float]]:
    """Counts and their probabilities, but for those that no float would show."""
    mean = trials * chance
    # Beyond this many standard deviations the rest is below a float's precision.
    reach = 12 * math.sqrt(mean * (1 - chance)) + 40
    first, last = max(0, int(mean - reach)), min(trials, int(mean + reach))
    log_odds = math.log(chance) - math.log1p(-chance)
    log_weight = (
        math.lgamma(trials + 1)
        - math.lgamma(first + 1)
        - math.lgamma(trials - first + 1)
        + first * math.log(chance)
        + (trials - first) * math.log1p(-chance)
    )
    for count in range(first, last + 1):
        yield count, math.exp(log_weight)
        if count < last:
            log_weight += math.log((trials - count) / (count + 1)) + log_odds
