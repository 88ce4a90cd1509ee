"""The parameters of a MoE layer: names, shapes, initialisers, shardings."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.sharding import PartitionSpec as P

from jax_ep.config import MoEConfig

# What a weight may be before it is cast to the tokens' dtype.
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16", "float64")))

_DIMS = ("expert", "hidden", "intermediate")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEParams:
    """The arrays of a MoE layer; what its config does not ask for is None.

    Inside a shard_map the arrays over experts hold this rank's `[L, ...]`; outside, all
    `[E, ...]`. F is an expert's hidden width, S that of the shared experts in all.

    Attributes:
      router_kernel: `[H, E]`.
      router_bias: `[E]`, added to the logits.
      selection_bias: `[E]` float32, added to the scores for the choice only; no
        gradient reaches it.
      expert_scale: `[E]`, multiplies each expert's weights.
      gate_up_proj: `[L, H, 2F]`, the gate's columns first, or None with the two below.
      gate_proj: `[L, H, F]`.
      up_proj: `[L, H, F]`.
      down_proj: `[L, F, H]`.
      gate_up_bias: `[L, 2F]`, or the two below.
      gate_bias: `[L, F]`.
      up_bias: `[L, F]`.
      down_bias: `[L, H]`.
      shared_gate_up_proj: `[H, 2S]`, or the two below.
      shared_gate_proj: `[H, S]`.
      shared_up_proj: `[H, S]`.
      shared_down_proj: `[S, H]`.
      shared_expert_gate: `[H, 1]`.
    """

    router_kernel: Any = None
    router_bias: Any = None
    selection_bias: Any = None
    expert_scale: Any = None
    gate_up_proj: Any = None
    gate_proj: Any = None
    up_proj: Any = None
    down_proj: Any = None
    gate_up_bias: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    shared_gate_up_proj: Any = None
    shared_gate_proj: Any = None
    shared_up_proj: Any = None
    shared_down_proj: Any = None
    shared_expert_gate: Any = None

    @property
    def routed(self) -> "MoEParams":
        """Those of the routed experts alone."""
        return MoEParams(
            gate_up_proj=self.gate_up_proj,
            gate_proj=self.gate_proj,
            up_proj=self.up_proj,
            down_proj=self.down_proj,
            gate_up_bias=self.gate_up_bias,
            gate_bias=self.gate_bias,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
        )

    @property
    def shared(self) -> "MoEParams":
        """Those of the shared experts alone."""
        return MoEParams(
            shared_gate_up_proj=self.shared_gate_up_proj,
            shared_gate_proj=self.shared_gate_proj,
            shared_up_proj=self.shared_up_proj,
            shared_down_proj=self.shared_down_proj,
            shared_expert_gate=self.shared_expert_gate,
        )


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """One parameter: its global shape, what each dimension is, how it starts.

    `dims` are "expert", "hidden" and "intermediate", or None for a dimension that is
    never worth sharding.
    """

    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    init: Callable[..., jax.Array]
    trainable: bool = True


def param_info(config: MoEConfig) -> dict[str, ParamInfo]:
    """The parameters that a config asks for, by their name in `MoEParams`."""
    e, h, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    s = config.shared_size
    kernel = initializers.lecun_normal(in_axis=-2, out_axis=-1)
    expert_kernel = initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
    zeros = initializers.zeros
    info = {"router_kernel": ParamInfo((h, e), (None, None), kernel)}
    if config.router_bias:
        info["router_bias"] = ParamInfo((e,), (None,), zeros)
    if config.selection_bias:
        info["selection_bias"] = ParamInfo((e,), (None,), zeros, trainable=False)
    if config.expert_scale:
        info["expert_scale"] = ParamInfo((e,), (None,), initializers.ones)
    into = ("expert", "hidden", "intermediate")
    if config.fuse_gate_up:
        info["gate_up_proj"] = ParamInfo((e, h, 2 * f), into, expert_kernel)
    else:
        info["gate_proj"] = ParamInfo((e, h, f), into, expert_kernel)
        info["up_proj"] = ParamInfo((e, h, f), into, expert_kernel)
    out_of = ("expert", "intermediate", "hidden")
    info["down_proj"] = ParamInfo((e, f, h), out_of, expert_kernel)
    if config.mlp_bias:
        if config.fuse_gate_up:
            info["gate_up_bias"] = ParamInfo((e, 2 * f), into[::2], zeros)
        else:
            info["gate_bias"] = ParamInfo((e, f), into[::2], zeros)
            info["up_bias"] = ParamInfo((e, f), into[::2], zeros)
        info["down_bias"] = ParamInfo((e, h), into[:2], zeros)
    if s:
        if config.fuse_gate_up:
            info["shared_gate_up_proj"] = ParamInfo((h, 2 * s), into[1:], kernel)
        else:
            info["shared_gate_proj"] = ParamInfo((h, s), into[1:], kernel)
            info["shared_up_proj"] = ParamInfo((h, s), into[1:], kernel)
        info["shared_down_proj"] = ParamInfo((s, h), out_of[1:], kernel)
        if config.shared_expert_gate:
            info["shared_expert_gate"] = ParamInfo((h, 1), (None, None), kernel)
    return info


def check_params(operation: str, params: MoEParams, config: MoEConfig) -> None:
    """Refuses parameters that a config lacks, or does not ask for, and other dtypes.

    Raises:
      ValueError: a parameter too many or too few, by name. TypeError: no `MoEParams`,
        or a dtype whose values are nothing without a scale (integers, FP8).
    """
    if not isinstance(params, MoEParams):
        raise TypeError(
            f"jax_ep.{operation}: params must be MoEParams, and is "
            f"{type(params).__name__}."
        )
    info = param_info(config)
    for field in dataclasses.fields(MoEParams):
        is_given = getattr(params, field.name) is not None
        if is_given != (field.name in info):
            raise ValueError(
                f"jax_ep.{operation}: params.{field.name} must "
                f"{'not ' if is_given else ''}be given with this config, which asks "
                f"for {', '.join(info)}."
            )
        if is_given:
            dtype = getattr(getattr(params, field.name), "dtype", None)
            if dtype is None or dtype not in _DTYPES:
                raise TypeError(
                    f"jax_ep.{operation}: params.{field.name} must be a float32, "
                    "bfloat16, float16 or float64 array, and is "
                    f"{dtype or type(getattr(params, field.name)).__name__}: multiply "
                    "quantised weights by their scales first."
                )


def init_params(
    key: jax.Array, config: MoEConfig, dtype: Any = jnp.float32
) -> MoEParams:
    """Fresh global parameters: LeCun normal kernels per expert, zero biases.

    Args:
      key: a PRNG key.
      config: the layer.
      dtype: of all but the selection bias, which is float32.

    Returns:
      `MoEParams` of arrays over all E experts.

    Source: variance 1/fan-in (LeCun et al., Efficient BackProp, 1998), the fan of each
    expert's own matrix.
    """
    info = param_info(config)
    keys = jax.random.split(key, len(info))
    return MoEParams(
        **{
            name: one.init(one_key, one.shape, dtype if one.trainable else jnp.float32)
            for (name, one), one_key in zip(info.items(), keys, strict=True)
        }
    )


def param_specs(config: MoEConfig, **axes: Any) -> MoEParams:
    """The `PartitionSpec` of every parameter.

    Args:
      config: the layer.
      **axes: a mesh axis, or tuple of axes, for `expert`, `hidden` or `intermediate`;
        a dimension that is not named is not sharded.

    Returns:
      `MoEParams` of `PartitionSpec`, an entry for every dimension.

    >>> from jax_ep.config import MoEConfig
    >>> config = MoEConfig(num_experts=8, num_experts_per_tok=2, hidden_size=4,
    ...                    moe_intermediate_size=4)
    >>> param_specs(config, expert="expert", hidden="fsdp").down_proj
    PartitionSpec('expert', None, 'fsdp')
    """
    for name in axes:
        if name not in _DIMS:
            raise TypeError(f"jax_ep.param_specs: {name} must be one of {_DIMS}.")
    specs = {}
    for name, info in param_info(config).items():
        spec = [None if dim is None else axes.get(dim) for dim in info.dims]
        specs[name] = P(*spec)
    return MoEParams(**specs)


def keep_axes(spec: P, names: Collection[str]) -> P:
    """The spec without the mesh axes that are not among `names`."""
    kept = [tuple(name for name in names_of(dim) if name in names) for dim in spec]
    return P(*(dim[0] if len(dim) == 1 else dim or None for dim in kept))


def names_of(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """An axis, a tuple of axes, or none, as a tuple."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
