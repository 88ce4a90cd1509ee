"""jax.checkpoint: by default, and with the documented names saved."""

import base
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import IDS, SCALES, WEIGHTS, X, custom_calls
from conftest import enough_for_reference
from jax.sharding import PartitionSpec as P
from stages import assert_bits_equal

import jax_ep

NAMES = ("jax_ep_handle", "jax_ep_recv", "jax_ep_out")
SAVE_NAMES = jax.checkpoint_policies.save_only_these_names(*NAMES)
COLLECTIVES = ("all-gather(", "all-to-all(", "all-gather-start(", "all-to-all-start(")


def block(implementation: str):
    """A layer whose backward needs what it received, and its output."""

    def body(x, ids, weights, scales):
        handle = jax_ep.dispatch_layout(
            ids, num_experts=8, implementation=implementation
        )
        recv, recv_weights = jax_ep.dispatch(x, handle, weights)
        y = recv * (recv_weights * base.row_scales(scales, handle))[:, None]
        out = jax_ep.combine(y, handle)
        return out * out

    return body


def loss(backend, body):
    spec = P("expert")
    function = jax.shard_map(
        body, mesh=backend.mesh(expert=4), in_specs=spec, out_specs=spec
    )
    return lambda x, weights, scales: function(x, IDS, weights, scales).sum()


def compiled_gradient(backend, body):
    step = jax.jit(jax.value_and_grad(loss(backend, body), argnums=(0, 1, 2)))
    compiled = step.lower(X, WEIGHTS, SCALES).compile()
    return compiled.as_text(), compiled(X, WEIGHTS, SCALES)


def num_collectives(text: str) -> int:
    return sum(text.count(f" {name}") for name in COLLECTIVES)


POLICIES = {
    "default": None,
    "names": SAVE_NAMES,
    "handle only": jax.checkpoint_policies.save_only_these_names("jax_ep_handle"),
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


@pytest.mark.jax_version
@pytest.mark.parametrize("policy", POLICIES)
def test_gradient(backend, policy):
    """Every policy gives the gradient of no checkpoint, and the value."""
    enough_for_reference(backend, policy in ("default", "names"))
    body = block(backend.implementation)
    remat = jax.checkpoint(body, policy=POLICIES[policy])
    _, got = compiled_gradient(backend, remat)
    out = base.outputs().astype(np.float64)
    assert got[0] == (out * out).sum()
    dx, d_weights, d_scales = got[1]
    factor = base.token_scales(IDS, WEIGHTS)[:, None]
    assert_bits_equal(dx, (2 * out * factor).astype(np.float32))
    # d_loss = 2 out d_out, so every row counts with 2 out instead of 1.
    _, want_weights, want_scales = base.gradients(x=(2 * out * X))
    assert_bits_equal(d_weights, want_weights)
    assert_bits_equal(d_scales, want_scales)


@pytest.mark.jax_version
def test_nothing_is_communicated_twice(backend):
    """With the names saved: one layout, and 2 forward and 2 backward exchanges."""
    body = block(backend.implementation)
    plain, _ = compiled_gradient(backend, body)
    saved, _ = compiled_gradient(backend, jax.checkpoint(body, policy=SAVE_NAMES))
    if backend.implementation == "ffi":
        assert custom_calls(plain) == custom_calls(saved) == (1, 2, 2)
    else:
        assert num_collectives(plain) == num_collectives(saved) > 0


@pytest.mark.jax_version
def test_scan_of_checkpointed_layers(ffi_backend):
    """In a scan, where XLA cannot merge a recomputation with the forward.

    Calls of a body count once. Without a policy all of the forward runs again; with the
    handle saved, rows are sent again and ids are not.
    """

    def layers(policy):
        one = jax.checkpoint(block("ffi"), policy=policy)

        def body(x, ids, weights, scales):
            def step(carry, n):
                return one(carry / 64, (ids + n) % 8, weights, scales), None

            return jax.lax.scan(step, x, jnp.arange(3, dtype=jnp.int32))[0]

        return body

    saved_text, saved = compiled_gradient(ffi_backend, layers(SAVE_NAMES))
    again_text, again = compiled_gradient(ffi_backend, layers(None))
    handle_text, handle = compiled_gradient(
        ffi_backend, layers(POLICIES["handle only"])
    )
    assert custom_calls(saved_text) == (1, 2, 2)
    assert custom_calls(again_text) == (2, 3, 3)
    assert custom_calls(handle_text) == (1, 3, 3)
    jax.tree.map(assert_bits_equal, saved, again)
    jax.tree.map(assert_bits_equal, saved, handle)
    unrolled = X
    for n in range(3):
        out = base.outputs(unrolled / 64, (IDS + n) % 8)
        unrolled = out * out
    np.testing.assert_allclose(saved[0], unrolled.sum(), rtol=1e-5)


@pytest.mark.jax_version
def test_names_are_in_the_jaxpr(backend):
    """They are API: nine leaves of a handle, rows and weights, the output."""
    jaxpr = str(
        jax.make_jaxpr(loss(backend, block(backend.implementation)))(X, WEIGHTS, SCALES)
    )
    assert [jaxpr.count(f"name={name}") for name in NAMES] == [9, 2, 1]


def router_block(implementation: str, tied: bool):
    """A router in front, whose logits may all be equal."""

    def body(x, router):
        logits = x @ router
        if tied:
            logits = logits * 0
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits), 2)
        handle = jax_ep.dispatch_layout(
            ids, num_experts=8, implementation=implementation
        )
        recv, recv_weights = jax_ep.dispatch(x, handle, weights)
        out = jax_ep.combine(jnp.tanh(recv) * recv_weights[:, None], handle)
        return out, ids

    return body


@pytest.mark.jax_version
@pytest.mark.parametrize("tied", [True, False])
def test_routes_are_the_same_in_the_recomputation(backend, tied):
    """Ids and gradients equal those without checkpoint, ties included."""
    router = np.random.default_rng(0).standard_normal((8, 8), np.float32)
    spec = P("expert")

    def gradient(body):
        function = jax.shard_map(
            body,
            mesh=backend.mesh(expert=4),
            in_specs=(spec, P()),
            out_specs=spec,
        )

        def total(x, router):
            out, ids = function(x, router)
            return (out * out).sum(), ids

        step = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
        return step(X / 8, router)

    plain = router_block(backend.implementation, tied)
    (value, ids), grads = gradient(plain)
    (value2, ids2), grads2 = gradient(jax.checkpoint(plain))
    (value3, ids3), grads3 = gradient(jax.checkpoint(plain, policy=SAVE_NAMES))
    np.testing.assert_array_equal(ids, ids2)
    np.testing.assert_array_equal(ids, ids3)
    assert value == value2 == value3
    for got in (grads2, grads3):
        for g, want in zip(got, grads, strict=True):
            np.testing.assert_allclose(g, want, rtol=1e-6, atol=1e-6)
    if tied:
        assert (np.asarray(ids) == [0, 1]).all()


@pytest.mark.jax_version
def test_memory_of_a_scan(ffi_backend):
    """With only the handle saved, a layer costs its carry and its handle.

    Measured as growth from 2 to 10 layers, so that nothing constant counts.
    """
    tokens, hidden, layers = 64, 256, (2, 10)
    policy = jax.checkpoint_policies.save_only_these_names("jax_ep_handle")
    one = jax.checkpoint(block("ffi"), policy=policy)
    spec = P("expert")

    def temp_bytes(num_layers):
        def body(x, ids, weights, scales):
            def step(carry, n):
                return one(carry, (ids + n) % 8, weights, scales), None

            return jax.lax.scan(step, x, jnp.arange(num_layers, dtype=jnp.int32))[0]

        function = jax.shard_map(
            body, mesh=ffi_backend.mesh(expert=4), in_specs=spec, out_specs=spec
        )
        shapes = [
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                ((4 * tokens, hidden), jnp.float32),
                ((4 * tokens, 2), jnp.int32),
                ((4 * tokens, 2), jnp.float32),
                ((8,), jnp.float32),
            )
        ]
        gradient = jax.jit(jax.grad(lambda *args: function(*args).sum()))
        analysis = gradient.lower(*shapes).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    growth = (temp_bytes(layers[1]) - temp_bytes(layers[0])) / (layers[1] - layers[0])
    handle_bytes = 4 * (tokens * 2 * (1 + 1 + 4) + 2 * 3 + 4 * 2 + 1)
    carry_bytes = 4 * tokens * hidden
    # XLA:CPU counts all four devices of a process, or one of them.
    assert growth <= 4 * 1.3 * (carry_bytes + handle_bytes), growth
    received_bytes = 4 * 4 * tokens * 2 * hidden
    assert growth < received_bytes
