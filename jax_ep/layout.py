"""Layout: where every (token, k) slot lands, decided before any row moves."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _ffi, ffi, two_hops
from jax_ep.axis import axis_label, expert_axis, vary_alike
from jax_ep.exchange import MAX_INT32, Exchange, Implementation
from jax_ep.payload import an_array

MAX_TOPK = _ffi.limits["topk"]  # One lane of a warp per slot of a token.

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
      hop: what an exchange over several domains adds, see `two_hops.Hop`; None is one
        domain. `recv_slot` is then `[G, D*Q, K]`, of the tokens that arrived in this
        domain, and `slot`, `slot_rank` and the counts are of all R ranks still.
      exchange: what its calls were told, inherited by every call with this handle; its
        fields are readable here too (`handle.num_experts`, ...).
      num_ranks: R.
      capacity: C, rows of the receive buffer.
      num_tokens: T, tokens per rank.
      num_topk: K.
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
    hop: two_hops.Hop | None
    exchange: Exchange = dataclasses.field(metadata=_STATIC)
    num_ranks: int = dataclasses.field(metadata=_STATIC)
    capacity: int = dataclasses.field(metadata=_STATIC)
    num_tokens: int = dataclasses.field(metadata=_STATIC)
    num_topk: int = dataclasses.field(metadata=_STATIC)

    @property
    def num_experts(self) -> int:
        """E, over all ranks."""
        return self.exchange.num_experts

    @property
    def axis_name(self) -> tuple[str, ...]:
        """The mesh axes of the exchange."""
        return tuple(self.exchange.axis_name)

    @property
    def expert_alignment(self) -> int:
        """A; each group starts on a multiple of it."""
        return self.exchange.expert_alignment

    @property
    def implementation(self) -> Implementation | None:
        """None, "ffi" or "xla", see `dispatch_layout`."""
        return self.exchange.implementation

    @property
    def num_sms(self) -> int | None:
        """SMs that a CUDA kernel may use, None for the default."""
        return self.exchange.num_sms

    @property
    def timeout_s(self) -> float:
        """Seconds after which a wait for another rank becomes an error."""
        return self.exchange.timeout_s

    @property
    def stamps(self) -> bool:
        """Whether calls note when their phases began and ended."""
        return self.exchange.stamps


@jax.named_scope("jax_ep.layout")
def dispatch_layout(
    topk_idx: jax.Array,
    *,
    num_experts: int | None = None,
    axis_name: str | Sequence[str] | None = None,
    domain_size: int | None = None,
    network_capacity_factor: float | None = None,
    capacity: int | None = None,
    expert_alignment: int | None = None,
    implementation: Implementation | None = None,
    num_sms: int | None = None,
    timeout_s: float | None = None,
    wire: Any = None,
    grad_wire: Any = None,
    stamps: bool | None = None,
    exchange: Exchange | None = None,
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
      topk_idx: `[T, K]`, any integer dtype, the experts of each token, 1 <= K <= 32. A
        negative id masks its slot. An id >= E does too and is counted in `num_invalid`.
        The same expert twice in a row makes two slots.
      num_experts: E <= 2048, over all ranks, a multiple of R. Rank r owns the experts
        `r * E // R` up to `(r + 1) * E // R`. Needed without an `exchange`.
      axis_name: mesh axis, or tuple of axes, of the R ranks; None is "expert". At most
        64 where the custom calls run. `()` is one rank, inside a shard_map or not.
      domain_size: G, the ranks of an NVLink domain, a divisor of R: rank r is in domain
        r // G, and D = R/G. Rows then cross between domains first, by XLA's own
        collective over the ranks with the same r % G, once to each domain, and from
        there by our exchange, once to each rank in it. Inside an expert rows are then
        ordered by (source rank in the domain, source domain, token, k). At most 64
        ranks a domain where the custom calls run, and no such limit on R. None, or R,
        is one domain.
      network_capacity_factor: a rank may send a domain this many times the tokens that
        uniform routing would. What has no room is dropped, and counted. None is room
        for all T tokens: as good up to four domains, and from eight on worth a warning.
      capacity: rows C of each rank's receive buffer, rounded down to a multiple of A.
        None is dropless: `R*T*K + L*(A-1)` rows. (A router that never repeats an id in
        a row needs no more than `R*T*min(K, L) + L*(A-1)`.)
      expert_alignment: A >= 1, in rows; None is 1.
      implementation: None runs the custom call on CPU devices of one process and on
        CUDA, and plain `jax.lax` collectives on everything else; "xla" runs the latter
        everywhere; "ffi" is the custom call or an error.
      num_sms: most SMs a CUDA kernel may use. None leaves at least 32 of them free.
      timeout_s: seconds after which waiting for another rank becomes an error that
        names it; None is 100.
      wire: what crosses the link in the calls with the handle, see `combine`; None is
        the rows' own dtype.
      grad_wire: the same for the calls of their backwards.
      stamps: for tools that measure: this call, and those with its handle, note when
        their phases began and ended, see `jax_ep.stamps`. Results are the same.
      exchange: all of these in one `Exchange`. Keywords that are given (not None) take
        the place of its fields.

    Returns:
      A `Handle`; its fields give the shapes. Integers only, so there is no derivative.
      Under `jax.checkpoint` its leaves carry the name `jax_ep_handle`.

    Raises:
      ValueError: no shard_map over the axis, a partly manual one, or a shape or value
        out of range. TypeError: ids that are no array of integers.

    On the wire: every rank's ids to every rank, `4*T*K*(R-1)` bytes out of each. With
    domains, Q the tokens with room: `8*Q*K*(D-1)` bytes of ids and slots between them,
    and `4*D*Q*K*(G-1)` inside.

    Source: the layout and the handle of DeepEP (github.com/deepseek-ai/DeepEP); here
    every rank knows all ids, so that nothing is exchanged about counts or positions.
    """
    op = "dispatch_layout"
    given: dict[str, Any] = dict(
        num_experts=num_experts,
        axis_name=axis_name,
        domain_size=domain_size,
        network_capacity_factor=network_capacity_factor,
        capacity=capacity,
        expert_alignment=expert_alignment,
        implementation=implementation,
        num_sms=num_sms,
        timeout_s=timeout_s,
        wire=wire,
        grad_wire=grad_wire,
        stamps=stamps,
    )
    if exchange is None:
        given = {name: value for name, value in given.items() if value is not None}
        if "num_experts" not in given:
            raise TypeError(f"jax_ep.{op}: num_experts or an exchange must be given.")
        axis = expert_axis(op, given.get("axis_name", "expert"))
        exchange = Exchange(operation=op, **given)
    else:
        exchange = exchange.replace(op, **given)
        axis = expert_axis(op, exchange.axis_name)
    an_array(op, "topk_idx", topk_idx)
    if topk_idx.ndim != 2:
        raise ValueError(
            f"jax_ep.{op}: topk_idx must have shape [T, K], and has {topk_idx.shape}."
        )
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(
            f"jax_ep.{op}: topk_idx must be of an integer dtype, and is "
            f"{topk_idx.dtype}."
        )
    num_tokens, num_topk = topk_idx.shape
    if not 1 <= num_topk <= MAX_TOPK:
        raise ValueError(
            f"jax_ep.{op}: topk_idx has K = {num_topk} columns, and K must be from 1 "
            f"to {MAX_TOPK}."
        )
    if exchange.num_experts % axis.num_ranks:
        raise ValueError(
            f"jax_ep.{op}: num_experts (={exchange.num_experts}) must be divisible by "
            f'the {axis.num_ranks} ranks of axis "{axis_label(axis.names)}".'
        )
    num_places = _places(op, exchange, axis, num_tokens, num_topk)
    alignment = exchange.expert_alignment
    dropless = axis.num_ranks * num_places * num_topk
    dropless += exchange.num_experts // axis.num_ranks * (alignment - 1)
    if dropless > MAX_INT32:
        raise ValueError(
            f"jax_ep.{op}: R*T*K + L*(A-1) (={dropless}) must be below 2**31: rows are "
            "int32."
        )
    rows = exchange.capacity
    if rows is None:
        rows = dropless // alignment * alignment
    ids = int32_ids(topk_idx, exchange.num_experts)
    call = ffi.Call(axis, exchange, rows)
    ids, hop = vary_alike(axis.names, ids), None
    if exchange.domain_size in (None, axis.num_ranks):
        arrays = ffi.layout(call, ids)
    else:
        arrays, hop = two_hops.layout(call, ids, num_places)
    arrays, hop = vary_alike(axis.names, (arrays, hop))
    handle = Handle(
        *arrays,
        hop=hop,
        exchange=exchange,
        num_ranks=axis.num_ranks,
        capacity=rows,
        num_tokens=num_tokens,
        num_topk=num_topk,
    )
    return checkpoint_name(handle, "jax_ep_handle")


def _places(operation, exchange: Exchange, axis, num_tokens: int, num_topk: int) -> int:
    """Q, or T of one domain, checked."""
    size = exchange.domain_size
    if size is None:
        return num_tokens
    if axis.num_ranks % size:
        raise ValueError(
            f"jax_ep.{operation}: domain_size (={size}) must divide the "
            f'{axis.num_ranks} ranks of axis "{axis_label(axis.names)}".'
        )
    if size == axis.num_ranks:
        return num_tokens
    expected = two_hops.expected_tokens(exchange, axis.num_ranks, num_tokens, num_topk)
    factor = exchange.network_capacity_factor
    if factor is not None and num_tokens and round(factor * expected, 6) < 1:
        raise ValueError(
            f"jax_ep.{operation}: network_capacity_factor (={factor}) must leave room "
            f"for a token: at least {1 / expected:.3g} with {num_tokens} tokens."
        )
    if factor is None and axis.num_ranks // size >= two_hops.MANY_DOMAINS:
        two_hops.warn_of_many_domains(axis.num_ranks // size)
    return two_hops.places(exchange, axis.num_ranks, num_tokens, num_topk)


def call_of(operation: str, handle: Handle) -> ffi.Call:
    """What a later call with this handle is told, checked against the mesh.

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
    seen_from_owner = (axis.num_ranks, *shape)
    if handle.hop is not None:
        size, num_topk = handle.exchange.domain_size, handle.num_topk
        seen_from_owner = (size, handle.hop.send_token.size, num_topk)
    if handle.slot.shape != shape or handle.recv_slot.shape != seen_from_owner:
        raise ValueError(
            f"jax_ep.{operation}: the handle's slot and recv_slot must have shapes "
            f"{shape} and {seen_from_owner} on each rank, and have "
            f"{handle.slot.shape} and {handle.recv_slot.shape}: pass it with "
            f'P("{label}").'
        )
    return ffi.Call(axis, handle.exchange, handle.capacity)


def int32_ids(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Ids of any integer dtype as int32; what is no expert stays none."""
    ids = topk_idx
    if ids.dtype.itemsize >= 4 and ids.dtype != jnp.int32:
        # Clamped before the cast, or 2**32 + 3 would become expert 3.
        clip = np.clip if isinstance(ids, np.ndarray) else jnp.clip
        lowest = 0 if jnp.issubdtype(ids.dtype, jnp.unsignedinteger) else -1
        ids = clip(ids, lowest, num_experts)
    return jnp.asarray(ids).astype(jnp.int32)


def row_is_kept(handle: Handle) -> jax.Array:
    """`[C]` bool: rows that hold a token. False on padding and past the last group."""
    # +1 where a group starts and -1 behind its last kept row. Not a search, which would
    # be a loop that splits a CUDA graph.
    edges = jnp.zeros(handle.capacity + 1, jnp.int32)
    edges = edges.at[handle.group_offsets].add(1)
    edges = edges.at[handle.group_offsets + handle.group_counts].add(-1)
    return jnp.cumsum(edges)[:-1] > 0
