"""Dispatch: every token's row to the ranks that own its experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep import two_hops
from jax_ep.axis import vary_alike
from jax_ep.block_scaled import BlockScaled, from_bits, multiplied_back, to_bits
from jax_ep.exchange import rows_format, sums_format
from jax_ep.layout import Handle, call_of
from jax_ep.payload import MAX_LEAVES, an_array, is_float, router_weights, to_wire


@jax.named_scope("jax_ep.dispatch")
def dispatch(
    x: Any,
    handle: Handle,
    topk_weights: jax.Array | None = None,
    *,
    wire: Any = None,
    grad_wire: Any = None,
    quantized: bool = False,
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
      wire: `jax_ep.BlockScaled(...)`, or a name of one (`"float8_e4m3fn"`, `"mxfp8"`),
        quantises every float32, bfloat16 and float16 array's rows on the way and
        multiplies them back, `[T, ...]` arrays as rows of all their elements; float32
        sends rows as they are. None is what the handle's exchange says.
      grad_wire: None or `jnp.float32`; the type in which the backward's partial sums
        cross the link, as `wire` of `combine`. None is that of the handle's exchange.
      quantized: whether those arrays come out as they travelled, as `jax_ep.Quantized`,
        for a product that takes FP8. Needs a `wire` that quantises.

    Returns:
      `recv_x`, like `x` with `[C, ...]` arrays, and `recv_weights`, `[C]` float32 (zero
      on padding), or None without `topk_weights`. Under `jax.checkpoint` they carry the
      name `jax_ep_recv`. Quantised, a `[T, ...]` array comes out as `Quantized`:
      `values` `[C, ...]`, and `scales` `[C, ceil(W / block)]`, a row's beside each
      other, zeros on padding.

    Raises:
      ValueError: a shape that does not fit the handle. TypeError: a dtype.

    Derivative: `dx = combine(d_recv_x)` with the same handle, for float32, bfloat16 and
    float16 arrays; others have none. In the same call, `d_topk_weights[t, k] =
    d_recv_weights[slot[t, k]]`, zero where the slot is masked or dropped. It goes
    straight through quantisation, unrounded: cotangents are never FP8. Differentiating
    by any other array of numbers (float64, FP8, complex) is an error.

    On the wire: a token's row once per destination rank, not once per expert. Quantised
    that is `BlockScaled.row_bytes`, 0.52 of bfloat16's.

    Source: dispatch of DeepEP (github.com/deepseek-ai/DeepEP); here rows arrive sorted
    by expert, padding is zero, drops are counted, and it has a derivative.
    """
    op = "dispatch"
    call = call_of(op, handle)
    leaves, restore = to_wire(op, "x", x, handle.num_tokens)
    topk_weights = weights_of_tokens(op, topk_weights, handle)
    rows_wire = rows_format(op, "wire", wire, handle.exchange.wire)
    if quantized and rows_wire is None:
        raise ValueError(
            f"jax_ep.{op}: quantized (=True) needs wire=jax_ep.BlockScaled(...), here "
            "or in the handle's exchange."
        )
    num_floats = sum(map(is_float, leaves)) if rows_wire is not None else 0
    if len(leaves) + num_floats > MAX_LEAVES:
        raise ValueError(
            f"jax_ep.{op}: x must have at most {MAX_LEAVES} arrays, with scales as "
            f"arrays of their own, and has {len(leaves)} and {num_floats}."
        )
    sums_wire = sums_format(op, "grad_wire", grad_wire, handle.exchange.grad_wire)
    leaves, topk_weights, handle = vary_alike(
        handle.axis_name, (leaves, topk_weights, handle)
    )
    recv, recv_weights = tuple(
        dispatch_leaves(
            (call, rows_wire, bool(quantized), sums_wire), leaves, topk_weights, handle
        )
    )
    if quantized:
        recv = [
            from_bits(*leaf, rows_wire) if isinstance(leaf, tuple) else leaf
            for leaf in recv
        ]
    return checkpoint_name((restore(tuple(recv)), recv_weights), "jax_ep_recv")


def weights_of_tokens(
    operation: str, topk_weights: Any, handle: Handle
) -> jax.Array | None:
    """The router's weights `[T, K]` as float32, checked; None stays None."""
    if topk_weights is None:
        return None
    an_array(operation, "topk_weights", topk_weights)
    shape = (handle.num_tokens, handle.num_topk)
    if topk_weights.shape != shape:
        raise ValueError(
            f"jax_ep.{operation}: topk_weights must have shape [T, K] = {shape}, and "
            f"has {topk_weights.shape}."
        )
    return router_weights(operation, "topk_weights", topk_weights)


# dx[t] = sum_k d_recv[slot[t, k]],  d_weights[t, k] = d_recv_weights[slot[t, k]]
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_leaves(static, leaves, weights, handle):
    """Dispatch of a list of leaves, whose float ones may travel quantised.

    `static` is the call, the rows' wire format, whether they stay quantised, and the
    wire format of the backward's sums. What stays quantised comes as the bits of its
    values and scales, and zeros that take the cotangent.
    """
    call, wire, quantized, _ = static
    if wire is None:
        recv_weights, recv = two_hops.dispatch(call, handle, leaves, weights)
        return recv, recv_weights
    sent: list[jax.Array] = []
    for leaf in leaves:
        sent += _to_row(leaf, wire) if is_float(leaf) else [leaf]
    recv_weights, recv = two_hops.dispatch(call, handle, sent, weights)
    recv, out = iter(recv), []
    for leaf in leaves:
        if not is_float(leaf):
            out.append(next(recv))
            continue
        width = leaf.shape[1]
        values, scales = next(recv)[:, :width], next(recv)[:, : wire.num_blocks(width)]
        if quantized:
            zeros = lax.full_like(values, 0, leaf.dtype)
            out.append((values, scales, zeros))
        else:
            out.append(multiplied_back(values, scales, wire, leaf.dtype))
    return tuple(out), recv_weights


def _to_row(leaf: jax.Array, wire: BlockScaled) -> list[jax.Array]:
    """Values and scales as the two leaves that travel, each padded to 16 bytes."""
    parts = zip(to_bits(leaf, wire), wire.leaf_bytes(leaf.shape[1]), strict=True)
    padded = []
    for bits, num_bytes in parts:
        missing = num_bytes // bits.dtype.itemsize - bits.shape[1]
        padded.append(jnp.pad(bits, ((0, 0), (0, missing))))
    return padded


def _dispatch_fwd(static, leaves, weights, handle):
    out = dispatch_leaves(static, leaves, weights, handle)
    return out, (handle, leaves, weights is None)


def _dispatch_bwd(static, residuals, cotangents):
    handle, leaves, no_weights = residuals
    d_recv, d_recv_weights = cotangents
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    d_leaves: list[Any] = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]
    # Of what stayed quantised, bits have no cotangent; the zeros beside them have it.
    rows = (d_recv[i] for i in floats)
    rows = tuple(row[-1] if isinstance(row, tuple) else row for row in rows)
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
    call, *_, wire = static
    values, sums = two_hops.combine(
        call, handle, rows, row_values=row_values, wire_f32=wire is not None
    )
    return sums, values


def _undispatch_fwd(static, rows, row_values, handle):
    return _undispatch(static, rows, row_values, handle), handle


def _undispatch_bwd(static, handle, cotangents):
    d_sums, d_values = cotangents
    call, *_, sums_wire = static
    static = (call, None, False, sums_wire)  # Of a derivative of second order: exact.
    d_rows, d_row_values = tuple(
        dispatch_leaves(static, tuple(d_sums), d_values, handle)
    )
    return d_rows, d_row_values, None


_undispatch.defvjp(_undispatch_fwd, _undispatch_bwd)
