"""The layer over global arrays and a mesh: `moe` in a shard_map of its own."""

import dataclasses
import difflib
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.axis import axis_label
from jax_ep.config import MoEConfig
from jax_ep.experts import Matmul
from jax_ep.losses import MoEStats
from jax_ep.mapped import (
    explicit_mapped_axes,
    is_mapped_over,
    is_spmd_axis_error,
)
from jax_ep.moe import moe
from jax_ep.params import (
    MoEParams,
    check_params,
    keep_axes,
    names_of,
    param_info,
    param_specs,
)
from jax_ep.placement import Placement
from jax_ep.stored import check_divides, checked_specs, storable
from jax_ep.tensor import tensor_axis_of
from jax_ep.tokens import Split, check_arrays, split_of

EXPERT_AXIS = "expert"
_NO_MESH = jax.sharding.AbstractMesh((), ())
_OTHER_EXPERT_AXES = ("ep", "exp")  # Where the default name would mean one of these.


def sharded_moe(
    x: jax.Array,
    params: MoEParams,
    config: MoEConfig,
    *,
    mesh: Any = None,
    axis_name: str | Sequence[str] = EXPERT_AXIS,
    data_axes: str | Sequence[str] | None = None,
    tensor_axis: str | Sequence[str] = (),
    sequence_axes: str | Sequence[str] | None = None,
    specs: MoEParams | None = None,
    token_mask: jax.Array | None = None,
    key: jax.Array | None = None,
    placement: Placement | None = None,
    keep_topk_idx: bool = False,
    matmul: Matmul | None = None,
) -> tuple[jax.Array, MoEStats]:
    """`moe` over global arrays: does the shard_map itself.

    Call it outside of any shard_map, under `jax.jit` or not. Tokens are split over
    `data_axes` and the expert axis: the batch, and S too where `sequence_axes` say so;
    what these do not divide is padded inside, and the padding masked, so any B will do.
    Weights that are split over further dimensions (FSDP) are gathered inside, so their
    gradients are reduce-scattered. Inside a fully manual shard_map, where x and params
    are this rank's share, it is `moe`.

    Args:
      x: `[B, ..., H]`, global; `[B, ..., S, H]` for sequences.
      params: global `MoEParams`, all E experts.
      config: the layer.
      mesh: `jax.sharding.Mesh` of Auto or Explicit axes. None is that of the context
        (`jax.set_mesh`), or the one that x or params are sharded over; without any,
        one device.
      axis_name: mesh axis, or tuple of axes, that the experts are split over. A mesh
        without an axis "expert" has all experts on each device, with a warning; `()`
        says that this is meant, and one device has them by any name. Another name that
        the mesh lacks is an error.
      data_axes: mesh axes that tokens are split over besides. None is all others.
      tensor_axis: mesh axis, or tuple of axes, that F of the routed experts is split
        over; tokens are the same on it, and cross the link once (see `tensor.py`).
        Shared experts are computed whole there. Fused gate and up are gathered and cut,
        so `fuse_gate_up=False` costs less.
      sequence_axes: those of all these that S is split over, and the batch not: a
        sequence-parallel x then stays where it is. None is as x's type says (Explicit
        axes), else none, unless B is too small for the shares.
      specs: `MoEParams` of `PartitionSpec`, how the weights are split, over any mesh
        axes; None is `param_specs(config, expert=axis_name,
        intermediate=tensor_axis)`.
      token_mask: bool, `x.shape[:-1]`, global; False for padding tokens, which go
        nowhere, count nowhere, get zero, and may be NaN.
      key: for jitter noise and random routing; each rank folds its index in.
      placement: which rank holds which experts, replicas included; global, the same on
        all ranks. The router, the losses and `expert_load` speak of logical experts
        still, and so do params: see `place_params`, whose exchange this adds. None is
        one slot for each expert, or `plan_placement` of equal loads where R does not
        divide E; params are then stored whole.
      keep_topk_idx: whether `MoEStats.topk_idx` holds the (logical) experts of the
        tokens.
      matmul: the experts' grouped product, see `experts`; the same function for the
        same layer, or each call outside of jit compiles anew.

    Returns:
      `out`, like x and sharded as x is, and `MoEStats`, replicated; `topk_idx` is split
      as tokens are.

    Raises:
      ValueError: an expert axis among the data axes; an axis that the mesh lacks; a
        weight's dimension that the axes do not divide; otherwise as `moe`.

    Derivative: as of `moe`; a mean over the global output has the gradients that one
    device would compute.
    """
    op = "sharded_moe"
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:
        mesh = context
    elif mesh is None:
        mesh = _mesh((x, params), axis_name)
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
    mapped = () if context.manual_axes else explicit_mapped_axes(mesh)
    for name in mapped:
        if name in (*data_names, *expert_names):
            raise ValueError(
                f'jax_ep.{op}: data_axes and axis_name must not have "{name}", which a '
                "vmap around this call maps over."
            )
    tensor_names = tensor_axis_of(
        op, tensor_axis, dict(mesh.shape), config, expert_names
    ).names
    if data_axes is None:
        taken = (*expert_names, *mapped, *tensor_names)
        data_names = tuple(n for n in mesh.axis_names if n not in taken)
    check_params(op, params, config)
    if specs is None:
        specs = param_specs(config, expert=expert_names, intermediate=tensor_names)
    specs = checked_specs(op, specs, config)
    _check_names(mesh, specs)
    check_arrays(op, x, config, token_mask, placement)
    args = (x, params, token_mask, key, placement)
    if context.manual_axes:
        static = (config, expert_names, data_names, tensor_names, sequence_axes)
        return _local(*static, keep_topk_idx, matmul, specs)(*args)
    for name, info in param_info(config).items():
        shape = getattr(params, name).shape
        if shape != info.shape:
            raise ValueError(
                f"jax_ep.{op}: params.{name} must have shape {info.shape}, and has "
                f"{shape}."
            )
    specs = storable(specs, config, mesh, expert_names)
    check_divides(op, specs, config, dict(mesh.shape))

    def over(data_names, check_vma=True):
        split = _split(mesh, x, expert_names + data_names, sequence_axes)
        static = (config, expert_names, data_names, tensor_names)
        static += (split.sequence_names, keep_topk_idx, matmul)
        return _sharded(static, mesh, split, specs, check_vma)(*args)

    # A custom_vjp gives what a vmap does not map a cotangent that varies over its
    # spmd_axis_name, which check_vma refuses; without, shard_map adds up over all axes.
    if data_axes is not None:
        known = {*expert_names, *data_names, *tensor_names}
        left = [name for name in mesh.axis_names if name not in known]
        arrays = (x, params, token_mask)
        is_mapped = any(is_mapped_over(mesh, name, arrays) for name in left)
        return over(data_names, check_vma=not is_mapped)
    # By default such an axis would be a data axis, and fails as one.
    last = ValueError()
    for taken in ((), *((name,) for name in data_names)):
        try:
            rest = tuple(name for name in data_names if name not in taken)
            return over(rest, check_vma=not taken)
        except ValueError as error:
            if not is_spmd_axis_error(error):
                raise
            last = error
    raise last


def _split(mesh, x, names, sequence_axes) -> Split:
    """How x is shared out; x's own order of axes where its type knows one."""
    spec = jax.typeof(x).sharding.spec
    spec = [names_of(dim) if dim is not P.UNCONSTRAINED else () for dim in spec]
    batch_spec = spec[0] if spec else ()
    if sequence_axes is None:
        found = spec[-2] if len(spec) > 2 and len(spec) == x.ndim else ()
        sequence_names = tuple(name for name in found if name in names) or None
    else:
        sequence_names = names_of(sequence_axes)
        if not set(sequence_names) <= set(names) or x.ndim < 3 and sequence_names:
            raise ValueError(
                f'jax_ep.sharded_moe: sequence_axes (="{axis_label(sequence_names)}") '
                f'must be of the axes that tokens are split over, "{axis_label(names)}'
                f'", for x of shape [B, ..., S, H], and x has {x.shape}.'
            )
    first = [name for name in batch_spec if name in names]
    rest = [n for n in mesh.axis_names if n in names and n not in first]
    sizes = {name: mesh.shape[name] for name in (*first, *rest)}
    return split_of(x.shape[:-1], sizes, sequence_names)


def _local(
    config,
    expert_names,
    data_names,
    tensor_names,
    sequence_axes,
    keep_topk_idx,
    matmul,
    specs,
):
    """`moe` with these static arguments, a function of arrays."""

    def local(x, params, token_mask, key, placement):
        return moe(
            x,
            params,
            config,
            axis_name=expert_names,
            data_axes=data_names,
            tensor_axis=tensor_names,
            sequence_axes=sequence_axes,
            specs=specs,
            token_mask=token_mask,
            key=key,
            placement=placement,
            keep_topk_idx=keep_topk_idx,
            matmul=matmul,
        )

    return local


@functools.lru_cache(maxsize=256)
def _sharded(static: Any, mesh, split, specs, check_vma):
    """The jitted shard_map, made once, so that a call outside of jit compiles once."""
    _, expert_names, data_names, tensor_names, _, keep_topk_idx, _ = static
    # Other axes than these are gathered by JAX at the border of the shard_map.
    known = expert_names + data_names + tensor_names
    specs = jax.tree.map(lambda spec: keep_axes(spec, known), specs)
    local = _local(*static, specs=specs)
    if mesh.empty:
        return jax.jit(local)

    def call(x, params, token_mask, key, placement):
        given, shape = jax.typeof(x).sharding, x.shape
        tokens = split.spec(x.ndim)
        specs_of_stats: Any = P()
        if keep_topk_idx:
            by_name: dict[str, Any] = {}
            for field in dataclasses.fields(MoEStats):
                by_name[field.name] = tokens if field.name == "topk_idx" else P()
            specs_of_stats = MoEStats(**by_name)
        padding = split.padding(shape[:-1])
        is_padded = any(after for _, after in padding)
        if is_padded:
            if token_mask is None:
                token_mask = jnp.ones(shape[:-1], bool)
            # What Explicit axes split cannot be padded.
            x, token_mask = _reshard((x, token_mask), (P(), P()), mesh)
            x, token_mask = (
                jnp.pad(array, padding + [(0, 0)] * (array.ndim - len(padding)))
                for array in (x, token_mask)
            )
        args = (x, params, token_mask, key, placement)
        in_specs = (tokens, specs, tokens, P(), P())
        used = tuple(
            spec if value is not None else None
            for spec, value in zip(in_specs, args, strict=True)
        )
        args = _reshard(args, used, mesh)
        out, stats = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=used,
            out_specs=(tokens, specs_of_stats),
            check_vma=check_vma,
        )(*args)
        if is_padded:
            real = tuple(slice(size) for size in shape[:-1])
            (out,) = _reshard((out,), (P(),), mesh)
            out = out[real]
            if keep_topk_idx:
                kept: Any
                (kept,) = _reshard((stats.topk_idx,), (P(),), mesh)
                stats = dataclasses.replace(stats, topk_idx=kept[real])
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
        if name in mesh.axis_names or mesh.size <= 1:
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
        _warn(
            f'the mesh has axes {tuple(mesh.axis_names)} and none "{EXPERT_AXIS}", so '
            f"each of its {mesh.size} devices computes all experts. Give axis_name="
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


def _mesh(tree, axis_name):
    """The mesh of the context, else of the arrays' types, else of one device."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree)]
    for mesh in meshes:
        if not mesh.empty:
            return mesh
    if names_of(axis_name) and jax.device_count() > 1:
        _warn(
            f"there is no mesh, and there are {jax.device_count()} devices: no expert "
            "parallelism, even where jit's in_shardings or an old `with mesh:` split "
            "the arrays. Give mesh=, or call it under jax.set_mesh(mesh)"
        )
    return _NO_MESH


def _warn(message: str) -> None:
    """Once a process, since the place is always this line."""
    meant = "axis_name=() says that this is meant."
    warnings.warn(f"jax_ep.sharded_moe: {message}; {meant}", stacklevel=1)
