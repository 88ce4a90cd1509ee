"""Expert ids as layers meet them, and the bytes that an exchange of them must move."""

import dataclasses

import numpy as np

KINDS = ("uniform", "zipf", "one-hot")


def make_ids(
    kind: str, ranks: int, tokens: int, topk: int, experts: int, seed: int = 0
) -> np.ndarray:
    """`[R, T, K]` int32, K different experts for each token.

    uniform: all alike. zipf: expert e is wanted in proportion to 1/(e+1), so the first
    rank has most of the work. one-hot: every token has the same K experts, all of the
    first rank.
    """
    if kind == "one-hot":
        return np.broadcast_to(np.arange(topk, dtype=np.int32), (ranks, tokens, topk))
    random = np.random.default_rng(seed)
    # The K largest of these are K draws without repetition.
    scores = random.gumbel(size=(ranks, tokens, experts)).astype(np.float32)
    if kind == "zipf":
        scores -= np.log1p(np.arange(experts, dtype=np.float32))
    chosen = np.argpartition(-scores, topk - 1, axis=-1)[..., :topk]
    return random.permuted(chosen, axis=-1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Rows that cross links and rows that land, as `[R]` counts.

    Attributes:
      demand: slots that each rank receives.
      egress: (token, other rank) pairs out of each rank: a token's row goes to each of
        its ranks once.
      ingress: the same by destination.
      local: (token, rank) pairs that stay on the token's rank.
    """

    demand: np.ndarray
    egress: np.ndarray
    ingress: np.ndarray
    local: np.ndarray


def traffic(ids: np.ndarray, experts: int) -> Traffic:
    """Of `[R, T, K]` ids; a negative one is masked, and moves nothing."""
    ranks = ids.shape[0]
    owner = np.where(ids < 0, -1, ids // (experts // ranks))
    demand = np.bincount(owner[owner >= 0], minlength=ranks)
    pairs = np.stack(  # [source, destination]
        [np.any(owner == rank, axis=2).sum(axis=1) for rank in range(ranks)], axis=1
    )
    local = np.diagonal(pairs).copy()
    np.fill_diagonal(pairs, 0)
    return Traffic(demand, pairs.sum(1), pairs.sum(0), local)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Of one exchange: of the busiest rank in each respect.

    Attributes:
      egress, ingress: over its link, each way.
      memory: of its HBM, read plus written: source rows, the ring that rows cross in
        (written and read), result rows, zeros.
    """

    egress: int
    ingress: int
    memory: int

    def floor(self, ceilings) -> float:
        """Seconds at the measured ceilings: of the slower, link or memory."""
        floors = [self.memory / ceilings.memory]
        if ceilings.egress and ceilings.ingress:
            floors += [self.egress / ceilings.egress, self.ingress / ceilings.ingress]
        return max(floors)


def dispatch_bytes(
    moved: Traffic, tokens: int, capacity: int, row_bytes: int, extra_bytes: int
) -> Bytes:
    """Rows of tokens to rows of experts; `extra_bytes` of weights go with each row."""
    wire = row_bytes + extra_bytes
    memory = tokens * row_bytes + 2 * moved.ingress.max() * wire + capacity * row_bytes
    return Bytes(
        int(moved.egress.max() * wire), int(moved.ingress.max() * wire), int(memory)
    )


def combine_bytes(
    moved: Traffic, tokens: int, row_bytes: int, extra_bytes: int
) -> Bytes:
    """Rows of experts, added, to rows of tokens: the way back."""
    wire = row_bytes + extra_bytes
    read = moved.demand * row_bytes
    memory = read + 2 * moved.egress * wire + tokens * row_bytes
    return Bytes(
        int(moved.ingress.max() * wire),
        int(moved.egress.max() * wire),
        int(memory.max()),
    )


def logical_bytes(moved: Traffic, row_bytes: int) -> int:
    """What DeepEP's published "logical bandwidth" divides by the time.

    A row for each (token, rank) pair that the busiest rank receives in dispatch, and
    sends back in combine, its own tokens' too (tests/elastic/test_ep.py of DeepEP,
    `num_scaleup_bytes`).
    """
    return int((moved.ingress + moved.local).max()) * row_bytes


def copied_bytes(
    name: str, moved: Traffic, tokens: int, capacity: int, row_bytes: int
) -> int:
    """Of CPU devices, all ranks together: rows read plus written, each of them once.

    Dispatch reads tokens' rows and writes whole buffers, zeros too; combine reads the
    rows that hold a token and writes tokens' rows. Their backwards the other way round.
    """
    ranks = len(moved.demand)
    if name in ("dispatch", "combine backward"):
        return ranks * (tokens + capacity) * row_bytes
    return (int(moved.demand.sum()) + ranks * tokens) * row_bytes
