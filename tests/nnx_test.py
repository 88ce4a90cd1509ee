"""The Flax nnx layer: numerics of `sharded_moe`, shardings, statistics, stacks."""

import doctest
import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import CPU_FFI
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.nnx
from jax_ep.config import MoEConfig
from jax_ep.nnx import MoE, SelectionBias
from jax_ep.params import MoEParams, param_info

BATCH, LENGTH, HIDDEN = 8, 4, 16
CONFIG = MoEConfig(
    num_experts=8,
    num_experts_per_tok=2,
    hidden_size=HIDDEN,
    moe_intermediate_size=12,
    score_func="sigmoid",
    selection_bias=True,
    num_shared_experts=1,
    load_balance_loss_weight=0.05,
    router_z_loss_weight=0.02,
)
ALL_AXES = ("data", "fsdp", "expert")


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, HIDDEN))


@pytest.fixture(scope="module")
def expected(x):
    """Output and what statistics say on one device, by the function."""
    params = arrays(MoE(CONFIG, rngs=nnx.Rngs(0)))
    out, stats = jax_ep.sharded_moe(x, params, CONFIG)
    return out, results(stats)


def results(stats):
    """What does not depend on the number of ranks."""
    return stats.expert_load, stats.router_entropy, stats.aux_loss


def arrays(layer) -> MoEParams:
    names = param_info(layer.config)
    return MoEParams(**{name: getattr(layer, name)[...] for name in names})


def mesh_of(kind):
    return jax.make_mesh((2, 2, 2), ALL_AXES, axis_types=(kind,) * 3)


def assert_close(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def loss_of(layer, x):
    return (layer(x) ** 2).mean() + layer.stats.get_value().aux_loss


@nnx.jit
def train_step(layer, optimizer, x):
    loss, gradients = nnx.value_and_grad(loss_of)(layer, x)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it.
        optimizer.update(layer, gradients)
    return loss


def test_examples():
    assert doctest.testmod(jax_ep.nnx).failed == 0


def test_one_device(x, expected):
    layer = MoE(CONFIG, rngs=nnx.Rngs(0))
    assert_close((layer(x), results(layer.stats.get_value())), expected)


def test_parameters():
    layer = MoE(CONFIG, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    info = param_info(CONFIG)
    for name, one in info.items():
        variable = getattr(layer, name)
        assert variable[...].shape == one.shape
        assert type(variable) is (nnx.Param if one.trainable else SelectionBias)
        dtype = jnp.bfloat16 if one.trainable else jnp.float32
        assert variable[...].dtype == dtype
    assert set(nnx.state(layer, nnx.Param)) == set(info) - {"selection_bias"}
    # LeCun normal: a variance of one over the fan-in, for each expert.
    kernel = MoE(CONFIG, rngs=nnx.Rngs(0)).down_proj[...]
    assert float(kernel.std()) == pytest.approx(12**-0.5, rel=0.1)


def test_kernel_init():
    layer = MoE(CONFIG, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    assert (layer.gate_up_proj[...] == 1).all()
    assert (layer.selection_bias[...] == 0).all()


def test_dtype(x):
    layer = MoE(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer(x).dtype == jnp.bfloat16
    exact = MoE(CONFIG, rngs=nnx.Rngs(0))(x)
    assert np.abs(np.asarray(layer(x), np.float32) - exact).max() < 0.1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_from_context(x, expected, kind):
    with jax.set_mesh(mesh_of(kind)):
        layer = MoE(CONFIG, fsdp_axis="fsdp", rngs=nnx.Rngs(0))
        assert layer.gate_up_proj[...].sharding.spec == P("expert", "fsdp", None)
        assert layer.gate_up_proj.out_sharding == ("expert", "fsdp", None)
        assert layer.down_proj[...].sharding.spec == P("expert", None, "fsdp")
        out = nnx.jit(lambda layer, x: layer(x))(layer, x)
        assert_close((out, results(layer.stats.get_value())), expected)


def test_mesh_as_argument(x, expected):
    layer = MoE(CONFIG, mesh=CPU_FFI.mesh(data=2, expert=4), rngs=nnx.Rngs(0))
    assert layer.down_proj[...].sharding.spec == P("expert", None, None)
    assert_close(layer(x), expected[0])


def test_mesh_without_the_expert_axis(x, expected):
    layer = MoE(CONFIG, mesh=CPU_FFI.mesh(data=4), rngs=nnx.Rngs(0))
    assert layer.down_proj.out_sharding == (None, None, None)
    with pytest.warns(UserWarning, match='none "expert"'):
        assert_close(layer(x), expected[0])


def test_expert_axis_among_the_data_axes(x):
    layer = MoE(
        CONFIG,
        data_axes=("data", "expert"),
        mesh=CPU_FFI.mesh(data=2, expert=4),
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match='must not have "expert", which is the expert'):
        layer(x)


@pytest.mark.parametrize("has_rules", [False, True])
def test_inside_the_users_shard_map(x, expected, has_rules):
    """The state split as its metadata says; logical rules of the context do no harm."""
    logical = dict(expert="experts", hidden="embed") if has_rules else None
    rules = (("experts", "expert"), ("embed", "fsdp")) if has_rules else ()
    with jax.set_mesh(mesh_of(AxisType.Auto)), nnx.logical_axis_rules(rules):
        layer = MoE(CONFIG, fsdp_axis="fsdp", logical_axes=logical, rngs=nnx.Rngs(0))
        if has_rules:
            assert layer.down_proj.out_sharding == ("experts", None, "embed")
        assert layer.down_proj[...].sharding.spec == P("expert", None, "fsdp")
        graph, params, state, rest = nnx.split(layer, nnx.Param, SelectionBias, ...)

        def local(params, state, rest, x):
            merged = nnx.merge(graph, params, state, rest)
            return merged(x), merged.stats.get_value()

        specs = nnx.get_partition_spec((params, state))
        out, stats = jax.jit(
            jax.shard_map(
                local,
                in_specs=(*specs, P(), P(ALL_AXES)),
                out_specs=(P(ALL_AXES), P()),
            )
        )(params, state, rest, x)
    assert_close((out, results(stats)), expected)


def test_training(x):
    """One device and eight: the same losses; state stays where it was."""
    losses = []
    for mesh in (None, mesh_of(AxisType.Explicit)):
        layer = MoE(CONFIG, mesh=mesh, fsdp_axis="fsdp", rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
        losses.append([float(train_step(layer, optimizer, x)) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][2] < losses[0][0]
    assert layer.down_proj[...].sharding.spec == P("expert", None, "fsdp")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_stacked_layers_and_their_optimizer(x, kind):
    """Two layers by vmap, run by scan; Adam's state is sharded like the weights."""
    named = {nnx.PARTITION_NAME: None}
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):

        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata=named)
        def make(rngs):
            return MoE(CONFIG, rngs=rngs)

        layers = make(nnx.Rngs(0))

        def forward(layers, x):
            @nnx.scan(
                in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=named
            )
            def body(layer, x):
                return x + layer(x)

            return body(layers, x)

        @nnx.jit
        def step(layers, optimizer, x):
            def loss(layers):
                out = forward(layers, x)
                return (out**2).mean() + layers.stats.get_value().aux_loss

            value, gradients = nnx.value_and_grad(loss)(layers)
            with jax.numpy_dtype_promotion("standard"):
                optimizer.update(layers, gradients)
            return value

        optimizer = nnx.Optimizer(layers, optax.adam(1e-2), wrt=nnx.Param)
        first, second = step(layers, optimizer, x), step(layers, optimizer, x)
        assert second < first
        assert layers.stats.get_value().expert_load.shape == (2, 8)
        assert layers.gate_up_proj.out_sharding == (None, "expert", None, None)
        like = layers.gate_up_proj[...].sharding
        assert like.spec[:2] == (None, "expert")
        moments = optimizer.opt_state[0]
        for moment in (moments.mu, moments.nu):
            sharding = moment["gate_up_proj"][...].sharding
            assert sharding.is_equivalent_to(like, 4)

        # The stack is the two layers, one after the other.
        state = nnx.state(layers, (nnx.Param, SelectionBias))
        out = forward(layers, x)
        for index in range(2):
            one = MoE(CONFIG, rngs=nnx.Rngs(0))
            nnx.update(one, jax.tree.map(lambda leaf, i=index: leaf[i], state))
            x = x + one(x)
        assert_close(out, x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_abstract_layers_under_a_mesh(x, kind):
    """For a restore of a checkpoint; before a call, and of a layer that was called."""
    mesh = jax.make_mesh(
        (2, 4), ("data", "expert"), axis_types=(kind,) * 2, devices=jax.devices("cpu")
    )

    def called():
        layer = MoE(CONFIG, rngs=nnx.Rngs(0))
        layer(jnp.asarray(x))
        return layer

    with jax.set_mesh(mesh):
        for make in (lambda: MoE(CONFIG, rngs=nnx.Rngs(0)), called):
            down_proj = nnx.eval_shape(make).down_proj.get_value()
            assert down_proj.sharding.spec == P("expert", None, None)


def test_without_statistics_a_closure_works(x, expected):
    layer = MoE(CONFIG, record_stats=False, rngs=nnx.Rngs(0))
    call = jax.jit(lambda x: layer(x, return_stats=True))
    out, stats = call(x)
    assert_close((out, results(stats)), expected)
    assert not layer.stats.get_value().expert_load.any()


def test_eval_mode(x):
    config = MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        hidden_size=HIDDEN,
        moe_intermediate_size=12,
        capacity_factor=0.5,
        eval_capacity_factor=-1,
        router_jitter_noise=0.5,
    )
    layer = MoE(config, mesh=CPU_FFI.mesh(expert=4), rngs=nnx.Rngs(0))
    noisy = layer(x, key=jax.random.key(0))
    assert layer.stats.get_value().num_dropped.sum() > 0
    layer.eval()
    clean = layer(x, key=jax.random.key(0))
    assert layer.stats.get_value().num_dropped.sum() == 0
    assert not np.array_equal(noisy, clean)
    np.testing.assert_array_equal(clean, layer(x))
    layer.train()
    np.testing.assert_array_equal(noisy, layer(x, key=jax.random.key(0)))


def test_token_mask(x):
    layer = MoE(CONFIG, rngs=nnx.Rngs(0))
    mask = jnp.arange(LENGTH)[None] < jnp.arange(BATCH)[:, None]
    out = layer(jnp.where(mask[..., None], x, jnp.nan), token_mask=mask)
    assert np.isfinite(out).all() and not np.asarray(out)[~np.asarray(mask)].any()


def test_selection_bias_update(x):
    layer = MoE(CONFIG, rngs=nnx.Rngs(0))
    layer(x)
    load = np.asarray(layer.stats.get_value().expert_load)
    bias = jax_ep.selection_bias_update(layer.selection_bias[...], load, 1e-3)
    layer.selection_bias[...] = bias
    np.testing.assert_allclose(bias, 1e-3 * np.sign(load.mean() - load), rtol=1e-5)


def test_jax_ep_does_not_import_flax():
    code = "import sys, jax_ep; sys.exit('flax' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_without_flax(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    for name in ("nnx", "linen"):
        monkeypatch.delitem(sys.modules, f"jax_ep.{name}", raising=False)
        with pytest.raises(
            ImportError, match=rf"^jax_ep\.{name} needs Flax, the extra"
        ):
            importlib.import_module(f"jax_ep.{name}")
