"""Any batch: fewer sequences than ranks, sequences split over ranks, one token."""

import dataclasses
import functools
import re
import warnings

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.linen
import jax_ep.nnx

pytestmark = pytest.mark.slow

CONFIG = jax_ep.MoEConfig(
    num_experts=8,
    num_experts_per_tok=2,
    hidden_size=16,
    moe_intermediate_size=8,
    num_shared_experts=1,
    load_balance_loss_weight=0.5,
    router_z_loss_weight=0.3,
)
BY_SEQUENCE = dataclasses.replace(CONFIG, load_balance_scope="sequence")


@functools.cache
def params_of():
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(lambda: jax_ep.init_params(jax.random.key(0), CONFIG))
    return jax.tree.map(
        lambda leaf: (rng.standard_normal(leaf.shape) * 0.4).astype(np.float32), shapes
    )


def tokens(*shape):
    rng = np.random.default_rng(sum(shape))
    return rng.standard_normal((*shape, 16)).astype(np.float32)


def total(out, x):
    return (out * jnp.cos(3 * x)).mean()


def expected(config, x, mask=None):
    """Loss and gradients of the dense layer; tokens that are masked are not there."""
    mask = np.ones(x.shape[:-1], bool) if mask is None else mask
    params = params_of()
    ids = dense.moe(np, x[mask], params, config)[1]
    sequence = (np.cumsum(np.ones_like(mask)) - 1).reshape(len(x), -1) // mask[0].size
    sequence = sequence.reshape(mask.shape)[mask]

    def loss(params, x):
        out, _, probs, logits = dense.moe(jnp, x[mask], params, config, ids)
        balance = dense.balance_loss(probs, ids, 8)
        if config.load_balance_scope == "sequence":
            each = [
                dense.balance_loss(probs[sequence == n], ids[sequence == n], 8)
                for n in np.unique(sequence)
            ]
            balance = sum(each) / len(each)
        out = jnp.zeros_like(x).at[mask].set(out)
        return total(out, x) + 0.5 * balance + 0.3 * dense.z_loss(jnp, logits)

    with jax.numpy_rank_promotion("allow"):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x), ids


def check(config, x, mask=None, **options):
    def loss(params, x):
        out, stats = jax_ep.sharded_moe(
            x, params, config, token_mask=mask, keep_topk_idx=True, **options
        )
        return total(out, x) + stats.aux_loss, (out, stats)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, (out, stats)), gradients = run(params_of(), x)
    (wanted, wanted_gradients), ids = expected(config, np.asarray(x), mask)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for one, two in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=2e-6)
    assert out.shape == x.shape
    mask = np.ones(x.shape[:-1], bool) if mask is None else mask
    np.testing.assert_array_equal(np.asarray(stats.topk_idx)[mask], ids)
    load = np.bincount(ids.reshape(-1), minlength=8)
    np.testing.assert_array_equal(stats.expert_load, load)
    assert stats.num_recv.sum() == load.sum()
    assert stats.max_load_ratio[0] == pytest.approx(load.max() / load.mean())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (CONFIG, (1, 1)),  # One token, four ranks.
        (CONFIG, (3, 1)),
        (CONFIG, (6,)),  # No sequences.
        (BY_SEQUENCE, (1, 6)),  # One sequence, which four do not divide.
        (BY_SEQUENCE, (5, 3)),
        (BY_SEQUENCE, (2, 4)),  # The batch over one axis, sequences over the other.
    ],
)
def test_any_batch(config, shape, kind):
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(kind,) * 2)
    x = tokens(*shape)
    with jax.set_mesh(mesh):
        if shape[0] % 2 == 0:
            x = jax.device_put(x, NamedSharding(mesh, P("data")))
        mask = None
        if shape == (5, 3):
            mask = np.arange(15).reshape(5, 3) % 4 > 0
        check(config, x, mask)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sequences_stay_split(kind):
    """S over an axis, B over another: nothing of x is moved before the exchange."""
    mesh = jax.make_mesh((2, 2), ("context", "expert"), axis_types=(kind,) * 2)
    sharding = NamedSharding(mesh, P("expert", "context"))
    x = jax.device_put(tokens(4, 6), sharding)
    options = dict(mesh=mesh)
    if kind == AxisType.Auto:  # There a type does not say how x is split.
        options["sequence_axes"] = "context"
    check(BY_SEQUENCE, x, **options)
    specs = jax_ep.param_specs(BY_SEQUENCE, expert="expert")
    params = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
        params_of(),
        specs,
    )
    call = jax.jit(
        lambda x, p: jax_ep.sharded_moe(x, p, BY_SEQUENCE, **options)[0],
        out_shardings=sharding,
    )
    text = call.lower(x, params).compile().as_text()
    assert not re.findall(r"all-gather|all-to-all|collective-permute", text)


# One sequence 1, 1, -1, -1, and logits 9x, -9x: half of the tokens go to each expert.
HALVES = jax_ep.MoEConfig(
    num_experts=2,
    num_experts_per_tok=1,
    hidden_size=1,
    moe_intermediate_size=1,
    load_balance_scope="sequence",
)
HALVES_X = np.array([1, 1, -1, -1], np.float32).reshape(1, 4, 1)
HALVES_PARAMS = jax_ep.MoEParams(
    router_kernel=np.array([[9, -9]], np.float32),
    gate_up_proj=np.ones((2, 1, 2), np.float32),
    down_proj=np.ones((2, 1, 1), np.float32),
)


def halves(**options):
    """The loss per sequence, the sequence split over two ranks by the user."""
    layer = jax.shard_map(
        lambda x, p: jax_ep.moe(x, p, HALVES, **options)[1].load_balance_loss,
        mesh=CPU_FFI.mesh(expert=2),
        in_specs=(P(None, "expert"), jax_ep.param_specs(HALVES, expert="expert")),
        out_specs=P(),
    )
    return jax.jit(layer)(HALVES_X, HALVES_PARAMS)


def test_a_part_is_no_sequence():
    np.testing.assert_allclose(halves(sequence_axes="expert"), [1.0], rtol=1e-6)
    mesh = CPU_FFI.mesh(expert=2)
    _, stats = jax_ep.sharded_moe(HALVES_X, HALVES_PARAMS, HALVES, mesh=mesh)
    np.testing.assert_allclose(stats.load_balance_loss, [1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            halves,
            "jax_ep.moe: sequence_axes must say which mesh axes each sequence is split "
            "over, () for none, since the loss is per sequence (load_balance_scope): a "
            "part would count as a whole one.",
        ),
        (
            lambda: halves(sequence_axes="data"),
            'jax_ep.moe: sequence_axes (="data") must be of the axes that tokens are '
            'split over, "expert".',
        ),
        (
            lambda: jax_ep.sharded_moe(
                tokens(4, 4),
                params_of(),
                CONFIG,
                mesh=CPU_FFI.mesh(tensor=2, expert=2),
                data_axes=(),
                sequence_axes="tensor",
            ),
            'jax_ep.sharded_moe: sequence_axes (="tensor") must be of the axes that '
            'tokens are split over, "expert", for x of shape [B, ..., S, H], and x has '
            "(4, 4, 16).",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message


def test_flax_layers_of_seven_experts_and_one_token():
    """Four ranks; linen's init with the usual dummy batch of one."""
    config = dataclasses.replace(CONFIG, num_experts=7)
    mesh = CPU_FFI.mesh(expert=4)
    x = tokens(1, 1)
    outs = []
    with jax.set_mesh(mesh):
        layer = jax_ep.nnx.MoE(config, rngs=nnx.Rngs(0))
        assert layer.down_proj.out_sharding == (None, None, None)
        outs.append(layer(x))
        params = {name: getattr(layer, name)[...] for name in layer.param_names}
        linen = jax_ep.linen.MoE(config)
        boxes = linen.init(jax.random.key(0), x)["params"]
        assert boxes["down_proj"].names == (None, None, None)
        outs.append(linen.apply({"params": params}, x))
    params = jax_ep.MoEParams(**jax.tree.map(np.asarray, params))
    wanted = dense.moe(np, x[0], params, config)[0]
    for out in outs:
        np.testing.assert_allclose(out[0], wanted, rtol=1e-4, atol=1e-6)


def test_flax_layers_over_a_tensor_axis():
    config = dataclasses.replace(CONFIG, fuse_gate_up=False)
    names = ("expert", "tensor")
    x = tokens(4, 2)
    mesh = jax.make_mesh((2, 2), names, axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        layer = jax_ep.nnx.MoE(config, tensor_axis="tensor", rngs=nnx.Rngs(0))
        down = layer.down_proj[...]
        assert down.sharding.spec == P("expert", "tensor", None)
        params = {name: getattr(layer, name)[...] for name in layer.param_names}
        linen = jax_ep.linen.MoE(config, tensor_axis="tensor")
        outs = [layer(x), linen.apply({"params": params}, x)]
    params = jax_ep.MoEParams(**jax.tree.map(np.asarray, params))
    wanted = dense.moe(np, x.reshape(8, 16), params, config)[0]
    for out in outs:
        got = np.asarray(out).reshape(8, 16)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_no_expert_parallelism_is_said_once():
    x, params = tokens(2, 2), params_of()
    mesh = CPU_FFI.mesh(data=2, model=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            jax_ep.sharded_moe(x, params, CONFIG, mesh=mesh)
            # A mesh that the layer does not see.
            jax.jit(
                lambda x: jax_ep.sharded_moe(x, params, CONFIG)[0],
                in_shardings=NamedSharding(mesh, P("data")),
            )(x)
        jax_ep.sharded_moe(x, params, CONFIG, axis_name=())
        jax_ep.sharded_moe(x, params, CONFIG, mesh=mesh, axis_name=())
    meant = "; axis_name=() says that this is meant."
    assert [str(one.message) for one in caught] == [
        "jax_ep.sharded_moe: the mesh has axes ('data', 'model') and none \"expert\", "
        f"so each of its 4 devices computes all experts. Give axis_name={meant}",
        "jax_ep.sharded_moe: there is no mesh, and there are 8 devices: no expert "
        "parallelism, even where jit's in_shardings or an old `with mesh:` split the "
        f"arrays. Give mesh=, or call it under jax.set_mesh(mesh){meant}",
    ]
