"""Losses that keep the experts busy, and the statistics of one call."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.axis import vary_alike
from jax_ep.config import MoEConfig
from jax_ep.dropless import Rounds
from jax_ep.layout import Handle
from jax_ep.params import names_of
from jax_ep.router import Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEStats:
    """What one call of a MoE layer did, summed over all ranks and the same on all.

    Every leaf has an axis, so that calls stack. Integers have no derivative; the losses
    do. Collectives behind leaves that nobody reads are removed by XLA.

    Attributes:
      expert_load: `[E]` int32, slots routed to each expert, before drops.
      num_recv: `[R]` int32, rows wanted at each rank of the expert axis, before drops.
      num_dropped: `[R]` int32, rows dropped there.
      num_rounds: `[1]` int32, rounds that ran, see `MoEConfig.dropless_fallback`; the
        most of any group of ranks.
      max_load_ratio: `[1]` float32, the busiest expert's slots over the mean; 1 is
        balance.
      required_capacity_factor: `[1]` float32, the least `capacity_factor` without a
        drop (alignment aside).
      router_entropy: `[1]` float32, mean entropy of the router's probabilities.
      load_balance_loss: `[1]` float32, see `load_balance_loss`.
      router_z_loss: `[1]` float32, see `router_z_loss`.
      weighted_loss: `[1]` float32, the two times their weights in the config.
      topk_idx: `[..., K]` int32, each token's experts, -1 where masked; inside a
        shard_map of this rank's tokens. None unless the layer was asked for it
        (`keep_topk_idx`); what `jax_ep.record` takes.
    """

    expert_load: jax.Array
    num_recv: jax.Array
    num_dropped: jax.Array
    num_rounds: jax.Array
    max_load_ratio: jax.Array
    required_capacity_factor: jax.Array
    router_entropy: jax.Array
    load_balance_loss: jax.Array
    router_z_loss: jax.Array
    weighted_loss: jax.Array
    topk_idx: jax.Array | None = None

    @property
    def aux_loss(self) -> jax.Array:
        """`[]` float32: what to add to the training loss, over all stacked calls."""
        return self.weighted_loss.sum()

    @property
    def dropped_fraction(self) -> jax.Array:
        """`[]` float32: dropped rows over wanted ones."""
        # Of many layers and ranks together they may be more than int32 holds.
        wanted = jnp.maximum(self.num_recv.astype(jnp.float32).sum(), 1)
        return self.num_dropped.astype(jnp.float32).sum() / wanted

    def metrics(self) -> dict[str, jax.Array]:
        """Scalars for a logger, `[]` each, by the names of the fields.

        Of stacked calls (layers, steps): the sum of `aux_loss`, the share of dropped
        rows in all, the most of rounds, load ratio and required capacity, and the mean
        of the rest.
        """
        return dict(
            aux_loss=self.aux_loss,
            dropped_fraction=self.dropped_fraction,
            load_balance_loss=self.load_balance_loss.mean(),
            max_load_ratio=self.max_load_ratio.max(),
            num_rounds=self.num_rounds.max(),
            required_capacity_factor=self.required_capacity_factor.max(),
            router_entropy=self.router_entropy.mean(),
            router_z_loss=self.router_z_loss.mean(),
        )

    def of_any_mesh(self) -> "MoEStats":
        """With shapes that depend on E alone, for state that outlives a mesh.

        `num_recv` and `num_dropped` are `[1]`, sums over the ranks, and `topk_idx` is
        None.
        """
        return dataclasses.replace(
            self,
            num_recv=self.num_recv.sum(dtype=jnp.int32)[None],
            num_dropped=self.num_dropped.sum(dtype=jnp.int32)[None],
            topk_idx=None,
        )

    @classmethod
    def zeros(cls, num_experts: int) -> "MoEStats":
        """What `of_any_mesh` gives of a layer of E experts that nobody has called."""
        count, number = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.float32)
        return cls(
            expert_load=jnp.zeros(num_experts, jnp.int32),
            num_recv=count,
            num_dropped=count,
            num_rounds=count,
            max_load_ratio=number,
            required_capacity_factor=number,
            router_entropy=number,
            load_balance_loss=number,
            router_z_loss=number,
            weighted_loss=number,
        )


def load_balance_loss(
    probs: jax.Array,
    topk_idx: jax.Array,
    *,
    axis_name: str | Sequence[str] = (),
) -> jax.Array:
    """`E * sum_e f_e * P_e` over all tokens: 1 where every expert gets the same share.

    `f_e` is the fraction of slots that chose e and `P_e` the mean probability of e,
    both over the tokens of all ranks (Switch Transformer, arXiv:2101.03961, equation 4,
    for K = 1; for any K as Megatron-LM, `E / (K * N^2) * sum(probs * counts)`). The
    form in Hugging Face transformers is K times this one.

    Args:
      probs: `[..., E]` float32.
      topk_idx: `[..., K]` int32. A token whose ids are all negative does not count.
      axis_name: mesh axes of an enclosing shard_map that the tokens are split over.

    Returns:
      `[]` float32, the same on all ranks of `axis_name`.

    Derivative: through `probs`; the fractions are constants.
    """
    num_experts, num_topk = probs.shape[-1], topk_idx.shape[-1]
    probs = probs.reshape(-1, num_experts)
    topk_idx = topk_idx.reshape(-1, num_topk)
    is_token = _is_token(topk_idx)
    count, total, num_tokens = _psum(
        (
            expert_counts(topk_idx, num_experts),
            jnp.where(is_token[:, None], probs, 0).sum(axis=0),
            is_token.sum(dtype=jnp.int32),
        ),
        axis_name,
    )
    num_tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32)
    products = (count.astype(jnp.float32) / num_tokens) * (total / num_tokens)
    return products.sum() * (num_experts / num_topk)


def sequence_load_balance_loss(
    probs: jax.Array,
    topk_idx: jax.Array,
    *,
    axis_name: str | Sequence[str] = (),
    sequence_axes: str | Sequence[str] = (),
) -> jax.Array:
    """The mean over sequences of `load_balance_loss` in each.

    DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20), without its factor alpha.

    Args:
      probs: `[B, S, E]` float32: sequences, or equal parts of them.
      topk_idx: `[B, S, K]` int32. A token whose ids are all negative does not count,
        nor does a sequence without tokens.
      axis_name: mesh axes of an enclosing shard_map that the tokens are split over.
      sequence_axes: those of them that each sequence is split over.

    Returns:
      `[]` float32, the same on all ranks of `axis_name`.

    Derivative: through `probs`.
    """
    parts = names_of(sequence_axes)
    others = tuple(name for name in names_of(axis_name) if name not in parts)
    num_tokens = _psum(_is_token(topk_idx).sum(axis=1, dtype=jnp.int32), parts)
    has_tokens = num_tokens > 0
    of_one = functools.partial(load_balance_loss, axis_name=parts)
    losses = jax.vmap(of_one)(probs, topk_idx)
    total, num_sequences = _psum(
        (
            jnp.where(has_tokens, losses, 0).sum(),
            has_tokens.sum(dtype=jnp.int32),
        ),
        others,
    )
    return total / jnp.maximum(num_sequences, 1).astype(jnp.float32)


def router_z_loss(
    logits: jax.Array,
    topk_idx: jax.Array | None = None,
    *,
    axis_name: str | Sequence[str] = (),
) -> jax.Array:
    """`mean(logsumexp(logits)^2)`: keeps the logits small (ST-MoE, arXiv:2202.08906).

    Args:
      logits: `[..., E]` float32.
      topk_idx: `[..., K]` int32; a token whose ids are all negative does not count.
      axis_name: mesh axes of an enclosing shard_map that the tokens are split over.

    Returns:
      `[]` float32, the same on all ranks of `axis_name`.

    Derivative: through `logits`.
    """
    logits = logits.reshape(-1, logits.shape[-1])
    is_token = jnp.ones(logits.shape[0], bool)
    if topk_idx is not None:
        is_token = _is_token(topk_idx.reshape(-1, topk_idx.shape[-1]))
    logits = jnp.where(is_token[:, None], logits, 0)
    squares = jax.nn.logsumexp(logits, axis=1) ** 2
    total, num_tokens = _psum(
        (jnp.where(is_token, squares, 0).sum(), is_token.sum(dtype=jnp.int32)),
        axis_name,
    )
    return total / jnp.maximum(num_tokens, 1).astype(jnp.float32)


def selection_bias_update(
    selection_bias: jax.Array, expert_load: jax.Array, rate: float
) -> jax.Array:
    """The next selection bias: up by `rate` for idle experts, down for busy ones.

    `bias + rate * sign(mean(load) - load)`, after each training step, with no gradient
    (auxiliary-loss-free balancing, arXiv:2408.15664, algorithm 1).

    Args:
      selection_bias: `[E]` float32.
      expert_load: `[E]`, slots over all ranks of the step: `MoEStats.expert_load`.
      rate: 1e-3 in DeepSeek-V3.

    Returns:
      `[E]` float32.
    """
    load = lax.stop_gradient(expert_load).astype(jnp.float32)
    return selection_bias + rate * jnp.sign(load.mean() - load)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectionLoads:
    """The loads of the calls since the last update of the selection bias.

    Attributes:
      expert_load: `[E]` float32, their sum.
      num_calls: `[1]` int32, how many they are.
    """

    expert_load: jax.Array
    num_calls: jax.Array

    @classmethod
    def zeros(cls, num_experts: int) -> "SelectionLoads":
        """Of no call."""
        return cls(jnp.zeros(num_experts, jnp.float32), jnp.zeros(1, jnp.int32))


def next_selection_bias(
    selection_bias: jax.Array,
    loads: SelectionLoads | None,
    expert_load: jax.Array,
    config: MoEConfig,
) -> tuple[jax.Array, SelectionLoads | None]:
    """What a layer's training call makes of its selection bias.

    Every `selection_bias_update_every` calls one `selection_bias_update`, with the
    loads of all of them.

    Args:
      selection_bias: `[E]` float32.
      loads: of the calls before; None where every call updates.
      expert_load: `[E]`, slots over all ranks of this call.
      config: the rate, and how many calls make a step.

    Returns:
      The next bias, and the next loads.
    """
    rate = config.selection_bias_update_rate
    if loads is None:
        return selection_bias_update(selection_bias, expert_load, rate), None
    total = loads.expert_load + expert_load.astype(jnp.float32)
    num_calls = loads.num_calls + 1
    is_due = num_calls >= config.selection_bias_update_every
    updated = selection_bias_update(selection_bias, total, rate)
    return jnp.where(is_due, updated, selection_bias), SelectionLoads(
        jnp.where(is_due, 0, total), jnp.where(is_due, 0, num_calls)
    )


def expert_counts(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """`[E]` int32: slots per expert; ids out of range count nowhere."""
    ids = topk_idx.reshape(-1)
    ids = jnp.where(ids < 0, num_experts, ids)
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop")


@jax.named_scope("jax_ep.stats")
def moe_stats(
    routing: Routing,
    handle: Handle | Sequence[Handle],
    config: MoEConfig,
    *,
    axis_name: Sequence[str],
    sequence_axes: Sequence[str] = (),
    rounds: Rounds | None = None,
    num_sequences: int | None = None,
) -> MoEStats:
    """The statistics and losses of one call, inside its shard_map.

    Args:
      routing: of this rank's T tokens.
      handle: their layout, or those of chunks of them.
      config: which losses, and their weights.
      axis_name: the mesh axes that tokens are split over, the expert axis among them.
      sequence_axes: those of them that each sequence is split over.
      rounds: what `in_rounds` made of the layout; None without it.
      num_sequences: equal sequences that the tokens consist of, for a load-balance loss
        per sequence; None is one.

    Returns:
      `MoEStats`, the same on all ranks of `axis_name`.

    Derivative: of the three losses, through the routing's probabilities and logits.

    Source: of each loss, its own function. `router_entropy` is the mean over tokens of
    `-sum_e p_e log p_e`, and `max_load_ratio` is `max_e load_e / mean_e load_e`.
    """
    handles = (handle,) if isinstance(handle, Handle) else tuple(handle)
    names = handles[0].axis_name
    num_recv = jnp.stack([each.num_recv for each in handles])  # [chunks, R]
    num_slots = [max(each.num_tokens * each.num_topk, 1) for each in handles]
    counted = routing.topk_idx
    if config.load_balance_counts == "best_scores":
        _, counted = lax.top_k(routing.probs, config.num_experts_per_tok)
        counted = jnp.where(_is_token(routing.topk_idx)[:, None], counted, -1)
    if config.load_balance_scope == "sequence":
        shape = (num_sequences or 1, -1)
        balance = sequence_load_balance_loss(
            routing.probs.reshape(*shape, config.num_experts),
            counted.reshape(*shape, config.num_experts_per_tok),
            axis_name=axis_name,
            sequence_axes=sequence_axes,
        )
    else:
        balance = load_balance_loss(routing.probs, counted, axis_name=axis_name)
    z = router_z_loss(routing.logits, routing.topk_idx, axis_name=axis_name)
    is_token = _is_token(routing.topk_idx)
    probs = lax.stop_gradient(routing.probs)
    entropy = jax.scipy.special.entr(probs).sum(axis=1)
    # The handle's counts are the same on all R ranks: one adds them. (R times them, and
    # divided, is more than int32 holds.)
    is_first = lax.axis_index(names) == 0 if names else True
    dropped = sum(
        each.num_dropped for each in (handles if rounds is None else [rounds])
    )
    load, recv, dropped, entropy, num_tokens = _psum(
        (
            expert_counts(routing.topk_idx, config.num_experts),
            jnp.where(is_first, num_recv.sum(0), 0),
            jnp.where(is_first, dropped, 0),
            jnp.where(is_token, entropy, 0).sum(),
            is_token.sum(dtype=jnp.int32),
        ),
        axis_name,
    )
    num_rounds = jnp.ones(1, jnp.int32) if rounds is None else rounds.num_rounds
    most = vary_alike(tuple(axis_name), (num_recv.max(1), num_rounds))
    busiest, num_rounds = lax.pmax(most, tuple(axis_name)) if axis_name else most
    factors = busiest.astype(jnp.float32) / jnp.array(num_slots, jnp.float32)
    max_load = load.max().astype(jnp.float32)
    mean_load = jnp.maximum(load.astype(jnp.float32).sum(), 1) / config.num_experts
    weighted = (
        config.load_balance_loss_weight * balance + config.router_z_loss_weight * z
    )
    return MoEStats(
        expert_load=load,
        num_recv=recv,
        num_dropped=dropped,
        num_rounds=num_rounds,
        max_load_ratio=(max_load / mean_load)[None],
        required_capacity_factor=factors.max()[None],
        router_entropy=(entropy / jnp.maximum(num_tokens, 1).astype(jnp.float32))[None],
        load_balance_loss=balance[None],
        router_z_loss=z[None],
        weighted_loss=weighted[None],
    )


def _is_token(topk_idx: jax.Array) -> jax.Array:
    return (topk_idx >= 0).any(axis=-1)


def _psum(tree, axis_name: str | Sequence[str]):
    names = names_of(axis_name)
    if not names:
        return tree
    return lax.psum(vary_alike(names, tree), names)
