"""Shapes of published Mixture-of-Experts models, from their `config.json`."""

import dataclasses
import difflib

from jax_ep.tools.console import UserError


@dataclasses.dataclass(frozen=True)
class Model:
    """What an exchange of a model's MoE layers depends on, and their number.

    Attributes:
      repository: on huggingface.co; its `config.json` says all the rest.
      hidden: H.
      expert_hidden: F, of one routed expert.
      experts: E, routed.
      topk: K.
      layers: MoE layers, without those whose MLP is dense.
      n_group, topk_group: of group-limited routing; 1 and 1 is none.
      dtype: of activations.
    """

    repository: str
    hidden: int
    expert_hidden: int
    experts: int
    topk: int
    layers: int
    n_group: int = 1
    topk_group: int = 1
    dtype: str = "bfloat16"


MODELS = {
    "deepseek-v2": Model(
        "deepseek-ai/DeepSeek-V2", 5120, 1536, 160, 6, 59, n_group=8, topk_group=3
    ),
    "deepseek-v2-lite": Model("deepseek-ai/DeepSeek-V2-Lite", 2048, 1408, 64, 6, 26),
    "deepseek-v3": Model(
        "deepseek-ai/DeepSeek-V3", 7168, 2048, 256, 8, 58, n_group=8, topk_group=4
    ),
    "glm-4.5": Model("zai-org/GLM-4.5", 5120, 1536, 160, 8, 89),
    "gpt-oss-20b": Model("openai/gpt-oss-20b", 2880, 2880, 32, 4, 24),
    "gpt-oss-120b": Model("openai/gpt-oss-120b", 2880, 2880, 128, 4, 36),
    "kimi-k2": Model("moonshotai/Kimi-K2-Instruct", 7168, 2048, 384, 8, 60),
    "mixtral-8x7b": Model("mistralai/Mixtral-8x7B-v0.1", 4096, 14336, 8, 2, 32),
    "mixtral-8x22b": Model("mistralai/Mixtral-8x22B-v0.1", 6144, 16384, 8, 2, 56),
    "olmoe-1b-7b": Model("allenai/OLMoE-1B-7B-0924", 2048, 1024, 64, 8, 16),
    "qwen2-57b-a14b": Model("Qwen/Qwen2-57B-A14B", 3584, 2560, 64, 8, 28),
    "qwen3-30b-a3b": Model("Qwen/Qwen3-30B-A3B", 2048, 768, 128, 8, 48),
    "qwen3-235b-a22b": Model("Qwen/Qwen3-235B-A22B", 4096, 1536, 128, 8, 94),
    "qwen3-coder-480b-a35b": Model(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct", 6144, 2560, 160, 8, 62
    ),
}


def find_model(name: str) -> Model:
    """The model of that name; `Owner/Name` and capitals are accepted.

    Raises:
      UserError: no such model; the message suggests the nearest.
    """
    short = name.lower().rsplit("/")[-1]
    if short in MODELS:
        return MODELS[short]
    for model in MODELS.values():
        if name.lower() == model.repository.lower():
            return model
    near = difflib.get_close_matches(short, MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(MODELS)}."
    raise UserError(
        f"model (={name}) is not known: {hint} Any other by --hidden, --experts and "
        "--topk."
    )
