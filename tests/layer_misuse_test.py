"""What the layer and its parts refuse, and in which words."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from jax.sharding import PartitionSpec as P

import jax_ep

CONFIG = jax_ep.MoEConfig(
    num_experts=8, num_experts_per_tok=2, hidden_size=16, moe_intermediate_size=24
)
BY_SEQUENCE = dataclasses.replace(CONFIG, load_balance_scope="sequence")
PARAMS = jax_ep.init_params(jax.random.key(0), CONFIG)
X = np.random.default_rng(0).standard_normal((8, 4, 16)).astype(np.float32)


def layer(x, ranks=4, config=CONFIG, **options):
    mesh = CPU_FFI.mesh(expert=ranks)
    return jax_ep.sharded_moe(x, PARAMS, config, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: layer(X.astype(np.int32)),
            TypeError,
            "jax_ep.sharded_moe: x must be float32, bfloat16 or float16, and is int32.",
        ),
        (
            lambda: jax.export.export(jax.jit(layer))(
                jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16"), np.float32)
            ),
            ValueError,
            "jax_ep.sharded_moe: x must have sizes that are numbers, and has (b, 16): "
            "receive buffers are of a static size, so export a program for each batch, "
            "or one for the largest and mask the rest (token_mask).",
        ),
        (
            # The transpose of what is meant, with as many entries.
            lambda: layer(X, token_mask=np.ones((4, 8), bool)),
            ValueError,
            "jax_ep.sharded_moe: token_mask must have shape x.shape[:-1] = (8, 4), and "
            "has (4, 8).",
        ),
        (
            # The local experts of two ranks are as many.
            lambda: layer(
                X,
                ranks=2,
                placement=jax_ep.plan_placement(np.ones(4), num_ranks=2, num_slots=4),
            ),
            ValueError,
            "jax_ep.sharded_moe: placement must be of num_experts (=8) experts, and is "
            "of 4.",
        ),
        (
            lambda: layer(X, specs=jax_ep.param_specs(CONFIG, expert="expret")),
            ValueError,
            'jax_ep.sharded_moe: specs split over "expret", and the mesh has '
            "('expert',): did you mean \"expert\"?",
        ),
        (
            lambda: layer(X.reshape(32, 16), config=BY_SEQUENCE),
            ValueError,
            "jax_ep.sharded_moe: x must have shape [..., S, H] for load_balance_scope "
            '"sequence", and has (32, 16).',
        ),
        (
            lambda: jax_ep.param_specs(CONFIG, experts="expert"),
            TypeError,
            "jax_ep.param_specs: experts must be one of ('expert', 'hidden', "
            "'intermediate').",
        ),
    ],
)
def test_layer(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


def test_data_axes_of_the_expert_axis():
    local = functools.partial(jax_ep.moe, config=CONFIG, data_axes=("data", "expert"))
    layer = jax.shard_map(
        lambda x, params: local(x, params)[0],
        mesh=CPU_FFI.mesh(data=2, expert=4),
        in_specs=(P(("data", "expert")), jax_ep.param_specs(CONFIG, expert="expert")),
        out_specs=P(("data", "expert")),
    )
    with pytest.raises(ValueError) as raised:
        jax.eval_shape(layer, X, PARAMS)
    assert str(raised.value) == (
        'jax_ep.moe: data_axes (="data,expert") must not repeat an axis, nor have one '
        'of the expert axis "expert".'
    )


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 5, 4), dict(), "logits must have shape [T, E], and has (2, 5, 4)."),
        (
            (4, 8),
            dict(num_experts_per_tok=9),
            "num_experts_per_tok (=9) must be from 1 to the 8 experts of logits.",
        ),
        (
            (4, 8),
            dict(n_group=3),
            "n_group (=3) must divide the 8 experts of logits.",
        ),
        (
            (4, 8),
            dict(n_group=2, topk_group=1, group_score="top2"),
            "group_score (='top2') must be 'top2_sum' or 'max'.",
        ),
        (
            (4, 8),
            dict(token_mask=np.ones(8, bool)),
            "token_mask must have shape [T] = (4,), and has (8,).",
        ),
    ],
)
def test_topk_routing(shape, options, message):
    options = dict(num_experts_per_tok=2) | options
    with pytest.raises(ValueError) as raised:
        jax_ep.topk_routing(jnp.ones(shape), **options)
    assert str(raised.value) == f"jax_ep.topk_routing: {message}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_experts_per_tok", 2.0),
        ("num_experts", None),
        ("hidden_size", 16.0),
        ("max_rounds", 1.5),
        ("num_sms", "4"),
        ("moe_intermediate_size", True),
    ],
)
def test_numbers_that_are_no_ints(name, value):
    """2.0 equals 2 and has its hash, so it would be found in its place in caches."""
    with pytest.raises(ValueError) as raised:
        dataclasses.replace(CONFIG, **{name: value})
    assert str(raised.value) == (
        f"jax_ep.MoEConfig: {name} (={value!r}) must be an int."
    )


def test_ints_of_numpy():
    config = dataclasses.replace(CONFIG, num_experts_per_tok=np.int64(2))
    assert config == CONFIG


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_factors_that_are_no_numbers(factor):
    with pytest.raises(ValueError, match="and finite, or -1 for dropless"):
        dataclasses.replace(CONFIG, capacity_factor=factor)
