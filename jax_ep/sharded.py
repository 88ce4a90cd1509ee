"""The layer over global arrays and a mesh: `moe` in a shard_map of its own."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.axis import axis_label
from jax_ep.config import MoEConfig
from jax_ep.losses import MoEStats
from jax_ep.moe import check_arrays, moe
from jax_ep.params import (
    MoEParams,
    check_params,
    keep_axes,
    names_of,
    param_info,
    param_specs,
)
from jax_ep.placement import Placement
from jax_ep.stored import check_divides, checked_specs, whole_experts

EXPERT_AXIS = "expert"
_OTHER_EXPERT_AXES = ("ep", "exp")  # Where the default name would mean one of these.


def sharded_moe(
    x: jax.Array,
    params: MoEParams,
    config: MoEConfig,
    *,
    mesh: Any = None,
    axis_name: str | Sequence[str] = EXPERT_AXIS,
    data_axes: str | Sequence[str] | None = None,
    specs: MoEParams | None = None,
    token_mask: jax.Array | None = None,
    key: jax.Array | None = None,
    placement: Placement | None = None,
    keep_topk_idx: bool = False,
) -> tuple[jax.Array, MoEStats]:
    """`moe` over global arrays: does the shard_map itself.

    Call it outside of any shard_map, under `jax.jit` or not. The first dimension of x
    is split over `data_axes` and the expert axis. Weights that are also split over data
    axes (FSDP) are gathered inside, so their gradients are reduce-scattered. Inside a
    fully manual shard_map, where x and params are this rank's share, it is `moe`.

    Args:
      x: `[B, ..., H]`, global.
      params: global `MoEParams`, all E experts.
      config: the layer.
      mesh: `jax.sharding.Mesh` of Auto or Explicit axes. None is that of the context
        (`jax.set_mesh`), or the one that x or params are sharded over; without any,
        one device.
      axis_name: mesh axis, or tuple of axes, that the experts are split over. A mesh
        without an axis "expert" has all experts on each device, as one device has by
        any name; another name that the mesh lacks is an error.
      data_axes: mesh axes that tokens are split over besides. None is all others.
      specs: `MoEParams` of `PartitionSpec`, how the weights are stored; None is
        `param_specs(config, expert=axis_name)`.
      token_mask: bool, `x.shape[:-1]`, global; see `moe`.
      key: see `moe`.
      placement: see `moe`; global, as planned.
      keep_topk_idx: see `moe`.

    Returns:
      `out`, like x and sharded as x is, and `MoEStats`, replicated; `topk_idx` is split
      as tokens are.

    Raises:
      ValueError: an expert axis among the data axes; an axis that the mesh lacks; a
        dimension that the axes do not divide; otherwise as `moe`.

    Derivative: as of `moe`; a mean over the global output has the gradients that one
    device would compute.
    """
    op = "sharded_moe"
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:
        mesh = context
    elif mesh is None:
        mesh = _mesh((x, params))
    expert_names = names_of(axis_name)
    data_names = names_of(data_axes)
    for name in data_names:
        if name in expert_names:
            raise ValueError(
                f'jax_ep.{op}: data_axes (="{axis_label(data_names)}") must not have '
                f'"{name}", which is the expert axis: tokens are always split over it.'
            )
        if name not in mesh.axis_names:
            raise ValueError(
                f'jax_ep.{op}: data_axes (="{axis_label(data_names)}") must name axes '
                f"of the mesh, which has {tuple(mesh.axis_names)}."
            )
    expert_names = _expert_axes_of(mesh, expert_names)
    if data_axes is None:
        data_names = tuple(n for n in mesh.axis_names if n not in expert_names)
    check_params(op, params, config)
    if specs is None:
        specs = param_specs(config, expert=expert_names)
    specs = checked_specs(op, specs, config)
    _check_names(mesh, specs)
    check_arrays(op, x, config, token_mask, placement)
    args = (x, params, token_mask, key, placement)
    if context.manual_axes:
        local = _local(config, expert_names, data_names, keep_topk_idx, specs)
        return local(*args)
    batch_names = tuple(n for n in mesh.axis_names if n in data_names + expert_names)
    num_shares = math.prod(mesh.shape[name] for name in batch_names)
    if x.ndim < 2 or x.shape[0] % num_shares:
        raise ValueError(
            f"jax_ep.{op}: x must have shape [B, ..., H] with B divisible by the "
            f'{num_shares} shares over "{axis_label(batch_names)}", and has {x.shape}.'
        )
    for name, info in param_info(config).items():
        shape = getattr(params, name).shape
        if shape != info.shape:
            raise ValueError(
                f"jax_ep.{op}: params.{name} must have shape {info.shape}, and has "
                f"{shape}."
            )
    num_ranks = math.prod(mesh.shape[name] for name in expert_names)
    if config.num_experts % num_ranks:
        specs = whole_experts(specs, config, expert_names)
    check_divides(op, specs, config, dict(mesh.shape))
    static = (config, expert_names, data_names, keep_topk_idx)
    return _sharded(static, mesh, batch_names, specs)(*args)


def _local(config, expert_names, data_names, keep_topk_idx, specs):
    """`moe` with these static arguments, a function of arrays."""

    def local(x, params, token_mask, key, placement):
        return moe(
            x,
            params,
            config,
            axis_name=expert_names,
            data_axes=data_names,
            specs=specs,
            token_mask=token_mask,
            key=key,
            placement=placement,
            keep_topk_idx=keep_topk_idx,
        )

    return local


@functools.lru_cache(maxsize=256)
def _sharded(static, mesh, batch_names, specs):
    """The jitted shard_map, made once, so that a call outside of jit compiles once."""
    config, expert_names, data_names, keep_topk_idx = static
    batch = P(batch_names) if batch_names else P()

    # Other axes than these are gathered by JAX at the border of the shard_map.
    known = expert_names + data_names
    specs = jax.tree.map(lambda spec: keep_axes(spec, known), specs)
    in_specs = (batch, specs, batch, P(), P())
    specs_of_stats: Any = P()
    if keep_topk_idx:
        by_name: dict[str, Any] = {}
        for field in dataclasses.fields(MoEStats):
            by_name[field.name] = batch if field.name == "topk_idx" else P()
        specs_of_stats = MoEStats(**by_name)

    local = _local(config, expert_names, data_names, keep_topk_idx, specs)

    def call(x, params, token_mask, key, placement):
        given = jax.typeof(x).sharding
        args = (x, params, token_mask, key, placement)
        used = tuple(
            spec if value is not None else None
            for spec, value in zip(in_specs, args, strict=True)
        )
        args = _reshard(args, used, mesh)
        out, stats = jax.shard_map(
            local, mesh=mesh, in_specs=used, out_specs=(batch, specs_of_stats)
        )(*args)
        if not given.mesh.empty:
            out = _reshard(out, given.spec, mesh)
        return out, stats

    return jax.jit(call)


def _reshard(tree, specs, mesh):
    """Arrays as a shard_map wants them on Explicit axes; Auto axes need nothing."""
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    if not explicit:
        return tree

    def reshard(spec, value):
        spec = keep_axes(spec, explicit)
        return jax.tree.map(
            lambda leaf: jax.sharding.reshard(leaf, NamedSharding(mesh, spec)), value
        )

    return jax.tree.map(reshard, specs, tree, is_leaf=lambda s: isinstance(s, P))


def _expert_axes_of(mesh, names):
    """Those of `names` that the mesh has; the default's absence is no expert axis."""
    for name in names:
        if name in mesh.axis_names or mesh.size == 1:
            continue
        nearest = difflib.get_close_matches(name, mesh.axis_names, n=1)
        if name == EXPERT_AXIS:
            nearest += [n for n in mesh.axis_names if n in _OTHER_EXPERT_AXES]
        if nearest or name != EXPERT_AXIS:
            hint = f': did you mean "{nearest[0]}"?' if nearest else "."
            raise ValueError(
                f'jax_ep.sharded_moe: axis_name (="{axis_label(names)}") must name '
                f"axes of the mesh, which has {tuple(mesh.axis_names)}{hint}"
            )
    return tuple(name for name in names if name in mesh.axis_names)


def _check_names(mesh, specs):
    """Axes that the mesh lacks split nothing; one that is nearly an axis is a typo."""
    used = {
        name
        for spec in jax.tree.leaves(specs)
        for part in spec
        for name in names_of(part)
    }
    for name in sorted(used - set(mesh.axis_names)):
        if nearest := difflib.get_close_matches(name, mesh.axis_names, n=1):
            raise ValueError(
                f'jax_ep.sharded_moe: specs split over "{name}", and the mesh has '
                f'{tuple(mesh.axis_names)}: did you mean "{nearest[0]}"?'
            )


def _mesh(tree):
    """The mesh of the context, else of the arrays' types, else of one device."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree)]
    for mesh in meshes:
        if not mesh.empty:
            return mesh
    return jax.sharding.AbstractMesh((1,), (EXPERT_AXIS,), axis_types=(AxisType.Auto,))
