"""Whole configs of other libraries: what their layers compute and train, by formula.

Each owner's router and loss is written here from its own code's definition, in NumPy's
float64, one token at a time where that is plainer; none of the package's code is used.
"""

import enum
import functools

import jax
import numpy as np
import pytest
from conftest import CPU_FFI

import jax_ep
from jax_ep import MoEConfig
from jax_ep.names import SOURCES

H, F, E, B, S = 12, 8, 8, 2, 6
RNG = np.random.default_rng(3)
X = RNG.normal(size=(B, S, H))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def top(scores, k):
    """`[n, k]` ids of the largest of each row."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def within_groups(scores, groups, kept, best):
    """Scores with -inf outside each row's `kept` groups with the best sum of `best`."""
    out = np.full_like(scores, -np.inf)
    for row, masked in zip(scores, out, strict=True):
        parts = row.reshape(groups, -1)
        sums = np.sort(parts, axis=1)[:, -best:].sum(1)
        for group in np.argsort(-sums)[:kept]:
            width = parts.shape[1]
            masked[group * width : (group + 1) * width] = parts[group]
    return out


def chosen(values, ids):
    return np.take_along_axis(values, ids, 1)


def counts(ids):
    """`[n, E]`: 1 where a token chose an expert."""
    return (ids[:, :, None] == np.arange(E)).sum(1)


def maxtext_loss(ids, probs):
    """mean(density * density_prob) * E^2, densities of each sequence."""
    density = counts(ids).reshape(B, S, E).mean(1)
    return (density * probs.reshape(B, S, E).mean(1)).mean() * E**2


def transformers_loss(ids, probs):
    """E * sum_e (slots of e over tokens) * (mean probability of e)."""
    return E * (counts(ids).mean(0) * probs.mean(0)).sum()


def megatron_loss(ids, probs):
    """sum(probs of e * tokens of e) * E / (K * N^2)."""
    n, k = ids.shape
    return (probs.sum(0) * counts(ids).sum(0)).sum() * E / (k * n * n)


def maxtext_mixtral(z, p):
    ids = top(z, 2)
    return ids, softmax(chosen(z, ids)), 0.02 * maxtext_loss(ids, softmax(z))


def maxtext_qwen3(z, p):
    ids = top(z, 3)
    return ids, softmax(chosen(z, ids)), 0.001 * maxtext_loss(ids, softmax(z))


def maxtext_deepseek_v3(z, p):
    scores = sigmoid(z)
    biased = scores + p.selection_bias
    ids = top(within_groups(biased, 4, 2, best=2), 3)
    weights = chosen(scores, ids)
    weights = 2.5 * weights / weights.sum(1, keepdims=True)
    return ids, weights, 1e-3 * maxtext_loss(ids, softmax(biased))


def maxtext_llama4(z, p):
    ids = top(z, 1)
    return ids, sigmoid(chosen(z, ids)), 0.01 * maxtext_loss(ids, softmax(z))


def hf_mixtral(z, p):
    probs = softmax(z)
    ids = top(probs, 2)
    weights = chosen(probs, ids)
    weights = weights / weights.sum(1, keepdims=True)
    return ids, weights, 0.02 * transformers_loss(ids, probs)


def hf_qwen3(z, p):
    probs = softmax(z)
    ids = top(probs, 3)
    return ids, chosen(probs, ids), 0.001 * transformers_loss(ids, probs)


def hf_deepseek_v3(z, p):
    ids, weights, _ = maxtext_deepseek_v3(z, p)
    return ids, weights, 0.0


def gpt_oss(loss, z, p):
    ids = top(z, 4)
    return ids, softmax(chosen(z, ids)), 0.9 * loss(ids, softmax(z))


def megatron_mixtral(z, p):
    ids = top(z, 2)
    z_loss = (np.log(np.exp(z).sum(1)) ** 2).mean()
    aux = 1e-2 * megatron_loss(ids, softmax(z)) + 1e-3 * z_loss
    return ids, softmax(chosen(z, ids)), aux


def megatron_deepseek_v3(z, p):
    scores = sigmoid(z)
    ids = top(within_groups(scores + p.selection_bias, 4, 2, best=2), 4)
    weights = chosen(scores, ids)
    weights = 2.5 * weights / weights.sum(1, keepdims=True)
    probs = scores / scores.sum(1, keepdims=True)
    by_scores = top(scores, 4)  # Its loss counts a top-k of its own.
    losses = [
        megatron_loss(*(part.reshape(B, S, -1)[b] for part in (by_scores, probs)))
        for b in range(B)
    ]
    return ids, weights, 1e-2 * np.mean(losses)


def swiglu(gate, up):
    return gate * sigmoid(gate) * up


def clipped(gate, up):
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate * sigmoid(1.702 * gate) * (up + 1)


MAXTEXT = dict(
    # Of a whole config: sizes after scaling beside the base ones, and much else.
    run_name="test",
    base_emb_dim=H,
    emb_dim=H,
    base_mlp_dim=F,
    mlp_dim=F,
    base_moe_mlp_dim=F,
    moe_mlp_dim=F,
    moe_expert_input_dim=-1,
    num_experts=E,
    base_num_decoder_layers=2,
    megablox=True,
    sparse_matmul=True,
    capacity_factor=-1.0,
    ragged_buffer_factor=-1.0,
    mlp_activations=["silu", "linear"],
    mlp_activations_limit=-1.0,
    norm_topk_prob=False,
    routed_score_func="",
    routed_bias=False,
    routed_bias_update_rate=0.0,
    routed_scaling_factor=1.0,
    n_routing_groups=-1,
    topk_routing_group=-1,
    shared_experts=0,
    mlp_bias=False,
    use_random_routing=False,
    moe_mlpwi_0="remat",
    ici_expert_parallelism=4,
    float32_weight_sum=True,
    z_loss_multiplier=1e-4,
    vocab_size=256,
    model_name="default",
)
HF = dict(
    architectures=["ForCausalLM"],
    hidden_size=H,
    hidden_act="silu",
    vocab_size=256,
    rope_theta=1e6,
    num_hidden_layers=2,
    intermediate_size=F,
    output_router_logits=True,
)
CASES = {
    "maxtext mixtral": (
        dict(
            MAXTEXT,
            decoder_block="mixtral",
            num_experts_per_tok=2,
            load_balance_loss_weight=0.02,
        ),
        maxtext_mixtral,
    ),
    "maxtext qwen3": (
        dict(
            MAXTEXT,
            decoder_block="qwen3_moe",
            num_experts_per_tok=3,
            norm_topk_prob=True,
            load_balance_loss_weight=0.001,
        ),
        maxtext_qwen3,
    ),
    "maxtext deepseek_v3": (
        dict(
            MAXTEXT,
            model_name="deepseek3-671b",
            decoder_block="deepseek",
            num_experts_per_tok=3,
            routed_score_func="sigmoid",
            routed_bias=True,
            routed_scaling_factor=2.5,
            n_routing_groups=4,
            topk_routing_group=2,
            shared_experts=1,
            load_balance_loss_weight=1e-3,
        ),
        maxtext_deepseek_v3,
    ),
    "maxtext gpt_oss": (
        dict(
            MAXTEXT,
            decoder_block="gpt_oss",
            num_experts_per_tok=4,
            mlp_activations=["sigmoid", "linear"],
            mlp_activations_limit=7.0,
            routed_bias=True,
            mlp_bias=True,
            load_balance_loss_weight=0.9,
        ),
        functools.partial(gpt_oss, maxtext_loss),
    ),
    "maxtext llama4": (
        dict(
            MAXTEXT,
            decoder_block="llama4",
            num_experts_per_tok=1,
            shared_experts=1,
            load_balance_loss_weight=0.01,
        ),
        maxtext_llama4,
    ),
    "hf mixtral": (
        dict(
            HF,
            model_type="mixtral",
            num_local_experts=E,
            num_experts_per_tok=2,
            router_jitter_noise=0.0,
            router_aux_loss_coef=0.02,
        ),
        hf_mixtral,
    ),
    "hf qwen3": (
        dict(
            HF,
            model_type="qwen3_moe",
            num_experts=E,
            num_experts_per_tok=3,
            intermediate_size=99,
            moe_intermediate_size=F,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            router_aux_loss_coef=0.001,
        ),
        hf_qwen3,
    ),
    "hf deepseek_v3": (
        dict(
            HF,
            model_type="deepseek_v3",
            n_routed_experts=E,
            num_experts_per_tok=3,
            moe_intermediate_size=F,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            aux_loss_alpha=0.001,
            seq_aux=True,
            first_k_dense_replace=1,
            ep_size=1,
            quantization_config=dict(quant_method="fp8"),
        ),
        hf_deepseek_v3,
    ),
    "hf gpt_oss": (
        dict(
            HF,
            model_type="gpt_oss",
            num_local_experts=E,
            num_experts_per_tok=4,
            experts_per_token=4,
            swiglu_limit=7.0,
            router_aux_loss_coef=0.9,
        ),
        functools.partial(gpt_oss, transformers_loss),
    ),
    "megatron mixtral": (
        {
            "--num-experts": E,
            "--hidden-size": H,
            "--ffn-hidden-size": F,
            "--moe-router-topk": 2,
            "--moe-router-load-balancing-type": "aux_loss",
            "--moe-aux-loss-coeff": 1e-2,
            "--moe-z-loss-coeff": 1e-3,
            "--moe-token-dispatcher-type": "alltoall",
            "--moe-grouped-gemm": True,
            "--swiglu": True,
            "--disable-bias-linear": True,
            "--num-layers": 2,
            "--expert-model-parallel-size": 8,
        },
        megatron_mixtral,
    ),
    "megatron deepseek_v3": (
        {
            "--num-experts": E,
            "--hidden-size": H,
            "--ffn-hidden-size": 99,
            "--moe-ffn-hidden-size": F,
            "--moe-shared-expert-intermediate-size": F,
            "--moe-router-topk": 4,
            "--moe-router-num-groups": 4,
            "--moe-router-group-topk": 2,
            "--moe-router-pre-softmax": True,
            "--moe-router-topk-scaling-factor": 2.5,
            "--moe-router-score-function": "sigmoid",
            "--moe-router-enable-expert-bias": True,
            "--moe-router-bias-update-rate": 1e-3,
            "--moe-router-load-balancing-type": "seq_aux_loss",
            "--moe-aux-loss-coeff": 1e-2,
            "--moe-router-dtype": "fp32",
            "--swiglu": True,
            "--disable-bias-linear": True,
        },
        megatron_deepseek_v3,
    ),
}


def random_params(config):
    """Every parameter far from zero, the choice's bias too."""
    shapes = jax.eval_shape(lambda: jax_ep.init_params(jax.random.key(0), config))
    random = np.random.default_rng(5)
    return jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape, scale=0.6).astype(np.float32),
        shapes,
    )


def literal_output(x, ids, weights, p, act, weigh_input):
    """A loop over tokens and their experts, then the shared one."""
    out = np.zeros_like(x)
    for t, (row, its, ws) in enumerate(zip(x, ids, weights, strict=True)):
        for e, w in zip(its, ws, strict=True):
            seen = row * w if weigh_input else row
            both = seen @ p.gate_up_proj[e]
            both = both if p.gate_up_bias is None else both + p.gate_up_bias[e]
            y = act(both[:F], both[F:]) @ p.down_proj[e]
            y = y if p.down_bias is None else y + p.down_bias[e]
            out[t] += y if weigh_input else w * y
    if p.shared_down_proj is not None:
        gate, up = np.split(x @ p.shared_gate_up_proj, 2, axis=1)
        out += swiglu(gate, up) @ p.shared_down_proj
    return out


@pytest.mark.parametrize("case", CASES)
def test_computes_and_trains_what_its_owner_does(case):
    names, owner = CASES[case]
    config = MoEConfig.from_names(**names)
    assert config == MoEConfig.from_names(source=case.split()[0], **names)
    params = random_params(config)
    p = jax.tree.map(np.float64, params)
    x = X.reshape(-1, H)
    z = x @ p.router_kernel
    is_gpt_oss = "gpt_oss" in case
    assert (p.router_bias is not None) == (p.down_bias is not None) == is_gpt_oss
    if is_gpt_oss:
        z = z + p.router_bias
    ids, weights, aux = owner(z, p)
    out, stats = jax.jit(
        lambda x, params: jax_ep.sharded_moe(
            x, params, config, mesh=CPU_FFI.mesh(expert=2), keep_topk_idx=True
        )
    )(X.astype(np.float32), params)
    got = np.asarray(stats.topk_idx).reshape(ids.shape)
    np.testing.assert_array_equal(np.sort(got, 1), np.sort(ids, 1))
    act = clipped if is_gpt_oss else swiglu
    want = literal_output(x, ids, weights, p, act, "llama4" in case)
    scale = np.abs(want).max()
    np.testing.assert_allclose(
        np.asarray(out).reshape(-1, H) / scale, want / scale, atol=2e-6
    )
    np.testing.assert_allclose(stats.aux_loss, aux, rtol=1e-5)


def test_gradient_of_weights_on_the_input():
    """Along one direction, against differences of the literal loop in float64."""
    config = MoEConfig.from_names(**CASES["maxtext llama4"][0])
    params = random_params(config)
    x, target = X.astype(np.float32), np.random.default_rng(7).normal(size=X.shape)
    direction = random_params(config)
    direction = jax.tree.map(lambda one: np.float64(one) / 3, direction)

    def literal(step):
        p = jax.tree.map(lambda one, two: one + step * two, params, direction)
        tokens = (x + step * target).reshape(-1, H)
        z = tokens @ p.router_kernel
        ids = top(x.reshape(-1, H) @ params.router_kernel, 1)  # No tie is near.
        out = literal_output(tokens, ids, sigmoid(chosen(z, ids)), p, swiglu, True)
        return (out * target.reshape(-1, H)).sum()

    def ours(x, params):
        mesh = CPU_FFI.mesh(expert=2)
        out, _ = jax_ep.sharded_moe(x, params, config, mesh=mesh)
        return (out * target.astype(np.float32)).sum()

    d_x, d_params = jax.jit(jax.grad(ours, argnums=(0, 1)))(x, params)
    got = (np.float64(d_x) * target).sum()
    pairs = zip(jax.tree.leaves(d_params), jax.tree.leaves(direction), strict=True)
    got += sum((np.float64(grad) * one).sum() for grad, one in pairs)
    step = 1e-4
    want = (literal(step) - literal(-step)) / (2 * step)
    assert abs(want) > 1
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("source", SOURCES)
def test_tables(source):
    """Every name is of one kind, has its place, and does not stand in the way."""
    table = SOURCES[source]
    assert not table.ignored & set(table.read)
    assert all(table.read.values())
    ignored = dict.fromkeys(table.ignored, "whatever")
    config = MoEConfig.from_names(
        source=source, **SIZES, num_experts_per_tok=2, **ignored
    )
    assert config.num_experts == 4
    nothing = dict.fromkeys(table.read)
    assert config == MoEConfig.from_names(
        source=source, **{**nothing, **SIZES, "num_experts_per_tok": 2}
    )


SIZES = dict(num_experts=4, hidden_size=H, moe_intermediate_size=F)


@pytest.mark.parametrize(
    "names, num_topk, weights",
    [
        # Logits 0: MaxText's softmax is over the chosen ones, whatever is asked for.
        (dict(base_emb_dim=H, norm_topk_prob=False), 2, 0.5),
        (dict(base_emb_dim=H, norm_topk_prob=True), 2, 0.5),
        (dict(base_emb_dim=H), 1, 1.0),
        (dict(model_type="mixtral", intermediate_size=F), 1, 1.0),
        (dict(model_type="qwen3_moe", norm_topk_prob=True), 1, 1.0),
        (dict(model_type="qwen3_moe", norm_topk_prob=False), 1, 0.25),
        (dict(model_type="qwen3_moe"), 2, 0.25),
        (dict(moe_router_score_function="sigmoid"), 1, 0.5),
        (dict(moe_router_score_function="sigmoid"), 2, 0.5),
        (dict(moe_router_pre_softmax=True), 2, 0.25),
        (dict(moe_router_pre_softmax=True), 1, 0.25),
        (dict(moe_grouped_gemm=True), 2, 0.5),
        (dict(), 1, 0.25),  # To be trained: the weight must depend on the logits.
        (dict(), 2, 0.5),
        (dict(use_pre_softmax=True), 2, 0.25),
    ],
)
def test_weights_of_equal_logits(names, num_topk, weights):
    config = MoEConfig.from_names(**SIZES, num_experts_per_tok=num_topk, **names)
    routing = jax_ep.router(np.ones((3, H), np.float32), np.zeros((H, 4)), config)
    np.testing.assert_allclose(routing.topk_weights, np.full((3, num_topk), weights))


@pytest.mark.parametrize(
    "names, factor, scope",
    [
        (dict(load_balance_loss_weight=0.1), 1, "global"),
        (dict(load_balance_loss_weight=0.1, base_emb_dim=H), 2, "sequence"),
        (dict(router_aux_loss_coef=0.1), 2, "global"),
        (dict(moe_aux_loss_coeff=0.1), 1, "global"),
        (
            dict(
                moe_aux_loss_coeff=[0.1],
                moe_router_load_balancing_type=["seq_aux_loss"],
            ),
            1,
            "sequence",
        ),
        (dict(aux_loss_coeff=0.1), 1, "global"),
        (dict(router_aux_loss_coef=0.1, output_router_logits=False), 0, "global"),
        (
            dict(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="none"),
            0,
            "global",
        ),
    ],
)
def test_factor_and_scope_of_the_loss(names, factor, scope):
    config = MoEConfig.from_names(**SIZES, num_experts_per_tok=2, **names)
    assert config.load_balance_loss_weight == pytest.approx(0.1 * factor)
    assert config.load_balance_scope == scope


@pytest.mark.parametrize(
    "names, capacity",
    [
        (dict(capacity_factor=1.5), 1.5),
        (dict(ragged_buffer_factor=1.5), 1.5),
        (dict(ragged_buffer_factor=-1, capacity_factor=1.25), 1.25),
        # MaxText's sparse products look at one of the two, its dense ones at the other.
        (dict(ragged_buffer_factor=-1, capacity_factor=2, sparse_matmul=True), None),
        (dict(ragged_buffer_factor=1.5, capacity_factor=2, sparse_matmul=True), 1.5),
        (dict(ragged_buffer_factor=1.5, capacity_factor=2, sparse_matmul=False), 2),
        (dict(moe_expert_capacity_factor=1.5), 1.5),
        (dict(moe_expert_rank_capacity_factor=1.5), 1.5),
        (dict(moe_expert_capacity_factor=-1.0), None),
    ],
)
def test_capacity(names, capacity):
    config = MoEConfig.from_names(**SIZES, num_experts_per_tok=2, **names)
    assert config.capacity_factor == capacity


def test_activations():
    """The same name is not the same function everywhere: gelu is exact in PyTorch."""

    def activation(**names):
        config = MoEConfig.from_names(**SIZES, num_experts_per_tok=2, **names)
        return config.activation

    assert activation(mlp_activations=["gelu", "linear"]) == "gelu_tanh"
    assert activation(hidden_act="gelu") == "gelu"
    assert activation(hidden_act="gelu_pytorch_tanh") == "gelu_tanh"
    assert activation(hidden_act="relu2") == "relu2"
    assert activation(mlp_activations=["relu", "linear"]) == "relu"
    geglu = dict(quick_geglu=True, glu_linear_offset=1.0)
    geglu.update(activation_func_clamp_value=7.0, moe_grouped_gemm=True)
    assert activation(**geglu) == "clipped_swiglu"

    def silu(gate):  # Megatron's config holds PyTorch's functions.
        raise AssertionError("is asked for its name alone")

    gated = dict(gated_linear_unit=True, moe_grouped_gemm=True)
    assert activation(activation_func=silu, **gated) == "silu"
    assert activation(activation_func="gelu", **gated) == "gelu"
    assert activation(activation=jax.nn.mish) is jax.nn.mish


def test_shared_experts():
    names = dict(MAXTEXT, num_experts_per_tok=2, shared_experts=2)
    config = MoEConfig.from_names(**dict(names, decoder_block="llama4"))
    assert config.num_shared_experts == 2 and not config.shared_expert_gate
    # A decoder block that does not look at the setting.
    config = MoEConfig.from_names(**dict(names, decoder_block="mixtral"))
    assert config.shared_size == 0
    config = MoEConfig.from_names(**dict(names, decoder_block="qwen3_next"))
    assert config.shared_expert_gate and config.shared_size == F


def test_decoder_blocks_in_any_case_and_as_the_enum_of_a_resolved_config():
    class Block(enum.Enum):
        LLAMA4 = "llama4"
        GEMMA4 = "gemma4"

    names = dict(MAXTEXT, num_experts_per_tok=1)
    want = MoEConfig.from_names(**names, decoder_block="llama4")
    assert want.weights_scale_input
    assert MoEConfig.from_names(**names, decoder_block="LLAMA4") == want
    assert MoEConfig.from_names(**names, decoder_block=Block.LLAMA4) == want
    with pytest.raises(ValueError, match=r"decoder_block \(='gemma4'\) has a router"):
        MoEConfig.from_names(**names, decoder_block=Block.GEMMA4)


GEMMA4 = dict(
    HF,
    model_type="gemma4_text",
    hidden_activation="gelu_pytorch_tanh",
    enable_moe_block=True,
    num_experts=E,
    top_k_experts=2,
    moe_intermediate_size=F,
)
GEMMA4_ROUTER = (
    "has a router that sees its input normalised, times a trained scale, and experts "
    "that see it normalised otherwise (models/gemma4/modeling_gemma4.py, "
    "Gemma4TextDecoderLayer): two inputs are not offered."
)


def test_gemma4_of_transformers_is_refused():
    """Its router is no part of a `MoEConfig`: without it other experts are chosen."""

    def message(make, *args, **kwargs):
        with pytest.raises(ValueError) as raised:
            make(*args, **kwargs)
        return str(raised.value)

    refused = f"MoEConfig: model_type (='gemma4_text') {GEMMA4_ROUTER}"
    assert message(MoEConfig.from_names, **GEMMA4) == f"jax_ep.{refused}"
    whole = dict(model_type="gemma4", text_config=GEMMA4)
    assert message(MoEConfig.from_names, **whole) == f"jax_ep.{refused}"
    assert (
        message(jax_ep.hf_moe_config, whole)
        == f"jax_ep.hf_moe_config: model_type (='gemma4_text') {GEMMA4_ROUTER}"
    )
    untyped = {name: GEMMA4[name] for name in GEMMA4 if name != "model_type"}
    assert (
        message(MoEConfig.from_names, **untyped)
        == f"jax_ep.MoEConfig: top_k_experts (=2) is Gemma 4's, which {GEMMA4_ROUTER}"
    )


def test_names_of_two_sources_that_one_of_them_only_has_beside_others():
    """DeepSeek's config.json has a name of Megatron's, Llama 4's one of MaxText's."""
    config = MoEConfig.from_names(
        **dict(
            CASES["hf deepseek_v3"][0], moe_layer_freq=1, interleave_moe_layer_step=1
        )
    )
    assert config.selection_bias and config.selection_bias_update_rate == 0
    # Not experts: what sampling chooses from.
    config = MoEConfig.from_names(**CASES["hf mixtral"][0], top_k=50)
    assert config.num_experts_per_tok == 2
    config = MoEConfig.from_names(
        **SIZES, moe_router_topk=2, moe_layer_freq=1, rope_scaling_factor=8.0
    )
    assert config.num_experts_per_tok == 2


def test_llama4_of_transformers_is_its_text_part():
    text = dict(
        HF, model_type="llama4_text", num_local_experts=E, num_experts_per_tok=1
    )
    config = MoEConfig.from_names(model_type="llama4", text_config=text)
    assert config == MoEConfig.from_names(**text)
    assert config == jax_ep.hf_moe_config(dict(model_type="llama4", text_config=text))
    assert config.weights_scale_input and config.shared_size == F
    assert config.load_balance_loss_weight == 0


REFUSED = [
    (
        dict(base_emb_dim=H, num_local_experts=4),
        "base_emb_dim is of MaxText and num_local_experts is of Hugging Face: the same "
        "values mean different layers there. Say whose with source=, one of maxtext, "
        "hf, megatron.",
    ),
    (
        dict(routed_bias=True),
        "routed_bias (=True) is router_bias, the logits', without a score function, "
        "and selection_bias, the choice's, with one (DeepSeek-V3): give decoder_block "
        "or routed_score_func too.",
    ),
    (
        dict(
            decoder_block="deepseek",
            routed_score_func="sigmoid",
            routed_bias=True,
            model_name="kimi-k2-1t",
        ),
        "routed_bias (=True) with model_name (='kimi-k2-1t') is in the weights too: "
        "names must begin with deepseek3 or deepseek4 for the choice alone.",
    ),
    (
        dict(decoder_block="mixtral", routed_score_func="sigmoid"),
        "routed_score_func (='sigmoid') must be '' in decoder_block 'mixtral': there "
        "it would be the input of a softmax, which is not offered.",
    ),
    (
        dict(decoder_block="deepseek", routed_score_func=""),
        "routed_score_func (='') must be 'softmax', 'sigmoid' or 'sqrtsoftplus' in "
        "decoder_block 'deepseek': logits as weights are not offered.",
    ),
    (
        dict(decoder_block="gemma4"),
        "decoder_block (='gemma4') has a router that sees its input normalised, times "
        "a trained scale, and experts that see it normalised otherwise "
        "(models/gemma4.py, Gemma4MoE): two inputs are not offered.",
    ),
    (
        dict(decoder_block="llama2"),
        "decoder_block (='llama2') must be one of deepseek, deepseek4, qwen3_next, "
        "qwen3_5, envy, gpt_oss, llama4, mixtral, qwen3_custom_moe, qwen3_moe: no "
        "other is known to have experts.",
    ),
    (
        dict(decoder_block="llama4", norm_topk_prob=True),
        "norm_topk_prob (=True) must be False in decoder_block 'llama4': there it "
        "would divide logits before their sigmoid, which is not offered.",
    ),
    (
        dict(base_emb_dim=H, global_parameter_scale=2),
        "global_parameter_scale (=2) changes base_emb_dim: give the resolved emb_dim.",
    ),
    (
        dict(mlp_activations=["silu"]),
        "mlp_activations (=['silu']) must be one of silu, swish, gelu, relu, sigmoid "
        "and then 'linear'.",
    ),
    (
        dict(decoder_block="deepseek4", first_num_hash_layers=3),
        "first_num_hash_layers (=3) must be 0: routing by a table of token ids is not "
        "offered.",
    ),
    (
        dict(moe_router_load_balancing_type="sinkhorn"),
        "moe_router_load_balancing_type (='sinkhorn') must be one of aux_loss, "
        "seq_aux_loss, global_aux_loss or none.",
    ),
    (
        dict(moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk=4),
        "moe_router_group_topk (=2) ranks groups by the sum of their 2 best logits: "
        "the best one, or two of scores, are offered.",
    ),
    (
        dict(moe_grouped_gemm=True, squared_relu=True),
        "squared_relu (=True) must be False: experts are gated (swiglu).",
    ),
    (
        dict(moe_latent_size=64),
        "moe_latent_size (=64) must not be given: it is not offered.",
    ),
    (
        dict(model_type="llama"),
        "model_type (='llama') must be one of mixtral, qwen2_moe, qwen3_moe, "
        "qwen3_next, olmoe, deepseek_v2, deepseek_v3, deepseek_v32, kimi_k2, "
        "glm4_moe, gpt_oss, llama4_text.",
    ),
    (
        dict(num_local_experts=8),
        "num_local_experts (=8) and num_experts (=4) differ.",
    ),
    (
        dict(num_moe_experts=8),
        "num_experts (=4) and num_moe_experts (=8) differ.",
    ),
    (
        dict(moe_grouped_gemm=True, activation_func="tanh"),
        "activation_func (='tanh') must be one of silu, swish, gelu, relu, "
        "squared_relu.",
    ),
    (
        dict(swiglu_limit=7.0),
        "swiglu_limit (=7.0) is of a model's own code: give model_type too.",
    ),
]


@pytest.mark.parametrize("names, message", REFUSED)
def test_refused(names, message):
    topk = {} if "moe_router_topk" in names else dict(num_experts_per_tok=2)
    with pytest.raises(ValueError) as raised:
        MoEConfig.from_names(**SIZES, **topk, **names)
    assert str(raised.value) == f"jax_ep.MoEConfig: {message}"


def test_one_expert_per_token_in_megatron_needs_its_softmax_first():
    with pytest.raises(ValueError, match="must be True where moe_router_topk is 1"):
        MoEConfig.from_names(**SIZES, moe_router_topk=1)


def test_bias_updates():
    """On with Megatron's bias, as its default has it; off with MaxText's."""
    megatron = dict(CASES["megatron deepseek_v3"][0])
    del megatron["--moe-router-bias-update-rate"]
    assert MoEConfig.from_names(**megatron).selection_bias_update_rate == 1e-3
    maxtext = dict(CASES["maxtext deepseek_v3"][0])
    assert MoEConfig.from_names(**maxtext).selection_bias_update_rate == 0
    maxtext["routed_bias_update_rate"] = 0.01
    assert MoEConfig.from_names(**maxtext).selection_bias_update_rate == 0.01


def test_an_unknown_source():
    with pytest.raises(ValueError) as raised:
        MoEConfig.from_names(**SIZES, source="marin")
    assert str(raised.value) == (
        "jax_ep.MoEConfig: source (='marin') must be one of maxtext, hf, megatron or "
        "None."
    )


@pytest.mark.parametrize(
    "name, hint",
    [
        ("moe_router_top_k", ": did you mean moe_router_topk?"),
        ("moe_ffn_hiden_size", ": did you mean moe_ffn_hidden_size?"),
        ("hiden_size", ": did you mean hidden_size?"),
        ("num_expertz", ": did you mean num_experts?"),
    ],
)
def test_in_a_whole_config_a_slip_is_found(name, hint):
    with pytest.raises(TypeError) as raised:
        MoEConfig.from_names(**SIZES, moe_router_topk=2, vocab_size=5, **{name: 3})
    assert str(raised.value) == (
        f"jax_ep.MoEConfig: {name} is not a name of a MoE layer{hint}"
    )


def test_what_is_not_about_the_layer_is_ignored_with_a_source_alone():
    names = dict(SIZES, num_experts_per_tok=2, vocab_size=5, rope_theta=1e4)
    for source in ("maxtext", "hf", "megatron"):
        assert MoEConfig.from_names(source=source, **names).num_experts == 4
    with pytest.raises(TypeError, match="vocab_size is not a name of a MoE layer"):
        MoEConfig.from_names(**names)
