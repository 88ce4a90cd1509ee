"""The expert axis: its ranks, its replica groups, and what a shard_map must offer."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_ep import _ffi

MAX_RANKS = _ffi.limits["ranks"]  # One NVLink domain; peers are kernel parameters.


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """The mesh axes that expert parallelism runs over, as seen inside a shard_map.

    Attributes:
      names: mesh axis names; a rank is `lax.axis_index(names)`.
      num_ranks: product of their sizes.
      mesh_axes: every axis of the mesh with its size, in mesh order.
      num_domains: D, where this is one of D consecutive parts of the ranks of `names`,
        an NVLink domain; `num_ranks` is then G, its ranks, and a rank is
        `lax.axis_index(names) % G`.
    """

    names: tuple[str, ...]
    num_ranks: int
    mesh_axes: tuple[tuple[str, int], ...]
    num_domains: int = 1

    @property
    def other_names(self) -> tuple[str, ...]:
        """The mesh axes that groups differ in, in mesh order."""
        return tuple(name for name, _ in self.mesh_axes if name not in self.names)

    @property
    def manual_names(self) -> tuple[str, ...]:
        """Those of `other_names` that no vmap maps over."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(name for name in self.other_names if name in manual)

    @property
    def groups(self) -> np.ndarray:
        """Flattened mesh positions `[G, R]`: a row per group, in rank order."""
        order = [name for name, _ in self.mesh_axes]
        sizes = [size for _, size in self.mesh_axes]
        positions = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes)
        axes = [order.index(name) for name in self.other_names + self.names]
        return positions.transpose(axes).reshape(-1, self.num_ranks)

    def of_domain(self, domain_size: int) -> "ExpertAxis":
        """The part of G consecutive ranks that this device is in."""
        return dataclasses.replace(
            self,
            num_ranks=domain_size,
            num_domains=self.num_ranks // domain_size,
        )

    @property
    def index_groups(self) -> list[list[int]] | None:
        """The ranks of each domain, as `lax` collectives take them; None is all."""
        if self.num_domains == 1:
            return None
        size = self.num_ranks
        return [list(range(d * size, d * size + size)) for d in range(self.num_domains)]

    def rank_and_group(self) -> jax.Array:
        """`[2]` int32: this device's rank, and its row in `groups`."""
        rank = lax.axis_index(self.names) if self.names else 0
        group = lax.axis_index(self.other_names) if self.other_names else 0
        if self.num_domains > 1:
            group = group * self.num_domains + rank // self.num_ranks
            rank = rank % self.num_ranks
        return jax.numpy.stack(
            [jax.numpy.int32(rank), jax.numpy.int32(group)]  # [rank, group]
        )


def expert_axis(operation: str, axis_name: str | Sequence[str]) -> ExpertAxis:
    """Checks that a fully manual shard_map over `axis_name` encloses the call.

    Raises:
      ValueError: no shard_map (unless `axis_name` is `()`, one rank), an unknown or
        repeated axis, or axes left automatic.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    shown = axis_label(names)
    if not names and (mesh.empty or not mesh.manual_axes):
        return ExpertAxis((), 1, ())  # One rank, and nobody to meet.
    if mesh.empty or not mesh.manual_axes:
        raise ValueError(
            f'jax_ep.{operation}: axis_name (="{shown}") must be an axis of an '
            "enclosing jax.shard_map, and no shard_map encloses this call."
        )
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f'jax_ep.{operation}: axis_name (="{shown}") must name axes of the '
                f"enclosing mesh, which has {tuple(mesh.axis_names)}."
            )
    if len(set(names)) != len(names):
        raise ValueError(
            f'jax_ep.{operation}: axis_name (="{shown}") must not repeat an axis.'
        )
    # Explicit axes that are left are those of a vmap (spmd_axis_name, or the mapped
    # dimension's own): shard_map makes them manual when it is batched. Where there is
    # no vmap, the lowering finds them missing.
    automatic = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == jax.sharding.AxisType.Auto
        or (name in names and name not in mesh.manual_axes)
    ]
    if automatic:
        raise ValueError(f"jax_ep.{operation}: {partly_manual(automatic)}")
    num_ranks = math.prod(mesh.shape[name] for name in names)
    return ExpertAxis(
        names, num_ranks, tuple((name, mesh.shape[name]) for name in mesh.axis_names)
    )


def partly_manual(names: Sequence[str]) -> str:
    """What to say where a shard_map is not manual over these axes."""
    return (
        f"the enclosing shard_map must be manual over every mesh axis, but leaves "
        f"{tuple(names)} automatic: drop its axis_names."
    )


def axis_label(names: tuple[str, ...]) -> str:
    """`expert`, or `data,expert` for a tuple of axes."""
    return ",".join(names)


def like(aval, shape, dtype):
    """A type that varies as `aval` does, of another shape and dtype, unsharded."""
    changes: dict[str, Any] = dict(
        shape=tuple(shape), dtype=jax.numpy.dtype(dtype), weak_type=False
    )
    if len(shape) != aval.ndim:
        spec = jax.sharding.PartitionSpec(*[None] * len(shape))
        changes["sharding"] = jax.sharding.NamedSharding(aval.sharding.mesh, spec)
    return aval.update(**changes)


def in_sequence(primitive, operands, dims, **params):
    """Vmap of a primitive whose operands must vary alike: one call after another."""
    mapped = [dim is not None for dim in dims]
    operands = [
        jax.numpy.moveaxis(operand, dim, 0) if is_mapped else operand
        for operand, dim, is_mapped in zip(operands, dims, mapped, strict=True)
    ]
    are_mapped = zip(operands, mapped, strict=True)
    split = {jax.typeof(o).sharding.spec[0] for o, m in are_mapped if m} - {None}
    if not split:
        return _in_sequence(primitive, operands, mapped, params)
    # An Explicit axis that the enclosing shard_map left to the vmap: manual here, so
    # that each of its devices calls for its own part.
    (names,) = split
    names = (names,) if isinstance(names, str) else tuple(names)
    along = jax.sharding.PartitionSpec(names)
    specs = tuple(along if m else jax.sharding.PartitionSpec() for m in mapped)
    return jax.shard_map(
        lambda *operands: _in_sequence(primitive, operands, mapped, params),
        in_specs=specs,
        out_specs=along,
        axis_names=set(names),
    )(*operands)


def _in_sequence(primitive, operands, mapped, params):
    moved = [operand for operand, m in zip(operands, mapped, strict=True) if m]

    def one(slices):
        slices = iter(slices)
        args = [
            next(slices) if is_mapped else operand
            for operand, is_mapped in zip(operands, mapped, strict=True)
        ]
        # With spmd_axis_name, the mapped ones vary over one axis more.
        return primitive.bind(*vary_alike((), args), **params)

    return lax.map(one, moved)


def vary_alike(names: tuple[str, ...], tree):
    """Casts every array to the union of all arrays' varying axes and `names`.

    A replicated operand beside a varying one would otherwise get, with no message, a
    gradient that lacks the other ranks' share. Under `check_vma=False` this is free.
    """
    leaves = jax.tree.leaves(tree)
    union = set(names).union(*(jax.typeof(leaf).mat.varying for leaf in leaves))

    def cast(leaf):
        missing = tuple(sorted(union - jax.typeof(leaf).mat.varying))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)
