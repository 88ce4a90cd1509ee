"""A small batch whose every value is exact in float32, and its layer of experts.

Expert e multiplies its rows by `scales[e]`, e + 1 unless said otherwise; so a token's
output is its row times the sum of its weights times its experts' scales.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep import ffi

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 4, 4, 8, 8, 2

_token = np.arange(RANKS * TOKENS)[:, None]
X = (1 + (7 * _token + 3 * np.arange(HIDDEN)) % 11).astype(np.float32)  # [R*T, H]
IDS = ((3 * _token + 5 * np.arange(TOPK)) % EXPERTS).astype(np.int32)  # [R*T, K]
WEIGHTS = ((1 + (_token + 2 * np.arange(TOPK)) % 4) / 8).astype(np.float32)  # [R*T, K]
SCALES = np.arange(1, EXPERTS + 1, dtype=np.float32)  # [E]

SUMS = [484, 540.25, 454.75, 595.75]  # of the outputs, per rank
WEIGHT_GRADIENT_SUMS = [1590, 1900, 1494, 2022]
SCALE_GRADIENTS = [59.125, 87.375, 63.375, 35.875, 58.625, 82.875, 61.125, 36.125]


def row_scales(scales: jax.Array, handle: jax_ep.Handle) -> jax.Array:
    """`[C]`: the scale of each row's expert, from this rank's `[L]`."""
    return jnp.repeat(scales, handle.group_sizes, total_repeat_length=handle.capacity)


def layer(x, ids, weights, scales, **static):
    """One layer of experts, inside a shard_map; `scales` is this rank's `[L]`."""
    static.setdefault("num_experts", EXPERTS)
    handle = jax_ep.dispatch_layout(ids, **static)
    recv, recv_weights = jax_ep.dispatch(x, handle, weights)
    y = recv * (recv_weights * row_scales(scales, handle))[:, None]
    return jax_ep.combine(y, handle)


def token_scales(ids, weights, scales=SCALES) -> np.ndarray:
    """`[n]`: what the layer multiplies each token by."""
    valid = (ids >= 0) & (ids < len(scales))
    return np.where(valid, weights * scales[np.where(valid, ids, 0)], 0).sum(-1)


def outputs(x=X, ids=IDS, weights=WEIGHTS, scales=SCALES) -> np.ndarray:
    """What the layer gives, for tokens of any number of ranks."""
    out = x * token_scales(ids, weights, scales)[:, None]
    return out.astype(np.float32) + np.float32(0)  # no sum is -0


def gradients(x=X, ids=IDS, weights=WEIGHTS, scales=SCALES):
    """Of the sum of all outputs: by x, weights and scales."""
    valid = (ids >= 0) & (ids < len(scales))
    expert = np.where(valid, ids, 0)
    dx = np.broadcast_to(token_scales(ids, weights, scales)[:, None], x.shape)
    row_sums = x.sum(1, keepdims=True)
    d_weights = np.where(valid, scales[expert] * row_sums, 0)
    d_scales = np.zeros_like(scales)
    np.add.at(d_scales, expert[valid], (weights * row_sums)[valid])
    return tuple(g.astype(np.float32) for g in (dx, d_weights, d_scales))


def per_rank(array, num_ranks: int = RANKS) -> list:
    """The sum of each rank's share."""
    return np.asarray(array).reshape(num_ranks, -1).sum(1).tolist()


def custom_calls(text: str) -> tuple[int, int, int]:
    """How many (layouts, dispatches, combines) a compiled program has."""
    return tuple(text.count(f'custom_call_target="{target}"') for target in ffi.TARGETS)
