"""Hugging Face's names in and out, without torch: round trips, spellings, messages."""

import dataclasses
import doctest
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import hf_models, pretrained, stored_formats
from jax_ep.checkpoint import load_safetensors
from jax_ep.config import MoEConfig
from jax_ep.hf_models import MODEL_TYPES, hf_moe_config
from jax_ep.params import init_params, param_info
from jax_ep.pretrained import export_hf_moe_layer, load_hf_moe_layer

H, F, E, K = 6, 4, 8, 2

SMALL = dict(hidden_size=H, num_experts_per_tok=K)
HF_CONFIGS = dict(
    mixtral=dict(num_local_experts=E, intermediate_size=F, hidden_act="silu"),
    qwen2_moe=dict(
        num_experts=E,
        moe_intermediate_size=F,
        intermediate_size=99,
        shared_expert_intermediate_size=3,
    ),
    qwen3_moe=dict(
        num_experts=E,
        moe_intermediate_size=F,
        intermediate_size=99,
        norm_topk_prob=True,
    ),
    olmoe=dict(num_experts=E, intermediate_size=F, norm_topk_prob=False),
    deepseek_v2=dict(
        n_routed_experts=E,
        moe_intermediate_size=F,
        intermediate_size=99,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
        scoring_func="softmax",
    ),
    deepseek_v3=dict(
        n_routed_experts=E,
        moe_intermediate_size=F,
        intermediate_size=99,
        n_shared_experts=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_group=4,
        topk_group=2,
    ),
    gpt_oss=dict(
        num_local_experts=E, intermediate_size=F, hidden_act="silu", swiglu_limit=7.0
    ),
    llama4_text=dict(
        num_local_experts=E, intermediate_size=F, intermediate_size_mlp=99
    ),
)
HF_CONFIGS["deepseek_v32"] = HF_CONFIGS["deepseek_v3"]
# Moonshot's config.json says null for what it has none of.
HF_CONFIGS["kimi_k2"] = dict(
    HF_CONFIGS["deepseek_v3"], n_group=1, topk_group=1, n_shared_experts=None
)
HF_CONFIGS["glm4_moe"] = dict(
    n_routed_experts=E, moe_intermediate_size=F, n_shared_experts=1
)
HF_CONFIGS["qwen3_next"] = HF_CONFIGS["qwen2_moe"]


def hf(model_type: str) -> dict:
    return dict(SMALL, model_type=model_type, **HF_CONFIGS[model_type])


def random_params(config: MoEConfig, seed: int = 0):
    params = jax.eval_shape(lambda: init_params(jax.random.key(seed), config))
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape).astype(np.float32), params
    )


def test_every_model_type_is_tested():
    assert set(HF_CONFIGS) == set(MODEL_TYPES)


def test_docstrings():
    assert doctest.testmod(pretrained).failed == 0
    assert doctest.testmod(hf_models).failed == 0


def test_configs():
    sizes = dict(num_experts=E, moe_intermediate_size=F, **SMALL)
    want = dict(
        mixtral=MoEConfig(**sizes),
        qwen2_moe=MoEConfig(
            norm_topk_prob=False,
            shared_expert_intermediate_size=3,
            shared_expert_gate=True,
            **sizes,
        ),
        qwen3_moe=MoEConfig(**sizes),
        olmoe=MoEConfig(norm_topk_prob=False, **sizes),
        deepseek_v2=MoEConfig(
            norm_topk_prob=False,
            num_shared_experts=2,
            routed_scaling_factor=16.0,
            n_group=4,
            topk_group=2,
            group_score="max",
            **sizes,
        ),
        deepseek_v3=MoEConfig(
            score_func="sigmoid",
            selection_bias=True,
            num_shared_experts=1,
            routed_scaling_factor=2.5,
            n_group=4,
            topk_group=2,
            **sizes,
        ),
        gpt_oss=MoEConfig(
            activation="clipped_swiglu", router_bias=True, mlp_bias=True, **sizes
        ),
        llama4_text=MoEConfig(
            score_func="sigmoid",
            norm_topk_prob=False,
            weights_scale_input=True,
            num_shared_experts=1,
            **sizes,
        ),
    )
    v3 = want["deepseek_v3"]
    no_groups = dict(n_group=1, topk_group=1)
    want["deepseek_v32"] = v3
    want["glm4_moe"] = dataclasses.replace(v3, routed_scaling_factor=1.0, **no_groups)
    want["kimi_k2"] = dataclasses.replace(
        v3, routed_scaling_factor=2.827, num_shared_experts=0, **no_groups
    )
    want["qwen3_next"] = dataclasses.replace(want["qwen2_moe"], norm_topk_prob=True)
    for model_type in MODEL_TYPES:
        assert hf_moe_config(hf(model_type)) == want[model_type], model_type
    config = hf_moe_config(hf("mixtral"), capacity_factor=1.25, expert_alignment=8)
    assert config == dataclasses.replace(
        want["mixtral"], capacity_factor=1.25, expert_alignment=8
    )


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per expert"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_round_trip(model_type, stacked, fused):
    config = hf_moe_config(hf(model_type), fuse_gate_up=fused)
    params = random_params(config)
    prefix = "model.layers.7.mlp."
    tensors = export_hf_moe_layer(
        params, config, model_type=model_type, prefix=prefix, stacked=stacked
    )
    others = {"model.layers.70.mlp.gate.weight": 0, "lm_head.weight": 0}
    loaded = load_hf_moe_layer(
        {**tensors, **others}, config, model_type=model_type, prefix=prefix
    )
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for name in param_info(config):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(params, name))
    half = load_hf_moe_layer(
        tensors, config, model_type=model_type, prefix=prefix, dtype=jnp.bfloat16
    )
    for name in param_info(config):
        want = jnp.float32 if name == "selection_bias" else jnp.bfloat16
        assert getattr(half, name).dtype == want, name


def test_names_and_orientation():
    """Each tensor's place, by hand: what a round trip cannot see."""
    config = hf_moe_config(hf("mixtral"))
    params = random_params(config)
    tensors = export_hf_moe_layer(params, config, model_type="mixtral")
    assert set(tensors) == {"gate.weight"} | {
        f"experts.{e}.w{i}.weight" for e in range(E) for i in (1, 2, 3)
    }
    np.testing.assert_array_equal(tensors["gate.weight"], params.router_kernel.T)
    gate_up = params.gate_up_proj
    np.testing.assert_array_equal(tensors["experts.5.w1.weight"], gate_up[5, :, :F].T)
    np.testing.assert_array_equal(tensors["experts.5.w3.weight"], gate_up[5, :, F:].T)
    np.testing.assert_array_equal(tensors["experts.5.w2.weight"], params.down_proj[5].T)

    config = hf_moe_config(hf("qwen2_moe"))
    params = random_params(config)
    tensors = export_hf_moe_layer(params, config, model_type="qwen2_moe", stacked=True)
    assert {name: value.shape for name, value in tensors.items()} == {
        "gate.weight": (E, H),
        "experts.gate_up_proj": (E, 2 * F, H),
        "experts.down_proj": (E, H, F),
        "shared_expert.gate_proj.weight": (3, H),
        "shared_expert.up_proj.weight": (3, H),
        "shared_expert.down_proj.weight": (H, 3),
        "shared_expert_gate.weight": (1, H),
    }

    config = hf_moe_config(hf("gpt_oss"))
    params = random_params(config)
    tensors = export_hf_moe_layer(params, config, model_type="gpt_oss")
    assert {name: value.shape for name, value in tensors.items()} == {
        "router.weight": (E, H),
        "router.bias": (E,),
        "experts.gate_up_proj": (E, H, 2 * F),
        "experts.gate_up_proj_bias": (E, 2 * F),
        "experts.down_proj": (E, F, H),
        "experts.down_proj_bias": (E, H),
    }
    np.testing.assert_array_equal(
        tensors["experts.gate_up_proj"][:, :, ::2], params.gate_up_proj[:, :, :F]
    )

    config = hf_moe_config(hf("deepseek_v3"))
    tensors = export_hf_moe_layer(
        random_params(config), config, model_type="deepseek_v3"
    )
    assert {name for name in tensors if not name.startswith("experts.")} == {
        "gate.weight",
        "gate.e_score_correction_bias",
        "shared_experts.gate_proj.weight",
        "shared_experts.up_proj.weight",
        "shared_experts.down_proj.weight",
    }


def tensors_of(model_type: str):
    config = hf_moe_config(hf(model_type))
    params = random_params(config)
    return config, export_hf_moe_layer(
        params, config, model_type=model_type, prefix="b."
    )


def refusal(tensors, config, model_type) -> str:
    with pytest.raises(ValueError) as error:
        load_hf_moe_layer(tensors, config, model_type=model_type, prefix="b.")
    return str(error.value)


def test_missing_surplus_and_misshapen_tensors_are_named():
    config, tensors = tensors_of("qwen3_moe")
    for name in ("b.experts.3.up_proj.weight", "b.gate.weight"):
        less = {key: value for key, value in tensors.items() if key != name}
        assert refusal(less, config, "qwen3_moe") == (
            f"jax_ep.load_hf_moe_layer: missing: {name}."
        )
    more = {**tensors, "b.experts.3.up_proj.bias": np.zeros(F)}
    assert refusal(more, config, "qwen3_moe") == (
        "jax_ep.load_hf_moe_layer: left over: b.experts.3.up_proj.bias."
    )
    wrong = {**tensors, "b.experts.3.up_proj.weight": np.zeros((H, F))}
    assert refusal(wrong, config, "qwen3_moe") == (
        "jax_ep.load_hf_moe_layer: b.experts.3.up_proj.weight must have shape (4, 6), "
        "and has (6, 4)."
    )
    # A wrong prefix: everything is missing, and four are enough to see it.
    with pytest.raises(ValueError) as error:
        load_hf_moe_layer(tensors, config, model_type="qwen3_moe", prefix="c.")
    assert str(error.value) == (
        "jax_ep.load_hf_moe_layer: missing: c.gate.weight, "
        "c.experts.0.gate_proj.weight, c.experts.0.up_proj.weight, "
        "c.experts.0.down_proj.weight and 21 more."
    )
    # More experts than the config has.
    fewer = dataclasses.replace(config, num_experts=7)
    assert "left over: b.experts.7.gate_proj.weight, " in refusal(
        tensors, fewer, "qwen3_moe"
    )


def test_other_messages():
    config, tensors = tensors_of("qwen3_moe")
    assert refusal(tensors, config, "llama") == (
        "jax_ep.load_hf_moe_layer: model_type (='llama') must be one of mixtral, "
        "qwen2_moe, qwen3_moe, qwen3_next, olmoe, deepseek_v2, deepseek_v3, "
        "deepseek_v32, kimi_k2, glm4_moe, gpt_oss, llama4_text."
    )
    params = load_hf_moe_layer(tensors, config, model_type="qwen3_moe", prefix="b.")
    with pytest.raises(ValueError) as error:
        export_hf_moe_layer(
            dataclasses.replace(params, down_proj=params.down_proj[:2]),
            config,
            model_type="qwen3_moe",
        )
    assert str(error.value) == (
        "jax_ep.export_hf_moe_layer: params.down_proj must have shape (8, 4, 6), and "
        "has (2, 4, 6)."
    )
    with pytest.raises(ValueError) as error:
        export_hf_moe_layer(
            dataclasses.replace(params, down_proj=None), config, model_type="qwen3_moe"
        )
    assert str(error.value).endswith("must have shape (8, 4, 6), and is None.")
    for setting, message in (
        (
            dict(hf("gpt_oss"), swiglu_limit=9.0),
            "jax_ep.hf_moe_config: swiglu_limit (=9.0) must be 7.0 for gpt_oss: "
            "nothing else is offered.",
        ),
        (
            dict(hf("deepseek_v2"), norm_topk_prob=True),
            "jax_ep.hf_moe_config: norm_topk_prob (=True) must be False for "
            "deepseek_v2: nothing else is offered.",
        ),
        (
            {
                key: value
                for key, value in hf("mixtral").items()
                if key != "hidden_size"
            },
            "jax_ep.hf_moe_config: hidden_size must be given for mixtral.",
        ),
    ):
        with pytest.raises(ValueError) as error:
            hf_moe_config(setting)
        assert str(error.value) == message


@pytest.mark.parametrize(
    "model_type, field, value, shown",
    [
        ("mixtral", "mlp_bias", True, "(=True) must be False"),
        ("llama4_text", "router_bias", True, "(=True) must be False"),
        ("qwen3_moe", "num_shared_experts", 1, "(=4) must be 0"),
        ("deepseek_v3", "expert_scale", True, "(=True) must be False"),
    ],
)
def test_a_field_without_tensors_is_named(model_type, field, value, shown):
    config = hf_moe_config(hf(model_type), **{field: value})
    params = random_params(config)
    for name, call in (
        ("load", lambda: load_hf_moe_layer({}, config, model_type=model_type)),
        ("export", lambda: export_hf_moe_layer(params, config, model_type=model_type)),
    ):
        with pytest.raises(ValueError) as error:
            call()
        field = "shared_size" if field == "num_shared_experts" else field
        assert str(error.value) == (
            f"jax_ep.{name}_hf_moe_layer: config.{field} {shown} for {model_type}, "
            "whose checkpoints have no such tensor."
        )


def test_fp8_blocks():
    random = np.random.default_rng(0)
    weight = random.normal(size=(200, 300)).astype(jnp.float8_e4m3fn)
    scale = random.random((2, 3)).astype(np.float32)
    got = stored_formats.from_fp8_blocks(weight, scale)
    for row, column in ((0, 0), (127, 128), (128, 255), (199, 299)):
        want = np.float32(weight[row, column]) * scale[row // 128, column // 128]
        assert got[row, column] == want

    config = hf_moe_config(
        dict(hf("deepseek_v3"), hidden_size=256, moe_intermediate_size=130)
    )
    params = random_params(config)
    tensors = export_hf_moe_layer(params, config, model_type="deepseek_v3")
    quantised = {}
    for name, value in tensors.items():
        quantised[name] = value
        if name.startswith(("experts.", "shared_experts.")):
            blocks = [-(-size // 128) for size in value.shape]
            quantised[name] = value.astype(jnp.float8_e4m3fn)
            quantised[f"{name}_scale_inv"] = np.full(blocks, 0.5, np.float32)
    loaded = load_hf_moe_layer(quantised, config, model_type="deepseek_v3")
    assert loaded.gate_up_proj.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        loaded.down_proj[3].T,
        (tensors["experts.3.down_proj.weight"].astype(jnp.float8_e4m3fn) * 0.5).astype(
            jnp.bfloat16
        ),
    )
    np.testing.assert_array_equal(loaded.selection_bias, params.selection_bias)
    del quantised["experts.3.down_proj.weight_scale_inv"]
    quantised["experts.2.up_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)
    with pytest.raises(ValueError) as error:
        load_hf_moe_layer(quantised, config, model_type="deepseek_v3")
    assert str(error.value) == (
        "jax_ep.load_hf_moe_layer: experts.2.up_proj.weight_scale_inv must have shape "
        "(2, 2), and has (1, 1)."
    )


def test_mxfp4():
    # Two numbers a byte, the low bits first: 1.5 and -6, times 2^(130 - 127).
    blocks = np.zeros((1, 16), np.uint8)
    blocks[0, 0] = 0xF3
    blocks[0, 15] = 0x90
    got = stored_formats.from_mxfp4(blocks, np.array([130], np.uint8)).astype(
        np.float32
    )
    want = np.zeros(32, np.float32)
    want[[0, 1, 31]] = 12, -48, -4
    np.testing.assert_array_equal(got, want)

    config = hf_moe_config(
        dict(hf("gpt_oss"), hidden_size=64, intermediate_size=32, num_local_experts=2)
    )
    random = np.random.default_rng(0)
    tensors = export_hf_moe_layer(
        random_params(config), config, model_type="gpt_oss", prefix="b."
    )
    plain = {}
    for name, rows, groups in (("gate_up_proj", 64, 2), ("down_proj", 64, 1)):
        blocks = random.integers(0, 256, (2, rows, groups, 16)).astype(np.uint8)
        scales = random.integers(120, 130, (2, rows, groups)).astype(np.uint8)
        plain[name] = stored_formats.from_mxfp4(blocks, scales)  # [E, out, in]
        del tensors[f"b.experts.{name}"]
        tensors[f"b.experts.{name}_blocks"] = blocks
        tensors[f"b.experts.{name}_scales"] = scales
    loaded = load_hf_moe_layer(
        tensors, config, model_type="gpt_oss", prefix="b.", dtype=jnp.float32
    )
    gate_up = plain["gate_up_proj"].astype(np.float32)
    np.testing.assert_array_equal(
        loaded.gate_up_proj[:, :, :32], gate_up[:, ::2].swapaxes(1, 2)
    )
    np.testing.assert_array_equal(
        loaded.gate_up_proj[:, :, 32:], gate_up[:, 1::2].swapaxes(1, 2)
    )
    np.testing.assert_array_equal(
        loaded.down_proj, plain["down_proj"].astype(np.float32).swapaxes(1, 2)
    )
    del tensors["b.experts.down_proj_scales"]
    assert refusal(tensors, config, "gpt_oss") == (
        "jax_ep.load_hf_moe_layer: missing: b.experts.down_proj_scales."
    )


def test_fp8_without_its_scale_is_named():
    """Numbers without it would be wrong, and nothing would fail."""
    config, tensors = tensors_of("qwen3_moe")
    name = "b.experts.3.up_proj.weight"
    tensors[name] = tensors[name].astype(jnp.float8_e4m3fn)
    assert refusal(tensors, config, "qwen3_moe") == (
        f"jax_ep.load_hf_moe_layer: missing: {name}_scale_inv."
    )


def write_safetensors(path, tensors):
    """The format, by hand: length, JSON header, bytes."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = dict(
            dtype=dtype,
            shape=list(array.shape),
            data_offsets=[len(data), len(data) + len(raw)],
        )
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_fp8_checkpoint_from_its_file(tmp_path):
    """E4M3 by its bits: 1.5, -0.875, 448 and the least denormal, times the scale."""
    bits = np.zeros((F, H), np.uint8)
    bits[0, :4] = 0x3C, 0xB6, 0x7E, 0x01
    want = np.zeros((F, H), np.float32)
    want[0, :4] = 1.5, -0.875, 448, 2.0**-9
    config, tensors = tensors_of("deepseek_v3")
    stored = {name: ("F32", array) for name, array in tensors.items()}
    stored["b.gate.weight"] = ("BF16", tensors["b.gate.weight"].astype(jnp.bfloat16))
    name = "b.experts.3.up_proj.weight"
    stored[name] = ("F8_E4M3", bits)
    stored[f"{name}_scale_inv"] = ("F32", np.full((1, 1), 0.5, np.float32))
    names = list(stored)
    for shard, part in enumerate((names[:5], names[5:])):
        path = tmp_path / f"model-{shard}.safetensors"
        write_safetensors(path, {name: stored[name] for name in part})
    read = load_safetensors(tmp_path)
    assert list(read) == names
    assert read[name].dtype == jnp.float8_e4m3fn
    assert read["b.gate.weight"].dtype == jnp.bfloat16
    assert not read[name].flags.writeable
    params = load_hf_moe_layer(
        read, config, model_type="deepseek_v3", prefix="b.", dtype=np.float32
    )
    np.testing.assert_array_equal(params.gate_up_proj[3, :, F:], 0.5 * want.T)
    np.testing.assert_array_equal(
        params.down_proj[2], tensors["b.experts.2.down_proj.weight"].T
    )
    np.testing.assert_array_equal(
        params.router_kernel, stored["b.gate.weight"][1].astype(np.float32).T
    )


def test_safetensors_of_every_dtype(tmp_path):
    values = np.arange(6).reshape(2, 3)
    dtypes = dict(F64=np.float64, F16=np.float16, BF16=jnp.bfloat16, I64=np.int64)
    dtypes.update(F8_E5M2=jnp.float8_e5m2, F8_E4M3=jnp.float8_e4m3fn, BOOL=np.bool_)
    dtypes.update(U8=np.uint8, I8=np.int8, U16=np.uint16, I32=np.int32)
    tensors = {name: (name, values.astype(dtype)) for name, dtype in dtypes.items()}
    tensors["scalar"] = ("F32", np.array(2.5, np.float32))
    tensors["empty"] = ("F32", np.zeros((0, 4), np.float32))
    write_safetensors(tmp_path / "a.safetensors", tensors)
    read = load_safetensors(tmp_path / "a.safetensors")
    assert set(read) == set(tensors)
    for name, (_, array) in tensors.items():
        assert read[name].dtype == array.dtype and read[name].shape == array.shape
        np.testing.assert_array_equal(read[name], array)


def test_safetensors_that_are_damaged(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, dict(w=("F32", np.zeros((2, 3), np.float32))))
    whole = path.read_bytes()

    def message(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(ValueError) as error:
            load_safetensors(path)
        return str(error.value).removeprefix(
            f"jax_ep.load_safetensors: path (={str(path)!r}) "
        )

    assert message(whole[:-1]) == (
        "must have 24 bytes of w, and has them at 0 to 24 of 23."
    )
    assert message(b"") == "must begin with its header's length, and has 0 bytes."
    assert message(whole[:20]).startswith("must begin with its header's length")
    assert message(b"\xff" * 40).startswith("must begin with its header's length")
    assert message(whole[:8] + b"[" + whole[9:]).startswith("must have a JSON header (")
    assert message(whole.replace(b'"F32"', b'"F4X"')).startswith(
        "has w in F4X, which must be one of ['BOOL', 'U8', "
    )
    assert message(whole.replace(b'"shape"', b'"share"')).startswith(
        "must say dtype, shape and data_offsets of w (KeyError"
    )
    for shard in "ab":
        (tmp_path / f"{shard}.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="must not repeat w of another file.$"):
        load_safetensors(tmp_path)
    with pytest.raises(FileNotFoundError, match="must have .safetensors files in it"):
        (tmp_path / "none").mkdir()
        load_safetensors(tmp_path / "none")
