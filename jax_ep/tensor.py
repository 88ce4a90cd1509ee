"""Tensor parallelism of the routed experts: F split over further mesh axes.

Ranks of a tensor axis have the same tokens. Each sends its share of H, so a token still
crosses the link once; the expert rank gathers whole rows, computes its share of F, and
the sum over F is scattered to shares of H, which combine brings home.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.axis import axis_label, vary_alike
from jax_ep.config import MoEConfig
from jax_ep.params import MoEParams, names_of

_FUSED = ("gate_up_proj", "gate_up_bias")
_LAST = ("gate_proj", "up_proj", "gate_bias", "up_bias")


@dataclasses.dataclass(frozen=True)
class TensorAxis:
    """The mesh axes that F is split over, and what happens there; none is allowed.

    Attributes:
      names: mesh axis names.
      size: product of their sizes.
    """

    names: tuple[str, ...] = ()
    size: int = 1

    def mine(self, rows: jax.Array | None) -> jax.Array | None:
        """This rank's columns of `[rows, H]`: `[rows, H / size]`."""
        return None if rows is None else self._share(rows, 1)

    def gathered(self, rows: jax.Array) -> jax.Array:
        """`[rows, H]` of all ranks' columns, for what each rank does with its F."""
        return gathered(rows, 1, self.names, self.names)

    def whole(self, rows: jax.Array) -> jax.Array:
        """The same, for what is the same on all ranks."""
        return gathered(rows, 1, self.names, ())

    def summed(self, rows: jax.Array) -> jax.Array:
        """This rank's columns of the sum over ranks."""
        if not self.names:
            return rows
        return lax.psum_scatter(rows, self.names, scatter_dimension=1, tiled=True)

    def parts(self, params: MoEParams, width: int) -> MoEParams:
        """Routed weights for this rank's share of `width` = F; its bias once.

        Those that are whole are cut, gate and up apart where they are one array, so
        that a rank has the same columns of both.
        """
        if not self.names:
            return params
        cut = {}
        for name in (*_LAST, *_FUSED, "down_proj"):
            weight = getattr(params, name)
            if weight is None:
                continue
            dim = 1 if name == "down_proj" else weight.ndim - 1
            if name in _FUSED:
                halves = jnp.split(weight, 2, axis=dim)
                weight = jnp.concatenate([self._share(h, dim) for h in halves], dim)
            elif weight.shape[dim] == width:
                weight = self._share(weight, dim)
            cut[name] = weight
        if params.down_bias is not None:
            bias, index = vary_alike(self.names, (params.down_bias, self._index()))
            cut["down_bias"] = jnp.where(index == 0, bias, jnp.zeros((), bias.dtype))
        return dataclasses.replace(params, **cut)

    def keeps(self, name: str, dim_name: str | None, names: tuple[str, ...]) -> bool:
        """Whether a routed weight's dimension, split over `names`, is split as here."""
        is_split = bool(self.names) and names[: len(self.names)] == self.names
        return is_split and dim_name == "intermediate" and name in (*_LAST, "down_proj")

    def _index(self):
        return jnp.asarray(lax.axis_index(self.names))

    def _share(self, array, dim):
        if not self.names:
            return array
        size = array.shape[dim] // self.size
        array, start = vary_alike(self.names, (array, self._index() * size))
        return lax.dynamic_slice_in_dim(array, start, size, dim)


def tensor_axis_of(
    operation: str,
    tensor_axis: str | Sequence[str],
    sizes: dict[str, int],
    config: MoEConfig,
    expert_names: Sequence[str],
) -> TensorAxis:
    """Checks the axes that a layer's F is split over.

    Args:
      operation: for messages.
      tensor_axis: mesh axis, or tuple of axes; () for none.
      sizes: the mesh axes and their sizes.
      config: the layer.
      expert_names: the expert axis.

    Raises:
      ValueError: an axis that the mesh lacks or that experts are split over, or that
        does not divide F and H.
    """
    names = names_of(tensor_axis)
    for name in names:
        if name not in sizes or name in expert_names:
            raise ValueError(
                f'jax_ep.{operation}: tensor_axis (="{axis_label(names)}") must name '
                f"axes of the mesh, which has {tuple(sizes)}, and none of the expert "
                f'axis "{axis_label(tuple(expert_names))}".'
            )
    size = math.prod(sizes[name] for name in names)
    for field in ("moe_intermediate_size", "hidden_size"):
        if getattr(config, field) % size:
            raise ValueError(
                f"jax_ep.{operation}: {field} (={getattr(config, field)}) must be "
                f'divisible by the {size} ranks of tensor_axis "{axis_label(names)}".'
            )
    return TensorAxis(names, size)


def gathered(
    array: jax.Array, dim: int, names: Sequence[str], token_axes: Sequence[str]
) -> jax.Array:
    """`array` whole along a dimension that is split over these axes, in that order.

    The result does not vary over those that tokens are the same on.
    """
    # The minor axis first: its pieces are neighbours.
    for name in reversed(names):
        # Over axes that hold the same tokens the result must not vary, or nothing that
        # it is part of could leave the shard_map as replicated. (Without check_vma
        # nothing is known to vary, and each copy's cotangent is its part of the whole:
        # the reduce-scatter behind a plain gather adds them.)
        is_known = name in jax.typeof(array).mat.varying
        to = "invarying" if is_known and name not in token_axes else "varying"
        array = lax.all_gather(array, name, axis=dim, tiled=True, to=to)
    return array
