"""Experts: the grouped MLP against a dense one, and what padding may not touch."""

import dataclasses
import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.config import MoEConfig
from jax_ep.experts import experts, gated, shared_experts
from jax_ep.params import MoEParams, init_params

RANKS, TOKENS, TOPK, HIDDEN, WIDTH, EXPERTS = 2, 12, 2, 16, 12, 8


def make(used=None, **fields):
    """A config, its parameters (biases too are random), x, ids and weights.

    Only the experts in `used` get rows; None is all.
    """
    sizes = dict(
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
    )
    config = MoEConfig(**{**sizes, **fields})
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.5,
        jax.eval_shape(lambda: init_params(jax.random.key(0), config)).routed,
    )
    tokens = RANKS * TOKENS
    x = rng.standard_normal((tokens, config.hidden_size)).astype(np.float32)
    ids = np.argsort(rng.random((tokens, config.num_experts)), axis=1)
    ids = ids[:, : config.num_experts_per_tok].astype(np.int32)
    if used is not None:
        ids = np.asarray(used, np.int32)[ids % len(used)]
    weights = rng.random(ids.shape).astype(np.float32)
    return config, params, x, ids, weights


def layer(backend, config, poison=False):
    """Dispatch, experts, combine over two ranks; `poison` puts NaN into all padding."""

    def local(params, x, weights, ids):
        handle = jax_ep.dispatch_layout(
            ids,
            num_experts=config.num_experts,
            expert_alignment=config.expert_alignment,
            implementation=backend.implementation,
        )
        recv_x, recv_weights = jax_ep.dispatch(x, handle, weights)
        if poison:
            row = jnp.arange(handle.capacity)
            first, count = handle.group_offsets, handle.group_counts
            is_row = (row[:, None] >= first) & (row[:, None] < first + count)
            is_row = is_row.any(1)
            recv_x = jnp.where(is_row[:, None], recv_x, jnp.nan)
            recv_weights = jnp.where(is_row, recv_weights, jnp.nan)
        late = config.mlp_bias
        y = experts(
            recv_x,
            handle,
            params,
            activation=config.activation,
            recv_weights=None if late else recv_weights,
        )
        if poison:
            y = jnp.where(is_row[:, None], y, jnp.nan)
        return jax_ep.combine(y, handle, weights=recv_weights if late else None)

    with jax.numpy_rank_promotion("allow"):
        return jax.shard_map(
            local,
            mesh=backend.mesh(expert=RANKS),
            in_specs=P("expert"),
            out_specs=P("expert"),
        )


@functools.cache
def expected_of(**fields):
    """Output and gradients of the dense layer."""
    config, params, x, ids, weights = make(**fields)

    def literal(params, x, weights, ids):
        return dense.routed(jnp, x, params, config, ids, weights)

    return value_and_gradients(literal, params, x, weights, ids)


def value_and_gradients(function, params, x, weights, ids):
    factors = np.random.default_rng(9).standard_normal(x.shape).astype(np.float32)

    def loss(params, x, weights):
        out = function(params, x, weights, ids).astype(jnp.float32)
        return (out * factors).sum(), out

    # A GPU's own choice for float32 is TF32.
    highest = jax.default_matmul_precision("highest")
    with jax.numpy_rank_promotion("allow"), highest:
        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        (_, out), gradients = jax.jit(gradient)(params, x, weights)
    return out, gradients


def assert_close(one, two, tolerance=2e-4):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


VARIANTS = dict(
    silu=dict(),
    split=dict(fuse_gate_up=False),
    gelu_tanh=dict(activation="gelu_tanh"),
    gpt_oss=dict(activation="clipped_swiglu", mlp_bias=True),
    split_bias=dict(mlp_bias=True, fuse_gate_up=False),
    aligned=dict(expert_alignment=8),
    aligned_bias=dict(expert_alignment=8, mlp_bias=True),
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_against_dense(backend, variant):
    config, *args = make(**VARIANTS[variant])
    params, x, ids, weights = args
    poison = config.expert_alignment > 1
    actual = value_and_gradients(
        layer(backend, config, poison), params, x, weights, ids
    )
    assert_close(actual, expected_of(**VARIANTS[variant]))


def test_exact_gelu():
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, 5, 4)).astype(np.float32) * 2
    np.testing.assert_allclose(
        gated(gate, up, "gelu"), dense.gelu(gate) * up, rtol=1e-5, atol=1e-6
    )


def test_clipped_swiglu_by_hand():
    # gate 9 -> 7, up -9 -> -7 and 9 -> 7; the sigmoid of 1.702 * 7 is 0.9999933.
    gate = np.array([[9.0, 9.0, 0.0, 1.0]], np.float32)
    up = np.array([[-9.0, 9.0, 5.0, 2.0]], np.float32)
    expected = [-6 * 7 * 0.9999933, 8 * 7 * 0.9999933, 0, 3 * 0.8457958]
    np.testing.assert_allclose(
        gated(gate, up, "clipped_swiglu")[0], expected, rtol=1e-6
    )


@pytest.mark.parametrize(
    "num_experts, used", [(8, (0, 2)), (18, tuple(range(6)))], ids=["8", "18"]
)
def test_empty_experts_have_zero_gradients(backend, num_experts, used):
    fields = dict(num_experts=num_experts, mlp_bias=True, expert_alignment=4, used=used)
    config, params, x, ids, weights = make(**fields)
    _, (d_params, *_) = value_and_gradients(
        layer(backend, config, poison=True), params, x, weights, ids
    )
    _, (expected, *_) = expected_of(**fields)
    assert_close(d_params, expected)
    unused = [e for e in range(num_experts) if e not in used]
    for leaf in jax.tree.leaves(d_params):
        assert not np.asarray(leaf)[unused].any()


def test_output_bias_gradient_is_over_real_rows(backend):
    """Experts y = x + b: db of an expert is the sum of the weights of its rows."""
    config, params, x, ids, weights = make(mlp_bias=True, expert_alignment=8)
    _, (d_params, *_) = value_and_gradients(
        layer(backend, config, poison=True), params, x, weights, ids
    )
    factors = np.random.default_rng(9).standard_normal(x.shape).astype(np.float32)
    for e in range(EXPERTS):
        weight = np.where(ids == e, weights, 0).sum(1)
        np.testing.assert_allclose(
            d_params.down_bias[e], weight @ factors, rtol=1e-4, atol=1e-5
        )


def test_masked_slots_have_zero_gradients(backend):
    config, params, x, ids, weights = make()
    ids[:, 1] = -1
    _, (_, _, d_weights) = value_and_gradients(
        layer(backend, config), params, x, weights, ids
    )
    assert not np.asarray(d_weights)[:, 1].any()
    assert np.asarray(d_weights)[:, 0].all()


@pytest.mark.parametrize("width", [96, 192])
def test_bfloat16_odd_widths(backend, width):
    config, params, x, ids, weights = make(hidden_size=64, moe_intermediate_size=width)
    params = jax.tree.map(lambda leaf: leaf * 0.2, params)
    rounded = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (params, x))
    out, _ = value_and_gradients(layer(backend, config), *rounded, weights, ids)
    back = jax.tree.map(lambda a: np.asarray(a, np.float32), rounded)
    expected = dense.routed(np, back[1], back[0], config, ids, weights)
    error = np.linalg.norm(np.asarray(out, np.float32) - expected)
    assert error < 5e-3 * np.linalg.norm(expected)


def test_refusals():
    config, params, *_ = make(mlp_bias=True)
    handle = jax_ep.Handle(
        **{
            field.name: np.zeros((4,), np.int32)
            for field in dataclasses.fields(jax_ep.Handle)
        }
    )
    recv_x = np.zeros((8, HIDDEN), np.float32)
    with pytest.raises(ValueError) as raised:
        experts(recv_x, handle, params, recv_weights=np.zeros(8, np.float32))
    assert str(raised.value) == (
        "jax_ep.experts: recv_weights would miss the output bias down_bias: give them "
        "to jax_ep.combine(weights=...)."
    )
    with pytest.raises(ValueError) as raised:
        experts(recv_x, handle, params)
    assert str(raised.value) == (
        "jax_ep.experts: down_proj must hold this rank's 4 experts, and has shape "
        "(8, 12, 16)."
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
def test_shared_experts(fused, has_gate):
    config, _, x, *_ = make()
    rng = np.random.default_rng(3)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32) * 0.5

    gate, up = normal(HIDDEN, 20), normal(HIDDEN, 20)
    both = np.concatenate([gate, up], axis=1)
    params = MoEParams(
        shared_gate_up_proj=both if fused else None,
        shared_gate_proj=None if fused else gate,
        shared_up_proj=None if fused else up,
        shared_down_proj=normal(20, HIDDEN),
        shared_expert_gate=normal(HIDDEN, 1) if has_gate else None,
    )
    np.testing.assert_allclose(
        shared_experts(jnp.asarray(x), params),
        dense.shared(np, x, params, config),
        rtol=1e-4,
        atol=1e-5,
    )
    assert shared_experts(jnp.asarray(x), MoEParams()) is None


@pytest.mark.parametrize(
    "activation, of_gate",
    [
        ("relu", lambda g: np.maximum(g, 0)),
        ("relu2", lambda g: np.maximum(g, 0) ** 2),
        ("sigmoid", lambda g: 1 / (1 + np.exp(-g))),
        (jax.nn.mish, lambda g: g * np.tanh(np.log1p(np.exp(g)))),
    ],
)
def test_activations_of_the_gate(activation, of_gate):
    gate, up = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    want = of_gate(np.float64(gate)) * up
    np.testing.assert_allclose(gated(gate, up, activation), want, rtol=1e-5, atol=1e-6)
    half = gated(jnp.asarray(gate, jnp.bfloat16), jnp.asarray(up), activation)
    assert half.dtype == jnp.float32


def test_another_grouped_product():
    """What is given multiplies, in the layer too, and nothing else does."""
    config, params, x, _, _ = make()
    shapes = []

    def matmul(lhs, rhs, group_sizes):
        shapes.append((lhs.shape[1], rhs.shape))
        return jax.lax.ragged_dot(lhs, rhs, group_sizes)

    kernel = np.zeros((HIDDEN, EXPERTS), np.float32)
    kernel[0] = np.arange(EXPERTS)
    params = dataclasses.replace(params, router_kernel=kernel)
    mesh = jax.make_mesh((RANKS,), ("expert",))
    with jax.set_mesh(mesh):
        out, _ = jax_ep.sharded_moe(x, params, config, matmul=matmul)
    wanted = dense.moe(np, x, params, config)[0]
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    assert shapes == [
        (HIDDEN, (EXPERTS // RANKS, HIDDEN, 2 * WIDTH)),
        (WIDTH, (EXPERTS // RANKS, WIDTH, HIDDEN)),
    ]
