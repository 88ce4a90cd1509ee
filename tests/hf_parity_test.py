"""Our layer beside the models' own code: outputs and gradients, on tiny random models.

Needs the extra `hf-test` (torch and transformers). JAX_EP_REQUIRE_HF=1 makes their
absence a failure.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI

import jax_ep
from jax_ep import stored_formats
from jax_ep.hf_models import hf_moe_config
from jax_ep.pretrained import export_hf_moe_layer, load_hf_moe_layer

os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torch
    import transformers
except ImportError as missing:
    if os.environ.get("JAX_EP_REQUIRE_HF"):
        raise
    pytest.skip(
        f'needs the extra "hf-test": pip install ".[hf-test]" ({missing})',
        allow_module_level=True,
    )

HIDDEN, WIDTH, EXPERTS, TOPK = 32, 24, 8, 3
BATCH, LENGTH = 4, 12

TINY = dict(
    vocab_size=16,
    hidden_size=HIDDEN,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    num_experts_per_tok=TOPK,
    max_position_embeddings=32,
)
MLA = dict(
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
    first_k_dense_replace=0,
    n_routed_experts=EXPERTS,
    moe_intermediate_size=WIDTH,
    intermediate_size=48,
)
QWEN = dict(
    num_experts=EXPERTS,
    moe_intermediate_size=WIDTH,
    intermediate_size=48,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
LOCAL = dict(num_local_experts=EXPERTS, intermediate_size=WIDTH)

MODELS = {
    "mixtral": ("mixtral", LOCAL),
    "qwen2_moe": ("qwen2_moe", dict(QWEN, shared_expert_intermediate_size=20)),
    "qwen3_moe": ("qwen3_moe", dict(QWEN, norm_topk_prob=True)),
    "qwen3_moe, not normalised": ("qwen3_moe", dict(QWEN, norm_topk_prob=False)),
    "olmoe": ("olmoe", dict(num_experts=EXPERTS, intermediate_size=WIDTH)),
    "deepseek_v2": ("deepseek_v2", dict(MLA, n_shared_experts=2)),
    "deepseek_v2, groups": (
        "deepseek_v2",
        dict(
            MLA,
            n_shared_experts=2,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=16.0,
        ),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        dict(MLA, n_shared_experts=1, n_group=4, topk_group=2),
    ),
    "gpt_oss": ("gpt_oss", LOCAL),
    "qwen3_next": (
        "qwen3_next",
        dict(
            QWEN,
            shared_expert_intermediate_size=20,
            layer_types=["full_attention"],
        ),
    ),
    "glm4_moe": (
        "glm4_moe",
        dict(MLA, n_shared_experts=1, routed_scaling_factor=1.5),
    ),
    "deepseek_v32": (
        "deepseek_v32",
        dict(
            MLA,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            mlp_layer_types=["sparse"],
            index_n_heads=2,
            index_head_dim=8,
            index_topk=4,
        ),
    ),
    "llama4_text": (
        "llama4_text",
        dict(LOCAL, intermediate_size_mlp=48, interleave_moe_layer_step=1),
    ),
}
# Kimi K2 is DeepSeek-V3's code with another config; transformers has no type of it.
MODELS["kimi_k2"] = (
    "deepseek_v3",
    dict(MLA, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.827),
)
# Types whose config says whether weights are normalised, and the others.
NORMALISE = [
    (case, norm)
    for case in MODELS
    if case == MODELS[case][0] or case == "kimi_k2"
    for norm in (
        (None,)
        if case in ("mixtral", "gpt_oss", "llama4_text", "deepseek_v2")
        else (True, False)
    )
]
# The names of published checkpoints, before the layer's part of them.
BLOCK = {
    "mixtral": "model.layers.0.block_sparse_moe.",
    "llama4_text": "model.layers.0.feed_forward.",
}
SPREAD = 0.5  # Of random weights: experts differ, and GPT-OSS's limits are met.


def model_of(case: str, **more):
    """The config and a model with random weights, everywhere far from zero."""
    model_type, settings = MODELS[case]
    settings = {**TINY, **settings, **more}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[0]
    block = layer.feed_forward if model_type == "llama4_text" else layer.mlp
    with torch.no_grad():
        for tensor in [*block.parameters(), *block.buffers()]:
            tensor.normal_(std=SPREAD)
    return config, model, block


def inputs():
    random = np.random.default_rng(0)
    x, target = random.normal(size=(2, BATCH, LENGTH, HIDDEN)).astype(np.float32)
    return x, target


def theirs(block, x, target):
    """Output, the gradient of x, and of every parameter by name."""
    block.zero_grad()
    tokens = torch.tensor(x, requires_grad=True)
    out = block(tokens)
    out = out[0] if isinstance(out, tuple) else out
    out = out.reshape(x.shape)
    (out * torch.tensor(target)).sum().backward()
    grads = {name: value.grad.numpy() for name, value in block.named_parameters()}
    return out.detach().numpy(), tokens.grad.numpy(), grads


def ours(params, config, x, target):
    mesh = CPU_FFI.mesh(expert=4)

    def loss(params, x):
        out, stats = jax_ep.sharded_moe(x, params, config, mesh=mesh)
        return jnp.sum(out * target), (out, stats)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (out, stats)), (d_params, d_x) = run(params, x)
    return np.asarray(out), np.asarray(d_x), d_params, stats


def assert_close(got, want, name):
    """Float32, relative to the largest entry: sums of a hundred terms in any order."""
    scale = np.abs(want).max()
    assert scale > 0, name
    np.testing.assert_allclose(
        got / scale, want / scale, rtol=0, atol=3e-6, err_msg=name
    )


def our_type(case: str) -> str:
    return case if case == "kimi_k2" else MODELS[case][0]


def settings_of(hf_config, case: str) -> dict:
    return {**hf_config.to_dict(), "model_type": our_type(case)}


@pytest.mark.parametrize("num_topk", [1, 2])
@pytest.mark.parametrize("case, norm", NORMALISE)
def test_weights_of_one_expert_and_of_two(case, norm, num_topk):
    """Normalised, one expert's weight is 1; some of its owners train it so."""
    more = {} if norm is None else dict(norm_topk_prob=norm)
    hf_config, _, block = model_of(case, num_experts_per_tok=num_topk, **more)
    model_type = our_type(case)
    config = hf_moe_config(settings_of(hf_config, case))
    if num_topk == 1 and norm is not None:
        assert config.norm_topk_prob == norm
    tensors = {name: value.numpy() for name, value in block.state_dict().items()}
    params = load_hf_moe_layer(tensors, config, model_type=model_type)
    x, _ = inputs()
    with torch.no_grad():
        want = block(torch.tensor(x))
    want = (want[0] if isinstance(want, tuple) else want).reshape(x.shape)
    run = jax.jit(
        functools.partial(jax_ep.sharded_moe, mesh=CPU_FFI.mesh(expert=4)),
        static_argnums=2,
    )
    assert_close(np.asarray(run(x, params, config)[0]), want.numpy(), "out")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("case", MODELS)
def test_outputs_and_gradients(case, fused):
    hf_config, _, block = model_of(case)
    model_type = our_type(case)
    config = hf_moe_config(settings_of(hf_config, case), fuse_gate_up=fused)
    assert config.num_experts == EXPERTS and config.hidden_size == HIDDEN
    tensors = {name: value.numpy() for name, value in block.state_dict().items()}
    params = load_hf_moe_layer(tensors, config, model_type=model_type)
    x, target = inputs()
    want_out, want_dx, want_grads = theirs(block, x, target)
    out, d_x, d_params, stats = ours(params, config, x, target)
    assert int(stats.num_dropped.sum()) == 0
    assert_close(out, want_out, "out")
    assert_close(d_x, want_dx, "x")
    grads = export_hf_moe_layer(d_params, config, model_type=model_type, stacked=True)
    bias = grads.pop("gate.e_score_correction_bias", None)
    assert bias is None or not bias.any()
    assert set(grads) == set(want_grads)
    for name, want in want_grads.items():
        assert_close(grads[name], want, name)


@pytest.mark.parametrize("case", [case for case in MODELS if case == our_type(case)])
def test_published_spelling(case, tmp_path):
    """What `save_pretrained` writes loads, and what we export is what it wrote."""
    hf_config, model, block = model_of(case)
    model_type = our_type(case)
    model.save_pretrained(tmp_path)
    saved = jax_ep.load_safetensors(tmp_path)
    config = hf_moe_config(settings_of(hf_config, case))
    prefix = BLOCK.get(model_type, "model.layers.0.mlp.")
    params = load_hf_moe_layer(saved, config, model_type=model_type, prefix=prefix)
    in_memory = {name: value.numpy() for name, value in block.state_dict().items()}
    stacked = load_hf_moe_layer(in_memory, config, model_type=model_type)
    for one, other in zip(*map(jax.tree.leaves, (params, stacked)), strict=True):
        np.testing.assert_array_equal(one, other)
    exported = export_hf_moe_layer(params, config, model_type=model_type, prefix=prefix)
    assert set(exported) == {name for name in saved if name.startswith(prefix)}
    for name, value in exported.items():
        np.testing.assert_array_equal(value, saved[name])


def test_gpt_oss_clips():
    """The parity case does reach the limits of the clipped activation."""
    _, _, block = model_of("gpt_oss")
    x, _ = inputs()
    tokens = torch.tensor(x.reshape(-1, HIDDEN))
    gate_up = (
        tokens @ block.experts.gate_up_proj[0] + block.experts.gate_up_proj_bias[0]
    )
    assert (gate_up[:, ::2] > 7).any() and (gate_up[:, 1::2].abs() > 7).any()


def test_mxfp4_is_theirs():
    from transformers.integrations import mxfp4

    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = random.integers(100, 140, (2, 6, 3)).astype(np.uint8)
    want = mxfp4.convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    ).numpy()
    got = stored_formats.from_mxfp4(blocks, scales).astype(np.float32)
    # Theirs comes transposed, [..., in, out].
    want = want if want.shape == got.shape else want.swapaxes(1, 2)
    np.testing.assert_array_equal(got, want)
