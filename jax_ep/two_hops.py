"""Two hops: over rails between NVLink domains, then the exchange inside a domain.

R = D * G ranks; rank r is in domain r // G, and a rail is the ranks with the same
r % G. Hop 1 is XLA's dense all_to_all on the rails, which moves a token once to each
domain that has one of its experts. Hop 2 is the exchange of one domain, over what
arrived: D * Q tokens in each rank, ordered by source domain, then by token.
"""

import dataclasses
import functools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep import ffi, reference
from jax_ep.axis import in_sequence, vary_alike
from jax_ep.exchange import Exchange

# From here on a dense share for each domain is mostly empty rows (K = 8).
MANY_DOMAINS = 8
MANY_DOMAINS_FACTOR = 1.06  # Of the expected tokens, with further rounds behind it.

# Slots that are numbered among themselves, each against each; 16 and 64 took longer on
# CPUs. (65536 slots of 8 domains: 17 ms, by a sort 53.)
_BLOCK = 32


@functools.cache
def warn_of_many_domains(num_domains: int) -> None:
    """Once: that rows for all tokens cross to every domain, wanted there or not."""
    warnings.warn(
        f"jax_ep.dispatch_layout: every token has room in each of {num_domains} "
        "domains, so mostly empty rows cross between them. A network_capacity_factor "
        f"(={MANY_DOMAINS_FACTOR}), with dropless_fallback or in_rounds, sends what is "
        "wanted.",
        stacklevel=4,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hop:
    """What two hops add to a handle. Every leaf is int32.

    Attributes:
      send_token: `[D, Q]`, this rank's token in each place for a domain; -1 if empty.
      send_slot: `[T, D]`, the place of a token for a domain; -1 if it has none there.
      slot: `[D*Q, K]`, of the tokens that arrived here, over this domain's ranks.
      slot_rank: `[D*Q, K]`, the rank in this domain that owns the slot's expert.
    """

    send_token: jax.Array
    send_slot: jax.Array
    slot: jax.Array
    slot_rank: jax.Array


class _Inner(NamedTuple):
    """The fields of a handle that hop 2 reads."""

    slot: Any
    slot_rank: Any
    recv_slot: Any
    group_counts: Any
    group_offsets: Any


def places(exchange: Exchange, num_ranks: int, num_tokens: int, num_topk: int) -> int:
    """Q, the tokens that a rank may send to a domain; T of one domain."""
    if exchange.domain_size is None or not num_tokens:
        return num_tokens
    expected = expected_tokens(exchange, num_ranks, num_tokens, num_topk)
    return room(exchange.network_capacity_factor, expected, num_tokens)


def room(factor: float | None, expected: float, num_tokens: int) -> int:
    """T without a `network_capacity_factor`, else that many times the expected tokens.

    Those are what uniform routing without repeated ids sends to a domain. Never more
    than T.
    """
    if factor is None:
        return num_tokens
    # Rounded first, as a layer's capacity is.
    return min(num_tokens, math.ceil(round(factor * expected, 6)))


def for_rounds(
    exchange: Exchange, num_ranks: int, num_tokens: int, num_topk: int
) -> Exchange:
    """The exchange of a layer that sends in further rounds what had no room.

    From eight domains on it has room between them for little more than uniform routing
    needs, unless it was told otherwise, or that is not even one token.
    """
    size, factor = exchange.domain_size, exchange.network_capacity_factor
    if size is None or factor is not None or num_ranks // size < MANY_DOMAINS:
        return exchange
    expected = expected_tokens(exchange, num_ranks, num_tokens, num_topk)
    factor = factor_for_rounds(expected)
    return dataclasses.replace(exchange, network_capacity_factor=factor)


def factor_for_rounds(expected: float) -> float:
    """The factor of a layer with further rounds from eight domains on."""
    return max(MANY_DOMAINS_FACTOR, 1 / expected if expected else 1.0)


def expected_tokens(
    exchange: Exchange, num_ranks: int, num_tokens: int, num_topk: int
) -> float:
    """Tokens of a rank with an expert in one domain, of K distinct uniform experts."""
    num_domains = num_ranks // (exchange.domain_size or num_ranks)
    return num_tokens * share_to_domain(exchange.num_experts, num_domains, num_topk)


def share_to_domain(num_experts: int, num_domains: int, num_topk: int) -> float:
    """The probability that one of K distinct uniform experts is in a given domain."""
    if num_topk > num_experts:
        return 1.0
    elsewhere = num_experts - num_experts // num_domains
    return 1 - math.comb(elsewhere, num_topk) / math.comb(num_experts, num_topk)


def layout(call: ffi.Call, ids: jax.Array, num_places: int):
    """The array fields of a `Handle` by two hops, and its `Hop`.

    Args:
      call: of the whole axis; its capacity is that of the receive buffers.
      ids: `[T, K]` int32.
      num_places: Q.

    On the wire, besides hop 2: between domains the ids of Q tokens to each domain and
    their slots back, `8*Q*K*(D-1)` bytes out of each rank, and a sum of 2*R counts.
    """
    axis, inner = call.axis, inner_call(call)
    num_domains = axis.num_ranks // inner.axis.num_ranks
    num_experts, of_domain = call.exchange.num_experts, inner.exchange.num_experts
    num_tokens, num_topk = ids.shape
    domains = jnp.arange(num_domains, dtype=jnp.int32)
    valid = (ids >= 0) & (ids < num_experts)
    domain = jnp.where(valid, ids // of_domain, num_domains)  # [T, K]
    goes = (domain[:, :, None] == domains[None, None]).any(axis=1)  # [T, D]
    number = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    send_slot = jnp.where(goes & (number < num_places), number, -1)
    place = jnp.where(send_slot < 0, num_places, send_slot)  # Out of bounds: dropped.
    tokens = jnp.broadcast_to(
        jnp.arange(num_tokens, dtype=jnp.int32)[:, None], place.shape
    )
    send_token = jnp.full((num_domains, num_places), -1, jnp.int32)
    send_token = send_token.at[domains[None], place].set(tokens, mode="drop")

    sent = _picked(ids, send_token, empty=-1)  # [D, Q, K]
    local = sent - domains[:, None, None] * of_domain
    local = jnp.where((sent >= 0) & (local >= 0) & (local < of_domain), local, -1)
    arrived = to_rails(call, local)
    arrived = _kept_fairly(inner, arrived)
    found = ffi.layout(inner, arrived.reshape(-1, num_topk))
    slot, slot_rank, recv_slot, sizes, counts, offsets = found[:6]

    back = to_rails(call, slot.reshape(num_domains, num_places, num_topk))
    mine = _of_slots(back, send_slot, domain, num_domains)
    owner = jnp.where(valid, ids // call.num_local_experts, -1)
    wanted = jnp.zeros(axis.num_ranks, jnp.int32)
    wanted = wanted.at[jnp.where(valid, owner, axis.num_ranks)].add(1, mode="drop")
    rank = lax.axis_index(axis.names)
    kept = jnp.zeros(axis.num_ranks, jnp.int32).at[rank].set(counts.sum())
    wanted, kept = lax.psum(vary_alike(axis.names, (wanted, kept)), axis.names)
    fields = (
        jnp.where(valid, mine, -1),
        owner,
        recv_slot,
        sizes,
        counts,
        offsets,
        wanted,
        wanted - kept,
        jnp.sum(ids >= num_experts, dtype=jnp.int32)[None],
    )
    return fields, Hop(send_token, send_slot, slot, slot_rank)


def dispatch(call: ffi.Call, handle, leaves, weights):
    """`ffi.dispatch` by the hops that the handle was made for."""
    if handle.hop is None:
        return ffi.dispatch(call, handle, leaves, weights)

    def carried(rows):
        """What arrives of `[T, W]`: `[D*Q, W]`, zero in empty places."""
        bits = _bits(rows)
        sent = to_rails(call, _picked(bits, handle.hop.send_token, empty=0))
        return lax.bitcast_convert_type(sent.reshape(-1, rows.shape[1]), rows.dtype)

    leaves = [carried(leaf) for leaf in leaves]
    weights = None if weights is None else carried(weights)
    return ffi.dispatch(inner_call(call), _inner(handle), leaves, weights)


def combine(
    call: ffi.Call,
    handle,
    leaves,
    *,
    bias=None,
    wire_f32: bool = False,
    out_f32: bool = False,
    **more,
):
    """`ffi.combine` by the hops that the handle was made for.

    A domain's sum is rounded to the wire type once and crosses to the token's rank,
    which starts at +0, adds the domains by ascending number and the bias last, in
    float32, and rounds once.
    """
    if handle.hop is None:
        told: dict[str, Any] = dict(bias=bias, wire_f32=wire_f32, out_f32=out_f32)
        return ffi.combine(call, handle, leaves, **told, **more)
    dtypes = [leaf.dtype for leaf in leaves]
    if wire_f32:
        # Exact, and the domain's sum comes out unrounded.
        leaves = [leaf.astype(jnp.float32) for leaf in leaves]
    values, partials = ffi.combine(
        inner_call(call), _inner(handle), leaves, wire_f32=wire_f32, **more
    )
    send_slot = handle.hop.send_slot
    num_tokens, num_domains = send_slot.shape

    def came_home(rows):
        rows = rows.reshape(num_domains, -1, rows.shape[1])
        # The barrier keeps XLA from undoing the rounding (excess precision).
        sent = to_rails(call, _bits(lax.optimization_barrier(rows)))
        return lax.bitcast_convert_type(sent, rows.dtype)

    sums = []
    biases = bias or [None] * len(dtypes)
    for partial, dtype, one_bias in zip(partials, dtypes, biases, strict=True):
        back = came_home(partial)
        total = jnp.zeros((num_tokens, partial.shape[1]), jnp.float32)
        for domain in range(num_domains):
            place = send_slot[:, domain]
            rows = back[domain, jnp.maximum(place, 0)].astype(jnp.float32)
            total = total + jnp.where(place[:, None] >= 0, rows, 0)
        total = reference.started_at_zero(total)
        if one_bias is not None:
            total = total + one_bias.astype(jnp.float32)
        sums.append(total if out_f32 else total.astype(dtype))
    if values is not None:
        of_domain = inner_call(call).axis.num_ranks
        domain = jnp.where(handle.slot < 0, num_domains, handle.slot_rank // of_domain)
        values = _of_slots(came_home(values), send_slot, domain, num_domains)
        values = jnp.where(handle.slot >= 0, values, 0)
    return values, tuple(sums)


def inner_call(call: ffi.Call) -> ffi.Call:
    """The call of hop 2, over one domain and its experts."""
    size = call.exchange.domain_size or call.axis.num_ranks
    num_domains = call.axis.num_ranks // size
    exchange = dataclasses.replace(
        call.exchange, num_experts=call.exchange.num_experts // num_domains
    )
    return ffi.Call(call.axis.of_domain(size), exchange, call.capacity)


def to_rails(call: ffi.Call, rows: jax.Array) -> jax.Array:
    """`[D, ...]` by destination domain to `[D, ...]` by source domain, on one rail."""
    if not rows.size:
        return rows
    num_ranks = call.axis.num_ranks
    size = call.exchange.domain_size or num_ranks
    rails = tuple(tuple(range(rail, num_ranks, size)) for rail in range(size))
    return _rails_p.bind(rows, axis_name=call.axis.names, rails=rails)


def _inner(handle) -> _Inner:
    return _Inner(
        handle.hop.slot,
        handle.hop.slot_rank,
        handle.recv_slot,
        handle.group_counts,
        handle.group_offsets,
    )


def _bits(rows: jax.Array) -> jax.Array:
    """For the collective: XLA sends bfloat16 as float32 on CPUs, twice the bytes."""
    return lax.bitcast_convert_type(rows, f"uint{8 * rows.dtype.itemsize}")


def _picked(rows: jax.Array, token: jax.Array, *, empty: int) -> jax.Array:
    """`rows[token]`, `[D, Q, W]`, and `empty` where there is no token."""
    found = rows[jnp.maximum(token, 0)]
    return jnp.where(token[:, :, None] >= 0, found, jnp.array(empty, rows.dtype))


def _of_slots(back, send_slot, domain, num_domains):
    """`[T, K]` of `[D, Q, K]`: what a slot's domain sent back; -1 without a place."""
    has_domain = domain < num_domains
    domain = jnp.where(has_domain, domain, 0)
    place = jnp.take_along_axis(send_slot, domain, axis=1)
    columns = jnp.arange(domain.shape[1], dtype=jnp.int32)[None]
    found = back[domain, jnp.maximum(place, 0), columns]
    return jnp.where(has_domain & (place >= 0), found, jnp.array(-1, back.dtype))


def _kept_fairly(inner: ffi.Call, ids: jax.Array) -> jax.Array:
    """`[D, Q, K]` ids without those that lose their row: shared among all R ranks.

    The exchange inside a domain would share an expert's rows among its G rails, and
    late domains would lose. So it is told only of slots that it has room for.
    """
    num_domains, num_places, num_topk = ids.shape
    size, num_experts = inner.axis.num_ranks, inner.exchange.num_experts
    alignment = inner.exchange.expert_alignment
    most = size * num_domains * num_places * num_topk
    most += inner.num_local_experts * (alignment - 1)
    if inner.capacity >= most // alignment * alignment:
        return ids  # All rows fit, whatever the routing.
    expert = jnp.where(ids < 0, num_experts, ids).reshape(num_domains, -1)
    wanted, number = jax.vmap(
        functools.partial(count_and_number, num_experts=num_experts)
    )(expert)  # [D, E/D], [D, Q*K]
    everyone = reference.all_gather(wanted, inner)  # [G, D, E/D]
    _, kept = reference.kept_rows(everyone.reshape(-1, num_experts), inner)
    rail = lax.axis_index(inner.axis.names) % size
    mine = kept.reshape(size, num_domains, num_experts)[rail]
    mine = jnp.pad(mine, ((0, 0), (0, 1)))  # Masked slots read this column.
    is_kept = number < jnp.take_along_axis(mine, expert, axis=1)
    return jnp.where(is_kept.reshape(ids.shape), ids, -1)


def count_and_number(expert, *, num_experts):
    """`reference.count_and_number` without a sort: by counts of blocks of slots."""
    num_slots = expert.size
    num_blocks = -(-num_slots // _BLOCK)
    missing = num_blocks * _BLOCK - num_slots
    expert = jnp.pad(expert, (0, missing), constant_values=num_experts)
    expert = expert.reshape(num_blocks, _BLOCK)
    block = jnp.arange(num_blocks, dtype=jnp.int32)[:, None]
    counts = jnp.zeros((num_blocks, num_experts + 1), jnp.int32)
    counts = counts.at[block, expert].add(1)
    before = jnp.cumsum(counts, axis=0) - counts
    earlier = jnp.tril(jnp.ones((1, _BLOCK, _BLOCK), bool), -1)
    same = (expert[:, :, None] == expert[:, None, :]) & earlier
    number = jnp.take_along_axis(before, expert, axis=1)
    number += same.sum(axis=2, dtype=jnp.int32)
    return counts.sum(axis=0)[:-1], number.reshape(-1)[:num_slots]


def _exchange_rails(rows, *, axis_name, rails):
    return lax.all_to_all(
        rows, axis_name, split_axis=0, concat_axis=0, axis_index_groups=rails
    )


# A primitive of its own: lax.all_to_all with groups has no rule for vmap.
_rails_p = Primitive("jax_ep_rails")
_rails_p.def_abstract_eval(lambda rows, **_: rows)
mlir.register_lowering(
    _rails_p, mlir.lower_fun(_exchange_rails, multiple_results=False)
)


def _batched_rails(operands, dims, **params):
    return in_sequence(_rails_p, operands, dims, **params), 0


batching.primitive_batchers[_rails_p] = _batched_rails
