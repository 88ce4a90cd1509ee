"""Hugging Face's MoE models: the `MoEConfig` of their config, their tensors' names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_ep.config import MoEConfig


@dataclasses.dataclass(frozen=True)
class Names:
    """How a model names the tensors of its MoE block."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str | None = None
    # GPT-OSS stores [in, out], gate and up columns in turn; all others [out, in].
    interleaved: bool = False


NAMES = dict(
    mixtral=Names(gate="w1", up="w3", down="w2"),
    qwen2_moe=Names(shared="shared_expert"),
    qwen3_moe=Names(),
    olmoe=Names(),
    deepseek_v2=Names(shared="shared_experts"),
    deepseek_v3=Names(shared="shared_experts"),
    gpt_oss=Names(router="router", interleaved=True),
)
MODEL_TYPES = tuple(NAMES)


def names_of(op: str, model_type: Any) -> Names:
    """Of a model type; `op` is for the message if there is no such type."""
    if model_type not in NAMES:
        raise ValueError(
            f"jax_ep.{op}: model_type (={model_type!r}) must be one of "
            f"{', '.join(MODEL_TYPES)}."
        )
    return NAMES[model_type]


def hf_moe_config(hf_config: Any, **fields: Any) -> MoEConfig:
    """The `MoEConfig` of a Hugging Face model: same routing, same experts.

    Args:
      hf_config: the content of the model's `config.json`, or its `transformers` config
        object; its `model_type` is one of `MODEL_TYPES`.
      **fields: of `MoEConfig`, for what the model's config does not say
        (`capacity_factor`, `expert_alignment`, `fuse_gate_up`, ...) or to differ.

    Returns:
      A `MoEConfig`. Its auxiliary losses are off, as they are in `transformers` unless
      asked for: there the load-balance loss is one over the tokens of all layers
      together, here one per layer, so `router_aux_loss_coef` does not carry over.

    Raises:
      ValueError: a model type that is not known, or a setting that changes the numbers
        and is not offered. TypeError: an unknown name among `fields`.

    Source: the configuration and model files of each `model_type` in `transformers`
    5.24 (the defaults of a setting that `config.json` leaves out are theirs).

    >>> config = hf_moe_config(
    ...     dict(model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8,
    ...          hidden_size=2048, moe_intermediate_size=768, norm_topk_prob=True))
    >>> config.num_experts, config.norm_topk_prob
    (128, True)
    """
    op = "hf_moe_config"
    given = hf_config if isinstance(hf_config, Mapping) else hf_config.to_dict()
    model_type = given.get("model_type")
    names_of(op, model_type)

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

    values = dict(
        num_experts=need("num_experts", "num_local_experts", "n_routed_experts"),
        num_experts_per_tok=need("num_experts_per_tok"),
        hidden_size=need("hidden_size"),
    )
    if model_type != "gpt_oss":
        values["activation"] = given.get("hidden_act", "silu")
    if model_type in ("mixtral", "olmoe", "gpt_oss"):
        values["moe_intermediate_size"] = need("intermediate_size")
    else:
        values["moe_intermediate_size"] = need("moe_intermediate_size")
    if model_type in ("qwen2_moe", "qwen3_moe", "olmoe"):
        values["norm_topk_prob"] = bool(given.get("norm_topk_prob", False))
    if model_type == "mixtral":
        # Theirs also scales what the experts see.
        refuse_unless("router_jitter_noise", 0.0)
    elif model_type == "qwen2_moe":
        values["shared_expert_intermediate_size"] = need(
            "shared_expert_intermediate_size"
        )
        values["shared_expert_gate"] = True
    elif model_type == "deepseek_v2":
        refuse_unless("mlp_bias", False)
        refuse_unless("norm_topk_prob", False)
        values.update(
            norm_topk_prob=False,
            num_shared_experts=need("n_shared_experts"),
            routed_scaling_factor=given.get("routed_scaling_factor", 1.0),
        )
        if given.get("topk_method", "greedy") != "greedy":
            refuse_unless("topk_method", "group_limited_greedy")
            values.update(
                n_group=need("n_group"),
                topk_group=need("topk_group"),
                group_score="max",
            )
    elif model_type == "deepseek_v3":
        refuse_unless("scoring_func", "sigmoid")
        refuse_unless("topk_method", "noaux_tc")
        values.update(
            score_func="sigmoid",
            selection_bias=True,
            norm_topk_prob=bool(given.get("norm_topk_prob", True)),
            num_shared_experts=need("n_shared_experts"),
            routed_scaling_factor=given.get("routed_scaling_factor", 2.5),
            n_group=given.get("n_group", 8),
            topk_group=given.get("topk_group", 4),
            group_score="top2_sum",
        )
    elif model_type == "gpt_oss":
        refuse_unless("swiglu_alpha", 1.702)
        refuse_unless("swiglu_limit", 7.0)
        values.update(activation="clipped_swiglu", router_bias=True, mlp_bias=True)
    return MoEConfig.from_names(**{**values, **fields})
