"""Experts: a gated MLP per local expert over the rows that dispatch has grouped."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.axis import vary_alike
from jax_ep.config import ACTIVATIONS, Activation, MoEConfig
from jax_ep.grouped_matmul import grouped_matmul
from jax_ep.layout import Handle, row_is_kept
from jax_ep.params import MoEParams
from jax_ep.tensor import TensorAxis

# GPT-OSS: slope of the gate's sigmoid, and the bound on gate and up.
_CLIPPED_ALPHA = 1.702
_CLIPPED_LIMIT = 7.0

_ACTIVATIONS = dict(
    silu=jax.nn.silu,
    gelu=functools.partial(jax.nn.gelu, approximate=False),
    gelu_tanh=functools.partial(jax.nn.gelu, approximate=True),
    relu=jax.nn.relu,
    relu2=lambda gate: jnp.square(jax.nn.relu(gate)),
    sigmoid=jax.nn.sigmoid,
)


Matmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@jax.named_scope("jax_ep.experts")
def experts(
    recv_x: jax.Array,
    handle: Handle,
    params: MoEParams,
    *,
    activation: Activation = "silu",
    recv_weights: jax.Array | None = None,
    matmul: Matmul | None = None,
) -> jax.Array:
    """Applies each local expert's gated MLP to its rows.

    `y = (act(x @ gate + b_gate, x @ up + b_up) * recv_weights) @ down + b_down`, with
    `grouped_matmul` over the handle's groups. Call it on the rows of `dispatch`, inside
    its shard_map.

    Padding rows and the rows past the last group may hold anything, NaN too: they give
    zero, and reach no gradient.

    Args:
      recv_x: `[C, H]` float32, bfloat16 or float16.
      handle: the handle that `dispatch` used.
      params: the projections of this rank's L experts, cast to recv_x's dtype, and
        biases; see `MoEParams`.
      activation: see `MoEConfig`. Evaluated in float32.
      recv_weights: `[C]` float32 from `dispatch`; multiplies the hidden activation.
        That is the weight on the output since `down` is linear, and it is free. With
        an output bias it is not: give the weights to `combine` instead.
      matmul: the grouped product of the projections, `(lhs, rhs, group_sizes) -> out`
        as `grouped_matmul`, which None is.

    Returns:
      `[C, H]` in recv_x's dtype, 0 in rows without a token.

    Raises:
      ValueError: a shape that does not fit, or `recv_weights` with an output bias.

    Derivative: of recv_x, recv_weights and every parameter. That of an expert without
    rows is exactly zero, whatever the grouped product says about empty groups.

    Source: gated linear units, arXiv:2002.05202, section 2; experts as grouped products
    over rows of their own, without padding to a capacity, arXiv:2211.15841.
    """
    if recv_weights is not None and params.down_bias is not None:
        raise ValueError(
            "jax_ep.experts: recv_weights would miss the output bias down_bias: give "
            "them to jax_ep.combine(weights=...)."
        )
    num_local = handle.group_sizes.shape[0]
    if params.down_proj.shape[0] != num_local:
        raise ValueError(
            f"jax_ep.experts: down_proj must hold this rank's {num_local} experts, and "
            f"has shape {params.down_proj.shape}."
        )
    recv_x, recv_weights, params, handle = vary_alike(
        handle.axis_name, (recv_x, recv_weights, params, handle)
    )
    dtype = recv_x.dtype
    kept = row_is_kept(handle)[:, None]
    dot = functools.partial(
        _grouped_dot, matmul=matmul or grouped_matmul, handle=handle, kept=kept
    )
    # Each `where` cleans its rows here, and their cotangents in the backward.
    x = jnp.where(kept, recv_x, jnp.zeros((), dtype))
    if params.gate_up_proj is None:
        gate = dot(x, params.gate_proj, params.gate_bias)
        up = dot(x, params.up_proj, params.up_bias)
    else:
        gate_up = dot(x, params.gate_up_proj, params.gate_up_bias)
        gate, up = jnp.split(gate_up, 2, axis=1)
    hidden = gated(gate, up, activation)
    if recv_weights is not None:
        hidden *= jnp.where(kept, recv_weights[:, None], 0)
    return dot(hidden.astype(dtype), params.down_proj, params.down_bias)


def weights_of_rows(config: MoEConfig, recv_x: jax.Array, recv_weights: Any):
    """Where a layer's router weights multiply its rows.

    Args:
      config: the layer.
      recv_x: `[C, H]` from `dispatch`.
      recv_weights: `[C]` float32 from `dispatch`.

    Returns:
      `recv_x`, times them in float32 where the config scales the input (Llama 4); the
      `recv_weights` of `experts`; the `weights` of `combine`, where there is an output
      bias, which the hidden activation's weight would miss.
    """
    if config.weights_scale_input:
        scaled = recv_x.astype(jnp.float32) * recv_weights[:, None]
        return scaled.astype(recv_x.dtype), None, None
    if config.mlp_bias:
        return recv_x, None, recv_weights
    return recv_x, recv_weights, None


def layer_experts(
    handle: Handle,
    recv_x: jax.Array,
    recv_weights: Any,
    params: MoEParams,
    *,
    config: MoEConfig,
    matmul: Matmul | None,
    tensor: TensorAxis,
) -> tuple[jax.Array, Any]:
    """What a layer does between dispatch and combine.

    Args:
      handle: the handle that `dispatch` used.
      recv_x: this rank's columns of the rows of `dispatch`.
      recv_weights: `[C]` float32 from `dispatch`.
      params: the routed experts' parameters.
      config: the layer.
      matmul: see `experts`.
      tensor: the tensor axis.

    Returns:
      What to combine, and the `weights` of `combine`, see `weights_of_rows`.
    """
    rows, early, late = weights_of_rows(config, tensor.gathered(recv_x), recv_weights)
    y = experts(
        rows,
        handle,
        params,
        activation=config.activation,
        recv_weights=early,
        matmul=matmul,
    )
    return tensor.summed(y), late


@jax.named_scope("jax_ep.shared_experts")
def shared_experts(
    x: jax.Array, params: MoEParams, *, activation: Activation = "silu"
) -> jax.Array | None:
    """The experts that every token visits (DeepSeek, Qwen2-MoE), as one gated MLP.

    Needs no mesh and nothing of the routed path, so that XLA may run it at any time;
    its output is the `bias` of `combine`.

    Args:
      x: `[T, H]`.
      params: `shared_*`, cast to x's dtype; without them there are no shared experts.
      activation: see `MoEConfig`.

    Returns:
      `[T, H]` in x's dtype, times `sigmoid(x @ shared_expert_gate)` where there is one
      (Qwen2-MoE); None without shared experts.

    Derivative: of x and the `shared_*` parameters.

    Source: shared expert isolation, DeepSeekMoE, arXiv:2401.06066, section 3.2; n
    shared experts of width F are one of width n F. The gate is of Qwen2-MoE's model
    code in `transformers`.
    """
    if params.shared_down_proj is None:
        return None
    return shared_output(shared_hidden(x, params, activation=activation), x, params)


def shared_hidden(
    x: jax.Array, params: MoEParams, *, activation: Activation = "silu"
) -> jax.Array:
    """The first half of `shared_experts`: `[T, S]`, the hidden activation."""
    dtype = x.dtype
    if params.shared_gate_up_proj is None:
        gate = x @ params.shared_gate_proj.astype(dtype)
        up = x @ params.shared_up_proj.astype(dtype)
    else:
        gate_up = x @ params.shared_gate_up_proj.astype(dtype)
        gate, up = jnp.split(gate_up, 2, axis=1)
    return gated(gate, up, activation).astype(dtype)


def shared_output(hidden: jax.Array, x: jax.Array, params: MoEParams) -> jax.Array:
    """The second half of `shared_experts`: `[T, H]`."""
    dtype = x.dtype
    out = hidden @ params.shared_down_proj.astype(dtype)
    if params.shared_expert_gate is not None:
        out *= jax.nn.sigmoid(x @ params.shared_expert_gate.astype(dtype))
    return out


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """`act(gate) * up` in float32 (arXiv:2002.05202); "clipped_swiglu" as below.

    GPT-OSS's model code: `gate = min(gate, 7)`, `up = clip(up, -7, 7)`, and
    `(up + 1) * gate * sigmoid(1.702 * gate)`. "relu2" is `relu(gate)^2 * up`
    (arXiv:2109.08668, section 3.1). A function is called with the gate.
    """
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if activation == "clipped_swiglu":
        gate = jnp.minimum(gate, _CLIPPED_LIMIT)
        up = jnp.clip(up, -_CLIPPED_LIMIT, _CLIPPED_LIMIT)
        return (up + 1) * gate * jax.nn.sigmoid(_CLIPPED_ALPHA * gate)
    if callable(activation):
        return activation(gate) * up
    if activation in _ACTIVATIONS:
        return _ACTIVATIONS[activation](gate) * up
    raise ValueError(
        f"jax_ep.experts: activation (={activation!r}) must be one of {ACTIVATIONS} or "
        "a function."
    )


def _grouped_dot(x, weight, bias, *, matmul, handle, kept):
    """`x @ weight[e] + bias[e]` for the rows of each expert e; zero in other rows."""
    y = matmul(x, weight.astype(x.dtype), handle.group_sizes)
    if bias is not None:
        # As one more column of x, so that the bias's gradient is a grouped sum too.
        bias = bias.astype(jnp.float32)[:, None]
        ones = jnp.ones_like(x[:, :1], jnp.float32)
        y = y + grouped_matmul(ones, bias, handle.group_sizes).astype(x.dtype)
    return jnp.where(kept, y, jnp.zeros((), x.dtype))
