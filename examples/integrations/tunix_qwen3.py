"""Tunix's Qwen3-MoE through jax_ep: same parameters and checkpoints, without masks.

Written for github.com/google/tunix at 8dc1f55e (`MoELayer` in
tunix/models/qwen3/model.py, a Flax nnx module). Put this file where Python finds it,
and before the model is built:

    from tunix.models.qwen3 import model
    import tunix_qwen3

    model.MoELayer = tunix_qwen3.with_jax_ep(model.MoELayer)

Its sharding config stays: experts lie on "fsdp", as tokens do, and their width on "tp".
The model must be called under its mesh (`jax.set_mesh`), or be given it as `mesh=`.
"""

from typing import Any

import jax

import jax_ep

EXPERT, TENSOR = "fsdp", "tp"


def with_jax_ep(moe_layer: type, mesh: Any = None) -> type:
    """A subclass of `MoELayer` that differs in what a call computes with."""

    class MoELayer(moe_layer):
        def __call__(self, x):
            axes = (mesh or jax.sharding.get_abstract_mesh()).shape
            out, _ = jax_ep.sharded_moe(
                x,
                jax_ep.MoEParams(
                    router_kernel=self.router.kernel[...],
                    gate_proj=self.gate_proj[...],
                    up_proj=self.up_proj[...],
                    down_proj=self.down_proj[...],
                ),
                layer_config(self),
                mesh=mesh,
                axis_name=EXPERT if EXPERT in axes else (),
                tensor_axis=TENSOR if axes.get(TENSOR, 1) > 1 else (),
            )
            return out

    return MoELayer


def layer_config(layer: Any) -> jax_ep.MoEConfig:
    """What a `MoELayer` computes: a softmax over all, of whose top k the sum is 1."""
    num_experts, hidden, width = layer.gate_proj.shape
    return jax_ep.MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=layer.experts_per_tok,
        hidden_size=hidden,
        moe_intermediate_size=width,
        norm_topk_prob=True,
        fuse_gate_up=False,
    )
