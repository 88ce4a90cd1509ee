"""Weights as they are stored, and as a rank computes with them."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ep.axis import ExpertAxis, axis_label, vary_alike
from jax_ep.config import MoEConfig
from jax_ep.params import MoEParams, names_of, param_info, param_specs
from jax_ep.placement import Placement
from jax_ep.tensor import TensorAxis, gathered


def checked_specs(operation: str, specs: MoEParams, config: MoEConfig) -> MoEParams:
    """Specs with an entry for every dimension of every parameter of a config.

    Raises:
      TypeError: specs that are no `MoEParams` of `PartitionSpec`. ValueError: a spec
        of more dimensions than its parameter has.
    """
    if not isinstance(specs, MoEParams):
        raise TypeError(
            f"jax_ep.{operation}: specs must be MoEParams of PartitionSpec (see "
            f"param_specs), and is {type(specs).__name__}."
        )
    full = {}
    for name, info in param_info(config).items():
        spec = getattr(specs, name)
        if not isinstance(spec, P):
            raise TypeError(
                f"jax_ep.{operation}: specs.{name} must be a PartitionSpec, and is "
                f"{spec!r}."
            )
        if len(spec) > len(info.shape):
            raise ValueError(
                f"jax_ep.{operation}: specs.{name} (={tuple(spec)}) must have at most "
                f"the {len(info.shape)} dimensions of params.{name}."
            )
        if P.UNCONSTRAINED in spec:
            raise ValueError(
                f"jax_ep.{operation}: specs.{name} (={tuple(spec)}) must say how each "
                "dimension is split."
            )
        full[name] = P(*spec, *[None] * (len(info.shape) - len(spec)))
    return MoEParams(**full)


def local_weights(
    params: MoEParams,
    specs: MoEParams | None,
    config: MoEConfig,
    axis: ExpertAxis,
    token_axes: tuple[str, ...],
    placement: Placement | None,
    tensor: TensorAxis = TensorAxis(),  # noqa: B008, frozen.
) -> MoEParams:
    """What a rank computes with: its L experts, and all other weights whole.

    Call it inside the shard_map. A dimension that is split is gathered, whatever the
    mesh axis; of a weight that then has all E experts the rank takes its own. Experts
    split over the expert axis first stay where they are.

    Args:
      params: of any split that `specs` describe.
      specs: their `PartitionSpec`s; None is experts split over `axis` and F over
        `tensor`. Names that the mesh lacks split nothing.
      config: the layer.
      axis: the expert axis.
      token_axes: the mesh axes that tokens are split over, the expert axis among them.
      placement: whether there is one: `place_params` takes all E experts too.
      tensor: the axes that F is split over.

    Returns:
      `MoEParams` of `[L, ...]` routed weights, with this rank's share of F; `[E, ...]`
      where a placement follows and all have that form.

    Raises:
      ValueError: a shape that is not the config's, naming the parameter.

    Derivative: that of a gather is a reduce-scatter, that of taking a share a padding
    with zeros.

    On the wire: each gathered weight, from each rank to the ranks of the gathered axes.
    """
    mesh_axes = dict(axis.mesh_axes)
    info = param_info(config)
    if specs is not None:
        specs = checked_specs("moe", specs, config)
    elif tensor.names:
        specs = param_specs(config, expert=axis.names, intermediate=tensor.names)
    whole, split = {}, set()
    for name, one in info.items():
        weight = getattr(params, name)
        spec = getattr(specs, name) if specs is not None else ()
        for dim, entry in enumerate(spec):
            names = tuple(n for n in names_of(entry) if n in mesh_axes)
            if one.dims[dim] == "expert" and names[: len(axis.names)] == axis.names:
                names = names[len(axis.names) :]
            if tensor.keeps(name, one.dims[dim], names):
                names = names[len(tensor.names) :]
                split.add(name)
            weight = gathered(weight, dim, names, token_axes)
        whole[name] = weight
    num_experts = config.num_experts
    num_local = num_experts // axis.num_ranks
    routed = [name for name, one in info.items() if one.dims[0] == "expert"]
    counts = {whole[name].shape[:1] for name in routed}
    if placement is None or counts != {(num_experts,)}:
        rank = lax.axis_index(axis.names) if axis.names else 0
        for name in routed:
            if whole[name].shape[:1] == (num_experts,) and num_local < num_experts:
                weight, start = vary_alike(
                    axis.names, (whole[name], jnp.asarray(rank * num_local))
                )
                whole[name] = lax.dynamic_slice_in_dim(weight, start, num_local)
    for name, one in info.items():
        shape = whole[name].shape
        wanted = one.shape
        if name in routed and shape[:1] != (num_experts,):
            wanted = (num_local, *one.shape[1:])
        if name in split:
            wanted = tuple(
                size // tensor.size if dim == "intermediate" else size
                for size, dim in zip(wanted, one.dims, strict=True)
            )
        if shape != wanted:
            raise ValueError(
                f"jax_ep.moe: params.{name} must be the rank's {wanted} of the whole "
                f"{one.shape}, and has shape {shape}"
                + (
                    "; specs say how weights are split besides."
                    if specs is None
                    else f" once gathered as specs.{name} "
                    f"(={tuple(getattr(specs, name))}) says."
                )
            )
    params = dataclasses.replace(params, **whole)
    return tensor.parts(params, config.moe_intermediate_size)


def storable(
    specs: MoEParams, config: MoEConfig, mesh, expert_names: tuple[str, ...]
) -> MoEParams:
    """The specs as given, or with whole experts where the ranks do not divide E.

    Args:
      specs: an entry for every dimension, as `param_specs` returns them.
      config: the layer.
      mesh: whose axes have sizes; of axes that it lacks there is one device.
      expert_names: mesh axes of the expert axis.

    Returns:
      `MoEParams` of `PartitionSpec`.
    """
    if not config.num_experts % math.prod(mesh.shape.get(n, 1) for n in expert_names):
        return specs
    changed = {}
    for name, info in param_info(config).items():
        first, *others = getattr(specs, name)
        if info.dims[0] == "expert":
            first = tuple(n for n in names_of(first) if n not in expert_names) or None
            changed[name] = P(first, *others)
    return dataclasses.replace(specs, **changed)


def check_divides(
    operation: str, specs: MoEParams, config: MoEConfig, mesh_axes: dict[str, int]
) -> None:
    """Refuses specs that split a dimension into unequal shares.

    Raises:
      ValueError: naming the parameter, the dimension and the axes.
    """
    for name, info in param_info(config).items():
        for dim, entry in enumerate(getattr(specs, name)):
            names = tuple(n for n in names_of(entry) if n in mesh_axes)
            shares = math.prod(mesh_axes[n] for n in names)
            if info.shape[dim] % shares:
                dim_name = info.dims[dim]
                shown = f"{dim_name} dimension" if dim_name else f"dimension {dim}"
                raise ValueError(
                    f"jax_ep.{operation}: the {shown} (={info.shape[dim]}) of "
                    f"params.{name} must be divisible by the {shares} shares over "
                    f'"{axis_label(names)}".'
                )
