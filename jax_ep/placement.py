"""Placement: which rank holds which expert, with replicas of the hot ones.

A router speaks of E logical experts, the pipeline of P >= E physical slots, P/R on each
rank. Between `route` and `dispatch_layout`, `place_topk` turns the one into the other;
`place_params` brings the experts' parameters to their slots, and on the way back sums
their gradients over replicas.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import ArrayLike

from jax_ep.axis import axis_label, expert_axis, vary_alike
from jax_ep.dispatch import dispatch
from jax_ep.exchange import MAX_EXPERTS, Exchange, Implementation
from jax_ep.layout import MAX_TOPK, dispatch_layout, int32_ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placement:
    """A map from E logical experts to P physical slots.

    The leaves are arrays, so that a new plan of the same shapes compiles nothing anew.
    Rank r owns the slots `r * P // R` up to `(r + 1) * P // R`.

    Attributes:
      phys_to_log: `[P]` int32, the expert in each slot.
      log_to_phys: `[E, M]` int32, the slots of each expert in ascending order, then -1.
        M is the most replicas an expert may have.
      num_replicas: `[E]` int32, from 1 to M.
    """

    phys_to_log: jax.Array | np.ndarray
    log_to_phys: jax.Array | np.ndarray
    num_replicas: jax.Array | np.ndarray

    @property
    def num_slots(self) -> int:
        """P."""
        return self.phys_to_log.shape[0]

    @property
    def num_experts(self) -> int:
        """E, logical."""
        return self.num_replicas.shape[0]


def identity_placement(num_experts: int) -> Placement:
    """Each expert in the slot of its own number, without replicas.

    On the host, in NumPy.

    Args:
      num_experts: E.

    Returns:
      A `Placement` with P = E and M = 1: what the layers do without one.
    """
    slots = np.arange(num_experts, dtype=np.int32)
    return Placement(slots, slots[:, None], np.ones_like(slots))


def plan_placement(
    loads: ArrayLike, *, num_ranks: int, num_slots: int | None = None
) -> Placement:
    """Plans replicas of hot experts and a balanced placement from measured loads.

    On the host, in NumPy: call it between steps. The same loads give the same plan.

    Two greedy steps. *Replicas*: every expert gets a slot; each further slot goes to
    the expert with the highest load per replica (among equals to the one with fewer
    replicas, then to the lower index), up to one replica per rank. This minimises the
    highest load of a slot. *Packing*: replicas by descending load, each to the rank
    with the least load so far among those with a free slot and, where there is one,
    without this expert (among equals to the one with more free slots, then to the lower
    index). On its rank, slots are in ascending order of expert.

    Args:
      loads: `[E]` finite numbers >= 0, rows routed to each expert, of recent batches.
      num_ranks: R <= 64.
      num_slots: P, a multiple of R from E up to `E * min(R, 32)`, at most 2048. None is
        the next multiple of R from E on: no memory for replicas but what fills up ranks
        when R does not divide E.

    Returns:
      A `Placement` with `M = min(P - E + 1, R, 32)`, which does not depend on `loads`.

    Raises:
      ValueError: an argument out of range.

    Source: the two steps of DeepSeek's expert-parallel load balancer (EPLB, global
    policy; DeepSeek-V3 report, section 3.4). Departures: a rank holds an expert once
    where that can be, since a second replica on it shares no load; no groups of nodes.
    """
    op = "plan_placement"
    loads = np.asarray(loads, np.float64)
    if loads.ndim != 1 or not loads.size:
        raise ValueError(
            f"jax_ep.{op}: loads must have shape [E], and has {loads.shape}."
        )
    if not (np.isfinite(loads).all() and (loads >= 0).all()):
        raise ValueError(f"jax_ep.{op}: loads must be finite and at least 0.")
    if num_ranks < 1:
        raise ValueError(f"jax_ep.{op}: num_ranks (={num_ranks}) must be at least 1.")
    num_experts = loads.size
    if num_slots is None:
        num_slots = -(-num_experts // num_ranks) * num_ranks
    most_replicas = min(num_ranks, MAX_TOPK)
    most_slots = min(num_experts * most_replicas, MAX_EXPERTS)
    if not num_experts <= num_slots <= most_slots:
        raise ValueError(
            f"jax_ep.{op}: num_slots (={num_slots}) must be from {num_experts}, one "
            f"for each expert, to {most_slots}."
        )
    if num_slots % num_ranks:
        raise ValueError(
            f"jax_ep.{op}: num_slots (={num_slots}) must be divisible by num_ranks "
            f"(={num_ranks})."
        )

    replicas = np.ones(num_experts, np.int64)
    for _ in range(num_slots - num_experts):
        share = np.where(replicas < most_replicas, loads / replicas, -1.0)
        replicas[np.lexsort((replicas, -share))[0]] += 1
    on_rank = _pack(loads, replicas, num_ranks, num_slots // num_ranks)

    phys_to_log = np.concatenate([np.sort(experts) for experts in on_rank])
    most = min(num_slots - num_experts + 1, most_replicas)
    log_to_phys = np.full((num_experts, most), -1, np.int32)
    for expert in range(num_experts):
        slots = np.flatnonzero(phys_to_log == expert)
        log_to_phys[expert, : slots.size] = slots
    return Placement(
        phys_to_log.astype(np.int32), log_to_phys, replicas.astype(np.int32)
    )


def rank_loads(loads: ArrayLike, placement: Placement, *, num_ranks: int) -> np.ndarray:
    """`[R]` float64: load of each rank when replicas share their expert's load evenly.

    On the host, in NumPy. `rank_loads(...).max() / rank_loads(...).mean()` is the
    imbalance: the factor by which the busiest rank holds up the others.

    Args:
      loads: `[E]`, rows routed to each logical expert.
      placement: as planned, or `identity_placement(E)` for the layout without a plan.
      num_ranks: R, a divisor of P.

    Returns:
      `[R]`; their sum is that of `loads`.
    """
    share = np.asarray(loads, np.float64) / np.asarray(placement.num_replicas)
    return share[np.asarray(placement.phys_to_log)].reshape(num_ranks, -1).sum(axis=1)


def place_topk(
    topk_idx: jax.Array,
    placement: Placement,
    *,
    axis_name: str | Sequence[str] = "expert",
    domain_size: int | None = None,
) -> jax.Array:
    """Turns the router's expert ids into slots, each replica getting its equal share.

    Call it inside the shard_map, before `dispatch_layout(..., num_experts=P)`.

    A rank deals its (token, k) slots of an expert to that expert's replicas in turn, in
    (token, k) order, rank r beginning with replica `r mod num_replicas`. So the shares
    that a rank gives to two replicas differ by at most one row, whatever the order of
    tokens, and the same ids give the same slots.

    Args:
      topk_idx: `[T, K]` int32 or int64, logical experts.
      placement: the plan, the same on all ranks.
      axis_name: the mesh axes of the exchange.
      domain_size: G, ranks of an NVLink domain: where an expert has replicas in the
        rank's own domain only those are dealt to, and rows stay in it. None is one.

    Returns:
      `[T, K]` int32 in [-1, P]: negative ids become -1, ids >= E become P, which the
      layout masks and counts as invalid. Integers: no derivative.

    Cost: one sort of T*K integers on each rank, none without replicas (M = 1). Nothing
    on the wire.

    Source: the logical-to-physical map of DeepSeek's load balancer (EPLB).
    """
    axis = expert_axis("place_topk", axis_name)
    num_experts, num_slots = placement.num_experts, placement.num_slots
    ids = int32_ids(topk_idx, num_experts)
    valid = (ids >= 0) & (ids < num_experts)
    expert = jnp.where(valid, ids, 0)
    log_to_phys = jnp.asarray(placement.log_to_phys, jnp.int32)
    if log_to_phys.shape[1] == 1:
        slot = log_to_phys[expert, 0]
    else:
        rank = lax.axis_index(axis.names) if axis.names else 0
        replicas = jnp.asarray(placement.num_replicas, jnp.int32)
        if domain_size is not None:
            slots_of_domain = num_slots * domain_size // axis.num_ranks
            is_here = log_to_phys // slots_of_domain == rank // domain_size
            is_here &= log_to_phys >= 0
            first = jnp.argsort(~is_here, axis=1, stable=True)
            log_to_phys = jnp.take_along_axis(log_to_phys, first, axis=1)
            num_here = is_here.sum(axis=1, dtype=jnp.int32)
            replicas = jnp.where(num_here > 0, num_here, replicas)
        replicas = replicas[expert]
        number = _number_in_expert(jnp.where(valid, ids, num_experts), num_experts)
        slot = log_to_phys[expert, (number + rank) % replicas]
    return jnp.where(valid, slot, jnp.where(ids < 0, -1, num_slots))


def place_params(
    params: Any,
    placement: Placement,
    *,
    axis_name: str | Sequence[str] = "expert",
    implementation: Implementation | None = None,
    exchange: Exchange | None = None,
):
    """Brings the experts' parameters to this rank's slots, replicas included.

    Call it inside the shard_map, on every rank. Parameters stay stored by logical
    expert, one copy each, so optimizer states and checkpoints do not know the plan.

    Args:
      params: up to eight `[L, ...]` float32, bfloat16 or float16 arrays, this rank's
        E/R logical experts; or `[E, ...]` arrays, all experts on every rank (the only
        way where R does not divide E). A pytree of them.
      placement: the plan, the same on all ranks.
      axis_name: the mesh axes of the exchange.
      implementation: as in `dispatch_layout`.
      exchange: an `Exchange` whose SMs, time limit and stamps this one inherits, as the
        layer's own; None is the defaults.

    Returns:
      `params` with `[P/R, ...]` arrays: the experts of this rank's slots, in order.

    Raises:
      ValueError: a leading dimension that is neither E/R nor E, or P not divisible.

    Derivative: the gradient of a logical expert is the sum over its replicas. From
    `[L, ...]` it is the derivative of a `dispatch`, in which an expert is a token, a
    replica one of its k: replicas' gradients are added in float32 by ascending rank.
    From `[E, ...]` it is a scatter-add here, and the sum over ranks is the one that
    shard_map makes for every replicated operand.

    On the wire: an expert's parameters once to each rank that holds a replica of it,
    its own excepted; the gradients the same way back. Nothing from `[E, ...]`.
    """
    op = "place_params"
    axis = expert_axis(op, axis_name)
    num_experts, num_slots = placement.num_experts, placement.num_slots
    if num_slots % axis.num_ranks:
        raise ValueError(
            f"jax_ep.{op}: the placement's {num_slots} slots must be divisible by the "
            f'{axis.num_ranks} ranks of axis "{axis_label(axis.names)}".'
        )
    slots_here = num_slots // axis.num_ranks
    local = num_experts // axis.num_ranks if not num_experts % axis.num_ranks else None
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        rows = leaf.shape[0] if leaf.ndim else None
        if rows not in (local, num_experts) or rows is None:
            allowed = num_experts if local is None else f"{local} or {num_experts}"
            raise ValueError(
                f"jax_ep.{op}: params{jax.tree_util.keystr(path)} must have {allowed} "
                f"experts first, and has shape {leaf.shape}."
            )
    leaves = jax.tree.leaves(params)
    if len({leaf.shape[0] for leaf in leaves}) > 1:
        raise ValueError(
            f"jax_ep.{op}: params must have either {local} or {num_experts} experts in "
            "every array, and has both."
        )
    rank = lax.axis_index(axis.names) if axis.names else 0
    if leaves[0].shape[0] == num_experts:
        mine = _rows_of(rank, placement.phys_to_log, slots_here)
        params, mine = vary_alike(axis.names, (params, mine))
        return jax.tree.map(lambda leaf: leaf[mine], params)
    if exchange is None:
        exchange = Exchange(num_experts=num_slots, axis_name=axis.names, operation=op)
    num_domains = axis.num_ranks // (exchange.domain_size or axis.num_ranks)
    handle = dispatch_layout(
        _rows_of(rank, placement.log_to_phys, leaves[0].shape[0]),
        # Parameters travel as they are, whatever crosses the link for tokens, and all
        # do: D times the expectation is room for all between domains.
        exchange=dataclasses.replace(
            exchange,
            network_capacity_factor=float(num_domains),
            capacity=None,
            expert_alignment=1,
            wire=None,
            grad_wire=None,
        ),
        num_experts=num_slots,
        axis_name=axis.names,
        capacity=slots_here,
        implementation=implementation,
    )
    return dispatch(params, handle)[0]


def placed(topk_idx, params, placement: Placement | None, exchange: Exchange):
    """`place_topk` and `place_params` of one layer; as given without a placement."""
    if placement is None:
        return topk_idx, params
    names = exchange.axis_name
    slots = place_topk(
        topk_idx, placement, axis_name=names, domain_size=exchange.domain_size
    )
    return slots, place_params(params, placement, axis_name=names, exchange=exchange)


def equal_shares(num_experts: int, num_ranks: int) -> Placement | None:
    """A placement of as many slots on each rank, where R does not divide E; else None.

    What fills up the slots are replicas, one more of some experts than of others.
    """
    if not num_experts % num_ranks:
        return None
    return plan_placement(np.ones(num_experts), num_ranks=num_ranks)


def _pack(loads, replicas, num_ranks, slots_per_rank) -> list[list[int]]:
    """The experts on each rank; see `plan_placement`."""
    share = np.repeat(loads / replicas, replicas)
    expert = np.repeat(np.arange(loads.size), replicas)
    on_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    total = [0.0] * num_ranks
    for item in np.argsort(-share, kind="stable"):
        free = [r for r in range(num_ranks) if len(on_rank[r]) < slots_per_rank]
        apart = [r for r in free if expert[item] not in on_rank[r]]
        rank = min(apart or free, key=lambda r: (total[r], len(on_rank[r]), r))
        on_rank[rank].append(int(expert[item]))
        total[rank] += share[item]
    return on_rank


def _rows_of(rank, table, num_rows: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(
        jnp.asarray(table, jnp.int32), rank * num_rows, num_rows
    )


def _number_in_expert(ids: jax.Array, num_experts: int) -> jax.Array:
    """`[T, K]`: the number of each slot among its expert's, in (token, k) order."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    count = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)
    first = jnp.cumsum(count) - count
    number = jnp.arange(flat.size, dtype=jnp.int32) - first[flat[order]]
    return jnp.zeros_like(number).at[order].set(number).reshape(ids.shape)
