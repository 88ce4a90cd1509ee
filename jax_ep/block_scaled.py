"""Block-scaled FP8: a row as one byte an element and one scale a block of elements.

The bits are defined by integer arithmetic, not by casts and quotients: XLA removes
casts that undo each other, turns a division by a constant into a product, and need not
divide exactly on GPUs. Written so, `jit`, eager calls, every platform and a CUDA kernel
agree.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_MIN_NORMAL = np.float32(2.0**-126)
_MAG = np.uint32(0x7FFFFFFF)  # All but the sign of a float32.
_INF = np.uint32(0x7F800000)
_NAN_CODE = 0x7F  # Of both value dtypes, as NVIDIA's conversions give it.
ROW_ALIGNMENT = 16  # Bytes; rows of a multiple of it are the exchange's fast path.


@dataclasses.dataclass(frozen=True)
class _Format:
    """An FP8 dtype: its exponent's bias, mantissa bits, and largest value."""

    bias: int
    mantissa: int
    largest: float  # 1.75 * 2**largest_exponent, in both.
    largest_exponent: int
    largest_code: int


_FORMATS = {
    jnp.dtype(jnp.float8_e4m3fn): _Format(7, 3, 448.0, 8, 0x7E),
    jnp.dtype(jnp.float8_e5m2): _Format(15, 2, 57344.0, 15, 0x7B),
}


@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """A wire format: FP8 values, and one scale for each block of a row's elements.

    A value times its block's scale is the element. Frozen and hashable. The names in
    `NAMES` stand for it wherever a wire format is asked for.

    Attributes:
      dtype: `float8_e4m3fn` (3 bits of mantissa, for activations) or `float8_e5m2` (2,
        and a wider range, for gradients).
      block: elements that share a scale, 128 (DeepSeek-V3) or 32 (MXFP8).
      scale: dtype of the scales, float32, or `float8_e8m0fnu` for powers of two.

    Raises:
      TypeError: another dtype. ValueError: another block.

    >>> BlockScaled(jnp.float8_e4m3fn).row_bytes(7168)  # 14336 in bfloat16
    7392
    """

    dtype: Any = jnp.float8_e4m3fn
    block: int = 128
    scale: Any = jnp.float32

    def __post_init__(self):
        for name, choices in (
            ("dtype", ("float8_e4m3fn", "float8_e5m2")),
            ("scale", ("float32", "float8_e8m0fnu")),
        ):
            value = getattr(self, name)
            try:
                found = jnp.dtype(value)
            except TypeError:
                found = None
            if found is None or found.name not in choices:
                raise TypeError(
                    f"jax_ep.BlockScaled: {name} must be {' or '.join(choices)}, and "
                    f"is {value!r}."
                )
            object.__setattr__(self, name, found)
        if isinstance(self.block, bool) or self.block not in (32, 128):
            raise ValueError(
                f"jax_ep.BlockScaled: block (={self.block!r}) must be 32 or 128."
            )
        object.__setattr__(self, "block", int(self.block))

    def __repr__(self) -> str:
        return (
            f"BlockScaled({self.dtype.name}, block={self.block}, "
            f"scale={self.scale.name})"
        )

    def num_blocks(self, width: int) -> int:
        """Scales of a row of `width` elements; the last block may be short."""
        return -(-width // self.block)

    def row_bytes(self, width: int) -> int:
        """Bytes of a row on the wire: values, then scales, each padded to 16 bytes."""
        return sum(self.leaf_bytes(width))

    def leaf_bytes(self, width: int) -> tuple[int, int]:
        """The two parts of `row_bytes`."""
        scales = self.num_blocks(width) * self.scale.itemsize
        return _aligned(width), _aligned(scales)


NAMES = {
    "float8_e4m3fn": BlockScaled(jnp.float8_e4m3fn),
    "float8_e5m2": BlockScaled(jnp.float8_e5m2),
    "mxfp8": BlockScaled(jnp.float8_e4m3fn, 32, jnp.float8_e8m0fnu),
    "mxfp8_e5m2": BlockScaled(jnp.float8_e5m2, 32, jnp.float8_e8m0fnu),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Rows as `quantize` and `dispatch(..., quantized=True)` give them.

    Unpacks as `values, scales = rows`. `dequantize` has a derivative; `values` and
    `scales` by themselves have none, since JAX would cast a cotangent of `values` to
    FP8, where most of it becomes 0 or NaN: differentiating through them is an error.
    Where a product of yours takes them, give it a derivative of its own
    (`jax.custom_vjp`) whose cotangent goes to `carrier`.

    Scales lie row by row beside the values, as `qwix.QArray(qvalue, scale)` holds them,
    which tokamax's `ragged_dot` takes (its GPU kernels multiply a quantised left
    operand back first, as `dequantize` does), and as DeepGEMM's contiguous grouped
    product is given them, for blocks of 128 and `expert_alignment=128`; it transposes
    scales itself. TransformerEngine's MXFP8 product wants them in tiles of its own.

    Attributes:
      values: `[..., W]` in `wire.dtype`; of dispatch's `[T, a, b]` arrays, a row of
        a * b elements each, `[C, a, b]`.
      scales: `[..., ceil(W / block)]` in `wire.scale`, one for each block of a row.
      carrier: zeros of `values`' shape in `dtype`, which nothing reads and XLA drops:
        the way of the derivative past the FP8 values.
      wire: the format.
      dtype: name of the dtype of the rows that were quantised.
    """

    values: jax.Array
    scales: jax.Array
    carrier: jax.Array
    wire: BlockScaled = dataclasses.field(metadata=dict(static=True))
    dtype: str = dataclasses.field(metadata=dict(static=True))

    def __iter__(self) -> Iterator[jax.Array]:
        return iter((self.values, self.scales))


@jax.named_scope("jax_ep.quantize")
def quantize(x: jax.Array, wire: BlockScaled | str) -> Quantized:
    """Rows as FP8 values with a scale for each block, in plain `jax.numpy`.

    Works anywhere. With M the dtype's largest value (448 or 57344) and `amax` a block's
    largest magnitude:

    - the scale is `max(amax * float32(1 / M), 2**-126)`; of a power-of-two format it is
      the smallest 2**e >= 2**-126 with `M * 2**e >= amax`;
    - a value is `x * r` rounded once to the FP8 dtype, to nearest, ties to even, and
      to at most M, with r the scale's reciprocal, rounded to nearest;
    - elements below 2**-126 in magnitude count as zero;
    - a block with an Inf or NaN has a NaN scale and NaN values, and no other does;
    - where the block does not divide W, a row's last block is short.

    Args:
      x: `[..., W]` float32, bfloat16 or float16, W >= 1.
      wire: the format, or its name.

    Returns:
      `Quantized`: `[..., W]` values, `[..., ceil(W / block)]` scales.

    Raises:
      TypeError: x's dtype, or `wire` is no such format. ValueError: x is a scalar.

    Derivative: straight through, that of the identity: `dequantize`'s reaches x
    unrounded.

    Source: one scale for 128 elements of a row, DeepSeek-V3, arXiv:2412.19437, section
    3.3.2; MXFP8, Open Compute Project, Microscaling Formats 1.0. That one rounds its
    scale down and saturates; this one rounds it up, so that nothing does.
    """
    wire = _block_scaled("quantize", wire)
    if not any(x.dtype == dtype for dtype in _FLOATS):
        raise TypeError(
            f"jax_ep.quantize: x must be float32, bfloat16 or float16, and is "
            f"{x.dtype}."
        )
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"jax_ep.quantize: x must have shape [..., W], W >= 1, and has {x.shape}."
        )
    values, scales = to_bits(lax.stop_gradient(x), wire)
    return from_bits(values, scales, _carrier(x), wire)


@jax.named_scope("jax_ep.dequantize")
def dequantize(rows: Quantized) -> jax.Array:
    """Values times scales, in the dtype of the rows that were quantised.

    In float32, rounded once; below 2**-126 in magnitude zero; at most the dtype's
    largest number, so that finite rows stay finite. A NaN scale gives NaN.

    Args:
      rows: from `quantize` or `dispatch(..., quantized=True)`.

    Returns:
      `[..., W]`.

    Raises:
      TypeError: `rows` is no `Quantized`.

    Derivative: the cotangent goes on to what was quantised, unchanged.
    """
    if not isinstance(rows, Quantized):
        raise TypeError(
            f"jax_ep.dequantize: rows must be a jax_ep.Quantized, and is a "
            f"{type(rows).__name__}."
        )
    values, scales = lax.stop_gradient((rows.values, rows.scales))
    shape, lead = values.shape, scales.shape[:-1]
    flat = (*lead, math.prod(shape[len(lead) :]))
    values = lax.bitcast_convert_type(values, jnp.uint8)
    bits = jnp.uint8 if scales.dtype.itemsize == 1 else jnp.uint32
    scales = lax.bitcast_convert_type(scales, bits)
    carrier = rows.carrier.reshape(flat)
    product = _product(rows.wire, rows.dtype, values.reshape(flat), scales, carrier)
    return product.reshape(shape)


@functools.partial(jax.jit, static_argnames="wire")
def to_bits(x: jax.Array, wire: BlockScaled) -> tuple[jax.Array, jax.Array]:
    """Values as uint8 and scales as uint8 or uint32, without a derivative."""
    form = _FORMATS[wire.dtype]
    *rows, width = x.shape
    blocks = wire.num_blocks(width)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign = (bits >> np.uint32(24)).astype(jnp.uint8) & np.uint8(0x80)
    bits &= _MAG
    bits = jnp.where(bits < np.uint32(1 << 23), np.uint32(0), bits)
    short = blocks * wire.block - width
    bits = jnp.pad(bits, [(0, 0)] * len(rows) + [(0, short)])
    bits = bits.reshape(*rows, blocks, wire.block)
    amax = bits.max(axis=-1)  # Inf and NaN have the largest bits.
    finite = amax < _INF
    if wire.scale == jnp.float32:
        # The product spelled out: under jit, XLA makes one of a quotient anyway.
        scale = _as_float(amax) * np.float32(1 / form.largest)
        scale = lax.bitcast_convert_type(jnp.maximum(scale, _MIN_NORMAL), jnp.uint32)
        reciprocal = _reciprocal(scale)
        scale = jnp.where(finite, scale, np.uint32(0x7FC00000))
    else:
        # 1.75 * 2**(n + e) >= amax, by amax's exponent and mantissa.
        above = (amax & np.uint32(0x7FFFFF)) > np.uint32(0x600000)
        exponent = (amax >> np.uint32(23)) + above.astype(jnp.uint32)
        least = np.uint32(form.largest_exponent + 1)
        exponent = jnp.maximum(exponent, least) - np.uint32(form.largest_exponent)
        reciprocal = (np.uint32(254) - exponent) << np.uint32(23)
        scale = jnp.where(finite, exponent, np.uint32(0xFF)).astype(jnp.uint8)
    code = _round(_as_float(bits) * _as_float(reciprocal)[..., None], form)
    code = jnp.where(finite[..., None], code, np.uint8(_NAN_CODE))
    code = code.reshape(*rows, blocks * wire.block)[..., :width]
    sign = jnp.where(code == np.uint8(_NAN_CODE), np.uint8(0), sign)
    return code | sign, scale


def from_bits(values, scales, carrier, wire: BlockScaled) -> Quantized:
    """The inverse of `to_bits`; `carrier` is what a derivative flows to."""
    values, scales = tuple(_guarded(wire, values, scales, carrier))
    return Quantized(values, scales, carrier, wire, carrier.dtype.name)


@functools.partial(jax.jit, static_argnames=("wire", "dtype"))
def multiplied_back(values, scales, wire: BlockScaled, dtype) -> jax.Array:
    """`dequantize` of bits, without a derivative."""
    values = lax.bitcast_convert_type(values, wire.dtype).astype(jnp.float32)
    width = values.shape[-1]
    if scales.dtype == jnp.uint8:
        exponent = scales.astype(jnp.uint32)
        scales = exponent << np.uint32(23)
        scales = jnp.where(exponent == np.uint32(0xFF), np.uint32(0x7FC00000), scales)
    scales = jnp.repeat(_as_float(scales), wire.block, axis=-1)[..., :width]
    product = values * scales
    size = jnp.abs(product)
    # What CPUs flush anyway, GPUs would not.
    product = jnp.where(
        size < _MIN_NORMAL, jnp.copysign(np.float32(0), product), product
    )
    # False for NaN. Rounding up to a power of two can reach past the last number.
    largest = np.float32(jnp.finfo(dtype).max)
    product = jnp.where(size > largest, jnp.copysign(largest, product), product)
    return product.astype(dtype)


def _round(magnitude, form: _Format) -> jax.Array:
    """FP8 codes of float32 magnitudes: nearest, ties to even, at most the largest."""
    drop = 23 - form.mantissa
    bits = lax.bitcast_convert_type(magnitude, jnp.uint32)
    odd = (bits >> np.uint32(drop)) & np.uint32(1)
    normal = (bits + odd + np.uint32((1 << (drop - 1)) - 1)) >> np.uint32(drop)
    normal -= np.uint32((127 - form.bias) << form.mantissa)
    # Below the smallest normal number, codes count steps of one size. That product is
    # exact, where an addition could be fused with the product before it.
    step = np.float32(2.0 ** (form.bias - 1 + form.mantissa))
    steps = lax.round(magnitude * step, lax.RoundingMethod.TO_NEAREST_EVEN)
    smallest = np.float32(2.0 ** (1 - form.bias))
    steps = jnp.where(magnitude < smallest, steps, np.float32(0)).astype(jnp.uint32)
    code = jnp.where(magnitude < smallest, steps, normal)
    return jnp.minimum(code, np.uint32(form.largest_code)).astype(jnp.uint8)


def _reciprocal(bits) -> jax.Array:
    """`1 / s` to nearest for normal float32 s >= 0 as bits, by long division.

    With s = m * 2**(e - 150), m of 24 bits, 1 / s = (2**47 / m) * 2**(103 - e).
    """
    mantissa = (bits & np.uint32(0x7FFFFF)) | np.uint32(1 << 23)
    exponent = bits >> np.uint32(23)
    rest = np.uint32(1 << 31)
    quotient = rest // mantissa
    rest = rest - quotient * mantissa
    for _ in range(2):
        rest = rest << np.uint32(8)
        digit = rest // mantissa
        quotient = (quotient << np.uint32(8)) | digit
        rest = rest - digit * mantissa
    # Never a tie: m would have to be a power of two, and then there is no rest.
    quotient += (rest * np.uint32(2) > mantissa).astype(jnp.uint32)
    return ((np.uint32(252) - exponent) << np.uint32(23)) + quotient


def _as_float(bits) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


@jax.custom_jvp
def _carrier(x):
    """Zeros like x, with the derivative of x."""
    return jnp.zeros_like(x)


@_carrier.defjvp
def _carrier_jvp(primals, tangents):
    return _carrier(*primals), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(wire, dtype, values, scales, carrier):
    """The dequantised rows, with the derivative of `carrier`."""
    del carrier
    return multiplied_back(values, scales, wire, jnp.dtype(dtype))


@_product.defjvp
def _product_jvp(wire, dtype, primals, tangents):
    return _product(wire, dtype, *primals), tangents[2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _guarded(wire, values, scales, carrier):
    """Bits as FP8 values and scales, whose derivative is an error, not zero."""
    del carrier
    values = lax.bitcast_convert_type(values, wire.dtype)
    return values, lax.bitcast_convert_type(scales, wire.scale)


def _guarded_fwd(wire, values, scales, carrier):
    args = (values.value, scales.value, carrier.value)
    return _guarded(wire, *args), None


def _guarded_bwd(wire, _, cotangents):
    for name, cotangent in zip(("values", "scales"), cotangents, strict=True):
        if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            dtype = wire.dtype if name == "values" else wire.scale
            raise TypeError(
                f"jax_ep.Quantized: {name} ({dtype.name}) have no derivative: use "
                "jax_ep.dequantize, or give your product a jax.custom_vjp whose "
                "cotangent goes to the carrier."
            )
    return None, None, None


_guarded.defvjp(_guarded_fwd, _guarded_bwd, symbolic_zeros=True)


def _block_scaled(operation: str, wire: Any) -> BlockScaled:
    found = NAMES.get(wire) if isinstance(wire, str) else wire
    if not isinstance(found, BlockScaled):
        raise TypeError(
            f"jax_ep.{operation}: wire must be a jax_ep.BlockScaled or one of "
            f"{', '.join(NAMES)}, and is {wire!r}."
        )
    return found
