"""The grouped product and its gradients, by XLA and by kernels that stand in.

Tokamax is not a dependency. A module in its place computes what tokamax's
`ragged_dot_general` promises, with NaN where that promises nothing, and notes its
calls; the last test takes the real one where it is installed.
"""

import importlib.util
import sys
import types

import experts_test
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Backend
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ep import grouped_matmul as module
from jax_ep.grouped_matmul import (
    BLOCKS,
    XLA,
    Kernel,
    Kernels,
    grouped_matmul,
    kernels_for,
)

ROWS, HIDDEN, WIDTH = 14, 6, 5
SIZES = np.array([3, 0, 5, 2], np.int32)  # and four rows that belong to no group
GROUP = np.repeat(np.arange(len(SIZES)), SIZES)
ANY = Kernel("tokamax_xla")
MOSAIC = Kernel("mosaic")


@pytest.fixture
def calls(monkeypatch):
    """Stands in for tokamax, and notes (implementation, dimensions) of each call."""
    noted = []

    def ragged_dot_general(
        lhs, rhs, group_sizes, dimensions, *, preferred_element_type, implementation
    ):
        assert preferred_element_type == lhs.dtype
        (name,) = implementation
        which = {v: k for k, v in module._DIMENSIONS.items()}[dimensions]
        noted.append((name, which))
        if which != "wgrad":
            out = lax.ragged_dot_general(lhs, rhs, group_sizes, dimensions)
            past = jnp.arange(lhs.shape[0]) >= group_sizes.sum()
            return jnp.where(past[:, None], jnp.asarray(jnp.nan, out.dtype), out)
        return lax.ragged_dot_general(lhs, rhs, group_sizes, dimensions)

    stand_in = types.ModuleType("tokamax")
    stand_in.ragged_dot_general = ragged_dot_general  # pyright: ignore
    monkeypatch.setitem(sys.modules, "tokamax", stand_in)
    return noted


def operands(dtype=np.float32):
    rng = np.random.default_rng(0)
    lhs = rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)
    rhs = rng.standard_normal((len(SIZES), HIDDEN, WIDTH)).astype(np.float32)
    d_out = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    for rows in (lhs, d_out):
        rows[len(GROUP) :] = 0
    return jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype), jnp.asarray(d_out, dtype)


def literal(lhs, rhs, d_out):
    """Output and gradients of the rows that belong to a group, row by row."""
    lhs, rhs, d_out = (np.asarray(a, np.float64) for a in (lhs, rhs, d_out))
    out = np.stack([lhs[r] @ rhs[e] for r, e in enumerate(GROUP)])
    d_lhs = np.stack([rhs[e] @ d_out[r] for r, e in enumerate(GROUP)])
    d_rhs = np.zeros(rhs.shape)
    for r, e in enumerate(GROUP):
        d_rhs[e] += np.outer(lhs[r], d_out[r])
    return out, d_lhs, d_rhs


def value_and_gradients(kernels, lhs, rhs, d_out):
    def run(lhs, rhs):
        return grouped_matmul(lhs, rhs, jnp.asarray(SIZES), kernels=kernels)

    out, pull = jax.vjp(jax.jit(run), lhs, rhs)
    return out, *pull(d_out)


@pytest.mark.jax_version
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("kernels", [Kernels(), Kernels(ANY, ANY, ANY), None])
def test_is_a_loop_over_rows(calls, kernels, dtype):
    args = operands(dtype)
    got = value_and_gradients(kernels, *args)
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    for array, expected in zip(got, literal(*args), strict=True):
        assert array.dtype == dtype
        array = np.asarray(array, np.float64)[: len(expected)]
        np.testing.assert_allclose(array, expected, rtol=tolerance, atol=tolerance)
    assert bool(calls) == (kernels == Kernels(ANY, ANY, ANY))


@pytest.mark.jax_version
def test_xla_has_the_bits_of_ragged_dot():
    lhs, rhs, d_out = operands(jnp.bfloat16)
    out, pull = jax.vjp(
        jax.jit(lambda a, b: lax.ragged_dot(a, b, jnp.asarray(SIZES))), lhs, rhs
    )
    expected = (out, *pull(d_out))
    for kernels in (Kernels(), Kernels(forward=XLA, wgrad=XLA)):
        got = value_and_gradients(kernels, lhs, rhs, d_out)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("x64", [False, True])
def test_groups_of_many_blocks(x64):
    """A block and less, a row more, several; what is past the last group is NaN."""
    sizes = np.array([70, 0, 1, 33, 32], np.int32)
    group = np.repeat(np.arange(len(sizes)), sizes)
    rng = np.random.default_rng(0)
    shapes = ((140, 6), (len(sizes), 6, 5), (140, 5))
    lhs, rhs, d_out = (rng.integers(-4, 5, shape) for shape in shapes)
    want = np.stack([lhs[r] @ rhs[e] for r, e in enumerate(group)])
    d_lhs = np.stack([rhs[e] @ d_out[r] for r, e in enumerate(group)])
    d_rhs = np.stack(
        [lhs[:136][group == e].T @ d_out[:136][group == e] for e in range(5)]
    )
    lhs, rhs, d_out = (np.asarray(a, np.float32) for a in (lhs, rhs, d_out))
    lhs[136:] = d_out[136:] = np.nan
    with jax.enable_x64(x64):
        run = jax.jit(lambda a, b: grouped_matmul(a, b, jnp.asarray(sizes)))
        out, pull = jax.vjp(run, lhs, rhs)
        got = (out, *pull(jnp.asarray(d_out)))
    for array, exact in zip(got, (want, d_lhs, d_rhs), strict=True):
        np.testing.assert_array_equal(array[: len(exact)], exact)


def test_a_buffer_costs_the_rows_in_use():
    """Operations of the compiled program: those of one block, in loops."""
    lhs, rhs = np.ones((4096, 64), np.float32), np.ones((16, 64, 64), np.float32)
    sizes = np.full(16, 4, np.int32)
    compiled = jax.jit(grouped_matmul).lower(lhs, rhs, sizes).compile()
    everything = 2.0 * 16 * 4096 * 64 * 64  # Every row with every group.
    assert compiled.cost_analysis()["flops"] < everything / 1000


@pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad"])
def test_each_product_has_its_own_kernel(calls, product):
    args = operands()
    got = value_and_gradients(Kernels(**{product: ANY}), *args)
    assert calls == [("xla", product)]
    expected = value_and_gradients(Kernels(), *args)
    for a, b in zip(got, expected, strict=True):
        a, b = (np.asarray(each)[: len(GROUP)] for each in (a, b))
        np.testing.assert_array_equal(a, b)


def test_kernels_of_a_gpu_are_lowered_for_cuda_alone(calls):
    lhs, rhs, _ = operands(jnp.bfloat16)

    def run(lhs, rhs):
        return grouped_matmul(lhs, rhs, jnp.asarray(SIZES), kernels=Kernels(MOSAIC))

    traced = jax.jit(run).trace(lhs, rhs)
    assert not calls
    traced.lower(lowering_platforms=("cpu",))
    assert not calls
    traced.lower(lowering_platforms=("cuda",))
    assert calls == [("mosaic", "forward")]


@pytest.mark.jax_version
def test_a_replicated_weight_gets_the_sum_of_all_ranks(calls):
    lhs, rhs, d_out = operands()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("expert",), auto, devices=jax.devices()[:2])
    factors = np.array([1.0, -3.0], np.float32)
    rows = jnp.concatenate([factor * lhs for factor in factors])

    def local(rhs, lhs):
        kernels = Kernels(ANY, ANY, ANY)
        out = grouped_matmul(lhs, rhs, jnp.asarray(SIZES), kernels=kernels)
        kept = jnp.arange(ROWS)[:, None] < len(GROUP)
        return lax.psum((jnp.where(kept, out, 0) * d_out).sum(), "expert")

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("expert")), out_specs=P())
    got = jax.jit(jax.grad(loss))(rhs, rows)
    _, _, d_rhs = literal(lhs, rhs, d_out)
    np.testing.assert_allclose(got, d_rhs * factors.sum(), rtol=1e-5, atol=1e-5)
    assert {which for _, which in calls} == {"wgrad"}


@pytest.mark.jax_version
@pytest.mark.parametrize("variant", ["silu", "aligned_bias"])
def test_what_a_kernel_leaves_in_other_rows_reaches_nothing(
    calls, monkeypatch, ffi_backend, variant
):
    """The stand-in leaves NaN there, in the output and in the gradient of lhs."""
    fields = experts_test.VARIANTS[variant]
    monkeypatch.setattr(module, "kernels_for", lambda dtype: Kernels(ANY, ANY, ANY))
    config, params, x, ids, weights = experts_test.make(**fields)
    layer = experts_test.layer(ffi_backend, config, poison=True)
    actual = experts_test.value_and_gradients(layer, params, x, weights, ids)
    experts_test.assert_close(actual, experts_test.expected_of(**fields))
    assert {which for _, which in calls} == {"forward", "dgrad", "wgrad"}


def test_vmap(calls):
    lhs, rhs, _ = operands()
    many = jnp.stack([lhs, 2 * lhs, -lhs])

    def run(lhs):
        sizes = jnp.asarray(SIZES)
        return grouped_matmul(lhs, rhs, sizes, kernels=Kernels(ANY, ANY, ANY))

    got = np.asarray(jax.jit(jax.vmap(run))(many))[:, : len(GROUP)]
    one = np.asarray(run(lhs))[: len(GROUP)]
    np.testing.assert_allclose(got, np.stack([one, 2 * one, -one]), rtol=1e-6)


def test_a_device_takes_what_was_measured_on_it_and_is_installed(monkeypatch):
    kind = "NVIDIA H1"
    fastest = Kernels(MOSAIC, Kernel("triton"), ANY)
    monkeypatch.setitem(module.FASTEST, kind, fastest)
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    found = {"tokamax", "jax_triton"}
    versions = {"triton": "3.10.1"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if name in found else None
    )
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    assert kernels_for(jnp.bfloat16) == fastest
    assert kernels_for(jnp.float32) == Kernels()
    versions["triton"] = "3.7.1"
    with pytest.warns(UserWarning) as caught:
        assert kernels_for(jnp.bfloat16) == Kernels(wgrad=ANY)
        found.remove("tokamax")
        assert kernels_for(jnp.bfloat16) == Kernels()
    assert {str(one.message) for one in caught} == {
        "jax_ep.grouped_matmul: on NVIDIA H1 some products of the experts are "
        "jax.lax.ragged_dot's, 40 to 78 times slower at DeepSeek-V3's shapes than "
        "kernels that are not installed: install tokamax, jax-triton and triton >= 3.9 "
        "(the extra tokamax of jax_ep), or name kernels= or matmul= yourself."
    }
    found.add("tokamax")
    device.device_kind = "NVIDIA H2"
    assert kernels_for(jnp.bfloat16) == Kernels()


def test_a_cpu_takes_blocks_of_rows():
    for dtype in (jnp.bfloat16, jnp.float32):
        assert kernels_for(dtype) == Kernels(BLOCKS, BLOCKS, BLOCKS)


needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed"
)


@needs_tokamax
@pytest.mark.gpu
def test_the_fastest_kernels_of_this_gpu():
    """At sizes that no tile divides, inside a shard_map."""
    (device,) = Backend("gpu", "ffi").devices(1)
    kernels = module.FASTEST.get(device.device_kind)
    if kernels is None:
        pytest.skip(f"no kernels were measured on {device.device_kind}")
    assert kernels_for(jnp.bfloat16) == kernels
    rng = np.random.default_rng(0)
    sizes = np.array([300, 0, 1, 131, 77], np.int32)
    group = np.repeat(np.arange(len(sizes)), sizes)
    shapes = ((640, 320), (len(sizes), 320, 200), (640, 200))
    lhs, rhs, d_out = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes
    )
    kept = jnp.arange(640)[:, None] < len(group)
    lhs, d_out = jnp.where(kept, lhs, 0), jnp.where(kept, d_out, 0)

    def run(lhs, rhs):
        out = grouped_matmul(lhs, rhs, jnp.asarray(sizes))
        return jnp.where(kept, out, 0)

    mesh = Mesh(np.array([device]), ("expert",))
    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())
    assert "triton" in jax.jit(run).lower(lhs, rhs).as_text()
    out, pull = jax.vjp(jax.jit(run), lhs, rhs)
    d_lhs, d_rhs = pull(d_out)
    d_lhs = jnp.where(kept, d_lhs, 0)  # other rows hold anything
    got = [np.asarray(a, np.float64) for a in (out, d_lhs, d_rhs)]
    lhs, rhs, d_out = (np.asarray(a, np.float64) for a in (lhs, rhs, d_out))
    expected = np.zeros(out.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    for e in range(len(sizes)):
        rows = np.flatnonzero(group == e)
        expected[0][rows] = lhs[rows] @ rhs[e]
        expected[1][rows] = d_out[rows] @ rhs[e].T
        expected[2][e] = lhs[rows].T @ d_out[rows]
    for array, want in zip(got, expected, strict=True):
        tolerance = 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(want).max()
        np.testing.assert_allclose(array, want, rtol=0, atol=tolerance)


@needs_tokamax
def test_tokamax_itself():
    args = operands(jnp.bfloat16)
    got = value_and_gradients(Kernels(ANY, ANY, ANY), *args)
    for array, expected in zip(got, literal(*args), strict=True):
        array = np.asarray(array, np.float64)[: len(expected)]
        np.testing.assert_allclose(array, expected, rtol=0.06, atol=0.06)
