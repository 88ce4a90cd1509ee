"""The Flax linen layer: the nnx layer's numerics, boxes, sown values, scan."""

import doctest

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep.linen
import jax_ep.nnx
from jax_ep.config import MoEConfig
from jax_ep.linen import MoE
from jax_ep.params import param_info

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
SOWN = ["intermediates", "losses"]


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, HIDDEN))


@pytest.fixture(scope="module")
def variables(x):
    return MoE(CONFIG).init(jax.random.key(0), x)


@pytest.fixture(scope="module")
def expected(variables, x):
    """Output, sown values and gradient of the layer on one device."""
    return run(MoE(CONFIG), variables, x)


def run(layer, variables, x):
    def loss(params):
        out, sown = layer.apply({**variables, "params": params}, x, mutable=SOWN)
        return (out**2).mean() + sown["losses"]["moe_aux_loss"], (out, sown)

    gradient = jax.value_and_grad(loss, has_aux=True)
    (value, (out, sown)), gradients = jax.jit(gradient)(variables["params"])
    return value, out, sown["losses"], nn.unbox(gradients)


def mesh_of(kind):
    return jax.make_mesh((2, 2, 2), ALL_AXES, axis_types=(kind,) * 3)


def assert_close(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_examples():
    assert doctest.testmod(jax_ep.linen).failed == 0


def test_same_numerics_and_parameters_as_nnx(variables, expected, x):
    layer = jax_ep.nnx.MoE(CONFIG, rngs=nnx.Rngs(0))
    state = nn.unbox({**variables["params"], **variables["moe_state"]})
    assert set(state) == set(param_info(CONFIG))
    for name, value in state.items():
        assert getattr(layer, name)[...].shape == value.shape
        getattr(layer, name)[...] = value
    np.testing.assert_allclose(layer(x), expected[1], rtol=1e-5, atol=1e-6)
    aux_loss = layer.stats.get_value().aux_loss
    np.testing.assert_allclose(aux_loss, expected[2]["moe_aux_loss"], rtol=1e-6)


def test_variables(variables):
    assert set(variables) == {"params", "moe_state"}  # No sown value of `init`.
    assert set(variables["moe_state"]) == {"selection_bias"}
    for name, box in variables["params"].items():
        assert isinstance(box, nn.Partitioned)
        assert box.value.shape == param_info(CONFIG)[name].shape


def test_sown_values(variables, x):
    _, sown = MoE(CONFIG).apply(variables, x, mutable=SOWN)
    (stats,) = sown["intermediates"]["moe_stats"]
    assert stats.expert_load.sum() == BATCH * LENGTH * 2
    assert sown["losses"]["moe_aux_loss"] == stats.aux_loss
    out = MoE(CONFIG).apply(variables, x)  # Nothing mutable, nothing sown.
    assert out.shape == x.shape


def test_partition_specs(x):
    def specs(**fields):
        shapes = jax.eval_shape(MoE(CONFIG, **fields).init, jax.random.key(0), x)
        return nn.get_partition_spec(shapes)["params"]

    assert specs()["down_proj"] == P("expert", None, None)
    assert specs(fsdp_axis="fsdp")["down_proj"] == P("expert", None, "fsdp")
    axes = dict(expert="exp", hidden="embed_moe", intermediate="mlp_moe")
    logical = specs(logical_axes=axes)
    assert logical["gate_up_proj"] == P("exp", "embed_moe", "mlp_moe")
    assert logical["router_kernel"] == P(None, None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_from_context(variables, expected, x, kind):
    layer = MoE(CONFIG, fsdp_axis="fsdp")
    mesh, arrays = mesh_of(kind), nn.unbox(variables)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
        shardings = nn.get_sharding(shapes, mesh)
        fresh = jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), x)
        kernel = fresh["params"]["down_proj"].value
        assert kernel.sharding.spec == P("expert", None, "fsdp")
        placed = jax.device_put(arrays, shardings)
        assert_close(run(layer, placed, x), expected)


def test_mesh_as_argument(variables, expected, x):
    layer = MoE(CONFIG, mesh=CPU_FFI.mesh(data=2, expert=4))
    assert_close(run(layer, nn.unbox(variables), x), expected)


@pytest.mark.parametrize("is_logical", [False, True])
def test_inside_the_users_shard_map(variables, expected, x, is_logical):
    """Boxes and logical rules name axes that are manual there."""
    axes = dict(expert="exp", hidden="embed") if is_logical else None
    layer = MoE(CONFIG, fsdp_axis="fsdp", logical_axes=axes)
    rules = [("exp", "expert"), ("embed", "fsdp")]
    arrays = nn.unbox(variables)
    with jax.set_mesh(mesh_of(AxisType.Auto)), nn.logical_axis_rules(rules):
        shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
        specs = nn.get_partition_spec(shapes)
        if is_logical:
            specs = nn.logical_to_mesh(specs)
        boxes = jax.tree.map(
            lambda box, value: (
                box.replace_boxed(value)
                if isinstance(box, nn.meta.AxisMetadata)
                else value
            ),
            shapes,
            arrays,
            is_leaf=lambda box: isinstance(box, nn.meta.AxisMetadata),
        )

        def local(variables, x):
            out, sown = layer.apply(variables, x, mutable=SOWN)
            return out, sown["losses"]["moe_aux_loss"][None]

        out, aux_loss = jax.jit(
            jax.shard_map(
                local, in_specs=(specs, P(ALL_AXES)), out_specs=(P(ALL_AXES), P())
            )
        )(boxes, x)
    assert_close((out, aux_loss[0]), (expected[1], expected[2]["moe_aux_loss"]))


def test_scan_over_layers(x):
    """The layers' axis comes first in every spec, the experts' after it."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda layer, x, _: (x + layer(x), None),
                variable_axes=dict.fromkeys(["params", "moe_state", *SOWN], 0),
                split_rngs={"params": True},
                length=2,
                metadata_params={nn.meta.PARTITION_NAME: None},
            )
            return scan(MoE(CONFIG, name="layers"), x, None)[0]

    with jax.set_mesh(CPU_FFI.mesh(data=2, expert=4)):
        variables = Stack().init(jax.random.key(0), x)
        specs = nn.get_partition_spec(variables)["params"]["layers"]
        assert specs["gate_up_proj"] == P(None, "expert", None, None)
        apply = jax.jit(lambda v: Stack().apply(v, x, mutable=SOWN))
        out, sown = apply(variables)
        assert sown["losses"]["layers"]["moe_aux_loss"].shape == (2,)
        (stats,) = sown["intermediates"]["layers"]["moe_stats"]
        assert stats.expert_load.shape == (2, 8)
    assert stats.aux_loss.shape == ()
    for index in range(2):
        one = {
            name: jax.tree.map(lambda leaf, i=index: leaf[i], nn.unbox(tree)["layers"])
            for name, tree in variables.items()
        }
        x = x + MoE(CONFIG).apply(one, x)
    assert_close(out, x)


def test_router_stream(variables, x):
    config = MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        hidden_size=HIDDEN,
        moe_intermediate_size=12,
        router_jitter_noise=0.5,
    )
    layer = MoE(config, dtype=jnp.bfloat16, kernel_init=nn.initializers.normal(1.0))
    variables = layer.init(jax.random.key(0), x)
    rngs = dict(router=jax.random.key(0))
    noisy = layer.apply(variables, x, rngs=rngs)
    clean = layer.apply(variables, x)
    assert noisy.dtype == jnp.bfloat16
    assert not np.array_equal(noisy, clean)
    same = layer.apply(variables, x, deterministic=True, rngs=rngs)
    np.testing.assert_array_equal(same, clean)


@pytest.mark.parametrize("every", [1, 2])
def test_a_training_step_updates_the_selection_bias(every):
    """sign(2 - 4) and sign(2 - 0), times the rate; once, and not in evaluation."""
    config = MoEConfig(
        num_experts=2,
        num_experts_per_tok=1,
        hidden_size=1,
        moe_intermediate_size=1,
        score_func="sigmoid",
        selection_bias=True,
        selection_bias_update_rate=0.5,
        selection_bias_update_every=every,
    )
    layer, x = MoE(config), np.ones((4, 1), np.float32)
    variables = nn.unbox(layer.init(jax.random.key(0), x))
    variables["params"]["router_kernel"] = jnp.array([[2.0, 1.0]])
    np.testing.assert_array_equal(variables["moe_state"]["selection_bias"], [0, 0])

    def step(variables, **static):
        _, state = layer.apply(variables, x, mutable=["moe_state"], **static)
        return {**variables, **state}

    unchanged = step(variables, deterministic=True)
    np.testing.assert_array_equal(unchanged["moe_state"]["selection_bias"], [0, 0])
    for _ in range(every):
        np.testing.assert_array_equal(variables["moe_state"]["selection_bias"], [0, 0])
        variables = step(variables)
    np.testing.assert_array_equal(variables["moe_state"]["selection_bias"], [-0.5, 0.5])


def test_returned_statistics(variables, x):
    out, stats = MoE(CONFIG).apply(variables, x, return_stats=True)
    assert out.shape == x.shape and stats.expert_load.sum() == BATCH * LENGTH * 2
