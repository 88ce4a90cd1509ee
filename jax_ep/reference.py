"""The three stages in plain `jax.lax` collectives: the oracle, and the portable path.

Same operands and results as the custom calls, same rows, same sums in the same order;
more bytes on the wire. Runs on every platform, and over several processes on CPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def layout(operands, *, call) -> list[jax.Array]:
    """Every rank sees all ids and derives all ranks' rows; see `dispatch_layout`."""
    topk_idx = operands.topk_idx
    num_ranks, num_local = call.axis.num_ranks, call.num_local_experts
    num_experts = call.exchange.num_experts
    alignment = call.exchange.expert_alignment
    ids = all_gather(topk_idx, call)  # [R, T, K]
    num_invalid = jnp.sum(topk_idx >= num_experts, dtype=jnp.int32)[None]
    valid = (ids >= 0) & (ids < num_experts)
    expert = jnp.where(valid, ids, num_experts).reshape(num_ranks, -1)  # [R, T*K]

    wanted, rank_in_source = jax.vmap(
        functools.partial(count_and_number, num_experts=num_experts)
    )(expert)  # [R, E], [R, T*K]
    kept, kept_by_source = kept_rows(wanted, call)  # [R, L], [R, E]
    demand = wanted.sum(axis=0, dtype=jnp.int32).reshape(num_ranks, num_local)

    sizes = _align(kept, alignment)
    offsets = jnp.cumsum(sizes, axis=1) - sizes  # [R, L]
    kept_before = jnp.cumsum(kept_by_source, axis=0) - kept_by_source
    first_row = offsets.reshape(1, -1) + kept_before  # [R, E]
    pad = ((0, 0), (0, 1))  # Masked slots read this column: no row is kept.
    row = _take(jnp.pad(first_row, pad), expert) + rank_in_source
    is_kept = rank_in_source < _take(jnp.pad(kept_by_source, pad), expert)
    row = jnp.where(is_kept, row, -1).reshape(ids.shape)
    owner = jnp.where(valid, ids // num_local, -1)

    me = _rank(call)
    num_recv = demand.sum(axis=1, dtype=jnp.int32)
    results = [
        row[me],
        owner[me],
        jnp.where(owner == me, row, -1),
        sizes[me],
        kept[me],
        offsets[me],
        num_recv,
        num_recv - kept.sum(axis=1, dtype=jnp.int32),
        num_invalid,
    ]
    return [result.astype(jnp.int32) for result in results]


def dispatch(operands, *, call):
    """Gathers all ranks' rows and picks this rank's; see `dispatch`."""
    recv_slot = operands.recv_slot
    flat = recv_slot.reshape(-1)
    row = jnp.where(flat < 0, call.capacity, flat)  # Out of bounds: dropped.
    source = jnp.full(call.capacity, -1, jnp.int32)
    source = source.at[row].set(jnp.arange(row.size, dtype=jnp.int32), mode="drop")

    def pick(values, index):
        if not values.shape[0]:
            return jnp.zeros((call.capacity, *values.shape[1:]), values.dtype)
        kept = (source >= 0).reshape(-1, *[1] * (values.ndim - 1))
        return jnp.where(kept, values[index], jnp.zeros((), values.dtype))

    weights = operands.weights
    if weights is not None:
        weights = pick(all_gather(weights, call).reshape(-1), source)
    leaves = []
    num_topk = recv_slot.shape[2]
    for leaf in operands.leaves:
        # As bits, or XLA would take NaNs of bfloat16 through float32 and change them.
        bits = lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
        rows = all_gather(bits, call).reshape(-1, leaf.shape[1])
        rows = pick(rows, source // num_topk)
        leaves.append(lax.bitcast_convert_type(rows, leaf.dtype))
    return weights, tuple(leaves)


def combine(operands, *, call, wire_f32, out_f32):
    """Adds rows here, exchanges one partial per token, adds those; see `combine`."""
    slot = operands.slot
    values = operands.row_values
    if values is not None:
        values = all_gather(values, call)  # [R, C]
        if call.capacity:
            values = values[jnp.maximum(operands.slot_rank, 0), jnp.maximum(slot, 0)]
            values = jnp.where(slot >= 0, values, 0)
        else:
            values = jnp.zeros(slot.shape, jnp.float32)
    sums = []
    biases = operands.bias or [None] * len(operands.leaves)
    for leaf, bias in zip(operands.leaves, biases, strict=True):
        wire_dtype = jnp.float32 if wire_f32 else leaf.dtype
        total = jnp.zeros((slot.shape[0], leaf.shape[1]), jnp.float32)
        partials = _partials(leaf, operands.weights, operands.recv_slot)
        # The barrier keeps XLA from undoing the rounding (excess precision).
        partials = lax.optimization_barrier(partials.astype(wire_dtype))
        partials = _all_to_all(partials, call)
        for rank in range(call.axis.num_ranks):
            # A rank without rows sends +0, and adding that changes no bit: no sum
            # that starts at +0 is ever -0.
            total = total + partials[rank].astype(jnp.float32)
        total = started_at_zero(total)
        if bias is not None:
            total = total + bias.astype(jnp.float32)
        sums.append(total if out_f32 else total.astype(leaf.dtype))
    return values, tuple(sums)


def _partials(leaf, weights, recv_slot):
    """`[R, T, W]` float32: per source token, this rank's rows, summed in order."""
    num_ranks, num_tokens, num_topk = recv_slot.shape
    total = jnp.zeros((num_ranks, num_tokens, leaf.shape[1]), jnp.float32)
    if not leaf.shape[0]:
        return total
    for k in range(num_topk):
        row = recv_slot[:, :, k]
        read = jnp.maximum(row, 0)
        values = leaf[read].astype(jnp.float32)
        if weights is not None:
            values = values * weights[read][..., None]
        total = total + jnp.where(row[..., None] >= 0, values, 0)
    return started_at_zero(total)


def started_at_zero(total):
    """A sum that began at +0, of one that XLA began at its first term."""
    # XLA takes `0 + x` for x, which it is not for -0.
    return jnp.where(total == 0, jnp.zeros_like(total), total)


def kept_rows(wanted: jax.Array, call):
    """The filling rule: what every expert keeps, and of each of its sources.

    Args:
      wanted: `[S, E]`, slots that each of S sources has at each expert.
      call: its axis, experts, alignment and capacity.

    Returns:
      `[R, L]` and `[S, E]`.
    """
    demand = wanted.sum(axis=0, dtype=jnp.int32)
    kept = jax.vmap(
        functools.partial(
            _fill, capacity=call.capacity, block=call.exchange.expert_alignment
        )
    )(demand.reshape(call.axis.num_ranks, call.num_local_experts))
    # Inside an expert that loses rows, its sources share what it keeps.
    by_source = jax.vmap(functools.partial(_fill, block=1))(wanted.T, kept.reshape(-1))
    return kept, by_source.T


def count_and_number(expert, *, num_experts):
    """Slots per expert `[E]`, and each slot's number among its expert's `[T*K]`."""
    order = jnp.argsort(expert, stable=True)
    count = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)
    first = jnp.cumsum(count) - count
    number = jnp.arange(expert.size, dtype=jnp.int32) - first[expert[order]]
    number = jnp.zeros(expert.size, jnp.int32).at[order].set(number)
    return count[:-1], number


def _fill(demand, capacity, *, block):
    """What each of `demand` `[N]` keeps of `capacity` rows, given out in blocks.

    The highest limit, a multiple of `block`, at which all fit; then, in order, one
    further block each while it fits.
    """

    def total(limit):
        rows = _align(jnp.minimum(demand, limit * block), block)
        return jnp.sum(rows, dtype=jnp.int32)

    def bisect(_, bounds):
        low, high = bounds  # total(low) fits; total(high + 1) does not, or is all.
        middle = low + (high - low + 1) // 2
        fits = total(middle) <= capacity
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    most = _align(jnp.max(demand, initial=0), block) // block
    limit, _ = lax.fori_loop(0, 32, bisect, (jnp.zeros_like(most), most))
    spare = (capacity - total(limit)) // block
    over = demand > limit * block
    extra = over & (jnp.cumsum(over, dtype=jnp.int32) <= spare)
    return jnp.minimum(demand, (limit + extra.astype(jnp.int32)) * block)


def _align(count, alignment):
    return -(-count // alignment) * alignment


def _take(table, index):
    """`table[s, index[s, i]]` for every source s."""
    return jnp.take_along_axis(table, index, axis=1)


def _rank(call):
    return call.axis.rank_and_group()[0]


def all_gather(values, call):
    """`[R, ...]` in rank order."""
    if not call.axis.names:
        return values[None]
    groups = call.axis.index_groups
    return lax.all_gather(values, call.axis.names, axis_index_groups=groups)


def _all_to_all(values, call):
    """`[R, ...]` by destination to `[R, ...]` by source."""
    if not call.axis.names:
        return values
    return lax.all_to_all(
        values,
        call.axis.names,
        split_axis=0,
        concat_axis=0,
        axis_index_groups=call.axis.index_groups,
    )
