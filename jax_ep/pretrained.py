"""Pretrained weights: a Hugging Face MoE block into `MoEParams`, and back again."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep import stored_formats
from jax_ep.config import MoEConfig
from jax_ep.hf_models import Names, check_fields, names_of
from jax_ep.params import MoEParams, param_info

_SHOWN = 4  # Names in a message, before "and n more".
_PER_EXPERT, _STACKED, _MXFP4 = "per expert", "stacked", "mxfp4"


def load_hf_moe_layer(
    tensors: Mapping[str, Any],
    config: MoEConfig,
    *,
    model_type: str,
    prefix: str = "",
    dtype: Any = None,
) -> MoEParams:
    """One MoE block of a Hugging Face checkpoint as parameters of our layer.

    On the host, in NumPy; put the result on devices with `jax.device_put` and the
    layer's shardings (`param_specs`). Each tensor is read once, so a mapping that reads
    lazily keeps memory at one layer.

    Each projection may be spelled per expert (as published checkpoints are:
    `experts.3.up_proj.weight`, Mixtral's `experts.3.w3.weight`), or stacked over
    experts (as recent `transformers` hold it in memory: `experts.gate_up_proj`). Blocks
    quantised as DeepSeek-V3's FP8 (`*_scale_inv`) or GPT-OSS's MXFP4 (`*_blocks`,
    `*_scales`) are dequantised.

    Args:
      tensors: names to arrays, e.g. from `load_safetensors`; values are what
        `numpy.asarray` takes.
      config: from `hf_moe_config`; `fuse_gate_up` says which form is made.
      model_type: one of `MODEL_TYPES`.
      prefix: what the names of this block start with, e.g. "model.layers.0.mlp." or
        "model.layers.0.block_sparse_moe.". Names that do not are left alone.
      dtype: of the result. None keeps the checkpoint's (bfloat16 for dequantised
        ones). The selection bias is float32 in any case.

    Returns:
      `MoEParams` of NumPy arrays over all E experts, `[in, out]` as our layer wants.

    Raises:
      ValueError: names the tensors that are missing, left over, or of a wrong shape, or
        a field of the config that the model type has no tensors of.
    """
    op = "load_hf_moe_layer"
    names = names_of(op, model_type)
    check_fields(op, names, config, model_type)
    block = {
        name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)
    }
    shapes = dict(_shapes(names, config, _spelling(block)))
    for name, shape in list(shapes.items()):
        scale = f"{name}_scale_inv"
        if scale in block:
            blocks = [-(-size // stored_formats.FP8_BLOCK) for size in shape[-2:]]
            shapes[scale] = (*shape[:-2], *blocks)
    _refuse_names(op, "missing", [prefix + n for n in shapes if n not in block])
    _refuse_names(op, "left over", [block[n] for n in block if n not in shapes])

    def read(name: str) -> np.ndarray:
        array = np.asarray(tensors[block[name]])
        if array.shape != shapes[name]:
            raise ValueError(
                f"jax_ep.{op}: {block[name]} must have shape {shapes[name]}, and has "
                f"{array.shape}."
            )
        return array

    def weight(name: str) -> np.ndarray:
        if f"{name}_blocks" in shapes:
            blocks, scales = read(f"{name}_blocks"), read(f"{name}_scales")
            array = stored_formats.from_mxfp4(blocks, scales).swapaxes(1, 2)
        elif f"{name}_scale_inv" in shapes:
            array = stored_formats.from_fp8_blocks(
                read(name), read(f"{name}_scale_inv")
            )
            array = array.astype(jnp.bfloat16 if dtype is None else dtype)
        else:
            array = read(name)
            if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 1:
                # Numbers without their scale would be wrong, and nothing would fail.
                _refuse_names(op, "missing", [f"{prefix}{name}_scale_inv"])
        return array if dtype is None else array.astype(dtype)

    values = _read_experts(names, config, _spelling(block), weight)
    values["router_kernel"] = weight(f"{names.router}.weight").T
    if config.router_bias:
        values["router_bias"] = weight(f"{names.router}.bias")
    if config.selection_bias:
        bias = read(f"{names.router}.e_score_correction_bias")
        values["selection_bias"] = bias.astype(np.float32)
    if config.shared_size:
        gate, up, down = (
            weight(f"{names.shared}.{part}_proj.weight").T
            for part in ("gate", "up", "down")
        )
        if config.fuse_gate_up:
            values["shared_gate_up_proj"] = np.concatenate([gate, up], axis=1)
        else:
            values.update(shared_gate_proj=gate, shared_up_proj=up)
        values["shared_down_proj"] = down
        if config.shared_expert_gate:
            values["shared_expert_gate"] = weight(f"{names.shared}_gate.weight").T
    wanted = param_info(config)
    return MoEParams(**{name: np.ascontiguousarray(values[name]) for name in wanted})


def export_hf_moe_layer(
    params: MoEParams,
    config: MoEConfig,
    *,
    model_type: str,
    prefix: str = "",
    stacked: bool = False,
) -> dict[str, np.ndarray]:
    """The inverse of `load_hf_moe_layer`: our parameters under Hugging Face's names.

    Being linear, it also brings gradients to the names and shapes of the model's.

    Args:
      params: global `MoEParams`; arrays that `numpy.asarray` can gather.
      config: the layer.
      model_type: one of `MODEL_TYPES`.
      prefix: put before each name.
      stacked: experts stacked, as recent `transformers` hold them in memory; False is
        per expert, as published checkpoints are. GPT-OSS and Llama 4 are always
        stacked.

    Returns:
      Names to NumPy arrays, in the parameters' dtypes.

    Raises:
      ValueError: a parameter that is missing or of a wrong shape, or of which the model
        type has none.
    """
    op = "export_hf_moe_layer"
    names = names_of(op, model_type)
    check_fields(op, names, config, model_type)
    values: dict[str, np.ndarray] = {}
    for name, info in param_info(config).items():
        value = getattr(params, name)
        if value is None or np.shape(value) != info.shape:
            shown = "is None" if value is None else f"has {np.shape(value)}"
            raise ValueError(
                f"jax_ep.{op}: params.{name} must have shape {info.shape}, and {shown}."
            )
        values[name] = np.asarray(value)

    def split(prefix: str, suffix: str) -> list[np.ndarray]:
        """Gate and up, from one fused array or from two."""
        if config.fuse_gate_up:
            return np.split(values[f"{prefix}gate_up_{suffix}"], 2, axis=-1)
        return [values[f"{prefix}{part}_{suffix}"] for part in ("gate", "up")]

    out = {f"{names.router}.weight": values["router_kernel"].T}
    if config.router_bias:
        out[f"{names.router}.bias"] = values["router_bias"]
    if config.selection_bias:
        out[f"{names.router}.e_score_correction_bias"] = values["selection_bias"]
    gate, up = split("", "proj")
    down = values["down_proj"]
    if names.interleaved:
        out["experts.gate_up_proj"] = _interleave(gate, up)
        out["experts.down_proj"] = down
        out["experts.gate_up_proj_bias"] = _interleave(*split("", "bias"))
        out["experts.down_proj_bias"] = values["down_bias"]
    elif names.in_out:
        out["experts.gate_up_proj"] = np.concatenate([gate, up], axis=2)
        out["experts.down_proj"] = down
    elif stacked:
        gate_up = np.concatenate([gate, up], axis=2)
        out["experts.gate_up_proj"] = gate_up.swapaxes(1, 2)
        out["experts.down_proj"] = down.swapaxes(1, 2)
    else:
        for expert in range(config.num_experts):
            for part, value in ((names.gate, gate), (names.up, up), (names.down, down)):
                out[f"experts.{expert}.{part}.weight"] = value[expert].T
    if config.shared_size:
        gate, up = split("shared_", "proj")
        down = values["shared_down_proj"]
        for part, value in (("gate", gate), ("up", up), ("down", down)):
            out[f"{names.shared}.{part}_proj.weight"] = value.T
        if config.shared_expert_gate:
            out[f"{names.shared}_gate.weight"] = values["shared_expert_gate"].T
    return {prefix + name: np.ascontiguousarray(value) for name, value in out.items()}


def _spelling(block: Mapping[str, str]) -> str:
    if "experts.gate_up_proj_blocks" in block:
        return _MXFP4
    return _STACKED if "experts.gate_up_proj" in block else _PER_EXPERT


def _shapes(
    names: Names, config: MoEConfig, spelling: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that a block must have, and its shape."""
    e, h, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    s = config.shared_size
    yield f"{names.router}.weight", (e, h)
    if config.router_bias:
        yield f"{names.router}.bias", (e,)
    if config.selection_bias:
        yield f"{names.router}.e_score_correction_bias", (e,)
    if names.interleaved:
        if spelling == _MXFP4:
            groups = h // stored_formats.MXFP4_BLOCK, f // stored_formats.MXFP4_BLOCK
            bytes_each = stored_formats.MXFP4_BLOCK // 2
            yield "experts.gate_up_proj_blocks", (e, 2 * f, groups[0], bytes_each)
            yield "experts.gate_up_proj_scales", (e, 2 * f, groups[0])
            yield "experts.down_proj_blocks", (e, h, groups[1], bytes_each)
            yield "experts.down_proj_scales", (e, h, groups[1])
        else:
            yield "experts.gate_up_proj", (e, h, 2 * f)
            yield "experts.down_proj", (e, f, h)
        yield "experts.gate_up_proj_bias", (e, 2 * f)
        yield "experts.down_proj_bias", (e, h)
    elif names.in_out:
        yield "experts.gate_up_proj", (e, h, 2 * f)
        yield "experts.down_proj", (e, f, h)
    elif spelling == _STACKED:
        yield "experts.gate_up_proj", (e, 2 * f, h)
        yield "experts.down_proj", (e, h, f)
    else:
        for expert in range(e):
            yield f"experts.{expert}.{names.gate}.weight", (f, h)
            yield f"experts.{expert}.{names.up}.weight", (f, h)
            yield f"experts.{expert}.{names.down}.weight", (h, f)
    if s:
        yield f"{names.shared}.gate_proj.weight", (s, h)
        yield f"{names.shared}.up_proj.weight", (s, h)
        yield f"{names.shared}.down_proj.weight", (h, s)
        if config.shared_expert_gate:
            yield f"{names.shared}_gate.weight", (1, h)


def _read_experts(names: Names, config: MoEConfig, spelling: str, weight) -> dict:
    """The routed experts' arrays, gate and up fused or not as the config says."""
    values: dict[str, np.ndarray] = {}

    def put(suffix: str, gate: np.ndarray, up: np.ndarray) -> None:
        if config.fuse_gate_up:
            values[f"gate_up_{suffix}"] = np.concatenate([gate, up], axis=-1)
        else:
            values.update({f"gate_{suffix}": gate, f"up_{suffix}": up})

    if names.interleaved:
        gate_up = weight("experts.gate_up_proj")
        put("proj", gate_up[..., ::2], gate_up[..., 1::2])
        gate_up = weight("experts.gate_up_proj_bias")
        put("bias", gate_up[..., ::2], gate_up[..., 1::2])
        values["down_proj"] = weight("experts.down_proj")
        values["down_bias"] = weight("experts.down_proj_bias")
    elif names.in_out:
        put("proj", *np.split(weight("experts.gate_up_proj"), 2, axis=2))
        values["down_proj"] = weight("experts.down_proj")
    elif spelling == _STACKED:
        gate_up = weight("experts.gate_up_proj").swapaxes(1, 2)
        put("proj", *np.split(gate_up, 2, axis=2))
        values["down_proj"] = weight("experts.down_proj").swapaxes(1, 2)
    else:

        def stack(*parts: str) -> np.ndarray:
            """`[E, in, out]`, the parts' columns side by side; no second copy."""
            out = None
            for expert in range(config.num_experts):
                each = [weight(f"experts.{expert}.{part}.weight").T for part in parts]
                one = np.concatenate(each, axis=1)
                if out is None:
                    out = np.empty((config.num_experts, *one.shape), one.dtype)
                out[expert] = one
            assert out is not None  # E >= 1.
            return out

        if config.fuse_gate_up:
            values["gate_up_proj"] = stack(names.gate, names.up)
        else:
            values["gate_proj"] = stack(names.gate)
            values["up_proj"] = stack(names.up)
        values["down_proj"] = stack(names.down)
    return values


def _interleave(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)


def _refuse_names(op: str, what: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ValueError(f"jax_ep.{op}: {what}: {shown}{more}.")
