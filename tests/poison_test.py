"""Every element of every result is written.

For a build that fills results with NaN, or with slots out of range, before it writes:
`pip install -Ccmake.define.JAX_EP_POISON_OUTPUTS=ON .` Set JAX_EP_REQUIRE_POISON=1
where the build must be one. The comparisons are those of the other files, which hold
for any build; here an element left out would show in each run.
"""

import os

import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from combine_test import noise
from conftest import CPU_FFI
from dispatch_test import FLOATS, setup, tagged_weights
from layout_test import CASES, Case
from stages import all_ranks, assert_bits_equal, assert_layout_equal

from jax_ep import _ffi

if not os.environ.get("JAX_EP_REQUIRE_POISON"):
    pytestmark = pytest.mark.skipif(
        not _ffi.poisons_outputs, reason="needs a build with JAX_EP_POISON_OUTPUTS"
    )


def test_build():
    assert _ffi.poisons_outputs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout(case):
    run, handle, layout = setup(CPU_FFI, case)
    assert_layout_equal(run, handle, layout)


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dispatch(case, with_weights):
    """Rows of several dtypes and odd widths, zeros, weights."""
    run, handle, layout = setup(CPU_FFI, case)
    shape = (case.ranks, case.tokens)
    x = [noise((*shape, n), dtype) for n, dtype in zip((5, 1, 3), FLOATS, strict=True)]
    x += [np.ones((*shape, 3), np.int8), np.ones(shape, np.int32)]
    weights = tagged_weights(case)
    recv, recv_weights = run.dispatch(
        [all_ranks(leaf) for leaf in x],
        handle,
        all_ranks(weights) if with_weights else None,
    )
    for got, leaf in zip(recv, x, strict=True):
        assert_bits_equal(run.by_rank(got), literal.dispatch(leaf, layout))
    if with_weights:
        assert_bits_equal(
            run.by_rank(recv_weights), literal.dispatch_weights(weights, layout)
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_combine_and_derivatives(case):
    """Sums, with and without weights and bias, and what flows back."""
    run, handle, layout = setup(CPU_FFI, case)
    rows, source = (case.ranks, layout.capacity), (case.ranks, case.tokens)
    y = [noise((*rows, n), dtype) for n, dtype in zip((5, 1, 3), FLOATS, strict=True)]
    bias = [
        noise((*source, n), leaf.dtype, 1) for n, leaf in zip((5, 1, 3), y, strict=True)
    ]
    powers = np.exp2(np.arange(np.prod(rows)) % 5 - 2).reshape(rows).astype(np.float32)
    flat_y, flat_bias = ([all_ranks(leaf) for leaf in leaves] for leaves in (y, bias))
    out = run.combine(flat_y, handle)
    full = run.combine(
        flat_y,
        handle,
        weights=all_ranks(powers),
        bias=flat_bias,
        wire=jnp.float32,
    )
    for n, leaf in enumerate(y):
        assert_bits_equal(run.by_rank(out[n]), literal.combine(leaf, layout))
        want = literal.combine(leaf, layout, powers, bias[n], np.float32)
        assert_bits_equal(run.by_rank(full[n]), want)

    x, weights = noise((*source, 5)), tagged_weights(case)
    d_recv, d_recv_weights = noise((*rows, 5), seed=2), noise(rows, seed=3)
    _, vjp = jax.vjp(
        lambda x, w: run._dispatch()(x, handle, w), all_ranks(x), all_ranks(weights)
    )
    dx, d_weights = jax.jit(vjp)((all_ranks(d_recv), all_ranks(d_recv_weights)))
    assert_bits_equal(run.by_rank(dx), literal.combine(d_recv, layout))
    assert_bits_equal(
        run.by_rank(d_weights), literal.undispatch_weights(d_recv_weights, layout)
    )


def test_masked_rows_of_the_field_reports():
    """Case 4 there: finite and equal to the clean run, now with poisoned buffers."""
    import field_reports_test

    field_reports_test.test_04_masked_rows(CPU_FFI)


def test_dropped_rows():
    """Case 9 there, and a drop in every arm that claims one."""
    case = Case(routing="skewed", capacity=20)
    run, handle, layout = setup(CPU_FFI, case)
    assert layout.num_dropped.max() > 0
    out = run.combine(np.ones((4 * 20, 3), np.float32), handle)
    kept = (layout.slot >= 0).sum(2, dtype=np.float32)[..., None]
    assert_bits_equal(run.by_rank(out), np.broadcast_to(kept, (4, 6, 3)))
