"""Weights stored in any split give what whole weights give."""

import dataclasses
import functools
import math

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.params import names_of, param_info

pytestmark = pytest.mark.slow

SIZES = dict(data=2, expert=2, tensor=2)
TOKENS = P(("data", "expert"))
CONFIG = jax_ep.MoEConfig(
    num_experts=8,
    num_experts_per_tok=2,
    hidden_size=16,
    moe_intermediate_size=8,
    router_bias=True,
    selection_bias=True,
    mlp_bias=True,
    num_shared_experts=2,
    shared_expert_gate=True,
)
PARTED = dataclasses.replace(CONFIG, fuse_gate_up=False)
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
FACTORS = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)


@functools.cache
def params_of(config):
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(lambda: jax_ep.init_params(jax.random.key(0), config))
    return jax.tree.map(
        lambda leaf: (rng.standard_normal(leaf.shape) * 0.4).astype(np.float32), shapes
    )


@functools.cache
def expected(config):
    """The dense layer's loss and gradients, all weights whole on one device."""
    params = params_of(config)
    ids = dense.moe(np, X, params, config)[1]

    def loss(params):
        return (dense.moe(jnp, X, params, config, ids)[0] * FACTORS).mean()

    with jax.numpy_rank_promotion("allow"):
        return jax.jit(jax.value_and_grad(loss))(params)


def specs_over(config, names, dim):
    """Every parameter split over these axes along its dimension `dim`, or its first."""
    specs = {}
    shares = math.prod(SIZES[name] for name in names_of(names))
    for name, info in param_info(config).items():
        here = dim % len(info.shape)
        if info.shape[here] % shares:
            here = 0
        specs[name] = P(*[None] * here, names)
    return jax_ep.MoEParams(**specs)


def check(layer, config):
    def loss(params):
        return (layer(X, params) * FACTORS).mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(params_of(config))
    wanted, wanted_gradients = expected(config)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name in param_info(config):
        np.testing.assert_allclose(
            getattr(gradients, name),
            getattr(wanted_gradients, name),
            rtol=1e-4,
            atol=1e-6,
            err_msg=name,
        )


CASES = [(name, dim) for name in SIZES for dim in range(3)] + [
    (("data", "expert"), 2),
    (("data", "expert"), 0),  # Rank r's experts are not neighbours.
    (("expert", "data"), 0),
    (("tensor", "expert"), 1),
]


@pytest.mark.parametrize(("names", "dim"), CASES, ids=str)
def test_every_parameter_over_every_axis(names, dim):
    """In the user's own shard_map, where no one else gathers."""
    number = CASES.index((names, dim))
    config = (CONFIG, PARTED)[number % 2]
    specs = specs_over(config, names, dim)
    placement = None
    if number % 4 in (1, 2):
        placement = jax_ep.plan_placement(np.arange(8.0), num_ranks=2, num_slots=12)
    layer = jax.shard_map(
        lambda x, params: jax_ep.moe(
            x, params, config, data_axes="data", specs=specs, placement=placement
        )[0],
        mesh=CPU_FFI.mesh(**SIZES),
        in_specs=(TOKENS, specs),
        out_specs=TOKENS,
        check_vma=number % 3 != 0,
    )
    check(layer, config)


@pytest.mark.parametrize(
    ("names", "dim"), [("expert", 2), (("tensor", "data"), 1), (("data", "expert"), 0)]
)
def test_global_arrays(names, dim):
    specs = specs_over(CONFIG, names, dim)
    mesh = CPU_FFI.mesh(**SIZES)
    check(
        lambda x, params: jax_ep.sharded_moe(
            x, params, CONFIG, mesh=mesh, data_axes="data", specs=specs
        )[0],
        CONFIG,
    )


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_experts_that_the_ranks_do_not_divide(num_ranks):
    """Seven experts on three or eight ranks: stored whole, some computed twice."""
    config = dataclasses.replace(CONFIG, num_experts=7)
    mesh = CPU_FFI.mesh(expert=num_ranks)

    def layer(x, params):
        # Tokens that no loss sees, for a batch that the ranks divide.
        x = np.concatenate([x, np.ones((16, 16), np.float32)])
        out, stats = jax_ep.sharded_moe(x, params, config, mesh=mesh)
        assert stats.expert_load.shape == (7,)
        return out[:8]

    check(layer, config)


def over_tensor(**options):
    """`moe` in a shard_map whose in_specs split F over another axis."""
    specs = jax_ep.param_specs(CONFIG, expert="expert", intermediate="tensor")
    layer = jax.shard_map(
        lambda x, params: jax_ep.moe(x, params, CONFIG, data_axes="data", **options)[0],
        mesh=CPU_FFI.mesh(**SIZES),
        in_specs=(TOKENS, specs),
        out_specs=TOKENS,
    )
    return jax.eval_shape(layer, X, params_of(CONFIG))


def global_layer(params=None, **specs):
    params = dataclasses.replace(params_of(CONFIG), **(params or {}))
    if specs:
        whole = jax_ep.param_specs(CONFIG, expert="expert")
        specs = dict(specs=dataclasses.replace(whole, **specs))
    mesh = CPU_FFI.mesh(**SIZES)
    return jax_ep.sharded_moe(X, params, CONFIG, mesh=mesh, **specs)


FLOATS = (
    "jax_ep.sharded_moe: params.down_proj must be a float32, bfloat16, float16 or "
    "float64 array, and is {}: multiply quantised weights by their scales first."
)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            over_tensor,
            ValueError,
            "jax_ep.moe: params.gate_up_proj must be the rank's (4, 16, 16) of the "
            "whole (8, 16, 16), and has shape (4, 16, 8); specs say how weights are "
            "split besides.",
        ),
        (
            lambda: over_tensor(specs=jax_ep.param_specs(CONFIG, expert="expert")),
            ValueError,
            "jax_ep.moe: params.gate_up_proj must be the rank's (4, 16, 16) of the "
            "whole (8, 16, 16), and has shape (4, 16, 8) once gathered as "
            "specs.gate_up_proj (=('expert', None, None)) says.",
        ),
        (
            lambda: global_layer(dict(down_proj=np.ones((8, 8, 16), np.int8))),
            TypeError,
            FLOATS.format("int8"),
        ),
        (
            lambda: global_layer(
                dict(down_proj=jnp.ones((8, 8, 16), jnp.float8_e4m3fn))
            ),
            TypeError,
            FLOATS.format("float8_e4m3fn"),
        ),
        (
            lambda: global_layer(dict(down_proj=[[1.0]])),
            TypeError,
            FLOATS.format("list"),
        ),
        (
            lambda: jax_ep.sharded_moe(X, {}, CONFIG),
            TypeError,
            "jax_ep.sharded_moe: params must be MoEParams, and is dict.",
        ),
        (
            lambda: jax_ep.sharded_moe(X, params_of(CONFIG), CONFIG, specs={}),
            TypeError,
            "jax_ep.sharded_moe: specs must be MoEParams of PartitionSpec (see "
            "param_specs), and is dict.",
        ),
        (
            lambda: global_layer(down_bias=None),
            TypeError,
            "jax_ep.sharded_moe: specs.down_bias must be a PartitionSpec, and is None.",
        ),
        (
            lambda: global_layer(down_bias=P("expert", None, "data")),
            ValueError,
            "jax_ep.sharded_moe: specs.down_bias (=('expert', None, 'data')) "
            "must have at most the 2 dimensions of params.down_bias.",
        ),
        (
            lambda: global_layer(down_bias=P("expert", P.UNCONSTRAINED)),
            ValueError,
            "jax_ep.sharded_moe: specs.down_bias (=('expert', UNCONSTRAINED)) "
            "must say how each dimension is split.",
        ),
        (
            lambda: global_layer(shared_expert_gate=P(None, "data")),
            ValueError,
            "jax_ep.sharded_moe: the dimension 1 (=1) of "
            'params.shared_expert_gate must be divisible by the 2 shares over "data".',
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message
