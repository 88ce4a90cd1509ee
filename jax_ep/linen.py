"""MoE layer for Flax linen: parameters and shardings; `moe` does the arithmetic."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.installed import pip_install

try:
    import flax.linen as nn
except ImportError as error:
    raise ImportError(
        f'jax_ep.linen needs Flax, the extra "flax": {pip_install("flax")}.'
    ) from error

from jax_ep.config import MoEConfig
from jax_ep.losses import SelectionLoads, next_selection_bias
from jax_ep.params import MoEParams, ParamInfo, names_of, param_info, param_specs
from jax_ep.placement import Placement
from jax_ep.sharded import sharded_moe
from jax_ep.stored import storable


class MoE(nn.Module):
    """A Mixture-of-Experts layer, `[B, ..., H]` to `[B, ..., H]`.

    Holds the parameters of `MoEParams` under their names there, each in a
    `nn.Partitioned` box (`nn.LogicallyPartitioned` with `logical_axes`) with its
    sharding, and `selection_bias` in the collection `moe_state`. Outside of shard_map
    the call is `sharded_moe`, over the mesh of the context. Inside the user's own, with
    the variables split as their shardings say, it is `moe`.

    Sows the call's `MoEStats` as `moe_stats` into `intermediates`, and its weighted
    auxiliary loss as `moe_aux_loss` into `losses`: add the leaves of that collection to
    the loss. The RNG stream `router`, where given, feeds jitter noise.

    With a `selection_bias_update_rate`, a call that is not deterministic and has
    `moe_state` among its mutable collections updates the selection bias in it, by the
    call's loads over all ranks.

    Attributes:
      config: the layer.
      axis_name: mesh axis, or tuple of axes, that the experts are split over. A mesh
        without an axis "expert", or no mesh, has all experts on each device; see
        `sharded_moe`.
      data_axes: mesh axes that tokens are split over besides; None is all others.
      tensor_axis: mesh axis, or tuple of axes, that F of the routed experts (and the
        width of shared ones, stored) is split over; see `sharded_moe`.
      sequence_axes: those of all these that S of x `[B, ..., S, H]` is split over; see
        `sharded_moe`.
      fsdp_axis: one of them that weights are split over along H besides.
      mesh: the mesh; None is that of the context, or of the arrays.
      dtype: in which inputs are taken and experts computed; None is the input's. The
        router computes in float32 always.
      param_dtype: of the parameters.
      logical_axes: names for the dimensions "expert", "hidden" and "intermediate", to
        put into the boxes in place of mesh axes; `nn.logical_axis_rules` map them.
      kernel_init: initialiser of every kernel. None is LeCun normal, per expert.
      keep_topk_idx: whether the statistics hold `topk_idx`, for `jax_ep.record`.

    >>> import jax, jax.numpy as jnp
    >>> from jax_ep.config import MoEConfig
    >>> from jax_ep.linen import MoE
    >>> config = MoEConfig(num_experts=8, num_experts_per_tok=2, hidden_size=16,
    ...                    moe_intermediate_size=32, load_balance_loss_weight=0.01)
    >>> layer, x = MoE(config), jnp.ones((2, 4, 16))
    >>> params = layer.init(jax.random.key(0), x)["params"]
    >>> out, sown = layer.apply({"params": params}, x, mutable=["intermediates"])
    >>> out.shape
    (2, 4, 16)
    >>> sown["intermediates"]["moe_stats"][0].expert_load.sum().item()
    16
    """

    config: MoEConfig
    axis_name: str | Sequence[str] = "expert"
    data_axes: str | Sequence[str] | None = None
    tensor_axis: str | Sequence[str] = ()
    sequence_axes: str | Sequence[str] | None = None
    fsdp_axis: str | None = None
    mesh: jax.sharding.Mesh | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    logical_axes: Mapping[str, str] | None = None
    kernel_init: Callable[..., jax.Array] | None = None
    keep_topk_idx: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        deterministic: bool = False,
        placement: Placement | None = None,
        return_stats: bool = False,
    ) -> Any:
        """Applies the layer; see `sharded_moe` for the arguments and `moe` for more.

        Args:
          x: `[B, ..., H]`, any B.
          token_mask: bool, `x.shape[:-1]`; False for padding tokens.
          deterministic: as `MoEConfig.evaluation()` has it.
          placement: which rank holds which experts, from `plan_placement`.
          return_stats: whether to return the `MoEStats` too.

        Returns:
          `[B, ..., H]`, in `dtype`; with `return_stats` a pair of that and `MoEStats`.
        """
        specs = param_specs(
            self.config,
            expert=self.axis_name,
            hidden=self.fsdp_axis,
            intermediate=self.tensor_axis or None,
        )
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        names = storable(specs, self.config, mesh, names_of(self.axis_name))
        if self.logical_axes is not None:
            names = param_specs(self.config, **self.logical_axes)
        params = {
            name: self._parameter(
                name, info, getattr(specs, name), getattr(names, name)
            )
            for name, info in param_info(self.config).items()
        }
        out, stats = sharded_moe(
            x if self.dtype is None else x.astype(self.dtype),
            MoEParams(**params),
            self.config.evaluation() if deterministic else self.config,
            mesh=self.mesh,
            axis_name=self.axis_name,
            data_axes=self.data_axes,
            tensor_axis=self.tensor_axis,
            sequence_axes=self.sequence_axes,
            specs=specs,
            token_mask=token_mask,
            key=self.make_rng("router") if self.has_rng("router") else None,
            placement=placement,
            keep_topk_idx=self.keep_topk_idx,
        )
        if not deterministic:
            self._update_selection_bias(stats.expert_load)
        result = (out, stats) if return_stats else out
        if self.is_initializing():
            return result  # Or variables of `init` would carry the first call's loss.
        self.sow("intermediates", "moe_stats", stats)
        self.sow(
            "losses",
            "moe_aux_loss",
            stats.aux_loss,
            init_fn=lambda: jnp.float32(0),
            reduce_fn=lambda total, loss: total + loss,
        )
        return result

    def _update_selection_bias(self, expert_load: jax.Array) -> None:
        config = self.config
        if not (config.selection_bias and config.selection_bias_update_rate):
            return
        loads = None
        if config.selection_bias_update_every > 1:
            loads = self.variable(
                "moe_state", "selection_load", SelectionLoads.zeros, config.num_experts
            )
        if self.is_initializing() or not self.is_mutable_collection("moe_state"):
            return
        bias, following = next_selection_bias(
            self.get_variable("moe_state", "selection_bias"),
            None if loads is None else loads.value,
            expert_load,
            config,
        )
        self.put_variable("moe_state", "selection_bias", bias)
        if loads is not None:
            self.put_variable("moe_state", "selection_load", following)

    def _parameter(self, name: str, info: ParamInfo, spec, names) -> jax.Array:
        """The parameter's array, without the sharding constraint of its box.

        That would name axes that a surrounding shard_map has made manual; the
        shard_map of the layer itself says how the array is split.
        """
        shape = _local_shape(info.shape, spec)
        if not info.trainable:
            key = self.make_rng("params") if self.is_initializing() else None
            state = self.variable("moe_state", name, info.init, key, shape, jnp.float32)
            return state.value
        is_kernel = len(shape) > 1
        init = self.kernel_init if self.kernel_init and is_kernel else info.init
        if self.logical_axes is None:
            init = nn.with_partitioning(init, tuple(names), mesh=self.mesh)
        else:
            init = nn.with_logical_partitioning(init, tuple(names), mesh=self.mesh)
        value = self.param(name, init, shape, self.param_dtype, unbox=False)
        if isinstance(value, nn.meta.AxisMetadata):
            value = value.unbox(apply_constraint=False)
        return value


def _local_shape(shape, spec):
    """The rank's share inside a shard_map, where flax sees that; else the whole."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        size // math.prod(mesh.shape[n] for n in names_of(dim) if n in mesh.manual_axes)
        for size, dim in zip(shape, spec, strict=True)
    )
