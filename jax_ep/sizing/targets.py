"""How many ranks a token goes to."""

import collections
import dataclasses
import functools
import math
import operator


def positive(where: str, **numbers: int) -> None:
    """Raises unless every one of `numbers` is an int of at least 1."""
    for name, value in numbers.items():
        try:
            whole = operator.index(value)
        except TypeError:
            raise TypeError(
                f"jax_ep.sizing.{where}: {name} (={value!r}) must be an int."
            ) from None
        if whole < 1 or isinstance(value, bool):
            raise ValueError(
                f"jax_ep.sizing.{where}: {name} (={value}) must be at least 1."
            )


@dataclasses.dataclass(frozen=True)
class UniformRouting:
    """A router without preferences: M of G groups, then K experts of those, all alike.

    Groups are consecutive experts, as in DeepSeek-V3 (report, section 2.1.2). That
    router picks groups by their two best scores, so it prefers groups that will get two
    of its experts, and spreads a token over more ranks: 2 to 9 per cent more, over 2 to
    64 ranks, for its E 256, K 8, 4 of 8 groups and random scores.

    Attributes:
      num_experts: E.
      num_topk: K, different experts for each token.
      n_group: G; 1 is no groups.
      topk_group: M, groups that a token may choose from.

    Raises:
      ValueError: a number below 1, K > E, G that does not divide E, M > G, or M groups
        with fewer than K experts. TypeError: no int.
    """

    num_experts: int
    num_topk: int
    n_group: int = 1
    topk_group: int = 1

    def __post_init__(self):
        positive("UniformRouting", **dataclasses.asdict(self))
        if self.num_topk > self.num_experts:
            self._refuse("num_topk", f"at most num_experts (={self.num_experts})")
        if self.num_experts % self.n_group:
            self._refuse("n_group", f"a divisor of num_experts (={self.num_experts})")
        if self.topk_group > self.n_group:
            self._refuse("topk_group", f"at most n_group (={self.n_group})")
        if self.num_candidates < self.num_topk:
            self._refuse(
                "topk_group",
                f"enough for num_topk (={self.num_topk}) experts, and those groups "
                f"have {self.num_candidates}",
            )

    @property
    def num_candidates(self) -> int:
        """Experts of a token's groups, `M * E / G`."""
        return self.topk_group * (self.num_experts // self.n_group)

    def _refuse(self, name: str, rule: str) -> None:
        raise ValueError(
            f"jax_ep.sizing.UniformRouting: {name} (={getattr(self, name)}) must be "
            f"{rule}."
        )


def distinct_ranks_independent(num_ranks: int, num_topk: int) -> float:
    """Expected ranks of a token whose K experts are on independently drawn ranks.

    Args:
      num_ranks: R.
      num_topk: K.

    Returns:
      `R * (1 - (1 - 1/R)^K)`; 6.45 for R = 16, K = 8. A little less than
      `distinct_ranks`, since a rank whose expert is taken is less likely to be drawn
      again.

    Raises:
      ValueError: a number below 1.

    Source: the expected number of non-empty bins of K balls in R bins.
    """
    positive("distinct_ranks_independent", num_ranks=num_ranks, num_topk=num_topk)
    return num_ranks * (1 - (1 - 1 / num_ranks) ** num_topk)


def distinct_ranks(routing: UniformRouting, num_ranks: int) -> float:
    """Expected ranks that a token goes to, its own included if it has an expert of it.

    Args:
      routing: who chooses.
      num_ranks: R, a divisor of E: rank r owns the experts `r*E/R` up to `(r+1)*E/R`.
        Or a multiple of E: an expert has R/E replicas, on ranks of their own, and
        tokens are dealt to them evenly. The same holds of nodes.

    Returns:
      The sum over ranks of the probability that some expert of theirs is chosen: with
      one group `R * (1 - C(E-L, K) / C(E, K))`, L = E/R; with more the same under
      every choice of M groups; K from R = E on.

    Raises:
      ValueError: R that neither divides E nor is a multiple of it.

    Source: the hypergeometric distribution, K draws without repetition. DeepEP chooses
    its number of SMs by the formula for one group (`get_theoretical_num_sms`).
    """
    return sum(rank_probabilities(routing, num_ranks))


@functools.lru_cache(maxsize=256)
def rank_probabilities(routing: UniformRouting, num_ranks: int) -> tuple[float, ...]:
    """For each rank (or domain), the probability that a token goes there.

    Args:
      routing: who chooses.
      num_ranks: R, as in `distinct_ranks`.

    Returns:
      R numbers, all alike unless groups lie across ranks unevenly.

    Raises:
      ValueError: as `distinct_ranks`.
    """
    positive("distinct_ranks", num_ranks=num_ranks)
    experts = routing.num_experts
    if num_ranks % experts == 0:
        return (routing.num_topk / num_ranks,) * num_ranks
    if experts % num_ranks:
        raise ValueError(
            f"jax_ep.sizing.distinct_ranks: num_ranks (={num_ranks}) must divide "
            f"num_experts (={experts}), or be a multiple of it (replicas)."
        )
    size = experts // routing.n_group
    num_local = experts // num_ranks
    found = []
    for first in range(0, experts, num_local):
        edges = range(first // size * size, first + num_local, size)
        overlaps = (
            min(edge + size, first + num_local) - max(edge, first) for edge in edges
        )
        found.append(1 - _miss(routing, tuple(sorted(overlaps))))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _miss(routing: UniformRouting, overlaps: tuple[int, ...]) -> float:
    """Probability that none is chosen of a block of experts, so many of each group."""
    # (groups chosen of those in the block, its experts among the candidates) -> ways
    ways: dict[tuple[int, int], int] = {(0, 0): 1}
    for overlap in overlaps:
        further: dict[tuple[int, int], int] = collections.defaultdict(int)
        for (groups, candidates), count in ways.items():
            further[groups, candidates] += count
            further[groups + 1, candidates + overlap] += count
        ways = further
    other = routing.n_group - len(overlaps)
    candidates, topk = routing.num_candidates, routing.num_topk
    misses = sum(
        count
        * math.comb(other, routing.topk_group - groups)
        * math.comb(candidates - local, topk)
        for (groups, local), count in ways.items()
        if groups <= routing.topk_group
    )
    choices = math.comb(routing.n_group, routing.topk_group)
    return misses / (choices * math.comb(candidates, topk))


def remote_ranks(routing: UniformRouting, num_ranks: int) -> float:
    """Expected ranks that a token's row must be sent to: all of its ranks but its own.

    Args:
      routing: who chooses.
      num_ranks: R, as in `distinct_ranks`.

    Returns:
      `distinct_ranks * (1 - 1/R)`: routing does not know where a token is, so the mean
      over source ranks leaves out one rank in R.

    Raises:
      ValueError: as `distinct_ranks`.
    """
    return distinct_ranks(routing, num_ranks) * (1 - 1 / num_ranks)
