"""Tokens of a layer: what is refused, and how a batch is shared out over a mesh."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ep.axis import ExpertAxis, axis_label
from jax_ep.config import MoEConfig
from jax_ep.params import names_of
from jax_ep.payload import is_float
from jax_ep.placement import Placement
from jax_ep.tensor import TensorAxis, tensor_axis_of


def check_arrays(
    operation: str,
    x: jax.Array,
    config: MoEConfig,
    token_mask: jax.Array | None,
    placement: Placement | None,
) -> None:
    """Refuses what would otherwise go wrong further down, or go unnoticed.

    Raises:
      ValueError: x without tokens or of a symbolic size, a mask of another shape than
        theirs, a placement of another number of experts, or no sequences where the loss
        is per sequence. TypeError: x is no array, or its dtype.
    """
    if not hasattr(x, "dtype") or not hasattr(x, "ndim"):
        raise TypeError(
            f"jax_ep.{operation}: x must be an array, and is {type(x).__name__}."
        )
    if not all(isinstance(size, int) for size in x.shape):
        raise ValueError(
            f"jax_ep.{operation}: x must have sizes that are numbers, and has "
            f"{x.shape}: receive buffers are of a static size, so export a program for "
            "each batch, or one for the largest and mask the rest (token_mask)."
        )
    if not is_float(x):
        raise TypeError(
            f"jax_ep.{operation}: x must be float32, bfloat16 or float16, and is "
            f"{x.dtype}."
        )
    if x.ndim < 3 and config.load_balance_scope == "sequence":
        # A rank's share would count as one, and the loss depend on the number of ranks.
        raise ValueError(
            f"jax_ep.{operation}: x must have shape [..., S, H] for load_balance_scope "
            f'"sequence", and has {x.shape}.'
        )
    if x.ndim < 2:
        raise ValueError(
            f"jax_ep.{operation}: x must have shape [..., H] with tokens, and has "
            f"{x.shape}."
        )
    if token_mask is not None and token_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"jax_ep.{operation}: token_mask must have shape x.shape[:-1] = "
            f"{x.shape[:-1]}, and has {token_mask.shape}."
        )
    if placement is not None and placement.num_experts != config.num_experts:
        raise ValueError(
            f"jax_ep.{operation}: placement must be of num_experts "
            f"(={config.num_experts}) experts, and is of {placement.num_experts}."
        )


def axes_of_tokens(
    config: MoEConfig,
    axis: ExpertAxis,
    data_axes: str | Sequence[str] | None,
    sequence_axes: str | Sequence[str] | None,
    tensor_axis: str | Sequence[str] = (),
) -> tuple[tuple[str, ...], tuple[str, ...], TensorAxis]:
    """The axes that tokens are split over, those that a sequence is, and F's.

    Args:
      config: the layer.
      axis: the expert axis, whose names come first.
      data_axes: further axes; None is all others but the tensor axes.
      sequence_axes: those of all these that one sequence is split over; None is none,
        where no loss needs to know.
      tensor_axis: axes that F is split over, and tokens are the same on.

    Raises:
      ValueError: a repeated axis; a sequence axis that tokens are not split over; a
        loss per sequence of sequences that may be parts.
    """
    sizes = dict(axis.mesh_axes)
    tensor = tensor_axis_of("moe", tensor_axis, sizes, config, axis.names)
    tensor_names = tensor.names
    data_names = names_of(data_axes)
    if data_axes is None:
        data_names = tuple(n for n in axis.manual_names if n not in tensor_names)
    axes = axis.names + data_names
    if len(set(axes)) < len(axes):
        raise ValueError(
            f'jax_ep.moe: data_axes (="{axis_label(data_names)}") must not repeat an '
            f'axis, nor have one of the expert axis "{axis_label(axis.names)}".'
        )
    if set(axes) & set(tensor_names):
        raise ValueError(
            f'jax_ep.moe: data_axes (="{axis_label(data_names)}") must not have one of '
            f'tensor_axis "{axis_label(tensor_names)}": its ranks have the same tokens.'
        )
    sequence_names = names_of(sequence_axes)
    if not set(sequence_names) <= set(axes):
        raise ValueError(
            f'jax_ep.moe: sequence_axes (="{axis_label(sequence_names)}") must be of '
            f'the axes that tokens are split over, "{axis_label(axes)}".'
        )
    is_split = math.prod(sizes[name] for name in axes) > 1
    if config.load_balance_scope == "sequence" and sequence_axes is None and is_split:
        raise ValueError(
            "jax_ep.moe: sequence_axes must say which mesh axes each sequence is split "
            "over, () for none, since the loss is per sequence (load_balance_scope): a "
            "part would count as a whole one."
        )
    return axes, sequence_names, tensor


def flat_tokens(x: jax.Array, token_mask: jax.Array | None):
    """`[T, H]`, zero where masked, and the mask `[T]` or None."""
    tokens = x.reshape(-1, x.shape[-1])
    if token_mask is None:
        return tokens, None
    mask = token_mask.reshape(-1)
    return jnp.where(mask[:, None], tokens, jnp.zeros((), x.dtype)), mask


@dataclasses.dataclass(frozen=True)
class Split:
    """How `x` `[B, ..., H]` is shared out: B over some mesh axes, S over others.

    S is the last dimension before H. What the shares do not divide is padded, and the
    padding masked.

    Attributes:
      batch_names: mesh axes that B is split over, the major one first.
      sequence_names: those that S is split over.
      num_batch_shares, num_sequence_shares: the products of their sizes.
    """

    batch_names: tuple[str, ...]
    sequence_names: tuple[str, ...]
    num_batch_shares: int
    num_sequence_shares: int

    def spec(self, ndim: int) -> P:
        """Of an array `[B, ..., S, H]`, or `[B, H]`."""
        if ndim < 3:
            return P(self.batch_names or None)
        middle = [None] * (ndim - 3)
        return P(self.batch_names or None, *middle, self.sequence_names or None)

    def padding(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """What `jnp.pad` takes, for the shape of x or its mask: `[B, ...]`."""
        after = [0] * len(shape)
        after[0] = -shape[0] % self.num_batch_shares
        if self.num_sequence_shares > 1:
            after[-1] = -shape[-1] % self.num_sequence_shares
        return [(0, rows) for rows in after]


def split_of(
    shape: tuple[int, ...],
    sizes: dict[str, int],
    sequence_names: tuple[str, ...] | None,
) -> Split:
    """The split of `x.shape[:-1]` over mesh axes.

    Args:
      shape: `[B, ...]`.
      sizes: the mesh axes that tokens are split over, the major one first, and their
        sizes.
      sequence_names: those that S is split over. None: the batch takes as many as
        leaves the least padding, and the sequence the rest, so that B = 1 is no waste.

    Returns:
      A `Split`.
    """
    names = tuple(sizes)

    def split(sequence):
        batch = tuple(name for name in names if name not in sequence)
        shares = (math.prod(sizes[n] for n in part) for part in (batch, sequence))
        return Split(batch, sequence, *shares)

    if sequence_names is not None:
        return split(sequence_names)
    if len(shape) < 2:
        return split(())
    candidates = [split(names[n:]) for n in range(len(names), -1, -1)]

    def num_rows(split):
        padded = zip(shape, split.padding(shape), strict=True)
        return math.prod(size + after for size, (_, after) in padded)

    return min(candidates, key=num_rows)  # Of equal ones the first: whole sequences.
