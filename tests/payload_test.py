"""Payloads: pytrees of arrays of every dtype in one call."""

import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from dispatch_test import setup
from layout_test import Case
from stages import all_ranks, assert_bits_equal

from jax_ep import payload

CASE = Case(routing="masked", alignment=4)
ROWS = (CASE.ranks, CASE.tokens)

SMALL_INTEGERS = [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32]
FP8 = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz]
WIDE = [jnp.int64, jnp.uint64, jnp.float64]


def bits(shape, dtype, seed: int = 0) -> np.ndarray:
    """Random bits, so NaNs of every payload among the floats."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return random.integers(0, 2, shape).astype(np.bool_)
    raw = random.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0]


def check(backend, tree):
    """Dispatches `[R, T, ...]` arrays, and compares them with the literal rows."""
    run, handle, layout = setup(backend, CASE)
    recv, _ = run.dispatch(jax.tree.map(all_ranks, tree), handle)
    assert jax.tree.structure(recv) == jax.tree.structure(tree)
    for got, x in zip(jax.tree.leaves(recv), jax.tree.leaves(tree), strict=True):
        assert_bits_equal(run.by_rank(got), literal.dispatch(x, layout))


@pytest.mark.parametrize(
    "dtype", [jnp.bool_, *SMALL_INTEGERS, *FP8, jnp.complex64], ids=lambda d: d.__name__
)
def test_every_dtype(backend, dtype):
    """One leaf by itself, with rows of an odd number of elements."""
    check(backend, bits((*ROWS, 3), dtype))


@pytest.mark.parametrize("dtype", WIDE, ids=lambda d: d.__name__)
def test_eight_byte_dtypes(backend, dtype, x64):
    check(backend, bits((*ROWS, 3), dtype))


def test_many_leaves_of_many_shapes(backend):
    """As many as there may be; `[T]` and `[T, a, b]`; an fp8 row with its scales."""
    tree = {
        "q": bits((*ROWS, 32), jnp.float8_e4m3fn),
        "scale": bits((*ROWS, 2), jnp.float32),
        "id": bits(ROWS, jnp.int32),
        "flag": bits((*ROWS, 1), jnp.bool_),
        "nested": [
            bits((*ROWS, 2, 3), jnp.bfloat16),
            (bits((*ROWS, 1, 1, 5), jnp.int16), bits(ROWS, jnp.complex64)),
            bits((*ROWS, 7), jnp.uint8),
        ],
    }
    missing = payload.MAX_LEAVES - len(jax.tree.leaves(tree))
    assert missing >= 0
    tree["more"] = [bits(ROWS, jnp.int8, seed) for seed in range(missing)]
    check(backend, tree)


def test_eight_byte_leaves_beside_others(backend, x64):
    check(
        backend, [bits((*ROWS, 5), jnp.float64), bits(ROWS, jnp.int8), bits(ROWS, bool)]
    )


def test_one_call_carries_all_leaves(ffi_backend):
    run, handle, _ = setup(ffi_backend, CASE)
    tree = [np.zeros((24, n), dtype) for n, dtype in ((3, jnp.float16), (2, np.int8))]
    text = run._dispatch().lower(tree, handle, None).compile().as_text()
    assert text.count('custom_call_target="jax_ep_') == 1


def test_combine_of_a_tree(backend):
    """Every leaf is summed on its own, whatever its shape and dtype."""
    run, handle, layout = setup(backend, CASE)
    random = np.random.default_rng(0)
    shapes = {
        "a": ((3,), jnp.float32),
        "b": ((), jnp.bfloat16),
        "c": ((2, 2), np.float16),
    }
    y, bias = (
        {
            name: random.standard_normal((4, rows, *tail), np.float32).astype(dtype)
            for name, (tail, dtype) in shapes.items()
        }
        for rows in (layout.capacity, CASE.tokens)
    )
    out = run.combine(
        jax.tree.map(all_ranks, y), handle, bias=jax.tree.map(all_ranks, bias)
    )
    for name in shapes:
        want = literal.combine(y[name], layout, bias=bias[name])
        assert_bits_equal(run.by_rank(out[name]), want)


def test_derivatives_of_a_tree(backend):
    """Floats have one, everything else float0, as JAX has it for integers."""
    run, handle, layout = setup(backend, CASE)
    random = np.random.default_rng(0)
    x = {
        "f32": random.standard_normal((*ROWS, 3), np.float32),
        "bf16": random.standard_normal((*ROWS, 2, 2), np.float32).astype(jnp.bfloat16),
        "f8": bits((*ROWS, 3), jnp.float8_e4m3fn),
        "i32": bits(ROWS, jnp.int32),
        "flag": bits(ROWS, jnp.bool_),
    }
    recv, vjp = jax.vjp(
        lambda x: run._dispatch()(
            x | {"f8": jax.lax.stop_gradient(x["f8"])}, handle, None
        )[0],
        jax.tree.map(all_ranks, x),
    )
    d_recv = {}
    for name, rows in recv.items():
        if jnp.issubdtype(rows.dtype, jnp.floating):
            noise = random.standard_normal(rows.shape, np.float32)
            d_recv[name] = jnp.asarray(noise).astype(rows.dtype)
        else:
            d_recv[name] = np.zeros(rows.shape, jax.dtypes.float0)
    (dx,) = vjp(d_recv)
    for name in ("f32", "bf16"):
        want = literal.combine(run.by_rank(d_recv[name]), layout)
        assert_bits_equal(run.by_rank(dx[name]), want)
    assert dx["i32"].dtype == dx["flag"].dtype == jax.dtypes.float0
    # Of bits that are numbers to JAX, only one that was cut off is zero; see wire_test.
    assert (np.asarray(dx["f8"]).astype(np.float32) == 0).all()


def test_derivative_of_a_tree_in_combine(backend):
    run, handle, layout = setup(backend, CASE)
    random = np.random.default_rng(0)
    weights = random.standard_normal((4, layout.capacity), np.float32)
    y, d_out = (
        [
            random.standard_normal((4, rows, *tail), np.float32)
            for tail in ((3,), (2, 2))
        ]
        for rows in (layout.capacity, CASE.tokens)
    )
    _, vjp = jax.vjp(
        lambda y, weights: run._combine()(y, handle, dict(weights=weights, bias=None)),
        [all_ranks(leaf) for leaf in y],
        all_ranks(weights),
    )
    dy, d_weights = vjp([all_ranks(leaf) for leaf in d_out])
    wants = [
        literal.weighted_combine_gradients(d, leaf, weights, layout)
        for d, leaf in zip(d_out, y, strict=True)
    ]
    for got, (want, _) in zip(dy, wants, strict=True):
        np.testing.assert_allclose(run.by_rank(got), want, rtol=1e-6)
    np.testing.assert_allclose(
        run.by_rank(d_weights), wants[0][1] + wants[1][1], rtol=1e-5, atol=1e-5
    )
