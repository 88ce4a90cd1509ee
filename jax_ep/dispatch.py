"""Dispatch: every token's row to the ranks that own its experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_ep import ffi
from jax_ep.axis import vary_alike
from jax_ep.layout import Handle, call_config
from jax_ep.payload import is_float, to_wire


@jax.named_scope("jax_ep.dispatch")
def dispatch(
    x: Any,
    handle: Handle,
    topk_weights: jax.Array | None = None,
    *,
    grad_wire_dtype: Any = None,
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
      topk_weights: `[T, K]` float32, the router's weights, or None.
      grad_wire_dtype: None or `jnp.float32`; the type in which the backward's partial
        sums cross the link, as `wire_dtype` of `combine`.

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
    config = call_config(op, handle)
    leaves, restore = to_wire(op, "x", x, handle.num_tokens)
    if topk_weights is not None:
        shape = (handle.num_tokens, handle.num_topk)
        if topk_weights.shape != shape:
            raise ValueError(
                f"jax_ep.{op}: topk_weights must have shape [T, K] = {shape}, and has "
                f"{topk_weights.shape}."
            )
        if topk_weights.dtype != jnp.float32:
            raise TypeError(
                f"jax_ep.{op}: topk_weights must be float32, and is "
                f"{topk_weights.dtype}."
            )
    grad_wire_f32 = wire_is_f32(op, "grad_wire_dtype", grad_wire_dtype)
    leaves, topk_weights, handle = vary_alike(
        handle.axis_name, (leaves, topk_weights, handle)
    )
    static = (config, grad_wire_f32)
    recv, recv_weights = tuple(dispatch_leaves(static, leaves, topk_weights, handle))
    return checkpoint_name((restore(recv), recv_weights), "jax_ep_recv")


def wire_is_f32(operation: str, name: str, wire_dtype: Any) -> bool:
    """Whether partial sums cross the link unrounded."""
    if wire_dtype is None:
        return False
    if jnp.dtype(wire_dtype) != jnp.float32:
        raise TypeError(
            f"jax_ep.{operation}: {name} must be None or float32, and is "
            f"{jnp.dtype(wire_dtype)}."
        )
    return True


# dx[t] = sum_k d_recv[slot[t, k]],  d_weights[t, k] = d_recv_weights[slot[t, k]]
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_leaves(static, leaves, weights, handle):
    """Dispatch of a list of leaves; `static` is the call's config and wire type."""
    config, _ = static
    return ffi.dispatch(config, handle, leaves, weights)


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
    config, grad_wire_f32 = static
    return ffi.combine(
        config, handle, rows, row_values=row_values, wire_f32=grad_wire_f32
    )


def _undispatch_fwd(static, rows, row_values, handle):
    return _undispatch(static, rows, row_values, handle), handle


def _undispatch_bwd(static, handle, cotangents):
    d_sums, d_values = cotangents
    d_rows, d_row_values = tuple(
        dispatch_leaves(static, tuple(d_sums), d_values, handle)
    )
    return d_rows, d_row_values, None


_undispatch.defvjp(_undispatch_fwd, _undispatch_bwd)
