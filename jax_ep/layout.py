"""Layout: where every (token, k) slot lands, decided before any row moves."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_ep import ffi
from jax_ep.axis import axis_label, expert_axis, vary_alike

Implementation = Literal["ffi", "xla"]

MAX_TOPK = 32  # One lane of a warp per slot of a token.
MAX_EXPERTS = 2048  # Counters of all experts fit one block's shared memory.
_MAX_INT32 = 2**31 - 1

_STATIC = dict(static=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """The routing of one batch of tokens, as `dispatch` and `combine` need it.

    Every leaf is int32 with at least one axis, so that one `PartitionSpec` over the
    expert axis fits them all and a handle may leave and re-enter a shard_map. A row is
    an index into an expert rank's receive buffer of `capacity` rows.

    Attributes:
      slot: `[T, K]`, the slot's row in its owner's buffer; -1 if masked or dropped.
      slot_rank: `[T, K]`, the rank that owns the slot's expert, also where the slot was
        dropped; -1 if masked. (`slot == -1` and `slot_rank >= 0`: dropped.)
      recv_slot: `[R, T, K]`, the same seen from the owner: this rank's row for (source
        rank, token, k); -1 if the slot is not this rank's.
      group_sizes: `[L]`, rows per local expert with alignment padding included, as
        `jax.lax.ragged_dot` takes them.
      group_counts: `[L]`, rows per local expert that hold a token.
      group_offsets: `[L]`, first row of each local expert.
      num_recv: `[R]`, rows wanted at each rank before drops, the same on all ranks.
      num_dropped: `[R]`, rows dropped at each rank, the same on all ranks.
      num_invalid: `[1]`, this rank's ids that are at least `num_experts`.
      num_experts: E, over all ranks.
      axis_name: the mesh axes of the exchange.
      num_ranks: R.
      capacity: C, rows of the receive buffer.
      expert_alignment: A; each group starts on a multiple of it.
      num_tokens: T, tokens per rank.
      num_topk: K.
      implementation: None, "ffi" or "xla", see `dispatch_layout`.
      num_sms: SMs a CUDA kernel may use, None for the default.
      timeout_s: seconds after which a wait for another rank becomes an error.
      stamps: whether calls note when their phases began and ended, see `stamps.py`.
    """

    slot: jax.Array
    slot_rank: jax.Array
    recv_slot: jax.Array
    group_sizes: jax.Array
    group_counts: jax.Array
    group_offsets: jax.Array
    num_recv: jax.Array
    num_dropped: jax.Array
    num_invalid: jax.Array
    num_experts: int = dataclasses.field(metadata=_STATIC)
    axis_name: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    num_ranks: int = dataclasses.field(metadata=_STATIC)
    capacity: int = dataclasses.field(metadata=_STATIC)
    expert_alignment: int = dataclasses.field(metadata=_STATIC)
    num_tokens: int = dataclasses.field(metadata=_STATIC)
    num_topk: int = dataclasses.field(metadata=_STATIC)
    implementation: Implementation | None = dataclasses.field(metadata=_STATIC)
    num_sms: int | None = dataclasses.field(metadata=_STATIC)
    timeout_s: float = dataclasses.field(metadata=_STATIC)
    stamps: bool = dataclasses.field(metadata=_STATIC)


_ARRAYS = [f.name for f in dataclasses.fields(Handle) if f.metadata != _STATIC]


@jax.named_scope("jax_ep.layout")
def dispatch_layout(
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: str | Sequence[str] = "expert",
    capacity: int | None = None,
    expert_alignment: int = 1,
    implementation: Implementation | None = None,
    num_sms: int | None = None,
    timeout_s: float = 100.0,
    stamps: bool = False,
) -> Handle:
    """Exchanges the expert ids and derives the row of every (token, k) slot.

    Call it inside a fully manual `jax.shard_map` over `axis_name`, on every rank, with
    the same static arguments and T. A rank with fewer tokens masks its tail with -1.

    Rows are ordered by local expert and, inside one, by (source rank, token, k); each
    group starts on a multiple of `expert_alignment`. Positions are prefix sums: the
    same ids give the same rows, every time.

    Where more rows are wanted than fit, rows are dropped and counted. Per rank,
    the experts share its buffer by the highest common limit, a multiple of A, that
    fits; then experts in index order take one further block of A while it fits. An
    expert that loses rows shares what it keeps among its source ranks by the same rule
    with A = 1; of one source the first (token, k) stay. (Demands 1000, 900, 300, 20
    with capacity 1500 and A 128 keep 512, 384, 300, 20.)

    Args:
      topk_idx: `[T, K]` int32 or int64, the experts of each token, 1 <= K <= 32. A
        negative id masks its slot. An id >= E does too and is counted in `num_invalid`.
        The same expert twice in a row makes two slots.
      num_experts: E <= 2048, over all ranks, a multiple of R. Rank r owns the experts
        `r * E // R` up to `(r + 1) * E // R`.
      axis_name: mesh axis, or tuple of axes, of R <= 64 ranks.
      capacity: rows C of each rank's receive buffer, rounded down to a multiple of A.
        None is dropless: `R*T*K + L*(A-1)` rows. (A router that never repeats an id in
        a row needs no more than `R*T*min(K, L) + L*(A-1)`.)
      expert_alignment: A >= 1, in rows.
      implementation: None runs the custom call on CPU devices of one process and on
        CUDA, and plain `jax.lax` collectives on everything else; "xla" runs the latter
        everywhere; "ffi" is the custom call or an error.
      num_sms: most SMs a CUDA kernel may use. None leaves at least 32 of them free.
      timeout_s: seconds after which waiting for another rank becomes an error that
        names it.
      stamps: for tools that measure: this call, and those with its handle, note when
        their phases began and ended, see `jax_ep.stamps`. Results are the same.

    Returns:
      A `Handle`; its fields give the shapes. Integers only, so there is no derivative.
      Under `jax.checkpoint` its leaves carry the name `jax_ep_handle`.

    Raises:
      ValueError: no shard_map over the axis, a partly manual one, or a shape or value
        out of range. TypeError: ids that are neither int32 nor int64.

    On the wire: every rank's ids to every rank, `4*T*K*(R-1)` bytes out of each.

    Source: the layout and the handle of DeepEP (github.com/deepseek-ai/DeepEP); here
    every rank knows all ids, so that nothing is exchanged about counts or positions.
    """
    op = "dispatch_layout"
    axis = expert_axis(op, axis_name)
    num_experts = _positive(op, "num_experts", num_experts)
    alignment = _positive(op, "expert_alignment", expert_alignment)
    label = axis_label(axis.names)
    if topk_idx.ndim != 2:
        raise ValueError(
            f"jax_ep.{op}: topk_idx must have shape [T, K], and has {topk_idx.shape}."
        )
    if topk_idx.dtype not in (jnp.int32, jnp.int64):
        raise TypeError(
            f"jax_ep.{op}: topk_idx must be int32 or int64, and is {topk_idx.dtype}."
        )
    num_tokens, num_topk = topk_idx.shape
    if not 1 <= num_topk <= MAX_TOPK:
        raise ValueError(
            f"jax_ep.{op}: topk_idx has K = {num_topk} columns, and K must be from 1 "
            f"to {MAX_TOPK}."
        )
    if num_experts > MAX_EXPERTS:
        raise ValueError(
            f"jax_ep.{op}: num_experts (={num_experts}) must be at most {MAX_EXPERTS}."
        )
    if num_experts % axis.num_ranks:
        raise ValueError(
            f"jax_ep.{op}: num_experts (={num_experts}) must be divisible by the "
            f'{axis.num_ranks} ranks of axis "{label}".'
        )
    if implementation not in (None, "ffi", "xla"):
        raise ValueError(
            f"jax_ep.{op}: implementation (={implementation!r}) must be None, 'ffi' or "
            "'xla'."
        )
    if num_sms is not None:
        num_sms = _positive(op, "num_sms", num_sms)
    if not timeout_s > 0:
        raise ValueError(f"jax_ep.{op}: timeout_s (={timeout_s}) must be positive.")
    dropless = axis.num_ranks * num_tokens * num_topk
    dropless += num_experts // axis.num_ranks * (alignment - 1)
    if dropless > _MAX_INT32:
        raise ValueError(
            f"jax_ep.{op}: R*T*K + L*(A-1) (={dropless}) must be below 2**31: rows are "
            "int32."
        )
    rows = _capacity(op, capacity, dropless, alignment)

    ids = int32_ids(topk_idx, num_experts)
    static: dict[str, Any] = dict(
        num_experts=num_experts,
        axis_name=axis.names,
        num_ranks=axis.num_ranks,
        capacity=rows,
        expert_alignment=alignment,
        num_tokens=num_tokens,
        num_topk=num_topk,
        implementation=implementation,
        num_sms=num_sms,
        timeout_s=float(timeout_s),
        stamps=bool(stamps),
    )
    config = ffi.Config(
        axis,
        num_experts,
        alignment,
        rows,
        implementation,
        num_sms,
        float(timeout_s),
        bool(stamps),
    )
    leaves = ffi.layout(config, vary_alike(axis.names, ids))
    arrays = dict(zip(_ARRAYS, leaves, strict=True))
    return checkpoint_name(Handle(**arrays, **static), "jax_ep_handle")


def call_config(operation: str, handle: Handle) -> ffi.Config:
    """The static arguments of a later call with this handle, checked against the mesh.

    Raises:
      TypeError: `handle` is none. ValueError: it was made for other ranks, or its
        leaves are not one rank's share.
    """
    if not isinstance(handle, Handle):
        raise TypeError(
            f"jax_ep.{operation}: handle must be a jax_ep.Handle, and is a "
            f"{type(handle).__name__}."
        )
    axis = expert_axis(operation, handle.axis_name)
    label = axis_label(handle.axis_name)
    if axis.num_ranks != handle.num_ranks:
        raise ValueError(
            f"jax_ep.{operation}: the handle was made for {handle.num_ranks} ranks, "
            f'and axis "{label}" has {axis.num_ranks} here.'
        )
    shape = (handle.num_tokens, handle.num_topk)
    if handle.slot.shape != shape or handle.recv_slot.shape != (axis.num_ranks, *shape):
        raise ValueError(
            f"jax_ep.{operation}: the handle's slot and recv_slot must have shapes "
            f"{shape} and {(axis.num_ranks, *shape)} on each rank, and have "
            f"{handle.slot.shape} and {handle.recv_slot.shape}: pass it with "
            f'P("{label}").'
        )
    return ffi.Config(
        axis,
        handle.num_experts,
        handle.expert_alignment,
        handle.capacity,
        handle.implementation,
        handle.num_sms,
        handle.timeout_s,
        handle.stamps,
    )


def int32_ids(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Ids of any integer dtype as int32; what is no expert stays none."""
    ids = topk_idx
    if ids.dtype != jnp.int32:
        # Clamped before the cast, or 2**32 + 3 would become expert 3.
        clip = np.clip if isinstance(ids, np.ndarray) else jnp.clip
        ids = clip(ids, -1, num_experts)
    return jnp.asarray(ids).astype(jnp.int32)


def row_is_kept(handle: Handle) -> jax.Array:
    """`[C]` bool: rows that hold a token. False on padding and past the last group."""
    # +1 where a group starts and -1 behind its last kept row. Not a search, which would
    # be a loop that splits a CUDA graph.
    edges = jnp.zeros(handle.capacity + 1, jnp.int32)
    edges = edges.at[handle.group_offsets].add(1)
    edges = edges.at[handle.group_offsets + handle.group_counts].add(-1)
    return jnp.cumsum(edges)[:-1] > 0


def _positive(operation: str, name: str, value: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"jax_ep.{operation}: {name} must be an int, and is a bool.")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(
            f"jax_ep.{operation}: {name} must be an int, and is a "
            f"{type(value).__name__}."
        ) from None
    if value < 1:
        raise ValueError(f"jax_ep.{operation}: {name} (={value}) must be at least 1.")
    return value


def _capacity(operation: str, capacity: int | None, dropless: int, alignment: int):
    if capacity is None:
        return dropless // alignment * alignment
    capacity = _positive(operation, "capacity", capacity)
    if capacity < alignment:
        raise ValueError(
            f"jax_ep.{operation}: capacity (={capacity}) must be at least "
            f"expert_alignment (={alignment})."
        )
    if capacity > _MAX_INT32:
        raise ValueError(
            f"jax_ep.{operation}: capacity (={capacity}) must be below 2**31: rows are "
            "int32."
        )
    return capacity // alignment * alignment
