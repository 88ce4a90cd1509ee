"""Hugging Face's MoE models: the `MoEConfig` of their config, their tensors' names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_ep.config import MoEConfig
from jax_ep.names import fields_of
from jax_ep.names.huggingface import MODEL_TYPES as MODEL_TYPES
from jax_ep.names.huggingface import check_model_type, model_type_of, model_values


@dataclasses.dataclass(frozen=True)
class Names:
    """How a model names the tensors of its MoE block."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str | None = None
    # Stored stacked and [E, in, out]: Llama 4, and GPT-OSS, whose gate and up columns
    # come in turn, and which has biases. All others are [E, out, in], or a tensor for
    # each expert.
    in_out: bool = False
    interleaved: bool = False


NAMES = dict(
    mixtral=Names(gate="w1", up="w3", down="w2"),
    qwen2_moe=Names(shared="shared_expert"),
    qwen3_moe=Names(),
    qwen3_next=Names(shared="shared_expert"),
    olmoe=Names(),
    deepseek_v2=Names(shared="shared_experts"),
    deepseek_v3=Names(shared="shared_experts"),
    deepseek_v32=Names(shared="shared_experts"),
    kimi_k2=Names(shared="shared_experts"),
    glm4_moe=Names(shared="shared_experts"),
    gpt_oss=Names(router="router", in_out=True, interleaved=True),
    llama4_text=Names(router="router", shared="shared_expert", in_out=True),
)


def names_of(op: str, model_type: Any) -> Names:
    """Of a model type; `op` is for the message if there is no such type."""
    check_model_type(op, model_type)
    return NAMES[model_type]


def check_fields(op: str, names: Names, config: MoEConfig, model_type: str) -> None:
    """Refuses a config that asks for parameters which the model type has no names of.

    Raises:
      ValueError: naming the field.
    """
    for field, has_names in (
        ("router_bias", names.interleaved),
        ("mlp_bias", names.interleaved),
        ("shared_size", names.shared is not None),
        ("expert_scale", False),
    ):
        if getattr(config, field) and not has_names:
            raise ValueError(
                f"jax_ep.{op}: config.{field} (={getattr(config, field)!r}) must be "
                f"{type(getattr(config, field))()!r} for {model_type}, whose "
                "checkpoints have no such tensor."
            )


def hf_moe_config(hf_config: Any, **fields: Any) -> MoEConfig:
    """The `MoEConfig` of a Hugging Face model: same routing, same experts.

    Args:
      hf_config: the content of the model's `config.json`, or its `transformers` config
        object; its `model_type`, or its `text_config`'s, is one of `MODEL_TYPES`.
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
    names_of(op, model_type_of(dict(given)))
    known = tuple(field.name for field in dataclasses.fields(MoEConfig))
    fields = fields_of(fields, None, known)
    return MoEConfig(**{**model_values(op, dict(given)), **fields})
