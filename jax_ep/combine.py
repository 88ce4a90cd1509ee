"""Combine: the experts' rows back to their tokens, summed."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import two_hops
from jax_ep.axis import vary_alike
from jax_ep.dispatch import dispatch_leaves
from jax_ep.exchange import rows_format, sums_format
from jax_ep.layout import Handle, call_of, row_is_kept
from jax_ep.payload import an_array, router_weights, to_wire


@jax.named_scope("jax_ep.combine")
def combine(
    y: Any,
    handle: Handle,
    *,
    weights: jax.Array | None = None,
    bias: Any = None,
    wire: Any = None,
    grad_wire: Any = None,
) -> Any:
    """Sums each token's rows over its experts, on all ranks, back in token order.

    Call it inside the shard_map that made the handle, on every rank. Rows are those of
    `dispatch`; padding rows are never read.

    `out[t] = sum_k y[slot[t, k]] + bias[t]`, in float32: on the expert rank a partial
    starts at +0, adds the token's rows by ascending k and is rounded once to the wire
    type; the token's rank starts at +0, adds the partials by ascending rank, adds the
    bias last and rounds once. A masked or dropped slot adds nothing; a token without
    any slot gets zero, or its bias. Unweighted sums have the same bits everywhere.

    Args:
      y: `[C, H]` float32, bfloat16 or float16, or a pytree of up to sixteen `[C, ...]`
        such arrays.
      handle: the handle that `dispatch` used.
      weights: `[C]` float32, bfloat16 or float16; multiplies the
        rows as they are read. Only needed where the weights cannot go into the
        experts' hidden activation (an output bias).
      bias: `[T, H]` in y's dtype, or a pytree like `y`; a shared expert's output.
      wire: `jnp.float32` sends partial sums unrounded; None is what the handle's
        exchange says, by default y's dtype. Sums are never quantised.
      grad_wire: how the backward's rows travel, as `wire` of `dispatch`:
        `BlockScaled(jnp.float8_e5m2)` quantises them on the way. None is what the
        handle's exchange says.

    Returns:
      `[T, H]` in y's dtype, or a pytree of them. Under `jax.checkpoint` they carry the
      name `jax_ep_out`.

    Raises:
      ValueError: a shape that does not fit the handle. TypeError: a dtype.

    Derivative: `dy = dispatch(d_out)` with the same handle, times `weights`;
    `d_weights = <y, dispatch(d_out)>` per row; `d_bias = d_out`.

    On the wire: one row per (token, expert rank), not one per expert.

    Source: combine of DeepEP (github.com/deepseek-ai/DeepEP); here sums have a fixed
    order in float32 on both sides, and a derivative.
    """
    op = "combine"
    call = call_of(op, handle)
    leaves, _ = to_wire(op, "y", y, handle.capacity, floats_only=True)
    if weights is not None:
        an_array(op, "weights", weights)
        if weights.shape != (handle.capacity,):
            raise ValueError(
                f"jax_ep.{op}: weights must have shape [C] = ({handle.capacity},), and "
                f"has {weights.shape}."
            )
        weights = router_weights(op, "weights", weights)
    added = None
    if bias is not None:
        structure = jax.tree.structure(y)
        added = bias_leaves(op, bias, structure, leaves, handle.num_tokens)
    sums_wire = sums_format(op, "wire", wire, handle.exchange.wire)
    rows_wire = rows_format(op, "grad_wire", grad_wire, handle.exchange.grad_wire)
    leaves, weights, added, handle = vary_alike(
        handle.axis_name, (leaves, weights, added, handle)
    )
    static = (call, rows_wire, False, sums_wire)
    sums = tuple(_combine(static, leaves, weights, added, handle))
    tails = [leaf.shape[1:] for leaf in jax.tree.leaves(y)]
    sums = [total.reshape(-1, *tail) for total, tail in zip(sums, tails, strict=True)]
    out = jax.tree.unflatten(jax.tree.structure(y), sums)
    return checkpoint_name(out, "jax_ep_out")


def bias_leaves(
    operation: str, bias: Any, structure: Any, leaves: Sequence[Any], num_tokens: int
) -> tuple[jax.Array, ...]:
    """The bias of a combine as `[T, W]` leaves, checked.

    Args:
      operation: for messages.
      bias: what the user gave, not None.
      structure: that of y.
      leaves: y's, `[C, W]`.
      num_tokens: T.
    """
    if jax.tree.structure(bias) != structure:
        raise ValueError(
            f"jax_ep.{operation}: bias must be a tree like y, {structure}, and is "
            f"{jax.tree.structure(bias)}."
        )
    found, _ = to_wire(operation, "bias", bias, num_tokens)
    for leaf, added, row in zip(leaves, found, jax.tree.leaves(bias), strict=True):
        if added.shape[1] != leaf.shape[1]:
            raise ValueError(
                f"jax_ep.{operation}: bias must have rows of {leaf.shape[1]} elements "
                f"as y has, and has shape {row.shape}."
            )
        if row.dtype != leaf.dtype:
            raise TypeError(
                f"jax_ep.{operation}: bias must have y's dtype {leaf.dtype}, and is "
                f"{row.dtype}."
            )
    return found


# dy[c] = w[c] * d_out[token(c)],  dw[c] = <y[c], d_out[token(c)]>,  d_bias = d_out
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(static, leaves, weights, bias, handle):
    # What `dispatch_leaves` takes, which is its derivative.
    call, *_, wire = static
    _, sums = two_hops.combine(
        call, handle, leaves, weights=weights, bias=bias, wire_f32=wire is not None
    )
    return sums


def _combine_fwd(static, leaves, weights, bias, handle):
    out = _combine(static, leaves, weights, bias, handle)
    weighted = None if weights is None else (leaves, weights)
    return out, (handle, weighted, bias is None)


def _combine_bwd(static, residuals, d_out):
    handle, weighted, no_bias = residuals
    rows, _ = tuple(dispatch_leaves(static, tuple(d_out), None, handle))
    d_bias = None if no_bias else tuple(d_out)
    if weighted is None:
        return rows, None, d_bias, None
    leaves, weights = weighted
    # Padding may hold NaN in y or weights, and NaN * 0 is NaN: choose, never multiply.
    kept = row_is_kept(handle)
    weights = jnp.where(kept, weights, jnp.float32(0))
    d_leaves, d_weights = [], jnp.zeros_like(weights)
    for leaf, row in zip(leaves, rows, strict=True):
        row = row.astype(jnp.float32)
        d_leaves.append((weights[:, None] * row).astype(leaf.dtype))
        products = jnp.where(kept[:, None], leaf.astype(jnp.float32) * row, 0)
        d_weights += products.sum(axis=1)
    return tuple(d_leaves), d_weights, d_bias, None


_combine.defvjp(_combine_fwd, _combine_bwd)
