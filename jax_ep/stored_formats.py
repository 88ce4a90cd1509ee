"""Quantised checkpoints as plain arrays: DeepSeek's FP8 blocks, GPT-OSS's MXFP4."""

import jax.numpy as jnp
import numpy as np

FP8_BLOCK = 128  # Rows and columns that share a scale in DeepSeek-V3's checkpoints.
MXFP4_BLOCK = 32  # Elements that share a scale: OCP Microscaling Formats 1.0, table 1.

# The values of E2M1, by their four bits (the same specification, section 5.3.3).
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_E8M0_BIAS = 127


def from_fp8_blocks(weight, scale_inv) -> np.ndarray:
    """`weight * scale_inv`, one scale for each block of 128 x 128 of the last two axes.

    Args:
      weight: `[..., M, N]` float8_e4m3fn.
      scale_inv: `[..., ceil(M / 128), ceil(N / 128)]` float32.

    Returns:
      `[..., M, N]` float32.

    Source: DeepSeek-V3's checkpoint, tensors `*.weight` and `*.weight_scale_inv`
    (arXiv:2412.19437, section 3.3.2, and the model's `kernel.py`).
    """
    rows, columns = weight.shape[-2:]
    scale = np.asarray(scale_inv, np.float32)
    scale = scale.repeat(FP8_BLOCK, axis=-2)[..., :rows, :]
    scale = scale.repeat(FP8_BLOCK, axis=-1)[..., :columns]
    return np.asarray(weight).astype(np.float32) * scale


def from_mxfp4(blocks, scales) -> np.ndarray:
    """Two 4-bit numbers a byte, the low bits first, times a power of two per 32.

    Args:
      blocks: `[..., N / 32, 16]` uint8.
      scales: `[..., N / 32]` uint8, exponents with a bias of 127.

    Returns:
      `[..., N]` bfloat16, which holds every such number exactly.

    Source: GPT-OSS's checkpoint, tensors `*_blocks` and `*_scales`; OCP Microscaling
    Formats 1.0, sections 5.3.3 and 5.4.1.
    """
    blocks = np.asarray(blocks)
    if blocks.ndim > 3:  # One expert at a time: float32 takes eight times the room.
        each = zip(blocks, np.asarray(scales), strict=True)
        return np.stack([from_mxfp4(*expert) for expert in each])
    values = np.stack([_E2M1[blocks & 0x0F], _E2M1[blocks >> 4]], axis=-1)
    values = values.reshape(*blocks.shape[:-1], MXFP4_BLOCK)
    exponent = np.asarray(scales).astype(np.int32) - _E8M0_BIAS
    values = np.ldexp(values, exponent[..., None])
    return values.reshape(*blocks.shape[:-2], -1).astype(jnp.bfloat16)
