"""Router: which experts each token goes to, and with what weight."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.config import BalanceProbs, GroupScore, MoEConfig, ScoreFunc


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The choice of experts of T tokens.

    Attributes:
      topk_idx: `[T, K]` int32, distinct ids in a row; -1 in masked rows.
      topk_weights: `[T, K]` float32; 0 in masked rows.
      probs: `[T, E]` float32, probabilities of all experts, summing to 1 in a row; what
        a load-balance loss takes.
      logits: `[T, E]` float32.
    """

    topk_idx: jax.Array
    topk_weights: jax.Array
    probs: jax.Array
    logits: jax.Array


def router(
    x: jax.Array,
    kernel: jax.Array,
    config: MoEConfig,
    *,
    bias: jax.Array | None = None,
    selection_bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    key: jax.Array | None = None,
) -> Routing:
    """Scores every expert for every token and chooses K of them, in float32.

    Needs no mesh: every token is by itself, so it may be called anywhere.

    Args:
      x: `[T, H]`, any float dtype.
      kernel: `[H, E]`, any float dtype.
      config: how to score and to choose.
      bias: `[E]`, added to the logits.
      selection_bias: `[E]` float32, see `topk_routing`.
      expert_scale: `[E]`, see `topk_routing`.
      token_mask: `[T]` bool, False for tokens that go nowhere. Their x may be NaN.
      key: for the jitter noise and random routing. Without it there is no noise.

    Returns:
      A `Routing`.

    Raises:
      ValueError: a shape that does not fit; random routing without a key.

    Derivative: of `topk_weights`, `probs` and `logits`; ids have none.

    Jitter multiplies the router's view of x by uniform noise in [1 - eps, 1 + eps]
    (Switch Transformer, arXiv:2101.03961, section 2.2).
    """
    if x.ndim != 2 or kernel.shape != (x.shape[1], config.num_experts):
        raise ValueError(
            f"jax_ep.router: x and kernel must have shapes [T, H] and [H, E] with E = "
            f"{config.num_experts}, and have {x.shape} and {kernel.shape}."
        )
    logits = _logits(x, kernel, config, bias, token_mask, key)
    return topk_routing(
        logits,
        num_experts_per_tok=config.num_experts_per_tok,
        score_func=config.score_func,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
        n_group=config.n_group,
        topk_group=config.topk_group,
        group_score=config.group_score,
        selection_bias=selection_bias,
        expert_scale=expert_scale,
        probs_from=config.load_balance_probs,
        token_mask=token_mask,
    )


@jax.named_scope("jax_ep.router")
def topk_routing(
    logits: jax.Array,
    *,
    num_experts_per_tok: int,
    score_func: ScoreFunc = "softmax",
    norm_topk_prob: bool | None = None,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: GroupScore = "top2_sum",
    selection_bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
    probs_from: BalanceProbs = "scores",
    token_mask: jax.Array | None = None,
) -> Routing:
    """Chooses K experts per token from the router's logits.

    The published routers, and their sources:

    - Mixtral (arXiv:2401.04088, section 2.1): softmax over the K largest logits, which
      is softmax over all, renormalised: the defaults.
    - Qwen3-MoE: softmax, top-k, renormalised: the defaults. Qwen2-MoE and OLMoE
      (arXiv:2409.02060): the same with `norm_topk_prob=False`.
    - GPT-OSS: top-k of the biased logits, softmax over those: the defaults.
    - DeepSeek-V2 (arXiv:2405.04434, section 2.1.2): softmax; groups by their best
      expert (`group_score="max"`); `norm_topk_prob=False`.
    - DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): sigmoid scores; groups by the sum
      of their two best; experts by score + bias, weights from the scores without it,
      normalised and scaled. Its code divides by the sum + 1e-20, whose derivative
      overflows where all scores vanish; here the quotient is a softmax of log scores.
    - Llama 4: sigmoid scores, `norm_topk_prob=False`; the weights multiply the experts'
      input, see `MoEConfig.weights_scale_input`.
    - sqrt-softplus scores, `sqrt(log(1 + exp(logit)))`, in place of the sigmoid
      (DeepSeek-V4, as MaxText has it).

    Args:
      logits: `[T, E]`, cast to float32.
      num_experts_per_tok: K.
      score_func: "softmax", "sigmoid" or "sqrtsoftplus".
      norm_topk_prob: divide the K weights by their sum; None does where K > 1. With
        K = 1 the weight is 1 if True, and its gradient 0.
      routed_scaling_factor: multiplies the weights.
      n_group: groups of E / n_group consecutive experts.
      topk_group: groups a token chooses from.
      group_score: "top2_sum" or "max", of score + bias.
      selection_bias: `[E]`, added to the scores for the choice alone; no gradient.
      expert_scale: `[E]`, multiplies the weights of each expert (Gemma 4).
      probs_from: what `Routing.probs` are, see `MoEConfig.load_balance_probs`.
      token_mask: `[T]` bool; False rows get ids -1 and weights 0.

    Returns:
      A `Routing`. Of equal scores the lower id wins. A row with a NaN logit has valid
      ids and NaN weights, and touches no other row.

    Derivative: through the scores of the chosen experts.
    """
    op = "topk_routing"
    if logits.ndim != 2:
        raise ValueError(
            f"jax_ep.{op}: logits must have shape [T, E], and has {logits.shape}."
        )
    num_tokens, num_experts = logits.shape
    if not 1 <= num_experts_per_tok <= num_experts:
        raise ValueError(
            f"jax_ep.{op}: num_experts_per_tok (={num_experts_per_tok}) must be from 1 "
            f"to the {num_experts} experts of logits."
        )
    if num_experts % n_group:
        raise ValueError(
            f"jax_ep.{op}: n_group (={n_group}) must divide the {num_experts} experts "
            "of logits."
        )
    if group_score not in ("top2_sum", "max"):
        raise ValueError(
            f"jax_ep.{op}: group_score (={group_score!r}) must be 'top2_sum' or 'max'."
        )
    if token_mask is not None and token_mask.shape != (num_tokens,):
        raise ValueError(
            f"jax_ep.{op}: token_mask must have shape [T] = ({num_tokens},), and has "
            f"{token_mask.shape}."
        )
    logits = logits.astype(jnp.float32)
    log_scores = _log_scores(logits, score_func)
    choice = lax.stop_gradient(jnp.exp(log_scores))
    if selection_bias is not None:
        choice += lax.stop_gradient(selection_bias).astype(jnp.float32)[None]
    if n_group > 1:
        choice = _limit_to_groups(choice, n_group, topk_group, group_score)
    _, topk_idx = lax.top_k(choice, num_experts_per_tok)
    weights = jnp.take_along_axis(log_scores, topk_idx, axis=1)
    # A score over a sum of scores is a softmax of their logarithms.
    if norm_topk_prob or (norm_topk_prob is None and num_experts_per_tok > 1):
        weights = jax.nn.softmax(weights, axis=1)
    else:
        weights = jnp.exp(weights)
    weights *= routed_scaling_factor
    if expert_scale is not None:
        weights *= expert_scale.astype(jnp.float32)[topk_idx]
    probs = _probs(logits, log_scores, selection_bias, probs_from)
    if token_mask is not None:
        topk_idx = jnp.where(token_mask[:, None], topk_idx, -1)
        weights = jnp.where(token_mask[:, None], weights, 0)
    return Routing(topk_idx.astype(jnp.int32), weights, probs, logits)


@jax.named_scope("jax_ep.router")
def _logits(x, kernel, config, bias, token_mask, key):
    """`[T, E]` float32."""
    x = x.astype(jnp.float32)
    if token_mask is not None:
        # Chosen, not multiplied: NaN * 0 in the kernel's gradient is NaN.
        x = jnp.where(token_mask[:, None], x, 0)
    if config.router_jitter_noise and key is not None:
        eps = config.router_jitter_noise
        x *= jax.random.uniform(key, x.shape, minval=1 - eps, maxval=1 + eps)
    # Full float32 also where the default for matrix products is less (TPU, TF32).
    logits = jnp.dot(x, kernel.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    if bias is not None:
        logits += bias.astype(jnp.float32)[None]
    if config.use_random_routing:
        if key is None:
            raise ValueError("jax_ep.router: use_random_routing needs a key.")
        return jax.random.normal(key, logits.shape)
    return logits


def _log_scores(logits: jax.Array, score_func: ScoreFunc) -> jax.Array:
    if score_func == "softmax":
        return jax.nn.log_softmax(logits, axis=1)
    if score_func == "sigmoid":
        return jax.nn.log_sigmoid(logits)
    if score_func != "sqrtsoftplus":
        raise ValueError(
            f"jax_ep.topk_routing: score_func (={score_func!r}) must be 'softmax', "
            "'sigmoid' or 'sqrtsoftplus'."
        )
    # Below -20 softplus(x) is exp(x) to float32, and soon underflows.
    is_small = logits < -20
    softplus = jax.nn.softplus(jnp.where(is_small, 0, logits))
    return jnp.where(is_small, logits, jnp.log(softplus)) / 2


def _probs(logits, log_scores, selection_bias, probs_from: BalanceProbs) -> jax.Array:
    if probs_from == "scores":
        return jax.nn.softmax(log_scores, axis=1)
    if probs_from == "softmax_of_logits":
        return jax.nn.softmax(logits, axis=1)
    if probs_from != "softmax_of_scores":
        raise ValueError(
            f"jax_ep.topk_routing: probs_from (={probs_from!r}) must be 'scores', "
            "'softmax_of_scores' or 'softmax_of_logits'."
        )
    scores = jnp.exp(log_scores)
    if selection_bias is not None:
        scores += lax.stop_gradient(selection_bias).astype(jnp.float32)[None]
    return jax.nn.softmax(scores, axis=1)


def _limit_to_groups(choice, n_group, topk_group, group_score):
    """`choice` with -inf outside the best `topk_group` groups of each token."""
    num_tokens, num_experts = choice.shape
    grouped = choice.reshape(num_tokens, n_group, num_experts // n_group)
    best, _ = lax.top_k(grouped, 2 if group_score == "top2_sum" else 1)
    _, groups = lax.top_k(best.sum(axis=2), topk_group)
    is_chosen = jax.nn.one_hot(groups, n_group, dtype=jnp.int32).sum(axis=1) > 0
    grouped = jnp.where(is_chosen[:, :, None], grouped, -jnp.inf)
    return grouped.reshape(num_tokens, num_experts)
