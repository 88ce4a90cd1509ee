"""A layer in chunks against the same layer as a whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enough_for_reference

import jax_ep
from jax_ep.chunks import chunk_sizes

CONFIG = jax_ep.MoEConfig(
    num_experts=8,
    num_experts_per_tok=2,
    hidden_size=16,
    moe_intermediate_size=32,
    num_shared_experts=1,
    load_balance_loss_weight=0.01,
    router_z_loss_weight=0.01,
)
PARAMS = jax_ep.init_params(jax.random.key(0), CONFIG)
X = np.random.default_rng(1).standard_normal((8, 7, 16)).astype(np.float32)


def run(config, mesh, **told):
    """Loss, output, statistics, and the gradients of parameters and x."""

    def loss(params, x):
        out, stats = jax_ep.sharded_moe(x, params, config, mesh=mesh, **told)
        return (out**2).sum() + stats.aux_loss, (out, stats)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(PARAMS, X)


def assert_close(found, expected):
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("num_chunks", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_chunks_are_the_layer(backend, num_chunks):
    enough_for_reference(backend, num_chunks == 1)
    mesh = backend.mesh(data=2, expert=4)
    config = dataclasses.replace(CONFIG, implementation=backend.implementation)
    whole = run(config, mesh)
    parts = run(dataclasses.replace(config, num_chunks=num_chunks), mesh)
    ((loss, (out, stats)), gradients) = parts
    assert_close((loss, out, gradients), (whole[0][0], whole[0][1][0], whole[1]))
    factor = dict(required_capacity_factor=0)  # Of the part that needs most.
    assert_close(
        dataclasses.replace(stats, **factor),
        dataclasses.replace(whole[0][1][1], **factor),
    )
    assert stats.required_capacity_factor >= whole[0][1][1].required_capacity_factor


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "domains"])
def test_other_layers_in_chunks(ffi_backend, axis):
    backend = ffi_backend
    mesh, told, config = backend.mesh(expert=4), {}, CONFIG
    if axis == "tensor":
        mesh, told = backend.mesh(tensor=2, expert=4), dict(tensor_axis="tensor")
    if axis == "domains":
        config = dataclasses.replace(config, domain_size=2)
    config = dataclasses.replace(config, implementation=backend.implementation)
    whole = run(config, mesh, **told)
    parts = run(dataclasses.replace(config, num_chunks=2), mesh, **told)
    assert_close(parts[0][1][0], whole[0][1][0])
    assert_close(parts[1], whole[1])


def test_each_chunk_drops_by_its_own_capacity(ffi_backend):
    """All tokens alike: of each chunk, a chunk's share of rows is kept."""
    config = dataclasses.replace(
        CONFIG, capacity_factor=0.5, num_chunks=2, num_shared_experts=0, num_experts=4
    )
    params = jax_ep.init_params(jax.random.key(0), config)
    mesh = ffi_backend.mesh(expert=4)
    x = jnp.ones((4, 6, 16))  # T = 6, chunks of 3; C = ceil(0.5 * 3 * 2) = 3.
    out, stats = jax.jit(lambda x: jax_ep.sharded_moe(x, params, config, mesh=mesh))(x)
    # Two experts, on two ranks, are wanted by all 24 tokens; each keeps 3 rows a chunk.
    assert sorted(stats.num_recv.tolist()) == [0, 0, 24, 24]
    assert sorted(stats.num_dropped.tolist()) == [0, 0, 18, 18]
    assert stats.required_capacity_factor.tolist() == [2.0]
    kept = np.abs(np.asarray(out)).reshape(4, 6, 16).sum(-1) > 0
    # Room for 3 rows of 4 sources with 3 each, in index order.
    assert kept.tolist() == [[True, False, False] * 2] * 3 + [[False] * 6]


def test_sizes():
    assert chunk_sizes(10, 4) == [3, 3, 2, 2]
    assert chunk_sizes(3, 5) == [1, 1, 1]
    assert chunk_sizes(0, 5) == [0]
    assert chunk_sizes(7, 1) == [7]


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("num_chunks", 0, "num_chunks (=0) must be at least 1"),
        ("mlp_bias", True, "mlp_bias (=True) must be False with num_chunks"),
        (
            "dropless_fallback",
            True,
            "dropless_fallback (=True) must be False with num_chunks",
        ),
        ("wire", "mxfp8", "must not quantise rows with num_chunks"),
    ],
)
def test_what_chunks_do_not_take(field, value, rule):
    told = {"num_chunks": 2, field: value}
    with pytest.raises(ValueError) as found:
        dataclasses.replace(CONFIG, **told)
    assert rule in str(found.value)
