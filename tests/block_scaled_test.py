"""Block-scaled FP8: its bits against float64 arithmetic, and its derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stages import assert_bits_equal

import jax_ep
from jax_ep.block_scaled import NAMES, BlockScaled, Quantized, dequantize, quantize

TINY = 2.0**-126
WIRES = [*NAMES.values(), BlockScaled(jnp.float8_e5m2, 32, jnp.float32)]


def grid(dtype) -> tuple[np.ndarray, np.ndarray]:
    """The finite magnitudes of an FP8 dtype, ascending, with their codes."""
    codes = np.arange(0x7F, dtype=np.uint8)
    numbers = codes.view(dtype).astype(np.float64)
    finite = np.isfinite(numbers)
    return numbers[finite], codes[finite]


def literal(x, wire: BlockScaled):
    """Value codes, scales, and rows multiplied back, in float64.

    Each step is exact there, and rounded to what the definition says.
    """
    numbers, number_codes = grid(wire.dtype)
    largest = numbers[-1]
    single = np.asarray(x).astype(np.float64)
    rows, width = single.shape
    codes = np.zeros((rows, width), np.uint8)
    scales = np.zeros((rows, -(-width // wire.block)), np.float64)
    back = np.zeros((rows, width), np.float64)
    for row in range(rows):
        for block in range(scales.shape[1]):
            span = slice(block * wire.block, (block + 1) * wire.block)
            element = single[row, span]
            if not np.isfinite(element).all():
                codes[row, span], scales[row, block], back[row, span] = (
                    0x7F,
                    np.nan,
                    np.nan,
                )
                continue
            size = np.where(np.abs(element) < TINY, 0.0, np.abs(element))
            if wire.scale == jnp.float32:
                scale = np.float64(
                    np.float32(size.max() * np.float64(np.float32(1 / largest)))
                )
                scale = max(scale, TINY)
            else:
                scale = TINY
                while largest * scale < size.max():
                    scale *= 2
            quotient = np.float64(np.float32(size * np.float64(np.float32(1 / scale))))
            quotient = np.minimum(quotient, largest)
            above = np.searchsorted(numbers, quotient).clip(0, len(numbers) - 1)
            below = np.maximum(above - 1, 0)
            up, down = numbers[above] - quotient, quotient - numbers[below]
            tie_up = number_codes[above] % 2 == 0
            nearest = np.where((up < down) | ((up == down) & tie_up), above, below)
            negative = np.signbit(element)
            codes[row, span] = number_codes[nearest] | np.where(negative, 0x80, 0)
            scales[row, block] = scale
            product = np.minimum(
                numbers[nearest] * scale, float(jnp.finfo(x.dtype).max)
            )
            product = np.float64(np.float32(product))
            product = np.where(product < TINY, 0.0, product)
            back[row, span] = np.where(negative, -product, product)
    return codes, scales, back


def awkward_rows(dtype, width: int, seed: int) -> np.ndarray:
    """Rows of every size, and all that a scale can stumble over."""
    random = np.random.default_rng(seed)
    sizes = np.exp2(random.uniform(-135, 127, (40, 1)))
    rows = random.standard_normal((40, width)) * sizes
    rows[8:16] = random.standard_normal((8, width)) * np.exp2(
        random.uniform(-20, 0, (8, width))
    )
    rows[0] = 0
    rows[1], rows[1, :2] = 0, (1e-30, -1e-30)
    rows[2] = 448 * 0.5 ** np.arange(width).clip(0, 140)
    rows[3], rows[3, 5] = 1, -0.0
    rows[4] = float(jnp.finfo(dtype).max)
    rows[5] = -float(jnp.finfo(dtype).max) * random.uniform(0.9, 1, width)
    rows[6] = float(jnp.finfo(dtype).tiny)
    rows[7] = 2.0**-130
    with np.errstate(over="ignore", under="ignore"):
        largest = float(jnp.finfo(dtype).max)
        rows = rows.clip(-largest, largest).astype(np.float32).astype(dtype)
    rows[16, 3], rows[17, width - 1], rows[18, 0] = np.nan, np.inf, -np.inf
    return rows


@pytest.mark.jax_version
@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__
)
def test_bits(wire, dtype):
    """Eager, under jit, and in float64 arithmetic; a width that no block divides."""
    x = awkward_rows(dtype, 300, seed=wire.block)
    codes, scales, back = literal(x, wire)
    rows = quantize(x, wire)
    assert (rows.values.dtype, rows.scales.dtype) == (wire.dtype, wire.scale)
    finite = np.isfinite(scales)
    got = np.asarray(rows.scales).astype(np.float64)
    np.testing.assert_array_equal(got[finite], scales[finite])
    assert np.isnan(got[~finite]).all()
    assert (~finite).sum(axis=1).tolist()[15:20] == [0, 1, 1, 1, 0]
    np.testing.assert_array_equal(np.asarray(rows.values).view(np.uint8), codes)
    got = dequantize(rows)
    assert got.dtype == dtype
    with np.errstate(under="ignore"):
        want = back.astype(np.float32).astype(dtype)
    is_nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), is_nan)
    assert_bits_equal(np.where(is_nan, 0, got), np.where(is_nan, 0, want))

    if (
        dtype == jnp.bfloat16 and wire in WIRES[:3:2]
    ):  # Operation by operation; XLA fuses none of them.
        with jax.disable_jit():
            eager = quantize(x[:20], wire)
            eager = (eager, dequantize(eager))
        under_jit = jax.jit(
            lambda x: (quantize(x, wire), dequantize(quantize(x, wire)))
        )
        for a, b in zip(
            jax.tree.leaves(under_jit(x[:20])), jax.tree.leaves(eager), strict=True
        ):
            assert_bits_equal(a, b)


def test_power_of_two_scale_of_the_threshold():
    """The scale changes right above 1.75 * 2**k, where bfloat16 would round it away."""
    above = np.nextafter(np.float32(1.75), np.float32(2))
    amax = np.float32([1.999, above, 1.75, 1.0])[:, None]
    exponents = np.arange(-10, 11)
    x = (amax * np.exp2(exponents).astype(np.float32)).reshape(-1, 1)
    want = np.exp2(exponents - 8 + (amax > 1.75)).reshape(-1, 1)
    got = quantize(x, NAMES["mxfp8"]).scales
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want)


@pytest.mark.parametrize("wire", ["float8_e4m3fn", "mxfp8"])
def test_zero_tiny_and_large_rows(wire):
    """No NaN or Inf; a zero row stays zero; its neighbours are as without it."""
    x = np.zeros((4, 128), np.float32)
    x[1, 0] = 1e-30
    x[2, :9] = 448 * 0.5 ** np.arange(9)
    x[3] = np.linspace(-3, 3, 128)
    got = np.asarray(dequantize(quantize(x, wire)))
    assert (got[0] == 0).all()
    assert abs(got[1, 0] - 1e-30) <= 1e-31 and (got[1, 1:] == 0).all()
    np.testing.assert_allclose(got[2], x[2], rtol=1 / 16)
    assert_bits_equal(got[3:], dequantize(quantize(x[3:], wire)))
    scale = np.asarray(quantize(x, wire).scales).astype(np.float32)
    assert (scale > 0).all()


def test_leading_dimensions_and_short_rows():
    wire = NAMES["mxfp8"]
    x = np.random.default_rng(0).standard_normal((2, 3, 1, 5), np.float32)
    values, scales = quantize(x, "mxfp8")
    assert values.shape == (2, 3, 1, 5) and scales.shape == (2, 3, 1, 1)
    flat = quantize(x.reshape(6, 5), wire)
    assert_bits_equal(values.reshape(6, 5), flat.values)
    assert_bits_equal(scales.reshape(6, 1), flat.scales)


def test_bytes_of_a_row():
    """Values and scales, each padded to 16 bytes."""
    assert BlockScaled().row_bytes(7168) == 7168 + 4 * 56
    assert BlockScaled(scale=jnp.float8_e8m0fnu).row_bytes(7168) == 7168 + 64
    assert NAMES["mxfp8"].row_bytes(7168) == 7168 + 224
    assert NAMES["mxfp8"].row_bytes(2880) == 2880 + 96
    assert BlockScaled().row_bytes(1) == 32


def test_the_derivative_goes_straight_through():
    """Of any order in reverse mode; jit, remat, vmap and scan over rows too."""
    random = np.random.default_rng(0)
    x, c = (random.standard_normal((3, 40), np.float32) for _ in range(2))

    def loss(x):
        return (dequantize(quantize(x, "float8_e5m2")) * c).sum()

    def in_scan(x):
        rows = jax.lax.scan(lambda s, x: (s, quantize(x, "float8_e5m2")), 0, x)[1]
        return (dequantize(rows) * c).sum()

    for f in (loss, jax.jit(loss), jax.checkpoint(loss), in_scan):
        assert_bits_equal(jax.grad(f)(x), c)
    per_row = jax.vmap(lambda x: dequantize(quantize(x, "mxfp8")).sum())
    assert_bits_equal(jax.grad(lambda x: per_row(x).sum())(x), np.ones_like(x))

    def squares(x):
        return (dequantize(quantize(x, "mxfp8")) ** 2).sum()

    # The first derivative holds the rounded rows, and of those, straight through, 2 c.
    second = jax.grad(lambda x: (jax.grad(squares)(x) * c).sum())(x)
    assert_bits_equal(second, 2 * c)
    assert (
        jax.grad(lambda x: dequantize(quantize(x, "mxfp8")).sum())(
            x.astype(jnp.bfloat16)
        ).dtype
        == jnp.bfloat16
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("field", ["values", "scales"])
def test_a_cotangent_of_fp8_is_an_error(wrap, field):
    def loss(x):
        return getattr(quantize(x, "mxfp8"), field).astype(jnp.float32).sum()

    x = np.ones((2, 32), np.float32)
    assert np.isfinite(wrap(loss)(x))
    with pytest.raises(
        TypeError, match=rf"jax_ep.Quantized: {field} \(float8_e.* carrier"
    ):
        jax.grad(wrap(loss))(x)


def test_formats_are_values():
    """Equal, hashable, static arguments; dtypes in any spelling."""
    assert BlockScaled("float8_e4m3fn") == BlockScaled(jnp.float8_e4m3fn, np.int64(128))
    assert (
        len({BlockScaled(), BlockScaled(np.dtype("float8_e4m3fn")), NAMES["mxfp8"]})
        == 2
    )
    rows = jax.jit(quantize, static_argnums=1)(
        np.ones((1, 3), np.float32), BlockScaled()
    )
    assert isinstance(rows, Quantized) and rows.wire == BlockScaled()
    assert (
        str(NAMES["mxfp8"])
        == "BlockScaled(float8_e4m3fn, block=32, scale=float8_e8m0fnu)"
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: BlockScaled(jnp.float32),
            TypeError,
            "BlockScaled: dtype must be float8_e4m3fn or float8_e5m2",
        ),
        (lambda: BlockScaled("x"), TypeError, "BlockScaled: dtype must be"),
        (
            lambda: BlockScaled(scale=jnp.bfloat16),
            TypeError,
            "BlockScaled: scale must be",
        ),
        (
            lambda: BlockScaled(block=64),
            ValueError,
            r"BlockScaled: block \(=64\) must be 32 or 128",
        ),
        (
            lambda: quantize(np.ones((2, 2), np.int8), "mxfp8"),
            TypeError,
            "quantize: x must be float32",
        ),
        (
            lambda: quantize(np.float32(1), "mxfp8"),
            ValueError,
            r"quantize: x must have shape \[..., W\]",
        ),
        (
            lambda: quantize(np.ones(2, np.float32), "fp8"),
            TypeError,
            "quantize: wire must be",
        ),
        (
            lambda: quantize(np.ones(2, np.float32), jnp.float32),
            TypeError,
            "quantize: wire must be",
        ),
        (
            lambda: dequantize(np.ones(2, np.float32)),
            TypeError,
            "dequantize: rows must be a jax_ep.Quantized",
        ),
    ],
)
def test_misuse(make, error, message):
    with pytest.raises(error, match=f"jax_ep.{message}"):
        make()


def test_public_names():
    assert jax_ep.BlockScaled is BlockScaled and jax_ep.quantize is quantize
    assert jax_ep.dequantize is dequantize and jax_ep.Quantized is Quantized
