"""MaxText's routed experts through jax_ep: same parameters, checkpoints and losses.

Written for github.com/AI-Hypercomputer/maxtext at 783c5f41 (`RoutedMoE` in
src/maxtext/layers/moe.py, an nnx module that linen models wrap). Put this file where
Python finds it, and before the model is built:

    from maxtext.layers import moe
    import maxtext_moe

    moe.RoutedMoE = maxtext_moe.with_jax_ep(moe.RoutedMoE)

`RoutedAndSharedMoE` takes it from there too, and keeps its own shared experts. Mesh,
config and logical axis rules stay: experts lie on "expert", their width on "tensor",
and whatever else weights are split over is gathered. Not taken over: quantisation, and
what `MoEConfig.from_names` refuses by name.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

import jax_ep
from jax_ep.names.maxtext import READ

EXPERT, TENSOR = "expert", "tensor"
# The axes that MaxText splits tokens over besides; the others hold copies.
DATA = ("data", "fsdp", "fsdp_transpose")
SEQUENCE = ("sequence", "context")
# Of base.yml, for other layers than this one.
_NOT_HERE = ("shared_experts", "base_emb_dim", "base_mlp_dim", "base_moe_mlp_dim")


def with_jax_ep(routed_moe: type) -> type:
    """A subclass of `RoutedMoE` that differs in what a call computes with."""

    class RoutedMoE(routed_moe):
        def __call__(self, inputs, out_sharding=None):
            if self.quant is not None:
                raise NotImplementedError(
                    "maxtext_moe: quantization must be off: jax_ep's experts take "
                    "weights as they are."
                )
            config = layer_config(self)
            axes = [name for name, size in self.mesh.shape.items() if size > 1]
            key = self.rngs.dropout() if config.use_random_routing else None
            out, stats = jax_ep.sharded_moe(
                inputs.astype(self.dtype),
                layer_params(self, config),
                config,
                mesh=self.mesh,
                axis_name=EXPERT if EXPERT in axes else (),
                data_axes=tuple(n for n in (*DATA, *SEQUENCE) if n in axes),
                tensor_axis=tuple(n for n in (TENSOR,) if n in axes),
                sequence_axes=tuple(n for n in SEQUENCE if n in axes),
                key=key,
            )
            loss = stats.aux_loss if self.config.load_balance_loss_weight > 0 else None
            update = None
            if rate := config.selection_bias_update_rate:
                # MaxText adds it to the bias itself.
                zeros = jnp.zeros(self.num_experts)
                update = jax_ep.selection_bias_update(zeros, stats.expert_load, rate)
            return out, loss, update

    return RoutedMoE


def layer_config(layer: Any) -> jax_ep.MoEConfig:
    """What a `RoutedMoE` computes, by the names of its config."""
    names = {
        # An enum's value is what base.yml says.
        name: getattr(value, "value", value)
        for name in READ
        if name not in _NOT_HERE
        and (value := getattr(layer.config, name, None)) is not None
    }
    names |= dict(
        num_experts=layer.num_experts,
        num_experts_per_tok=layer.num_experts_per_tok,
        moe_mlp_dim=layer.intermediate_dim,
    )
    config = jax_ep.MoEConfig.from_names(source="maxtext", **names)
    return dataclasses.replace(config, fuse_gate_up=False)


def layer_params(layer: Any, config: jax_ep.MoEConfig) -> jax_ep.MoEParams:
    """A `RoutedMoE`'s own parameters, under our names."""

    def of(variable):
        return None if variable is None else jnp.asarray(variable[...], layer.dtype)

    bias = layer.gate.bias
    bias = None if bias is None else bias[...]
    return jax_ep.MoEParams(
        router_kernel=layer.gate.kernel[...],
        router_bias=bias if config.router_bias else None,
        selection_bias=bias if config.selection_bias else None,
        gate_proj=of(layer.wi_0),
        up_proj=of(layer.wi_1),
        down_proj=of(layer.wo),
        gate_bias=of(layer.wi_0_bias),
        up_bias=of(layer.wi_1_bias),
        down_bias=of(layer.wo_bias),
    )
