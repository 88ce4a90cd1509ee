"""MoE layer for Flax nnx: parameters and shardings; `moe` does the arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        'jax_ep.nnx needs Flax, the extra "flax": pip install "jax_ep[flax]".'
    ) from error

from jax_ep.config import MoEConfig
from jax_ep.params import MoEParams, keep_axes, names_of, param_info, param_specs
from jax_ep.placement import Placement
from jax_ep.sharded import sharded_moe


class SelectionBias(nnx.Variable):
    """The router's selection bias: state that no gradient trains."""


class MoEStatistics(nnx.Intermediate):
    """The `MoEStats` of a layer's last call; None before the first."""

    # Under a mesh, nnx.eval_shape makes every variable without one a single abstract
    # array, which None and a tree of arrays cannot be.
    sharding = ()


class MoE(nnx.Module):
    """A Mixture-of-Experts layer, `[B, ..., H]` to `[B, ..., H]`.

    Holds the parameters of `MoEParams` under their names there, each an `nnx.Param`
    with its sharding, and `selection_bias` as a `SelectionBias`. Outside of shard_map
    the call is `sharded_moe`, over the mesh of the context. Inside the user's own, with
    the state split as its shardings say, it is `moe`.

    The statistics of the last call are in `stats`, a `MoEStatistics` variable (an
    `nnx.Intermediate`): add `layer.stats.get_value().aux_loss` to the loss. Setting
    them is a state change, as BatchNorm's is; where that is in the way, e.g. under a
    `jax.jit` that only closes over the layer, set `record_stats=False`.

    Args:
      config: the layer.
      axis_name: mesh axis, or tuple of axes, that the experts are split over. A mesh
        without an axis "expert", or no mesh, has all experts on each device; see
        `sharded_moe`.
      data_axes: mesh axes that tokens are split over besides; None is all others.
      fsdp_axis: one of them that weights are split over along H besides.
      mesh: the mesh; None is that of the context, or of the arrays.
      dtype: in which inputs are taken and experts computed; None is the input's. The
        router computes in float32 always.
      param_dtype: of the parameters.
      logical_axes: names for the dimensions "expert", "hidden" and "intermediate", to
        put into the shardings in place of mesh axes; rules map them (e.g.
        `nnx.logical_axis_rules`).
      kernel_init: initialiser of every kernel. None is LeCun normal, per expert.
      record_stats: whether calls set `stats`.
      keep_topk_idx: whether they hold `topk_idx` too, for `jax_ep.record`.
      deterministic: as `MoEConfig.evaluation()` has it; `model.eval()` sets it.
      rngs: its `params` stream.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_ep.config import MoEConfig
    >>> from jax_ep.nnx import MoE
    >>> config = MoEConfig(num_experts=8, num_experts_per_tok=2, hidden_size=16,
    ...                    moe_intermediate_size=32, load_balance_loss_weight=0.01)
    >>> layer = MoE(config, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 4, 16))).shape
    (2, 4, 16)
    >>> layer.stats.get_value().expert_load.sum().item()
    16
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        axis_name: str | Sequence[str] = "expert",
        data_axes: str | Sequence[str] | None = None,
        fsdp_axis: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        logical_axes: Mapping[str, str] | None = None,
        kernel_init: Callable[..., jax.Array] | None = None,
        record_stats: bool = True,
        keep_topk_idx: bool = False,
        deterministic: bool = False,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.axis_name = names_of(axis_name)
        self.data_axes = None if data_axes is None else names_of(data_axes)
        self.fsdp_axis = fsdp_axis
        self.mesh = mesh
        self.dtype = dtype
        self.record_stats = record_stats
        self.keep_topk_idx = keep_topk_idx
        self.deterministic = deterministic
        self.stats = MoEStatistics(None)
        self.param_names = tuple(param_info(config))
        axes = dict(expert=self.axis_name, hidden=fsdp_axis)
        specs = param_specs(config, **(axes if logical_axes is None else logical_axes))
        known_mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        for name, info in param_info(config).items():
            is_kernel = len(info.shape) > 1
            init = kernel_init if kernel_init and is_kernel else info.init
            dtype = param_dtype if info.trainable else jnp.float32
            value = init(rngs.params(), info.shape, dtype)
            spec = getattr(specs, name)
            metadata: dict[str, Any] = {} if mesh is None else dict(mesh=mesh)
            if known_mesh.empty:
                metadata["eager_sharding"] = False
            elif logical_axes is None:
                spec = keep_axes(spec, known_mesh.axis_names)
            variable = nnx.Param if info.trainable else SelectionBias
            setattr(self, name, variable(value, out_sharding=tuple(spec), **metadata))

    def __call__(
        self,
        x: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        key: jax.Array | None = None,
        deterministic: bool | None = None,
        placement: Placement | None = None,
    ) -> jax.Array:
        """Applies the layer; see `sharded_moe` for the arguments and `moe` for more.

        Args:
          x: `[B, ..., H]`; B must be divisible by the shares that tokens are split in.
          token_mask: bool, `x.shape[:-1]`; False for padding tokens.
          key: for jitter noise and random routing.
          deterministic: overrides the attribute.
          placement: which rank holds which experts, from `plan_placement`.

        Returns:
          `[B, ..., H]`, in `dtype`.
        """
        if deterministic is None:
            deterministic = self.deterministic
        out, stats = sharded_moe(
            x if self.dtype is None else x.astype(self.dtype),
            MoEParams(**{name: getattr(self, name)[...] for name in self.param_names}),
            self.config.evaluation() if deterministic else self.config,
            mesh=self.mesh,
            axis_name=self.axis_name,
            data_axes=self.data_axes,
            specs=param_specs(
                self.config, expert=self.axis_name, hidden=self.fsdp_axis
            ),
            token_mask=token_mask,
            key=key,
            placement=placement,
            keep_topk_idx=self.keep_topk_idx,
        )
        if self.record_stats:
            if hasattr(self, "stats"):
                self.stats.set_value(stats)
            else:  # Popped, as intermediates are.
                self.stats = MoEStatistics(stats)
        return out
