"""MoEConfig: names of other libraries, and what it refuses."""

import dataclasses

import pytest

from jax_ep.config import MoEConfig
from jax_ep.names.plain import ALIASES

SIZES = dict(
    num_experts=8, num_experts_per_tok=2, hidden_size=16, moe_intermediate_size=32
)

# Names that set one field, with a value and the field; `names_test.py` has those whose
# meaning is their owner's.
NAMES = [
    ("num_local_experts", 16, "num_experts"),
    ("n_routed_experts", 16, "num_experts"),
    ("num_experts_per_token", 3, "num_experts_per_tok"),
    ("top_k", 3, "num_experts_per_tok"),
    ("moe_topk", 3, "num_experts_per_tok"),
    ("num_moe_experts", 16, "num_experts"),
    ("moe_router_topk", 3, "num_experts_per_tok"),
    ("base_emb_dim", 48, "hidden_size"),
    ("emb_dim", 48, "hidden_size"),
    ("base_moe_mlp_dim", 48, "moe_intermediate_size"),
    ("moe_mlp_dim", 48, "moe_intermediate_size"),
    ("moe_ffn_hidden_size", 48, "moe_intermediate_size"),
    ("intermediate_dim", 48, "moe_intermediate_size"),
    ("intermediate_size", 48, "moe_intermediate_size"),
    ("capacity_factor", 1.5, "capacity_factor"),
    ("ragged_buffer_factor", 1.5, "capacity_factor"),
    ("eval_ragged_buffer_factor", -1, "eval_capacity_factor"),
    ("norm_topk_prob", False, "norm_topk_prob"),
    ("routed_score_func", "sigmoid", "score_func"),
    ("score_function", "sigmoid", "score_func"),
    ("scoring_func", "sqrtsoftplus", "score_func"),
    ("expert_bias", True, "selection_bias"),
    ("routed_scaling_factor", 2.5, "routed_scaling_factor"),
    ("scaling_factor", 2.5, "routed_scaling_factor"),
    ("n_routing_groups", 4, "n_group"),
    ("num_groups", 4, "n_group"),
    ("load_balance_loss_weight", 0.01, "load_balance_loss_weight"),
    ("aux_loss_coeff", 0.01, "load_balance_loss_weight"),
    ("z_loss", 0.001, "router_z_loss_weight"),
    ("router_z_loss_coef", 0.001, "router_z_loss_weight"),
    ("shared_experts", 2, "num_shared_experts"),
    ("n_shared_experts", 2, "num_shared_experts"),
    ("num_shared_experts", 2, "num_shared_experts"),
    ("shared_expert_intermediate_size", 64, "shared_expert_intermediate_size"),
    ("use_random_routing", True, "use_random_routing"),
    ("prefuse_moe_weights", False, "fuse_gate_up"),
    ("mlp_bias", True, "mlp_bias"),
    ("moe_implementation", "xla", "implementation"),
    ("moe_dropless_fallback", True, "dropless_fallback"),
    ("hidden_act", "gelu", "activation"),
    ("hidden_activation", "gelu", "activation"),
]


@pytest.mark.parametrize("name, value, field", NAMES, ids=[name for name, *_ in NAMES])
def test_each_name_sets_its_field(name, value, field):
    sizes = {key: size for key, size in SIZES.items() if key != field}
    config = MoEConfig.from_names(**sizes, **{name: value})
    assert getattr(config, field) == value


def test_every_alias_is_tested_or_paired():
    assert set(ALIASES) - {name for name, *_ in NAMES} == {
        "group_topk",
    }


@pytest.mark.parametrize(
    "names",
    [
        dict(n_group=4, topk_group=2),
        dict(n_routing_groups=4, topk_routing_group=2),
        dict(num_groups=4, group_topk=2),
    ],
)
def test_groups(names):
    config = MoEConfig.from_names(**SIZES, **names)
    assert (config.n_group, config.topk_group) == (4, 2)


@pytest.mark.parametrize(
    "value, expected", [("layer", True), ("step", True), (None, False), (False, False)]
)
def test_dropless_fallback_of_maxtext(value, expected):
    config = MoEConfig.from_names(**SIZES, moe_dropless_fallback=value)
    assert config.dropless_fallback is expected


def test_no_groups_is_minus_one_in_maxtext():
    config = MoEConfig.from_names(**SIZES, n_routing_groups=-1, topk_routing_group=-1)
    assert (config.n_group, config.topk_group) == (1, 1)


@pytest.mark.parametrize(
    "name",
    [
        "float32_gate_logits",
        "float32_weight_sum",
        "report_capacity_overflow",
        "use_ring_of_experts",
        "num_moe_token_chunks",
        "expert_chunks",
    ],
)
def test_names_without_a_field(name):
    assert MoEConfig.from_names(**SIZES, **{name: True}) == MoEConfig(**SIZES)


def test_other_transports_are_replaced_by_ours():
    config = MoEConfig.from_names(**SIZES, moe_implementation="ring")
    assert config.implementation is None


@pytest.mark.parametrize("factor", [-1, -1.0, None])
def test_dropless(factor):
    assert MoEConfig(**SIZES, capacity_factor=factor).capacity_factor is None


@pytest.mark.parametrize(
    "names, norm",
    [
        (dict(use_pre_softmax=True), False),
        (dict(use_pre_softmax=False), True),
        (dict(use_pre_softmax=True, norm_topk_prob=True), True),
        (dict(use_pre_softmax=False, norm_topk_prob=True), True),
        (dict(use_pre_softmax=True, score_func="sigmoid"), True),
    ],
)
def test_softmax_before_or_after_top_k(names, norm):
    assert MoEConfig.from_names(**SIZES, **names).norm_topk_prob is norm


def test_pre_softmax_against_norm_topk_prob():
    with pytest.raises(ValueError, match=r"use_pre_softmax \(=False\) and norm_topk"):
        MoEConfig.from_names(**SIZES, use_pre_softmax=False, norm_topk_prob=False)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(TypeError) as raised:
        MoEConfig.from_names(**SIZES, num_expert_per_tok=2)
    assert str(raised.value) == (
        "jax_ep.MoEConfig: num_expert_per_tok is not a name of a MoE layer: did you "
        "mean num_experts_per_tok?"
    )


def test_unknown_name_without_a_near_one():
    with pytest.raises(TypeError, match="rope_theta is not a name of a MoE layer.$"):
        MoEConfig.from_names(**SIZES, rope_theta=1e4)


def test_two_aliases_that_differ():
    with pytest.raises(ValueError) as raised:
        MoEConfig.from_names(**SIZES, top_k=4)
    assert str(raised.value) == (
        "jax_ep.MoEConfig: top_k (=4) and num_experts_per_tok (=2) both set "
        "num_experts_per_tok, and differ."
    )


def test_two_aliases_that_agree():
    assert MoEConfig.from_names(**SIZES, top_k=2, moe_topk=2) == MoEConfig(**SIZES)


def test_missing_names():
    with pytest.raises(TypeError, match="hidden_size, moe_intermediate_size must be"):
        MoEConfig.from_names(num_experts=8, top_k=2)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_experts=0), "num_experts (=0) must be at least 1."),
        (
            dict(num_experts_per_tok=9),
            "num_experts_per_tok (=9) must be at most num_experts (=8).",
        ),
        (dict(n_group=3), "n_group (=3) must divide num_experts (=8)."),
        (
            dict(n_group=2, topk_group=3),
            "topk_group (=3) must be at most n_group (=2).",
        ),
        (
            dict(n_group=4, topk_group=1, num_experts_per_tok=3),
            "topk_group (=1) must leave num_experts_per_tok (=3) experts to choose "
            "from: 1 groups have 2.",
        ),
        (
            dict(n_group=8, topk_group=2),
            "n_group (=8) must leave two experts a group for top2_sum.",
        ),
        (
            dict(score_func="tanh"),
            "score_func (='tanh') must be one of ('softmax', 'sigmoid', "
            "'sqrtsoftplus').",
        ),
        (
            dict(capacity_factor=0.4),
            "capacity_factor (=0.4) must be at least 1/num_experts_per_tok (=1/2) and "
            "finite, or -1 for dropless.",
        ),
        (
            dict(eval_capacity_factor=0.25),
            "eval_capacity_factor (=0.25) must be at least 1/num_experts_per_tok "
            "(=1/2) and finite, or -1 for dropless.",
        ),
        (
            dict(router_jitter_noise=1.0),
            "router_jitter_noise (=1.0) must be in [0, 1).",
        ),
        (dict(num_shared_experts=-1), "num_shared_experts (=-1) must be at least 0."),
        (
            dict(shared_expert_gate=True),
            "shared_expert_gate (=True) needs shared experts.",
        ),
        (dict(max_rounds=0), "max_rounds (=0) must be at least 1."),
        (
            dict(dropless_fallback="rounds"),
            "dropless_fallback (='rounds') must be True or False.",
        ),
        (dict(mlp_bias=None), "mlp_bias (=None) must be True or False."),
        (dict(norm_topk_prob=2), "norm_topk_prob (=2) must be True or False."),
        (
            dict(activation="swish"),
            "activation (='swish') must be one of ('silu', 'gelu', 'gelu_tanh', "
            "'relu', 'relu2', 'sigmoid', 'clipped_swiglu') or a function.",
        ),
    ],
)
def test_refused_values(fields, message):
    with pytest.raises(ValueError) as raised:
        MoEConfig(**{**SIZES, **fields})
    assert str(raised.value) == f"jax_ep.MoEConfig: {message}"


def test_a_function_as_activation_must_be_hashable():
    class Scaled:
        __hash__ = None

        def __call__(self, gate):
            return 2 * gate

    with pytest.raises(ValueError, match=r"activation .* must be hashable, as func"):
        MoEConfig(**SIZES, activation=Scaled())
    config = MoEConfig(**SIZES, activation=abs)
    assert hash(config) == hash(MoEConfig(**SIZES, activation=abs))


def test_is_hashable_and_compares():
    one, two = MoEConfig(**SIZES), MoEConfig(**SIZES, capacity_factor=-1)
    assert hash(one) == hash(two) and one == two
    assert one != dataclasses.replace(one, activation="gelu")


@pytest.mark.parametrize("factor, expected", [(None, 1.25), (-1, None), (2.0, 2.0)])
def test_evaluation(factor, expected):
    config = MoEConfig(
        **SIZES,
        capacity_factor=1.25,
        eval_capacity_factor=factor,
        router_jitter_noise=0.1,
    )
    evaluation = config.evaluation()
    assert evaluation.capacity_factor == expected
    assert evaluation.router_jitter_noise == 0


def test_shared_size():
    assert MoEConfig(**SIZES).shared_size == 0
    assert MoEConfig(**SIZES, num_shared_experts=2).shared_size == 64
    both = dict(num_shared_experts=2, shared_expert_intermediate_size=40)
    assert MoEConfig(**SIZES, **both).shared_size == 40
