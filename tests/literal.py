"""The three stages and their derivatives, word for word, as loops over tokens.

Plain numpy; the oracle of every other implementation. Arrays have the ranks' axis in
front, since the loops see all ranks at once: ids are `[R, T, K]`, rows `[R, T, ...]` at
their source and `[R, C, ...]` at their experts.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Layout:
    """What `jax_ep.Handle` holds, for all ranks."""

    slot: np.ndarray  # [R, T, K]
    slot_rank: np.ndarray  # [R, T, K]
    recv_slot: np.ndarray  # [R (owner), R (source), T, K]
    group_sizes: np.ndarray  # [R, L]
    group_counts: np.ndarray  # [R, L]
    group_offsets: np.ndarray  # [R, L]
    num_recv: np.ndarray  # [R (observer), R]
    num_dropped: np.ndarray  # [R (observer), R]
    num_invalid: np.ndarray  # [R, 1]
    capacity: int

    def kept_slots(self):
        """(source, token, k, owner, row) of every kept slot, in this order."""
        for source, token, k in np.ndindex(self.slot.shape):
            row = int(self.slot[source, token, k])
            if row >= 0:
                yield source, token, k, int(self.slot_rank[source, token, k]), row


def align(count: int, block: int) -> int:
    while count % block:
        count += 1
    return count


def fill(demands: list[int], capacity: int, block: int) -> list[int]:
    """What each of `demands` keeps of `capacity` rows given out in whole blocks."""

    def rows(kept):
        return sum(align(count, block) for count in kept)

    def limited(limit):
        return [min(demand, limit) for demand in demands]

    limit = 0
    while limit < max(demands, default=0) and rows(limited(limit + block)) <= capacity:
        limit += block
    kept = limited(limit)
    for index, demand in enumerate(demands):
        more = kept.copy()
        more[index] = min(demand, limit + block)
        if demand > limit and rows(more) <= capacity:
            kept = more
    return kept


def layout(
    ids: np.ndarray, num_experts: int, capacity: int | None = None, alignment: int = 1
) -> Layout:
    num_ranks, num_tokens, num_topk = ids.shape
    num_local = num_experts // num_ranks
    if capacity is None:
        capacity = num_ranks * num_tokens * num_topk + num_local * (alignment - 1)
    capacity = capacity // alignment * alignment

    slot = np.full(ids.shape, -1, np.int32)
    slot_rank = np.full(ids.shape, -1, np.int32)
    recv_slot = np.full((num_ranks, *ids.shape), -1, np.int32)
    group_sizes, group_counts, group_offsets = np.zeros(
        (3, num_ranks, num_local), np.int32
    )
    num_recv, num_dropped = np.zeros((2, num_ranks), np.int32)
    num_invalid = np.zeros((num_ranks, 1), np.int32)

    # wanted[expert][source]: its slots, by (token, k).
    wanted = [[[] for _ in range(num_ranks)] for _ in range(num_experts)]
    for source, token, k in np.ndindex(ids.shape):
        expert = int(ids[source, token, k])
        if expert >= num_experts:
            num_invalid[source] += 1
        elif expert >= 0:
            wanted[expert][source].append((source, token, k))
            slot_rank[source, token, k] = expert // num_local

    for rank in range(num_ranks):
        mine = wanted[rank * num_local : (rank + 1) * num_local]
        demands = [sum(len(slots) for slots in sources) for sources in mine]
        kept = fill(demands, capacity, alignment)
        row = 0
        for expert, sources in enumerate(mine):
            group_offsets[rank, expert] = row
            kept_of_sources = fill([len(slots) for slots in sources], kept[expert], 1)
            for slots, kept_of_source in zip(sources, kept_of_sources, strict=True):
                for index in slots[:kept_of_source]:
                    slot[index] = recv_slot[rank][index] = row
                    row += 1
            group_counts[rank, expert] = row - group_offsets[rank, expert]
            row = align(row, alignment)
            group_sizes[rank, expert] = row - group_offsets[rank, expert]
        num_recv[rank] = sum(demands)
        num_dropped[rank] = sum(demands) - sum(kept)

    everywhere = (num_ranks, num_ranks)
    return Layout(
        slot,
        slot_rank,
        recv_slot,
        group_sizes,
        group_counts,
        group_offsets,
        np.broadcast_to(num_recv, everywhere),
        np.broadcast_to(num_dropped, everywhere),
        num_invalid,
        capacity,
    )


def dispatch(x: np.ndarray, layout: Layout) -> np.ndarray:
    """`[R, C, ...]`, zero where no token's row is."""
    num_ranks = x.shape[0]
    recv = np.zeros((num_ranks, layout.capacity, *x.shape[2:]), x.dtype)
    for source, token, _, owner, row in layout.kept_slots():
        recv[owner, row] = x[source, token]
    return recv


def dispatch_weights(weights: np.ndarray, layout: Layout) -> np.ndarray:
    """`[R, C]`: each row's weight, from `[R, T, K]`."""
    recv = np.zeros((weights.shape[0], layout.capacity), weights.dtype)
    for source, token, k, owner, row in layout.kept_slots():
        recv[owner, row] = weights[source, token, k]
    return recv


def undispatch_weights(d_recv_weights: np.ndarray, layout: Layout) -> np.ndarray:
    """`[R, T, K]`: the derivative of `dispatch_weights`, its transpose."""
    d_weights = np.zeros(layout.slot.shape, d_recv_weights.dtype)
    for source, token, k, owner, row in layout.kept_slots():
        d_weights[source, token, k] = d_recv_weights[owner, row]
    return d_weights


def combine(
    y: np.ndarray,
    layout: Layout,
    weights: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    wire_dtype: np.dtype | None = None,
) -> np.ndarray:
    """`[R, T, ...]` from `[R, C, ...]`; also the derivative of `dispatch`.

    In float32: the partial of an expert rank starts at +0, adds the token's rows by
    ascending k and is rounded to the wire type; the total starts at +0, adds the
    partials of the ranks that have one by ascending rank, then the bias, and is
    rounded.
    """
    num_ranks, num_tokens, _ = layout.slot.shape
    out = np.zeros((num_ranks, num_tokens, *y.shape[2:]), y.dtype)
    for source, token in np.ndindex(num_ranks, num_tokens):
        partials = {}
        owners, rows = layout.slot_rank[source, token], layout.slot[source, token]
        for owner, row in zip(owners, rows, strict=True):  # by ascending k
            if row < 0:
                continue
            value = y[owner, row].astype(np.float32)
            if weights is not None:
                value = weights[owner, row] * value
            zero = np.zeros(y.shape[2:], np.float32)
            partials[owner] = partials.get(owner, zero) + value
        total = np.zeros(y.shape[2:], np.float32)
        for _, partial in sorted(partials.items()):
            total = total + partial.astype(wire_dtype or y.dtype).astype(np.float32)
        if bias is not None:
            total = total + bias[source, token].astype(np.float32)
        out[source, token] = total.astype(y.dtype)
    return out


def weighted_combine_gradients(
    d_out: np.ndarray, y: np.ndarray, weights: np.ndarray, layout: Layout
) -> tuple[np.ndarray, np.ndarray]:
    """Of a weighted combine: `d_y [R, C, H]` and `d_weights [R, C]`, in float64."""
    d_y = np.zeros(y.shape, np.float64)
    d_weights = np.zeros(weights.shape, np.float64)
    for source, token, _, owner, row in layout.kept_slots():
        grad = d_out[source, token].astype(np.float64)
        d_y[owner, row] = np.float64(weights[owner, row]) * grad
        d_weights[owner, row] = np.sum(grad * y[owner, row].astype(np.float64))
    return d_y, d_weights
