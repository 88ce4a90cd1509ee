"""The layer under vmap, and derivatives of derivatives, against independent loops."""

import dataclasses
import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from moe_test import GPT_OSS, PLAIN, assert_close, make

import jax_ep
from jax_ep import grouped_matmul
from jax_ep.grouped_matmul import Kernel, Kernels


@pytest.fixture(params=["xla", "triton"])
def config_of(request, monkeypatch):
    """Makes configs whose experts' products take a kernel; XLA runs either on CPUs."""
    kernels = Kernels(*[Kernel(request.param)] * 3)
    monkeypatch.setattr(grouped_matmul, "kernels_for", lambda dtype: kernels)

    def config_of(config):
        # A config of its own, since sharded_moe keeps what it traced for one.
        return dataclasses.replace(config, timeout_s=50.0 + len(request.param))

    return config_of


@pytest.mark.parametrize("fields", [PLAIN, GPT_OSS], ids=["plain", "gpt_oss"])
def test_vmap(config_of, fields):
    """Over x alone: the parameters' gradients are those of as many calls."""
    config, params, x = make(**fields)
    batch = np.stack([x, 1 - x])
    layer = functools.partial(
        jax_ep.sharded_moe, config=config_of(config), mesh=CPU_FFI.mesh(expert=4)
    )

    def loss(call, batch, params):
        return jnp.sin(call(batch, params)).sum()

    def mapped(batch, params):
        return jax.vmap(lambda x: layer(x, params)[0])(batch)

    def one_by_one(batch, params):
        return jnp.stack([layer(x, params)[0] for x in batch])

    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2)), static_argnums=0)
    assert_close(run(mapped, batch, params), run(one_by_one, batch, params))


def test_gradient_penalty(config_of):
    """Gradients, by x and the parameters, of the norm of a gradient by x."""
    config, params, x = make(**PLAIN)

    def penalty(layer, x, params):
        grad = jax.grad(lambda x: jnp.sin(layer(x, params)).sum())(x)
        return (grad**2).sum()

    def ours(x, params):
        mesh = CPU_FFI.mesh(expert=4)
        return jax_ep.sharded_moe(x, params, config_of(config), mesh=mesh)[0]

    ids = dense.moe(np, x.reshape(-1, x.shape[-1]), params, config)[1]

    def theirs(x, params):
        tokens = x.reshape(-1, x.shape[-1])
        return dense.moe(jnp, tokens, params, config, ids)[0].reshape(x.shape)

    run = jax.jit(jax.value_and_grad(penalty, argnums=(1, 2)), static_argnums=0)
    with jax.numpy_rank_promotion("allow"):
        want = run(theirs, x, params)
    # Sums of terms as large as the largest entries, in float32.
    for g, w in zip(*map(jax.tree.leaves, (run(ours, x, params), want)), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-4 * np.abs(w).max())
