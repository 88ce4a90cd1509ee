"""The whole layer in ten lines, inside a shard_map; `sharded_moe` makes its own."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jax_ep.axis import expert_axis
from jax_ep.capacity import receive_capacity
from jax_ep.chunks import chunk_sizes, in_chunks, split
from jax_ep.combine import combine
from jax_ep.config import MoEConfig
from jax_ep.dispatch import dispatch
from jax_ep.dropless import in_rounds
from jax_ep.experts import Matmul, layer_experts, shared_experts
from jax_ep.layout import dispatch_layout
from jax_ep.losses import MoEStats, moe_stats
from jax_ep.params import MoEParams, check_params
from jax_ep.placement import Placement, equal_shares, placed
from jax_ep.router import router
from jax_ep.stored import local_weights
from jax_ep.tokens import axes_of_tokens, check_arrays, flat_tokens
from jax_ep.two_hops import for_rounds


def moe(
    x: jax.Array,
    params: MoEParams,
    config: MoEConfig,
    *,
    axis_name: str | Sequence[str] = "expert",
    data_axes: str | Sequence[str] | None = None,
    tensor_axis: str | Sequence[str] = (),
    sequence_axes: str | Sequence[str] | None = None,
    specs: MoEParams | None = None,
    token_mask: jax.Array | None = None,
    key: jax.Array | None = None,
    placement: Placement | None = None,
    keep_topk_idx: bool = False,
    matmul: Matmul | None = None,
) -> tuple[jax.Array, MoEStats]:
    """A Mixture-of-Experts layer: router, layout, dispatch, experts, combine.

    Call it inside a fully manual `jax.shard_map` over `axis_name`, on every rank.
    `sharded_moe` makes that itself and explains the arguments. Here x is this rank's
    `[..., H]` (`[..., S, H]` for a loss per sequence), and params are its L experts, or
    all E, and the rest of `MoEParams` whole, or what `specs` say of them. A loss per
    sequence must be told `sequence_axes`, () where no sequence is split.

    Returns:
      `out`, like x, and `MoEStats`, the same on all ranks but for `topk_idx`.

    Raises:
      ValueError, TypeError: as the stages and the checks below raise.

    Derivative: of x and params. Slots that were dropped add nothing to either.
    On the wire: see `dispatch`, `combine`; statistics are all-reduces of E numbers.

    Source: `y = sum over the top k experts e of g_e(x) * E_e(x)`, arXiv:1701.06538,
    equation 1. What each model departs in is in `topk_routing` and `MoEConfig`.
    """
    axis = expert_axis("moe", axis_name)
    check_params("moe", params, config)
    check_arrays("moe", x, config, token_mask, placement)
    given = (data_axes, sequence_axes, tensor_axis)
    axes, sequence_axes, tensor = axes_of_tokens(config, axis, *given)
    placement = placement or equal_shares(config.num_experts, axis.num_ranks)
    params = local_weights(params, specs, config, axis, axes, placement, tensor)
    tokens, mask = flat_tokens(x, token_mask)
    if key is not None and axes:
        key = jax.random.fold_in(key, lax.axis_index(axes))

    routing = router(
        tokens,
        params.router_kernel,
        config,
        bias=params.router_bias,
        selection_bias=params.selection_bias,
        expert_scale=params.expert_scale,
        token_mask=mask,
        key=key,
    )
    slots = config.num_experts if placement is None else placement.num_slots

    def exchange_of(num_tokens):
        rows = receive_capacity(config, num_tokens, axis.num_ranks, num_slots=slots)
        return config.exchange(axis_name=axis.names, num_slots=slots, capacity=rows)

    exchange = exchange_of(len(tokens))
    has_rounds = config.dropless_fallback and config.capacity_factor is not None
    if has_rounds:
        told = (axis.num_ranks, len(tokens), config.num_experts_per_tok)
        exchange = for_rounds(exchange, *told)
    topk_idx, routed = placed(routing.topk_idx, params.routed, placement, exchange)
    static: dict[str, Any] = dict(config=config, matmul=matmul, tensor=tensor)
    weights, rounds = routing.topk_weights, None
    if config.num_chunks is not None:
        sizes = chunk_sizes(len(tokens), config.num_chunks)
        handle = [
            dispatch_layout(ids, exchange=exchange_of(len(ids)))
            for ids in split(topk_idx, sizes)
        ]
        out = in_chunks(routed, params.shared, tokens, weights, handle, **static)
    else:
        handle = dispatch_layout(topk_idx, exchange=exchange)
        shared = shared_experts(tokens, params, activation=config.activation)
        layer = functools.partial(_routed_experts, **static)
        if has_rounds:
            args, most = (routed, tokens, topk_idx, weights, handle), config.max_rounds
            out, rounds = in_rounds(layer, *args, max_rounds=most, bias=shared)
        else:
            out = layer(routed, tokens, weights, handle, shared)
    stats = moe_stats(
        routing,
        handle,
        config,
        axis_name=axes,
        sequence_axes=sequence_axes,
        rounds=rounds,
        num_sequences=math.prod(x.shape[:-2]) if x.ndim > 2 else None,
    )
    if keep_topk_idx:
        kept = routing.topk_idx.reshape(*x.shape[:-1], config.num_experts_per_tok)
        stats = dataclasses.replace(stats, topk_idx=kept)
    return out.reshape(x.shape), stats


def _routed_experts(params, x, weights, handle, bias, *, config, matmul, tensor):
    """Dispatch, experts, combine: what `in_rounds` may repeat."""
    recv_x, recv_weights = dispatch(tensor.mine(x), handle, weights)
    static: dict[str, Any] = dict(config=config, matmul=matmul, tensor=tensor)
    y, late = layer_experts(handle, recv_x, recv_weights, params, **static)
    return tensor.whole(combine(y, handle, weights=late, bias=tensor.mine(bias)))
