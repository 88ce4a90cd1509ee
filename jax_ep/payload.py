"""Payloads: a pytree of arrays as the 2-D leaves that travel in one wire row."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import _ffi
from jax_ep.block_scaled import Quantized

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)  # Leaves with a derivative.
MAX_LEAVES = _ffi.limits["leaves"]  # Their pointers are kernel parameters.
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def is_float(leaf: jax.Array) -> bool:
    """Whether the leaf has a derivative here."""
    return any(leaf.dtype == dtype for dtype in FLOATS)


def an_array(operation: str, name: str, value: Any) -> None:
    """Refuses what is no array: a list, a dict, an argument in another's place."""
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"jax_ep.{operation}: {name} must be an array, and is a "
            f"{type(value).__name__}."
        )


def router_weights(operation: str, name: str, weights: jax.Array) -> jax.Array:
    """Weights as float32; those of a router in a narrower float are cast."""
    if not is_float(weights):
        raise TypeError(
            f"jax_ep.{operation}: {name} must be float32, bfloat16 or float16, and is "
            f"{weights.dtype}."
        )
    return jnp.asarray(weights).astype(jnp.float32)


def to_wire(
    operation: str, name: str, tree: Any, num_rows: int, *, floats_only: bool = False
) -> tuple[tuple[jax.Array, ...], Callable[[tuple[jax.Array, ...]], Any]]:
    """Flattens a payload to `[num_rows, W]` leaves, and says how to undo it.

    f32, bf16 and f16 leaves stay what they are. All others move as bits, as unsigned
    integers of at most four bytes; to differentiate by a number among them (float64,
    FP8, complex) is an error, since its gradient would be zero.

    Args:
      operation: for messages, e.g. "dispatch".
      name: of the argument, for messages.
      tree: arrays of shape `[num_rows, ...]`.
      num_rows: T or C.
      floats_only: whether a leaf that is no f32, bf16 or f16 is an error.

    Returns:
      The leaves, and a function from leaves `[rows, W]` (of any number of rows) to a
      tree like `tree` with that many rows.

    Raises:
      ValueError: no leaves, more than sixteen, or a wrong shape. TypeError: a dtype of
        another size than 1, 2, 4 or 8 bytes.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if not 1 <= len(paths) <= MAX_LEAVES:
        raise ValueError(
            f"jax_ep.{operation}: {name} must have from 1 to {MAX_LEAVES} arrays, and "
            f"has {len(paths)}."
        )
    wires, restores = [], []
    for path, leaf in paths:
        leaf = jnp.asarray(leaf)
        shown = name + jax.tree_util.keystr(path)
        if leaf.ndim == 0 or leaf.shape[0] != num_rows:
            raise ValueError(
                f"jax_ep.{operation}: {shown} must have shape [{num_rows}, ...], and "
                f"has {leaf.shape}."
            )
        if 0 in leaf.shape[1:]:
            raise ValueError(
                f"jax_ep.{operation}: {shown} must have rows of at least one element, "
                f"and has shape {leaf.shape}."
            )
        if floats_only and not is_float(leaf):
            raise TypeError(
                f"jax_ep.{operation}: {shown} must be float32, bfloat16 or float16, "
                f"and is {leaf.dtype}."
            )
        wire, restore = _leaf_to_wire(operation, shown, leaf)
        wires.append(wire)
        restores.append(restore)

    def restore_tree(leaves):
        return treedef.unflatten(
            [restore(leaf) for restore, leaf in zip(restores, leaves, strict=True)]
        )

    return tuple(wires), restore_tree


def _leaf_to_wire(operation: str, shown: str, leaf: jax.Array):
    tail = leaf.shape[1:]
    if is_float(leaf):
        return _flat(leaf), lambda rows: shaped(rows, tail)
    dtype = leaf.dtype
    if not _moves_as_bits(dtype):
        raise TypeError(
            f"jax_ep.{operation}: {shown} must have a dtype of 1, 2, 4 or 8 bytes, and "
            f"is {dtype}."
        )
    if jnp.issubdtype(dtype, jnp.inexact):
        leaf = _without_derivative(
            f"jax_ep.{operation}: {shown} is {dtype}, which moves as bits and has no "
            "derivative: send float32, bfloat16 or float16, quantised by wire="
            "jax_ep.BlockScaled(...) if need be, or jax.lax.stop_gradient(...) of it.",
            leaf,
        )
    if dtype == jnp.bool_:
        wire = leaf.astype(jnp.uint8)
        return _flat(wire), lambda rows: rows.reshape(rows.shape[0], *tail).astype(
            jnp.bool_
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = jnp.stack([leaf.real, leaf.imag], axis=-1)
        wire = lax.bitcast_convert_type(parts, jnp.uint32)

        def restore_complex(rows):
            parts = rows.reshape(rows.shape[0], *tail, 2)
            parts = lax.bitcast_convert_type(parts, jnp.float32)
            return lax.complex(parts[..., 0], parts[..., 1])

        return _flat(wire), restore_complex
    # Eight bytes become two words, since uint64 exists under jax_enable_x64 only.
    size = min(dtype.itemsize, 4)
    wire = lax.bitcast_convert_type(leaf, _BITS[size])
    words = wire.shape[1:]
    return _flat(wire), lambda rows: lax.bitcast_convert_type(
        rows.reshape(rows.shape[0], *words), dtype
    )


def shaped(rows: Any, tail: tuple[int, ...]) -> Any:
    """Rows `[n, W]` as `[n, *tail]`; of quantised ones the values, not the scales."""
    if not isinstance(rows, Quantized):
        return rows.reshape(rows.shape[0], *tail)
    return dataclasses.replace(
        rows, values=shaped(rows.values, tail), carrier=shaped(rows.carrier, tail)
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_derivative(message, leaf):
    """The leaf; `message` is the error of differentiating by it."""
    del message
    return leaf


@_without_derivative.defjvp
def _without_derivative_jvp(message, primals, tangents):
    del primals, tangents
    raise TypeError(message)


def _moves_as_bits(dtype) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype.itemsize > 8:
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits == 8 * dtype.itemsize  # Not int4.
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits == 8 * dtype.itemsize  # Not float4.
    return dtype == jnp.bool_ or dtype == np.complex64


def _flat(leaf: jax.Array) -> jax.Array:
    width = int(np.prod(leaf.shape[1:], dtype=np.int64))
    return leaf.reshape(leaf.shape[0], width)
