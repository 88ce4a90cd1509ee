"""Which mesh axes a vmap around a call maps over: no shard_map in it may use them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

_SPMD_ERROR = "spmd_axis_name cannot appear in shard_map in_specs"


def is_spmd_axis_error(error: ValueError) -> bool:
    """Whether a shard_map failed because a vmap has its axis as `spmd_axis_name`."""
    return _SPMD_ERROR in str(error)


def explicit_mapped_axes(mesh: Any) -> tuple[str, ...]:
    """The Explicit axes that a vmap around the call maps over."""
    if AxisType.Explicit not in mesh.axis_types:
        return ()
    manual = []

    def look():
        manual.extend(jax.sharding.get_abstract_mesh().manual_axes)
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=(), out_specs=P()))
    return tuple(name for name in mesh.axis_names if name not in manual)


def is_mapped_over(mesh: Any, name: str, arrays: Any) -> bool:
    """Whether a vmap of any of `arrays` has the Auto axis as `spmd_axis_name`.

    Nothing says so but a shard_map over that axis, which fails; its result is unused.
    """
    kind = mesh.axis_types[mesh.axis_names.index(name)]
    traced = [
        leaf.reshape(-1)[0].astype(jnp.float32)
        for leaf in jax.tree.leaves(arrays)
        if isinstance(leaf, Tracer) and leaf.size
    ]
    if kind != AxisType.Auto or not traced:
        return False
    probe = jnp.broadcast_to(sum(traced[1:], traced[0]), (mesh.shape[name],))
    try:
        jax.shard_map(lambda x: x, mesh=mesh, in_specs=P(name), out_specs=P(name))(
            probe
        )
    except ValueError as error:
        if not is_spmd_axis_error(error):
            raise
        return True
    return False
