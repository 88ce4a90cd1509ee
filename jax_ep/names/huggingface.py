"""Hugging Face's names: a model's `config.json`, as `transformers` 5.24 takes it."""

from collections.abc import Mapping
from typing import Any

from jax_ep.names.plain import value_of
from jax_ep.names.source import Source, Values, first, known, refuse, same

# Where experts and weights are decided: TopKRouter, SparseMoeBlock, Experts, MoE of
# models/<type>/modeling_<type>.py; what is left out: configuration_<type>.py.
_MODEL = "models/<type>/modeling_<type>.py"
READ = dict(
    text_config="configuration_<type>.py: the language model's part",
    model_type="models/auto/configuration_auto.py",
    num_experts=_MODEL,
    num_local_experts=_MODEL,
    n_routed_experts=_MODEL,
    num_experts_per_tok=_MODEL,
    top_k="generation's, or in configs without num_experts_per_tok this",
    top_k_experts="models/gemma4/modeling_gemma4.py",
    hidden_size=_MODEL,
    intermediate_size=_MODEL,
    moe_intermediate_size=_MODEL,
    n_shared_experts=_MODEL,
    shared_expert_intermediate_size=_MODEL,
    hidden_act="activations.py, ACT2FN",
    hidden_activation="activations.py, ACT2FN",
    norm_topk_prob=_MODEL,
    scoring_func="models/deepseek_v3/modeling_deepseek_v3.py: sigmoid",
    topk_method="models/deepseek_v2/modeling_deepseek_v2.py",
    n_group=_MODEL,
    topk_group=_MODEL,
    routed_scaling_factor=_MODEL,
    router_jitter_noise="models/mixtral/modeling_mixtral.py",
    mlp_bias="models/deepseek_v2/modeling_deepseek_v2.py",
    swiglu_alpha="models/gpt_oss/modeling_gpt_oss.py",
    swiglu_limit="models/gpt_oss/modeling_gpt_oss.py",
    router_aux_loss_coef="models/mixtral/modeling_mixtral.py, "
    "load_balancing_loss_func: K at balance",
    output_router_logits="MixtralForCausalLM.forward: without them, no loss",
)

# Of layers without experts and of other blocks; the alpha is of DeepSeek's own code,
# transformers has no such loss for its models.
IGNORED = """
    aux_loss_alpha decoder_sparse_step enable_moe_block ep_size first_k_dense_replace
    index_topk interleave_moe_layer_step mlp_only_layers moe_layer_freq moe_layers
    num_nextn_predict_layers seq_aux experts_implementation experts_per_token
    expert_dtype
""".split()

MARKERS = {
    "model_type",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "top_k_experts",
    "hidden_act",
    "hidden_activation",
    "scoring_func",
    "topk_method",
    "swiglu_alpha",
    "swiglu_limit",
    "router_aux_loss_coef",
    "output_router_logits",
    "architectures",
    "transformers_version",
    "num_hidden_layers",
    "decoder_sparse_step",
    "first_k_dense_replace",
    "aux_loss_alpha",
}

_ROUTER_OF_ITS_OWN = (
    "has a router that sees its input normalised, times a trained scale, and experts "
    "that see it normalised otherwise (models/gemma4/modeling_gemma4.py, "
    "Gemma4TextDecoderLayer): two inputs are not offered"
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LIKE_QWEN2 = ("qwen2_moe", "qwen3_next")
_LIKE_DEEPSEEK_V3 = dict(
    # What each leaves out of config.json: scaling, n_group, topk_group.
    deepseek_v3=(2.5, 8, 4),
    deepseek_v32=(2.5, 8, 4),
    kimi_k2=(2.827, 1, 1),  # DeepSeek-V3's code, with Kimi's config.json.
    glm4_moe=(1.0, 1, 1),
)
MODEL_TYPES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "olmoe",
    "deepseek_v2",
    *_LIKE_DEEPSEEK_V3,
    "gpt_oss",
    "llama4_text",
)
# Whose config of text has experts, or not; theirs is a router like no other.
_NORMALISES_FOR_ROUTER = ("gemma4_text", "diffusion_gemma_text")
# Those whose ForCausalLM adds a load-balance loss; the others train without one.
_HAS_LOSS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "gpt_oss")
# Whether weights are divided where config.json does not say.
_NORMALISES = dict(qwen2_moe=False, qwen3_moe=False, olmoe=False, qwen3_next=True)


def check_model_type(op: str, model_type: Any) -> None:
    """Raises for a model type whose MoE block is not known, or not offered."""
    if model_type in _NORMALISES_FOR_ROUTER:
        raise ValueError(
            f"jax_ep.{op}: model_type (={model_type!r}) {_ROUTER_OF_ITS_OWN}."
        )
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"jax_ep.{op}: model_type (={model_type!r}) must be one of "
            f"{', '.join(MODEL_TYPES)}."
        )


def model_values(op: str, given: Values) -> Values:
    """Fields of `MoEConfig` for the config of a known model type, without losses.

    Raises:
      ValueError: a setting that changes the numbers and is not offered.
    """
    given = _of_text(given)
    model_type = given["model_type"]

    def need(*names: str) -> Any:
        for name in names:
            if given.get(name) is not None:
                return given[name]
        raise ValueError(f"jax_ep.{op}: {names[0]} must be given for {model_type}.")

    def refuse_unless(name: str, offered: Any) -> None:
        value = given.get(name)
        if value is not None and value != offered:
            raise ValueError(
                f"jax_ep.{op}: {name} (={value!r}) must be {offered!r} for "
                f"{model_type}: nothing else is offered."
            )

    def said(name: str, otherwise: Any) -> Any:
        return otherwise if given.get(name) is None else given[name]

    need(*_EXPERTS)
    values = dict(
        num_experts=same(known(**given), *_EXPERTS),
        num_experts_per_tok=need("num_experts_per_tok"),
        hidden_size=need("hidden_size"),
    )
    if model_type != "gpt_oss":
        values["activation"] = value_of("activation", said("hidden_act", "silu"))
    if model_type in ("mixtral", "olmoe", "gpt_oss", "llama4_text"):
        values["moe_intermediate_size"] = need("intermediate_size")
    else:
        values["moe_intermediate_size"] = need("moe_intermediate_size")
    if model_type in _NORMALISES:
        values["norm_topk_prob"] = said("norm_topk_prob", _NORMALISES[model_type])
    if model_type == "mixtral":
        # Theirs also scales what the experts see.
        refuse_unless("router_jitter_noise", 0.0)
        values["norm_topk_prob"] = True
    elif model_type in _LIKE_QWEN2:
        values["shared_expert_intermediate_size"] = need(
            "shared_expert_intermediate_size"
        )
        values["shared_expert_gate"] = True
    elif model_type == "deepseek_v2":
        refuse_unless("mlp_bias", False)
        refuse_unless("norm_topk_prob", False)
        values.update(
            norm_topk_prob=False,
            num_shared_experts=said("n_shared_experts", 0),
            routed_scaling_factor=said("routed_scaling_factor", 1.0),
        )
        if said("topk_method", "greedy") != "greedy":
            refuse_unless("topk_method", "group_limited_greedy")
            values.update(
                n_group=need("n_group"),
                topk_group=need("topk_group"),
                group_score="max",
            )
    elif model_type in _LIKE_DEEPSEEK_V3:
        refuse_unless("scoring_func", "sigmoid")
        refuse_unless("topk_method", "noaux_tc")
        scaling, n_group, topk_group = _LIKE_DEEPSEEK_V3[model_type]
        values.update(
            score_func="sigmoid",
            selection_bias=True,
            norm_topk_prob=said("norm_topk_prob", True),
            num_shared_experts=said("n_shared_experts", 0),
            routed_scaling_factor=said("routed_scaling_factor", scaling),
            n_group=said("n_group", n_group),
            topk_group=said("topk_group", topk_group),
            group_score="top2_sum",
        )
    elif model_type == "gpt_oss":
        refuse_unless("swiglu_alpha", 1.702)
        refuse_unless("swiglu_limit", 7.0)
        values.update(
            activation="clipped_swiglu",
            norm_topk_prob=True,
            router_bias=True,
            mlp_bias=True,
        )
    elif model_type == "llama4_text":
        values.update(
            score_func="sigmoid",
            norm_topk_prob=False,
            weights_scale_input=True,
            num_shared_experts=1,
        )
    return values


def _of_text(given: Values) -> Values:
    """The language model's part of a config with several parts (Llama 4)."""
    text = given.get("text_config")
    if text is None or given.get("model_type") in MODEL_TYPES:
        return given
    return dict(text if isinstance(text, Mapping) else text.to_dict())


def model_type_of(given: Values) -> Any:
    """The model type whose MoE block it is."""
    return _of_text(given).get("model_type")


def translate(given: Values, others: Values) -> Values:
    """Fields of `MoEConfig` for a `config.json`, losses included."""
    given = _of_text(given)
    model_type = given.get("model_type")
    if model_type is not None:
        check_model_type("MoEConfig", model_type)
        values = model_values("MoEConfig", given)
    else:
        values = _values_without_type(given, others)
    weight = given.get("router_aux_loss_coef")
    has_loss = model_type is None or model_type in _HAS_LOSS
    if weight and has_loss and given.get("output_router_logits") is not False:
        num_topk = {**others, **values}.get("num_experts_per_tok", 1)
        values["load_balance_loss_weight"] = weight * num_topk
    return values


def _values_without_type(given: Values, others: Values) -> Values:
    if "top_k_experts" in given:
        refuse(
            "top_k_experts",
            given["top_k_experts"],
            f"is Gemma 4's, which {_ROUTER_OF_ITS_OWN}",
        )
    values = known(
        num_experts=same(given, *_EXPERTS),
        num_experts_per_tok=first(given, "num_experts_per_tok", "top_k"),
        hidden_size=given.get("hidden_size"),
        # With the other one, this is of the layers without experts.
        moe_intermediate_size=first(
            given, "moe_intermediate_size", "intermediate_size"
        ),
        num_shared_experts=given.get("n_shared_experts"),
        shared_expert_intermediate_size=given.get("shared_expert_intermediate_size"),
        norm_topk_prob=given.get("norm_topk_prob"),
        score_func=given.get("scoring_func"),
        routed_scaling_factor=given.get("routed_scaling_factor"),
        router_jitter_noise=given.get("router_jitter_noise"),
        mlp_bias=given.get("mlp_bias"),
    )
    for name in ("swiglu_alpha", "swiglu_limit"):
        if name in given:
            refuse(name, given[name], "is of a model's own code: give model_type too")
    activation = same(given, "hidden_act", "hidden_activation")
    if activation is not None:
        values["activation"] = value_of("activation", activation)
    method = given.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
        refuse(
            "topk_method",
            method,
            "must be 'greedy', 'group_limited_greedy' or 'noaux_tc'",
        )
    if method == "noaux_tc":
        values["selection_bias"] = True
    if method != "greedy":
        for name in ("n_group", "topk_group"):
            value = value_of(name, given.get(name))
            values.update(known(**{name: value}))
    if method == "group_limited_greedy":
        values["group_score"] = "max"
    return values


SOURCE = Source(
    label="Hugging Face",
    read=READ,
    ignored=frozenset(IGNORED),
    markers=frozenset(MARKERS),
    translate=translate,
)
