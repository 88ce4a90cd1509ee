"""How an exchange grows with the ranks, from one NVLink domain to many nodes."""

import dataclasses
from collections.abc import Iterable

from jax_ep.sizing.bounds import Bound, Machine, time_bound
from jax_ep.sizing.memory import Shape
from jax_ep.sizing.targets import distinct_ranks
from jax_ep.sizing.traffic import (
    Traffic,
    combine_traffic,
    dispatch_traffic,
    sums_dtype,
)

EP_RANKS = tuple(2**n for n in range(1, 12))  # EP2 to EP2048.


@dataclasses.dataclass(frozen=True)
class Route:
    """What one way of sending rows costs: bytes of a rank, and the least time."""

    dispatch: Traffic
    combine: Traffic
    dispatch_bound: Bound
    combine_bound: Bound

    @property
    def seconds(self) -> float:
        """Of dispatch and combine, one after the other."""
        return self.dispatch_bound.seconds + self.combine_bound.seconds


@dataclasses.dataclass(frozen=True)
class Step:
    """An exchange over so many ranks.

    Attributes:
      num_ranks: R.
      num_domains: D; 1 is one NVLink domain, where nothing is forwarded.
      distinct_ranks: ranks that a token goes to.
      distinct_domains: domains that it goes to.
      direct: every row sent to its rank.
      forwarded: one copy for each domain, see `rows_per_token`.
    """

    num_ranks: int
    num_domains: int
    distinct_ranks: float
    distinct_domains: float
    direct: Route
    forwarded: Route


def fits(shape: Shape, num_ranks: int, domain_size: int) -> bool:
    """Whether experts divide evenly over R ranks, and over their domains."""
    experts = shape.routing.num_experts
    num_domains = max(1, num_ranks // domain_size)
    return (num_ranks <= domain_size or not num_ranks % domain_size) and all(
        not experts % owners or not owners % experts
        for owners in (num_ranks, num_domains)
    )


def growth(
    shape: Shape,
    machine: Machine,
    *,
    ranks: Iterable[int] = EP_RANKS,
    dtype: str = "bfloat16",
    num_sms: int | None = None,
) -> list[Step]:
    """Bytes and least times over a range of R, tokens per rank the same.

    It says what an exchange would cost, not that jax_ep runs it: that is one NVLink
    domain of at most 64 ranks today, without forwarding. From R > E on, experts have
    replicas (see `distinct_ranks`).

    Args:
      shape: the exchange; its `num_ranks` is not used.
      machine: rates, and the size of a domain.
      ranks: values of R; those over which the experts do not divide evenly are left
        out.
      dtype: of the rows of dispatch; where those are FP8, combine's are bfloat16.
      num_sms: as in `time_bound`.

    Returns:
      A step for each R.
    """
    steps = []
    for num_ranks in ranks:
        if not fits(shape, num_ranks, machine.domain_size):
            continue
        at = dataclasses.replace(shape, num_ranks=num_ranks)
        num_domains = max(1, num_ranks // machine.domain_size)
        step = Step(
            num_ranks,
            num_domains,
            distinct_ranks(at.routing, num_ranks),
            distinct_ranks(at.routing, num_domains),
            _route(at, machine, dtype, num_sms, forward=False),
            _route(at, machine, dtype, num_sms, forward=True),
        )
        steps.append(step)
    return steps


def _route(
    shape: Shape, machine: Machine, dtype: str, num_sms: int | None, *, forward: bool
) -> Route:
    domain = machine.domain_size
    dispatch = dispatch_traffic(shape, dtype=dtype, domain_size=domain, forward=forward)
    combine = combine_traffic(
        shape,
        dtype=sums_dtype(dtype),
        domain_size=domain,
        forward=forward,
    )
    return Route(
        dispatch,
        combine,
        time_bound(dispatch, machine, num_sms=num_sms),
        time_bound(combine, machine, num_sms=num_sms),
    )
