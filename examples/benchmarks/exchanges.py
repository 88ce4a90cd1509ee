"""The programs that are timed: chains of one exchange, each after the one before.

A step takes a carry and gives the next one. The carry's first element is set to a
number that depends on the result, by a kernel of one thread, so that no two exchanges
overlap and XLA can neither merge nor drop one. A program runs a step so many times:
unrolled for jax_ep, which XLA captures in a CUDA graph; as a loop for programs of XLA's
own operations, whose whole result is part of the loop's state, or XLA would compute no
more of it than one element.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class Layer:
    """What an exchange is compiled for."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    capacity: int
    num_sms: int | None = None

    def layout(self, ids, implementation="ffi") -> jax_ep.Handle:
        """The handle of `[T, K]` ids."""
        return jax_ep.dispatch_layout(
            ids,
            num_experts=self.experts,
            capacity=self.capacity,
            num_sms=self.num_sms,
            implementation=implementation,
        )


def on_ranks(function: Callable, mesh: Mesh, **keywords):
    """`function` of each rank's shares, jitted."""
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    return jax.jit(mapped, **keywords)


def after(carry: jax.Array, result: jax.Array) -> jax.Array:
    """The carry, which now depends on the result."""
    first = result[(0,) * result.ndim]
    number = jnp.where(first > 1e30, 1, 2).astype(carry.dtype)
    return carry.at[(0,) * carry.ndim].set(number)


def unrolled(step: Callable, mesh: Mesh, count: int):
    """`(carry, *constants) -> carry` after `count` steps; the carry is donated."""

    def chain(carry, *constants):
        for _ in range(count):
            carry = step(carry, *constants)
        return carry

    return on_ranks(chain, mesh, donate_argnums=0)


def looped(exchange: Callable, mesh: Mesh, count: int):
    """`((carry, result), *constants) -> (carry, result)`; both are donated."""

    def chain(state, *constants):
        def body(_, state):
            result = exchange(state[0], *constants)
            return after(state[0], result), result

        return lax.fori_loop(0, count, body, state)

    return on_ranks(chain, mesh, donate_argnums=0)


# --- jax_ep: steps -----------------------------------------------------------------


def layout_step(layer: Layer, ids):
    """Ids to handle."""
    return after(ids, layer.layout(ids).slot)


def dispatch_step(layer: Layer, x, handle, weights):
    """Rows and weights to the experts."""
    handle = dataclasses.replace(handle, num_sms=layer.num_sms)
    return after(x, jax_ep.dispatch(x, handle, weights)[0])


def combine_step(layer: Layer, y, handle):
    """Rows of experts, summed, to their tokens."""
    handle = dataclasses.replace(handle, num_sms=layer.num_sms)
    return after(y, jax_ep.combine(y, handle))


def dispatch_backward_step(layer: Layer, d_recv, d_recv_weights, handle, x, weights):
    """Cotangents of rows and of their weights to cotangents of x and weights."""
    _, pull_back = jax.vjp(lambda *a: jax_ep.dispatch(a[0], handle, a[1]), x, weights)
    return after(d_recv, pull_back((d_recv, d_recv_weights))[0])


def combine_backward_step(layer: Layer, d_out, handle, y):
    """Cotangents of the sums to cotangents of the rows."""
    _, pull_back = jax.vjp(lambda y: jax_ep.combine(y, handle), y)
    return after(d_out, pull_back(d_out)[0])


def round_trip_step(layer: Layer, ids, x, weights):
    """Layout, dispatch and combine."""
    handle = layer.layout(ids)
    recv, _ = jax_ep.dispatch(x, handle, weights)
    return after(ids, jax_ep.combine(recv, handle))


STEPS: dict[str, tuple[Callable, str, tuple[str, ...]]] = {
    # name: step, carry, constants
    "layout": (layout_step, "ids", ()),
    "dispatch": (dispatch_step, "x", ("handle", "weights")),
    "combine": (combine_step, "y", ("handle",)),
    "dispatch backward": (
        dispatch_backward_step,
        "y",
        ("row_weights", "handle", "x", "weights"),
    ),
    "combine backward": (combine_backward_step, "x", ("handle", "y")),
    "round trip": (round_trip_step, "ids", ("x", "weights")),
}


def program(name: str, layer: Layer, mesh: Mesh, count: int):
    """The jitted chain of one of `STEPS`."""
    return unrolled(functools.partial(STEPS[name][0], layer), mesh, count)


def differing(layer: Layer, ids, x, y, weights, row_weights):
    """`[1, n]`: elements of each result that differ from the reference's in a bit."""

    def everything(implementation):
        handle = layer.layout(ids, implementation)
        received, pull_back = jax.vjp(
            lambda *a: jax_ep.dispatch(a[0], handle, a[1]), x, weights
        )
        d_x, d_weights = pull_back((y, row_weights))
        out, pull_back = jax.vjp(lambda y: jax_ep.combine(y, handle), y)
        leaves = jax.tree.leaves(handle)
        return [*leaves, *received, d_x, d_weights, out, *pull_back(x)]

    def count(got, want):
        bits = f"uint{8 * got.dtype.itemsize}"
        got, want = (lax.bitcast_convert_type(a, bits) for a in (got, want))
        return jnp.sum(got != want, dtype=jnp.int32)

    pairs = zip(everything("ffi"), everything("xla"), strict=True)
    return jnp.stack([count(*pair) for pair in pairs])[None]


# --- what JAX users have: all ranks' rows, or ragged updates ------------------------


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
