"""Dropless in bounded memory: what does not fit in one round goes in further rounds."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.axis import expert_axis, vary_alike
from jax_ep.layout import Handle, call_of, dispatch_layout, int32_ids

Layer = Callable[[Any, Any, Any, Handle, Any], Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounds:
    """What the rounds of one call came to. Every leaf is int32 with one axis.

    Attributes:
      num_rounds: `[1]`, rounds that ran, the first included; the same on all ranks.
      num_dropped: `[R]`, rows of each rank still dropped after the last round, the same
        on all ranks.
    """

    num_rounds: jax.Array
    num_dropped: jax.Array


def in_rounds(
    layer: Layer,
    params: Any,
    x: Any,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    handle: Handle,
    *,
    max_rounds: int | None = None,
    bias: Any = None,
    other_axes: Sequence[str] = (),
) -> tuple[Any, Rounds]:
    """Runs a layer, and again for the slots that its handle dropped until none is left.

    Call it inside the shard_map that made the handle, on every rank. Memory is that of
    one layer of capacity C, forward and backward, however many rows overflow.

    Each round lays out the slots that earlier rounds dropped (`slot == -1` with
    `slot_rank >= 0`), with the handle's capacity, and adds its output to what there is.
    Rounds run in a loop whose condition is a count that is the same on all ranks, so
    nothing is exchanged, computed or allocated for a round that is not needed.

    Args:
      layer: `layer(params, x, topk_weights, handle, bias) -> out`, dispatch, experts
        and combine with that handle; `bias` (None or like `out`) goes into combine. It
        must be linear in the slots: the outputs of two handles that share out the slots
        add up. Arrays reach it through its arguments, not by closure.
      params: pytree of arrays, the experts' parameters on this rank.
      x: `[T, H]`, or a pytree of `[T, ...]` arrays.
      topk_idx: `[T, K]`, the ids that the handle was made from.
      topk_weights: `[T, K]` float32, or None.
      handle: from `dispatch_layout(topk_idx, capacity=C, ...)`: the first round.
      max_rounds: most rounds, the first included. None is as many as the worst routing
        needs, `ceil((R*T*K + L*(A-1)) / C)`: no row is dropped.
      bias: None or like `out`; added once.
      other_axes: mesh axes besides the handle's over which `layer` communicates by
        itself (to gather parameters, say). Their ranks then run equally many rounds.

    Returns:
      `out`, and the `Rounds`. Between rounds `out` is rounded to its dtype.

    Raises:
      ValueError: `max_rounds` below 1, or `topk_idx` of another shape than the handle.

    Derivative: that of the layer with enough capacity, in x, topk_weights, params and
    bias. The first round keeps for the backward what the layer keeps (or, under
    `jax.checkpoint`, what the policy says); each further round is laid out and computed
    again there, one after the other. Gradients of rounds add up in their own dtype.

    On the wire: in each round, the bytes of its layout and of the rows it moves.

    Cost without overflow: the condition, once forward and once backward. (XLA reads it
    on the host on GPUs outside of command buffers.)

    Source: the idea is MaxText's `moe_dropless_fallback`, a second, chunked branch that
    its ring of experts alone has. Here it is a loop, for any layer over a handle.
    """
    op = "in_rounds"
    call = call_of(op, handle)
    if topk_idx.shape != handle.slot.shape:
        raise ValueError(
            f"jax_ep.{op}: topk_idx must have the handle's shape [T, K] = "
            f"{handle.slot.shape}, and has {topk_idx.shape}."
        )
    if max_rounds is None:
        # In every round but the last all C/A blocks of A rows are taken, and only an
        # expert's last block holds fewer than A rows.
        rows = handle.num_ranks * handle.num_tokens * handle.num_topk
        rows += call.num_local_experts * (handle.expert_alignment - 1)
        max_rounds = max(1, -(-rows // handle.capacity)) if handle.capacity else 1
        if handle.hop is not None and handle.num_tokens:
            # What keeps a row back may be a full rank or a rail without room, in turn;
            # every round delivers at least one row.
            max_rounds = handle.num_ranks * handle.num_tokens * handle.num_topk
    max_rounds = operator.index(max_rounds)
    if max_rounds < 1:
        raise ValueError(f"jax_ep.{op}: max_rounds (={max_rounds}) must be at least 1.")
    axes = tuple(other_axes)
    if axes:
        expert_axis(op, axes)
    ids = int32_ids(topk_idx, handle.num_experts)
    x, ids, topk_weights, handle, bias = vary_alike(
        handle.axis_name, (x, ids, topk_weights, handle, bias)
    )
    # Gradients of params are then added up after the loop, whose rounds may differ in
    # number. The reverse, x as params vary, would take from a layer that adds up over
    # further axes (tensor parallelism) that its output is the same on them.
    params = vary_alike(tuple(jax.typeof(ids).mat.varying), params)
    static = (layer, max_rounds, axes)
    operands = (params, x, topk_weights)
    out, rounds = tuple(_in_rounds(static, operands, bias, ids, handle))
    # Also of all rounds: with it saved, remat repeats none of them to have `out`.
    return checkpoint_name(out, "jax_ep_out"), jax.tree.map(_without_tangent, rounds)


# d(params, x, weights) = sum over rounds of the layer's own;  d_bias = d_out
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_rounds(static, operands, bias, ids, handle) -> Any:
    layer, _, _ = static
    params, x, weights = operands
    out = layer(params, x, weights, handle, bias)
    return _finish(static, operands, out, ids, handle)


def _finish(static, operands, out, ids, handle):
    layer, max_rounds, axes = static
    params, x, weights = operands

    def one_round(handle, out):
        return layer(params, x, weights, handle, out)

    return _while_dropped(one_round, out, ids, handle, max_rounds, axes)


def _in_rounds_fwd(static, operands, bias, ids, handle):
    layer, _, _ = static

    def first_round(operands, bias):
        params, x, weights = operands
        return layer(params, x, weights, handle, bias)

    out, transpose = jax.vjp(first_round, operands, bias)
    out, rounds = _finish(static, operands, out, ids, handle)
    return (out, rounds), (transpose, operands, ids, handle)


def _in_rounds_bwd(static, residuals, cotangents):
    layer, max_rounds, axes = static
    transpose, operands, ids, handle = residuals
    d_out, _ = cotangents
    d_operands, d_bias = transpose(d_out)
    # What has no derivative (integers in a payload) does not travel through the loop.
    d_floats, restore = _floats(d_operands)

    def one_round(handle, d_floats):
        def forward(operands):
            params, x, weights = operands
            return layer(params, x, weights, handle, None)

        _, transpose = jax.vjp(forward, operands)
        parts, _ = _floats(transpose(d_out)[0])
        return [total + part for total, part in zip(d_floats, parts, strict=True)]

    d_floats, _ = _while_dropped(one_round, d_floats, ids, handle, max_rounds, axes)
    return restore(d_floats), d_bias, None, None


_in_rounds.defvjp(_in_rounds_fwd, _in_rounds_bwd)


def _without_tangent(count: jax.Array) -> jax.Array:
    """A custom_vjp's integers carry float0 tangents, and pmax has no rule for those."""
    bits = lax.bitcast_convert_type(count, jnp.uint32)
    return lax.bitcast_convert_type(bits, jnp.int32)


def _floats(tree):
    """The leaves that are not float0, and a function that puts them back."""
    leaves, treedef = jax.tree.flatten(tree)
    has_derivative = [leaf.dtype != jax.dtypes.float0 for leaf in leaves]
    floats = [leaf for leaf, has in zip(leaves, has_derivative, strict=True) if has]

    def restore(floats):
        floats = iter(floats)
        return treedef.unflatten(
            next(floats) if has else leaf
            for leaf, has in zip(leaves, has_derivative, strict=True)
        )

    return floats, restore


def _while_dropped(one_round, carry, ids, handle, max_rounds, axes):
    """`carry = one_round(handle, carry)` for each further round, and `Rounds`."""
    # Of the handle's type, since rounds differ along axes that do not take part.
    first = jnp.ones_like(handle.num_invalid)
    if not handle.capacity:  # No tokens, and a layout refuses such a capacity.
        return carry, Rounds(first, handle.num_dropped)

    def dropped(handle, ids):
        is_dropped = (handle.slot < 0) & (handle.slot_rank >= 0)
        total = jnp.sum(handle.num_dropped)
        if axes:
            total = lax.pmax(vary_alike(axes, total), axes)
        return jnp.where(is_dropped, ids, -1), total

    def more(state):
        num_rounds, (_, total), _, _ = state
        return (total > 0) & (num_rounds[0] < max_rounds)

    def body(state):
        num_rounds, (ids, _), _, carry = state
        again = dispatch_layout(ids, capacity=handle.capacity, exchange=handle.exchange)
        carry = one_round(again, carry)
        return num_rounds + 1, dropped(again, ids), again.num_dropped, carry

    state = (first, dropped(handle, ids), handle.num_dropped, carry)
    num_rounds, _, num_dropped, carry = lax.while_loop(more, body, state)
    return carry, Rounds(num_rounds, num_dropped)
