"""The whole layer in ten lines, inside a shard_map; `sharded_moe` makes its own."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.axis import axis_label, expert_axis
from jax_ep.combine import combine
from jax_ep.config import MoEConfig
from jax_ep.dispatch import dispatch
from jax_ep.dropless import in_rounds
from jax_ep.experts import experts, shared_experts
from jax_ep.layout import dispatch_layout
from jax_ep.losses import MoEStats, moe_stats
from jax_ep.params import MoEParams, check_params, names_of
from jax_ep.payload import is_float
from jax_ep.placement import Placement, place_params, place_topk, plan_placement
from jax_ep.router import router
from jax_ep.stored import checked_specs, local_weights


def moe(
    x: jax.Array,
    params: MoEParams,
    config: MoEConfig,
    *,
    axis_name: str | Sequence[str] = "expert",
    data_axes: str | Sequence[str] | None = None,
    specs: MoEParams | None = None,
    token_mask: jax.Array | None = None,
    key: jax.Array | None = None,
    placement: Placement | None = None,
    keep_topk_idx: bool = False,
) -> tuple[jax.Array, MoEStats]:
    """A Mixture-of-Experts layer: router, layout, dispatch, experts, combine.

    Call it inside a fully manual `jax.shard_map` over `axis_name`, on every rank.
    `sharded_moe` does the shard_map itself.

    Args:
      x: `[T, H]` or `[..., H]`, float32, bfloat16 or float16; this rank's tokens. All
        but the router computes in its dtype.
      params: this rank's L experts (or all E), and the rest of `MoEParams` whole, or
        see `specs`. Where R does not divide E, all experts: `plan_placement` then gives
        each rank as many, some of them more than once.
      config: the layer.
      axis_name: mesh axis, or tuple of axes, that the experts are split over.
      data_axes: further mesh axes that tokens are split over; None is all others.
        Statistics and losses are over all of them and `axis_name`.
      specs: `MoEParams` of `PartitionSpec`: how the weights are split, over any mesh
        axes. Whatever is split besides the experts (FSDP) is gathered first; None is
        `param_specs(config, expert=axis_name)`.
      token_mask: bool, `x.shape[:-1]`; False for padding tokens, which go nowhere,
        count nowhere, get zero, and may be NaN.
      key: for jitter noise and random routing; each rank folds its index in.
      placement: which rank holds which experts, replicas included; the same on all
        ranks. The router, the losses and `expert_load` speak of logical experts still,
        and so do params: see `place_params`, whose exchange this adds.
      keep_topk_idx: whether `MoEStats.topk_idx` holds the (logical) experts of the
        tokens.

    Returns:
      `out`, like x, and `MoEStats`, the same on all ranks but for `topk_idx`.

    Raises:
      ValueError, TypeError: as the stages raise.

    Derivative: of x and params. Slots that were dropped add nothing to either.

    On the wire: see `dispatch` and `combine`; the statistics are a few all-reduces of
    E numbers, gone where nobody reads them.

    Source: `y = sum over the top k experts e of g_e(x) * E_e(x)`, arXiv:1701.06538,
    equation 1, plus shared experts (`shared_experts`). What each model departs in is in
    `topk_routing` and `MoEConfig`.
    """
    axis = expert_axis("moe", axis_name)
    check_params("moe", params, config)
    check_arrays("moe", x, config, token_mask, placement)
    data_names = axis.other_names if data_axes is None else names_of(data_axes)
    axes = axis.names + data_names
    if len(set(axes)) < len(axes):
        raise ValueError(
            f'jax_ep.moe: data_axes (="{axis_label(data_names)}") must not repeat an '
            f'axis, nor have one of the expert axis "{axis_label(axis.names)}".'
        )
    if config.num_experts % axis.num_ranks and placement is None:
        # Some experts more than once, so that every rank holds as many.
        placement = plan_placement(
            np.ones(config.num_experts), num_ranks=axis.num_ranks
        )
    if specs is not None:
        specs = checked_specs("moe", specs, config)
    params = local_weights(
        params,
        specs,
        config,
        axis,
        token_axes=axes,
        has_placement=placement is not None,
    )
    if key is not None and axes:
        key = jax.random.fold_in(key, lax.axis_index(axes))
    tokens, mask = x.reshape(-1, x.shape[-1]), None
    if token_mask is not None:
        mask = token_mask.reshape(-1)
        tokens = jnp.where(mask[:, None], tokens, jnp.zeros((), x.dtype))

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
    topk_idx, routed = routing.topk_idx, params.routed
    num_slots = config.num_experts if placement is None else placement.num_slots
    exchange = config.exchange(
        axis_name=axis.names,
        num_slots=num_slots,
        capacity=receive_capacity(
            config, tokens.shape[0], axis.num_ranks, num_slots=num_slots
        ),
    )
    if placement is not None:
        topk_idx = place_topk(topk_idx, placement, axis_name=axis.names)
        routed = place_params(
            routed, placement, axis_name=axis.names, exchange=exchange
        )
    handle = dispatch_layout(topk_idx, exchange=exchange)
    shared = shared_experts(tokens, params, activation=config.activation)
    layer = functools.partial(_routed_experts, config=config)
    rounds = None
    if config.dropless_fallback and config.capacity_factor is not None:
        out, rounds = in_rounds(
            layer,
            routed,
            tokens,
            topk_idx,
            routing.topk_weights,
            handle,
            max_rounds=config.max_rounds,
            bias=shared,
        )
    else:
        out = layer(routed, tokens, routing.topk_weights, handle, shared)
    stats = moe_stats(
        routing,
        handle,
        config,
        axis_name=axes,
        rounds=rounds,
        num_sequences=math.prod(x.shape[:-2]) if x.ndim > 2 else None,
    )
    if keep_topk_idx:
        kept = routing.topk_idx.reshape(*x.shape[:-1], config.num_experts_per_tok)
        stats = dataclasses.replace(stats, topk_idx=kept)
    return out.reshape(x.shape), stats


def check_arrays(
    operation: str,
    x: jax.Array,
    config: MoEConfig,
    token_mask: jax.Array | None,
    placement: Placement | None,
) -> None:
    """Refuses what would otherwise go wrong further down, or go unnoticed.

    Raises:
      ValueError: a mask of another shape than the tokens, a placement of another
        number of experts, or no sequences where the loss is per sequence. TypeError:
        x's dtype.
    """
    if not is_float(x):
        raise TypeError(
            f"jax_ep.{operation}: x must be float32, bfloat16 or float16, and is "
            f"{x.dtype}."
        )
    if x.ndim < 3 and config.load_balance_scope == "sequence":
        # A rank's share would count as one, and the loss depend on the number of ranks.
        raise ValueError(
            f"jax_ep.{operation}: x must have shape [..., S, H] for load_balance_scope "
            f'"sequence", and has {x.shape}.'
        )
    if token_mask is not None and token_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"jax_ep.{operation}: token_mask must have shape x.shape[:-1] = "
            f"{x.shape[:-1]}, and has {token_mask.shape}."
        )
    if placement is not None and placement.num_experts != config.num_experts:
        raise ValueError(
            f"jax_ep.{operation}: placement must be of num_experts "
            f"(={config.num_experts}) experts, and is of {placement.num_experts}."
        )


def _routed_experts(params, tokens, topk_weights, handle, bias, *, config):
    """Dispatch, experts, combine: what `in_rounds` may repeat."""
    recv_x, recv_weights = dispatch(tokens, handle, topk_weights)
    if config.weights_scale_input:
        scaled = recv_x.astype(jnp.float32) * recv_weights[:, None]
        recv_x = scaled.astype(recv_x.dtype)
        y = experts(recv_x, handle, params, activation=config.activation)
        return combine(y, handle, bias=bias)
    # With an output bias, weights cannot go into the hidden activation.
    early, late = (None, recv_weights) if config.mlp_bias else (recv_weights, None)
    y = experts(
        recv_x, handle, params, activation=config.activation, recv_weights=early
    )
    return combine(y, handle, weights=late, bias=bias)


def receive_capacity(
    config: MoEConfig, num_tokens: int, num_ranks: int, *, num_slots: int | None = None
) -> int | None:
    """Rows C of a rank's receive buffer, for `dispatch_layout`.

    `capacity_factor * T * K`, rounded up to the alignment, and never more than a router
    that repeats no id in a row can fill, `R*T*min(K, L) + L*(A-1)`; dropless, that.

    Args:
      config: the layer.
      num_tokens: T.
      num_ranks: R.
      num_slots: slots of a `Placement` over all ranks; None is one for each expert.

    Returns:
      C; None where there are no tokens.

    Source: the capacity factor of Switch Transformer, arXiv:2101.03961, equation 3, per
    rank in place of per expert, so that its experts share what room there is.
    """
    if not num_tokens:
        return None
    num_topk, alignment = config.num_experts_per_tok, config.expert_alignment
    num_local = max((num_slots or config.num_experts) // num_ranks, 1)
    bound = num_ranks * num_tokens * min(num_topk, num_local)
    bound += num_local * (alignment - 1)
    if config.capacity_factor is None:
        return bound
    # Rounded first, since 1.1 * 10 is a little more than 11.
    rows = math.ceil(round(config.capacity_factor * num_tokens * num_topk, 6))
    return min(-(-rows // alignment) * alignment, bound)
