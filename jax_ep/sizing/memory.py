"""The shapes of an exchange, its buffers, and what alignment adds."""

import dataclasses
import math
from collections.abc import Iterable

from jax_ep import _ffi
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

    Raises:
      ValueError: a number below 1, tokens that no array can have, an R that does not
        fit E, a capacity factor that `MoEConfig` refuses.
    """

    routing: UniformRouting
    tokens: int
    hidden: int
    num_ranks: int
    capacity_factor: float | None = None
    expert_alignment: int = 1

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

    @property
    def num_slots(self) -> int:
        """Places for experts over all ranks: E, or R where experts have replicas."""
        return max(self.routing.num_experts, self.num_ranks)


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
      none.

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
      R, and one number.
    """
    slots = shape.tokens * shape.routing.num_topk
    num_local = shape.num_slots // shape.num_ranks
    return 4 * ((2 + shape.num_ranks) * slots + 3 * num_local + 2 * shape.num_ranks + 1)


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
    # Beyond this many standard deviations the rest is below a float's precision.
    reach = 12 * math.sqrt(mean * (1 - chance)) + 40
    first, last = max(0, int(mean - reach)), min(trials, int(mean + reach))
    log_odds = math.log(chance) - math.log1p(-chance)
    log_first = (
        math.lgamma(trials + 1)
        - math.lgamma(first + 1)
        - math.lgamma(trials - first + 1)
        + first * math.log(chance)
        + (trials - first) * math.log1p(-chance)
    )
    log_weight, weights, blocks = log_first, 0.0, 0.0
    for count in range(first, last + 1):
        weight = math.exp(log_weight)
        weights += weight
        blocks += weight * -(-count // alignment)
        if count < last:
            log_weight += math.log((trials - count) / (count + 1)) + log_odds
    return alignment * blocks / weights / mean
