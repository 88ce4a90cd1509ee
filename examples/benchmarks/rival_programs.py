"""What JAX users have: all ranks' rows gathered, or ragged updates. Loops of them.

A loop's whole result is part of its state, or XLA would compute no more of it than one
element.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

import jax_ep
from jax_ep.tools.benchmark.exchanges import AXIS, Layer, after, on_ranks


def looped(exchange: Callable, mesh: Mesh, count: int):
    """`((carry, result), *constants) -> (carry, result)`; both are donated."""

    def chain(state, *constants):
        def body(_, state):
            result = exchange(state[0], *constants)
            return after(state[0], result), result

        return lax.fori_loop(0, count, body, state)

    return on_ranks(chain, mesh, donate_argnums=0)


def both(x, handle, y):
    """What a rival's dispatch and combine must give, in a chain's later steps."""
    recv, _ = jax_ep.dispatch(after(x, x), handle)
    return recv, jax_ep.combine(after(y, y), handle)


def ring_dispatch(x, source):
    """All ranks' rows to all, then this rank's; `source [C]` counts over all slots."""
    rows = lax.all_gather(x, AXIS, tiled=True)
    return jnp.where(source[:, None] >= 0, rows[jnp.maximum(source, 0)], 0)


def ring_combine(y, recv_slot):
    """Every rank's share of every token's sum, added by a reduce-scatter."""
    slots = recv_slot.reshape(-1, recv_slot.shape[-1])  # [R*T, K]
    total = jnp.zeros((slots.shape[0], y.shape[1]), jnp.float32)
    for k in range(slots.shape[1]):
        row = slots[:, k]
        rows = y[jnp.maximum(row, 0)].astype(jnp.float32)
        total = total + jnp.where(row[:, None] >= 0, rows, 0)
    return lax.psum_scatter(total.astype(y.dtype), AXIS, tiled=True)


def ring_source(handle: jax_ep.Handle):
    """`[C]`: of which of the `[R*T]` tokens each row is; -1 on padding."""
    slots = handle.recv_slot.reshape(-1)
    row = jnp.where(slots < 0, handle.capacity, slots)
    token = jnp.arange(row.size, dtype=jnp.int32) // handle.num_topk
    source = jnp.full(handle.capacity, -1, jnp.int32)
    return source.at[row].set(token, mode="drop")


def ragged_plan(layer: Layer, ids) -> dict[str, Any]:
    """Offsets and sizes of one update per (peer, expert), both ways. Drops nothing."""
    ranks = lax.axis_size(AXIS)
    local = layer.experts // ranks
    me = lax.axis_index(AXIS)
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(layer.experts, jnp.int32).at[flat].add(1)
    counts = lax.all_gather(counts, AXIS)  # [source, E]
    total = counts.sum(0, dtype=jnp.int32).reshape(ranks, local)
    first = (jnp.cumsum(total, 1, dtype=jnp.int32) - total).reshape(-1)  # [E]
    before = jnp.cumsum(counts, 0, dtype=jnp.int32) - counts
    at_expert = first + before  # [source, E]: first row in the owner's buffer
    at_source = jnp.cumsum(counts, 1, dtype=jnp.int32) - counts

    def of_me(table):  # [source * L]: of my experts, by source
        return lax.dynamic_slice_in_dim(table, me * local, local, 1).reshape(-1)

    return dict(
        token=order // layer.topk,
        place=jnp.zeros_like(order).at[order].set(jnp.arange(order.size)),
        dispatch=(at_source[me], counts[me], at_expert[me], of_me(counts)),
        combine=(of_me(at_expert), of_me(counts), of_me(at_source), counts[me]),
    )


def ragged_dispatch(layer: Layer, x, token, offsets):
    """Sorts the tokens' rows by expert and sends each expert's to its place."""
    rows = jnp.zeros((layer.capacity, x.shape[1]), x.dtype)
    return lax.ragged_all_to_all(x[token], rows, *offsets, axis_name=AXIS)


def ragged_combine(layer: Layer, y, place, offsets):
    """The same way back, and the sum of each token's rows."""
    rows = jnp.zeros((layer.tokens * layer.topk, y.shape[1]), y.dtype)
    rows = lax.ragged_all_to_all(y, rows, *offsets, axis_name=AXIS)
    rows = rows[place.reshape(layer.tokens, layer.topk)]
    return rows.astype(jnp.float32).sum(1).astype(y.dtype)
