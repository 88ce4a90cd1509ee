"""The state of the nnx layer does what BatchNorm's does, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import CPU_FFI
from flax import nnx

from jax_ep.config import MoEConfig
from jax_ep.nnx import MoE, SelectionBias

BATCH, LENGTH, HIDDEN = 8, 2, 8
CONFIG = MoEConfig(
    num_experts=8,
    num_experts_per_tok=2,
    hidden_size=HIDDEN,
    moe_intermediate_size=4,
    score_func="sigmoid",
    selection_bias=True,
    selection_bias_update_rate=0.125,
    load_balance_loss_weight=0.01,
)
X = np.random.default_rng(0).standard_normal((BATCH, LENGTH, HIDDEN), np.float32)

make_layer = pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: MoE(CONFIG, rngs=nnx.Rngs(0)), id="moe"),
        pytest.param(lambda: nnx.BatchNorm(HIDDEN, rngs=nnx.Rngs(0)), id="batch_norm"),
    ],
)


def shapes(layer):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.state(layer))


def leaves(layer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(layer))]


def same(one, two):
    for a, b in zip(leaves(one), leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@make_layer
def test_a_call_changes_values_and_no_structure(make):
    layer = make()
    graph, before = nnx.split(layer)
    layer(X)
    after_graph, after = nnx.split(layer)
    assert graph == after_graph
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert shapes(layer) == shapes(make())


def test_the_structure_is_the_same_for_every_number_of_ranks():
    found = []
    for ranks in (1, 2, 8):
        mesh = CPU_FFI.mesh(expert=ranks)
        layer = MoE(CONFIG, mesh=mesh, rngs=nnx.Rngs(0))
        layer(X)
        found.append(shapes(layer))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("where", ["nowhere", "context", "argument"])
def test_a_train_step_compiles_once(where):
    mesh = jax.make_mesh((2, 4), ("data", "expert"))
    traces = []

    @nnx.jit
    def step(layer, x):
        traces.append(None)

        def loss(layer):
            return (layer(x) ** 2).mean() + layer.stats.get_value().aux_loss

        params, gradients = nnx.state(layer, nnx.Param), nnx.grad(loss)(layer)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))

    def train():
        given = mesh if where == "argument" else None
        layer = MoE(CONFIG, mesh=given, rngs=nnx.Rngs(0))
        for _ in range(3):
            step(layer, X)
        assert layer.stats.get_value().expert_load.sum() == BATCH * LENGTH * 2

    if where == "context":
        with jax.set_mesh(mesh):
            train()
    else:
        train()
    assert len(traces) == 1


@make_layer
def test_control_flow(make):
    """Carry of scan and fori_loop, operand of cond: as called by hand."""
    by_hand = make()
    for _ in range(3):
        by_hand(X)

    looped = make()
    nnx.fori_loop(0, 3, lambda _, layer: (layer(X), layer)[1], looped)
    same(looped, by_hand)

    scanned = make()

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(layer, x):
        return layer, layer(x)

    body(scanned, jnp.stack([X] * 3))
    same(scanned, by_hand)

    chosen = make()

    @nnx.jit
    def maybe(layer, is_called):
        nnx.cond(is_called, lambda layer: (layer(X), None)[1], lambda _: None, layer)

    for is_called in (True, False, True, True):
        maybe(chosen, is_called)
    same(chosen, by_hand)


@make_layer
def test_clones_splits_averages_and_aot(make):
    layer = make()
    layer(X)
    same(nnx.clone(layer), layer)
    graph, state = nnx.split(layer)
    same(nnx.merge(graph, state), layer)

    @jax.jit
    def total(state, other):
        return jax.tree.map(lambda a, b: a + b, state, other)

    summed = total(state, nnx.split(make())[1])
    assert jax.tree.structure(summed) == jax.tree.structure(state)

    @jax.jit
    def forward(state, x):
        merged = nnx.merge(graph, state)
        out = merged(x)
        return out, nnx.split(merged)[1]

    compiled = forward.lower(state, X).compile()
    for _ in range(2):
        out, state = compiled(state, X)
    assert out.shape == X.shape


def test_capture_gives_the_whole_statistics():
    layer = MoE(CONFIG, keep_topk_idx=True, rngs=nnx.Rngs(0))
    before = nnx.split(layer)[0]
    out, captured = nnx.capture(layer, nnx.Intermediate)(X)
    (stats,) = captured["moe_stats"].get_value()
    assert out.shape == X.shape
    assert stats.topk_idx.shape == (BATCH, LENGTH, 2)
    assert stats.num_recv.shape == (1,)
    assert nnx.split(layer)[0] == before


def test_checkpoints_move_to_another_mesh(tmp_path):
    def make(ranks):
        return MoE(CONFIG, mesh=CPU_FFI.mesh(expert=ranks), rngs=nnx.Rngs(0))

    for calls in (0, 1):
        layer = make(4)
        for _ in range(calls):
            layer(X)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / f"{calls}", nnx.to_pure_dict(nnx.state(layer)))
        other = make(2)
        other(2 * X)
        with ocp.StandardCheckpointer() as checkpointer:
            target = nnx.to_pure_dict(nnx.state(other))
            restored = checkpointer.restore(tmp_path / f"{calls}", target)
        state = nnx.state(other)
        nnx.replace_by_pure_dict(state, restored)
        nnx.update(other, state)
        same(other, layer)
        np.testing.assert_allclose(other(X), layer(X), rtol=1e-4, atol=1e-5)


def test_jitter_takes_the_layers_own_stream():
    config = MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        hidden_size=HIDDEN,
        moe_intermediate_size=4,
        router_jitter_noise=0.9,
    )
    layer = MoE(config, rngs=nnx.Rngs(0, router=1))
    first, second = layer(X), layer(X)
    assert not np.array_equal(first, second)
    again = MoE(config, rngs=nnx.Rngs(0, router=1))
    np.testing.assert_array_equal(first, again(X))
    np.testing.assert_array_equal(
        layer(X, deterministic=True), layer(X, deterministic=True)
    )


# Two experts, one per token, and a router that sends all to expert 0.
BALANCED = dict(
    num_experts=2,
    num_experts_per_tok=1,
    hidden_size=1,
    moe_intermediate_size=1,
    score_func="sigmoid",
    selection_bias=True,
    selection_bias_update_rate=0.5,
)
ONES = np.ones((4, 1), np.float32)


def towards_first(layer):
    layer.router_kernel[...] = jnp.array([[2.0, 1.0]])
    return layer


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("remat", [False, True])
def test_a_training_step_updates_the_selection_bias(ranks, remat):
    """sign(2 - 4) and sign(2 - 0), times the rate; once, and not in evaluation."""
    mesh = CPU_FFI.mesh(expert=ranks)
    layer = towards_first(MoE(MoEConfig(**BALANCED), mesh=mesh, rngs=nnx.Rngs(0)))
    layer(ONES, deterministic=True)
    np.testing.assert_array_equal(layer.selection_bias[...], [0, 0])

    def loss(layer, x):
        call = nnx.remat(lambda layer, x: layer(x)) if remat else MoE.__call__
        return call(layer, x).sum()

    nnx.jit(nnx.grad(loss))(layer, ONES)
    np.testing.assert_array_equal(layer.selection_bias[...], [-0.5, 0.5])
    assert isinstance(layer.selection_bias, SelectionBias)


def test_micro_batches_of_a_step_make_one_update():
    """Loads (3, 0) and (0, 1): the sum says expert 0; one by one they would cancel."""
    config = MoEConfig(**BALANCED, selection_bias_update_every=2)
    layer = towards_first(MoE(config, rngs=nnx.Rngs(0)))
    for expected in ([0, 0], [-0.5, 0.5], [-0.5, 0.5], [0, 0]):
        # sigmoid(2), sigmoid(1) and the bias: at (-0.5, 0.5) all choose expert 1.
        layer(ONES[:3])
        np.testing.assert_array_equal(layer.selection_bias[...], expected)
    assert int(layer.selection_load.get_value().num_calls[0]) == 0
