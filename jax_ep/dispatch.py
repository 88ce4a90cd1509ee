"""Dispatch: every token's row to the ranks that own its experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_ep import two_hops
from jax_ep.axis import vary_alike
from jax_ep.exchange import wire_dtype
from jax_ep.layout import Handle, call_of
from jax_ep.payload import an_array, is_float, router_weights, to_wire


@jax.named_scope("jax_ep.dispatch")
def dispatch(
    x: Any,
    handle: Handle,
    topk_weights: jax.Array | None = None,
    *,
    grad_wire: Any = None,
) -> tuple[Any, jax.Array | None]:
    """Sends each token's row to the ranks of its experts, grouped by expert there.

    Call it inside the shard_map that made the handle, on every rank.

    Received rows are ordered by local expert, then by (source rank, token, k). Padding
    rows and the rows past the last group are zero.

    Args:
      x: `[T, H]` float32, bfloat16 or float16, any H >= 1, or a pytree of up to sixteen
        `[T, ...]` arrays that travel together. Arrays of any other dtype of 1, 2, 4 or
        8 bytes move as bits. Rows of a multiple of 16 bytes are the fast path.
      handle: from `dispatch_layout`, of this or of an earlier batch with its routing.
      topk_weights: `[T, K]`, the router's weights, or None. float32; bfloat16 and
        float16 are cast to it, and get their gradient in their own dtype.
      grad_wire: None or `jnp.float32`; the type in which the backward's partial sums
        cross the link, as `wire` of `combine`. None is that of the handle's exchange.

    Returns:
      `recv_x`, like `x` with `[C, ...]` arrays, and `recv_weights`, `[C]` float32 (zero
      on padding), or None without `topk_weights`. Under `jax.checkpoint` they carry the
      name `jax_ep_recv`.

    Raises:
      ValueError: a shape that does not fit the handle. TypeError: a dtype.

    Derivative: `dx = combine(d_recv_x)` with the same handle, for float32, bfloat16 and
    float16 arrays; others have none. In the same call, `d_topk_weights[t, k] =
    d_recv_weights[slot[t, k]]`, zero where the slot is masked or dropped.

    On the wire: a token's row once per destination rank, not once per expert.

    Source: dispatch of DeepEP (github.com/deepseek-ai/DeepEP); here rows arrive sorted
    by expert, padding is zero, drops are counted, and it has a derivative.
    """
    op = "dispatch"
    call = call_of(op, handle)
    leaves, restore = to_wire(op, "x", x, handle.num_tokens)
    if topk_weights is not None:
        an_array(op, "topk_weights", topk_weights)
        shape = (handle.num_tokens, handle.num_topk)
        if topk_weights.shape != shape:
            raise ValueError(
                f"jax_ep.{op}: topk_weights must have shape [T, K] = {shape}, and has "
                f"{topk_weights.shape}."
            )
        topk_weights = router_weights(op, "topk_weights", topk_weights)
    wire = wire_dtype(op, "grad_wire", grad_wire) or handle.exchange.grad_wire
    leaves, topk_weights, handle = vary_alike(
        handle.axis_name, (leaves, topk_weights, handle)
    )
    recv, recv_weights = tuple(
        dispatch_leaves((call, wire), leaves, topk_weights, handle)
    )
    return checkpoint_name((restore(recv), recv_weights), "jax_ep_recv")


# dx[t] = sum_k d_recv[slot[t, k]],  d_weights[t, k] = d_recv_weights[slot[t, k]]
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_leaves(static, leaves, weights, handle):
    """Dispatch of a list of leaves; `static` is the call and the sums' wire format."""
    call, _ = static
    recv_weights, recv = two_hops.dispatch(call, handle, leaves, weights)
    return recv, recv_weights


def _dispatch_fwd(static, leaves, weights, handle):
    out = dispatch_leaves(static, leaves, weights, handle)
    return out, (handle, leaves, weights is None)


def _dispatch_bwd(static, residuals, cotangents):
    handle, leaves, no_weights = residuals
    d_recv, d_recv_weights = cotangents
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    d_leaves: list[Any] = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]
    rows = tuple(d_recv[i] for i in floats)
    if not floats and not no_weights:
        # The weights' cotangents need a call to travel in.
        rows = (jnp.zeros_like(d_recv_weights)[:, None],)
    d_weights = None
    if rows:
        sums, d_weights = tuple(_undispatch(static, rows, d_recv_weights, handle))
        for i, total in zip(floats, sums, strict=False):
            d_leaves[i] = total
    return tuple(d_leaves), d_weights, None


dispatch_leaves.defvjp(_dispatch_fwd, _dispatch_bwd)


# The transpose of dispatch, whose own is dispatch: so derivatives of any order exist.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _undispatch(static, rows, row_values, handle):
    call, wire = static
    values, sums = two_hops.combine(
        call, handle, rows, row_values=row_values, wire_f32=wire is not None
    )
    return sums, values


def _undispatch_fwd(static, rows, row_values, handle):
    return _undispatch(static, rows, row_values, handle), handle


def _undispatch_bwd(static, handle, cotangents):
    d_sums, d_values = cotangents
    d_rows, d_row_values = tuple(
        dispatch_leaves(static, tuple(d_sums), d_values, handle)
    )
    return d_rows, d_row_values, None


_undispatch.defvjp(_undispatch_fwd, _undispatch_bwd)
