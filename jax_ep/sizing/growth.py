"""How an exchange grows with the ranks, from one NVLink domain to many nodes."""

import dataclasses
from collections.abc import Iterable

from jax_ep import two_hops
from jax_ep.sizing.bounds import Bound, Machine, time_bound
from jax_ep.sizing.hops import Hops, HopsBound, combine_hops, dispatch_hops, hops_bound
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
    """What it costs to send every row straight to its rank, and the least time."""

    dispatch: Traffic
    combine: Traffic
    dispatch_bound: Bound
    combine_bound: Bound

    @property
    def seconds(self) -> float:
        """Of dispatch and combine, one after the other."""
        return self.dispatch_bound.seconds + self.combine_bound.seconds


@dataclasses.dataclass(frozen=True)
class HopsRoute:
    """What it costs by two hops, and the least time."""

    dispatch: Hops
    combine: Hops
    dispatch_bound: HopsBound
    combine_bound: HopsBound

    @property
    def seconds(self) -> float:
        """Of dispatch and combine, all hops one after the other."""
        return self.dispatch_bound.serial + self.combine_bound.serial


@dataclasses.dataclass(frozen=True)
class Step:
    """An exchange over so many ranks.

    Attributes:
      num_ranks: R.
      num_domains: D; 1 is one NVLink domain.
      distinct_ranks: ranks that a token goes to.
      distinct_domains: domains that it goes to.
      direct: every row sent to its rank: over several domains a comparison, which our
        kernels do not run.
      hops: by two hops, as `domain_size` does; None of one domain.
    """

    num_ranks: int
    num_domains: int
    distinct_ranks: float
    distinct_domains: float
    direct: Route
    hops: HopsRoute | None


def fits(shape: Shape, num_ranks: int, domain_size: int) -> bool:
    """Whether experts divide evenly over R ranks, and over their domains."""
    experts = shape.routing.num_experts
    num_domains = max(1, num_ranks // domain_size)
    return (num_ranks <= domain_size or not num_ranks % domain_size) and all(
        not experts % owners or not owners % experts
        for owners in (num_ranks, num_domains)
    )


def of_layer(shape: Shape, num_ranks: int, domain_size: int) -> Shape:
    """The exchange over R ranks, with the room between domains that a layer has.

    Args:
      shape: the exchange; its ranks and domain are not used.
      num_ranks: R.
      domain_size: G.

    Returns:
      With the shape's own `network_capacity_factor`, or what one token needs where that
      is more. Without one, with 1.06 from eight domains on where there is a capacity
      factor, as a layer has it whose `dropless_fallback` sends the rest in further
      rounds; else with room for all tokens.
    """
    at = dataclasses.replace(
        shape,
        num_ranks=num_ranks,
        domain_size=domain_size,
        network_capacity_factor=None,
    )
    factor = shape.network_capacity_factor
    if factor is not None:
        factor = max(factor, 1 / at.expected_tokens)
    elif at.num_domains >= two_hops.MANY_DOMAINS and shape.capacity_factor is not None:
        factor = two_hops.factor_for_rounds(at.expected_tokens)
    return dataclasses.replace(at, network_capacity_factor=factor)


def growth(
    shape: Shape,
    machine: Machine,
    *,
    ranks: Iterable[int] = EP_RANKS,
    dtype: str = "bfloat16",
    num_sms: int | None = None,
) -> list[Step]:
    """Bytes and least times over a range of R, tokens per rank the same.

    From R > E on, experts have replicas (see `distinct_ranks`).

    Args:
      shape: the exchange, made one of R ranks by `of_layer`.
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
        at = of_layer(shape, num_ranks, machine.domain_size)
        step = Step(
            num_ranks,
            at.num_domains,
            distinct_ranks(at.routing, num_ranks),
            distinct_ranks(at.routing, at.num_domains),
            _direct(at, machine, dtype, num_sms),
            _hops(at, machine, dtype, num_sms) if at.num_domains > 1 else None,
        )
        steps.append(step)
    return steps


def _direct(shape: Shape, machine: Machine, dtype: str, num_sms: int | None) -> Route:
    dispatch = dispatch_traffic(shape, dtype=dtype)
    combine = combine_traffic(shape, dtype=sums_dtype(dtype))
    return Route(
        dispatch,
        combine,
        time_bound(dispatch, machine, num_sms=num_sms),
        time_bound(combine, machine, num_sms=num_sms),
    )


def _hops(shape: Shape, machine: Machine, dtype: str, num_sms: int | None) -> HopsRoute:
    dispatch = dispatch_hops(shape, dtype=dtype)
    combine = combine_hops(shape, dtype=sums_dtype(dtype))
    return HopsRoute(
        dispatch,
        combine,
        hops_bound(dispatch, machine, num_sms=num_sms),
        hops_bound(combine, machine, num_sms=num_sms),
    )
