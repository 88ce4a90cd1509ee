"""A Hugging Face MoE block's weights in our Flax layer, and both outputs compared.

Without --checkpoint it makes a tiny model of --model-type with random weights and saves
it, as `transformers` does; from there on it is what one does with a real checkpoint:
read `config.json`, read the tensors of one block, and put them into the layer, whose
experts are spread over the devices. Needs the extra `hf-test` besides `examples`.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

DEVICES = 4
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from jax_ep.checkpoint import load_safetensors  # noqa: E402
from jax_ep.hf_models import MODEL_TYPES, hf_moe_config  # noqa: E402
from jax_ep.nnx import MoE  # noqa: E402
from jax_ep.pretrained import load_hf_moe_layer  # noqa: E402

# transformers has no class of Kimi K2: it is DeepSeek-V3's, with another config.
MADE = [model_type for model_type in MODEL_TYPES if model_type != "kimi_k2"]
TOKENS = (4, 16)  # Sequences, and the length of each.
TOLERANCE = 1e-5  # Float32, relative to the largest output.

# Small in every size that the model types name; each takes those it knows.
TINY = dict(
    vocab_size=16,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=2,
    first_k_dense_replace=0,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model-type", choices=MADE, default="qwen3_moe", help="[qwen3_moe]")
    add("--checkpoint", type=Path, help="folder with config.json and *.safetensors")
    add("--layer", type=int, default=1, help="of the model's layers [1]")
    options = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError as missing:
        sys.exit(
            f'flax_import.py needs the extra "hf-test": pip install ".[hf-test]" '
            f"({missing})"
        )

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.checkpoint
        if folder is None:
            folder = Path(temporary)
            save_tiny_model(options.model_type, folder)
        layer = load_layer(folder, options.layer)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
    decoder = model.model.layers[options.layer]
    block = decoder.feed_forward if hasattr(decoder, "feed_forward") else decoder.mlp

    x = np.random.default_rng(0).normal(size=(*TOKENS, layer.config.hidden_size))
    x = x.astype(np.float32)
    ours = np.asarray(layer(x))
    with torch.no_grad():
        theirs = block(torch.tensor(x))
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).numpy()
    theirs = theirs.reshape(ours.shape)
    worst = np.abs(ours - theirs).max() / np.abs(theirs).max()
    print(f"slots per expert: {layer.stats.get_value().expert_load}")
    print(f"outputs differ by {worst:.1e} of the largest")
    if not worst < TOLERANCE:
        sys.exit("That is more than float32 explains.")


def load_layer(folder: Path, index: int) -> MoE:
    """The MoE block of one of a checkpoint's layers as a Flax layer on a mesh."""
    hf_config = json.loads((folder / "config.json").read_text())
    config = hf_moe_config(hf_config)
    devices = jax.devices()
    num_ranks = math.gcd(len(devices), config.num_experts, DEVICES)
    mesh = Mesh(np.array(devices[:num_ranks]), ("expert",))
    layer = MoE(config, mesh=mesh, rngs=nnx.Rngs(0))

    parts = dict(mixtral="block_sparse_moe", llama4_text="feed_forward")
    part = parts.get(hf_config["model_type"], "mlp")
    params = load_hf_moe_layer(
        load_safetensors(folder),
        config,
        model_type=hf_config["model_type"],
        prefix=f"model.layers.{index}.{part}.",
        dtype=np.float32,
    )
    print(f"{hf_config['model_type']}, layer {index}, experts on {num_ranks} devices:")
    for name in layer.param_names:
        variable, value = getattr(layer, name), getattr(params, name)
        sharding = variable.get_value().sharding
        variable.set_value(jax.device_put(value, sharding))
        print(f"  {name:22}{value.shape!s:18}{sharding.spec}")
    return layer


def save_tiny_model(model_type: str, folder: Path) -> None:
    import torch
    import transformers

    known = transformers.AutoConfig.for_model(model_type).to_dict()
    settings = {name: value for name, value in TINY.items() if name in known}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(std=0.2)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
