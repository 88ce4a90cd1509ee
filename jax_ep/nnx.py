"""MoE layer for Flax nnx: parameters and shardings; `moe` does the arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.installed import pip_install

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        f'jax_ep.nnx needs Flax, the extra "flax": {pip_install("flax")}.'
    ) from error

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.config import MoEConfig
from jax_ep.losses import MoEStats, SelectionLoads, next_selection_bias
from jax_ep.params import MoEParams, keep_axes, names_of, param_info, param_specs
from jax_ep.placement import Placement
from jax_ep.sharded import sharded_moe
from jax_ep.stored import storable


class SelectionBias(nnx.Variable):
    """The router's selection bias: state that no gradient trains."""


class _Tree(nnx.Variable):
    # Under a mesh, nnx.eval_shape makes every variable without one a single abstract
    # array, which a tree of arrays cannot be.
    sharding = ()


class SelectionLoad(_Tree):
    """The `SelectionLoads` since the last update of the selection bias."""


class MoEStatistics(_Tree):
    """The `MoEStats` of a layer's last call, `of_any_mesh`; zeros before the first."""


class MoE(nnx.Module):
    """A Mixture-of-Experts layer, `[B, ..., H]` to `[B, ..., H]`.

    Holds the parameters of `MoEParams` under their names there, each an `nnx.Param`
    with its sharding, and `selection_bias` as a `SelectionBias`. Outside of shard_map
    the call is `sharded_moe`, over the mesh of the context. Inside the user's own, with
    the state split as its shardings say, it is `moe`.

    The statistics of the last call are in `stats`, a `MoEStatistics` variable: add
    `layer.stats.get_value().aux_loss` to the loss. They are there from the start, as
    zeros, and their shapes depend on E alone, so that state has one structure before
    and after a call, and on every mesh. Setting them is a state change, as BatchNorm's
    is; where that is in the way, e.g. under a `jax.jit` that only closes over the
    layer, set `record_stats=False` and call with `return_stats=True`. A call under
    `nnx.capture(layer, nnx.Intermediate)` sows them whole as `moe_stats`.

    With a `selection_bias_update_rate` every call that is not deterministic updates the
    selection bias too, by its loads over all ranks. With router noise the layer keeps
    a stream of `rngs`, "router" or the default, as `nnx.Dropout` does.

    Args:
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
        put into the shardings in place of mesh axes; rules map them (e.g.
        `nnx.logical_axis_rules`).
      kernel_init: initialiser of every kernel. None is LeCun normal, per expert.
      record_stats: whether calls set `stats`.
      keep_topk_idx: whether returned and sown statistics hold `topk_idx` too, for
        `jax_ep.record`.
      deterministic: as `MoEConfig.evaluation()` has it; `model.eval()` sets it.
      rngs: its `params` stream; with router noise, `router` too.

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

    selection_bias: SelectionBias

    def __init__(
        self,
        config: MoEConfig,
        *,
        axis_name: str | Sequence[str] = "expert",
        data_axes: str | Sequence[str] | None = None,
        tensor_axis: str | Sequence[str] = (),
        sequence_axes: str | Sequence[str] | None = None,
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
        self.tensor_axis = names_of(tensor_axis)
        self.sequence_axes = None if sequence_axes is None else names_of(sequence_axes)
        self.fsdp_axis = fsdp_axis
        self.mesh = mesh
        self.dtype = dtype
        self.record_stats = record_stats
        self.keep_topk_idx = keep_topk_idx
        self.deterministic = deterministic
        self.param_names = tuple(param_info(config))
        axes = self._axes()
        specs = param_specs(config, **(axes if logical_axes is None else logical_axes))
        known_mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        if logical_axes is None:
            specs = storable(specs, config, known_mesh, self.axis_name)

        def zeros(tree):
            # On the mesh, where a call will leave its successor: a jitted step would
            # compile again for another sharding.
            if known_mesh.empty:
                return tree.zeros(config.num_experts)
            replicated = P(None) if mesh is None else NamedSharding(mesh, P(None))
            make = jax.jit(tree.zeros, static_argnums=0, out_shardings=replicated)
            return make(config.num_experts)

        self.stats = MoEStatistics(zeros(MoEStats))
        self.updates_bias = bool(
            config.selection_bias and config.selection_bias_update_rate
        )
        if self.updates_bias and config.selection_bias_update_every > 1:
            self.selection_load = SelectionLoad(zeros(SelectionLoads))
        else:
            self.selection_load = None
        if config.router_jitter_noise or config.use_random_routing:
            self.rngs = rngs["router"].fork()
        else:
            self.rngs = None
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
        return_stats: bool = False,
    ) -> Any:
        """Applies the layer; see `sharded_moe` for the arguments and `moe` for more.

        Args:
          x: `[B, ..., H]`, any B.
          token_mask: bool, `x.shape[:-1]`; False for padding tokens.
          key: for jitter noise and random routing; None is the next of the layer's.
          deterministic: overrides the attribute.
          placement: which rank holds which experts, from `plan_placement`.
          return_stats: whether to return the `MoEStats` too, whole.

        Returns:
          `[B, ..., H]`, in `dtype`; with `return_stats` a pair of that and `MoEStats`.
        """
        if deterministic is None:
            deterministic = self.deterministic
        is_noisy = self.config.use_random_routing or not deterministic
        if key is None and self.rngs is not None and is_noisy:
            key = self.rngs()
        out, stats = sharded_moe(
            x if self.dtype is None else x.astype(self.dtype),
            MoEParams(**{name: getattr(self, name)[...] for name in self.param_names}),
            self.config.evaluation() if deterministic else self.config,
            mesh=self.mesh,
            axis_name=self.axis_name,
            data_axes=self.data_axes,
            tensor_axis=self.tensor_axis,
            sequence_axes=self.sequence_axes,
            specs=param_specs(self.config, **self._axes()),
            token_mask=token_mask,
            key=key,
            placement=placement,
            keep_topk_idx=self.keep_topk_idx,
        )
        if self.record_stats:
            self.stats.set_value(stats.of_any_mesh())
        if hasattr(self, "__captures__"):  # Elsewhere, sow makes an attribute.
            self.sow(nnx.Intermediate, "moe_stats", stats)
        if self.updates_bias and not deterministic:
            self._update_selection_bias(stats.expert_load)
        return (out, stats) if return_stats else out

    def _axes(self) -> dict[str, Any]:
        return dict(
            expert=self.axis_name,
            hidden=self.fsdp_axis,
            intermediate=self.tensor_axis or None,
        )

    def _update_selection_bias(self, expert_load: jax.Array) -> None:
        loads = self.selection_load
        bias, following = next_selection_bias(
            self.selection_bias[...],
            None if loads is None else loads.get_value(),
            expert_load,
            self.config,
        )
        self.selection_bias[...] = bias
        if loads is not None:
            loads.set_value(following)
