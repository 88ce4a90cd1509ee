"""A literal dense MoE: every expert sees every token, and weights choose.

Written from the published formulas, with none of the package's code, over numpy
(float64) or jax.numpy (for its gradients). Choices are always numpy's.
"""

import math

import numpy as np


def softmax(xp, values):
    values = xp.exp(values - values.max(-1, keepdims=True))
    return values / values.sum(-1, keepdims=True)


def sigmoid(xp, values):
    return 1 / (1 + xp.exp(-values))


def gelu(values):
    """The exact one, numpy only."""
    return values * 0.5 * (1 + np.vectorize(math.erf)(values / math.sqrt(2)))


def activate(xp, gate, up, activation):
    if activation == "silu":
        return gate * sigmoid(xp, gate) * up
    if activation == "gelu":
        return gelu(gate) * up
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + xp.tanh(inner)) * up
    assert activation == "clipped_swiglu"
    gate, up = xp.minimum(gate, 7.0), xp.clip(up, -7.0, 7.0)
    return gate * sigmoid(xp, 1.702 * gate) * (up + 1)


def scores_of(xp, logits, config):
    if config.score_func == "softmax":
        return softmax(xp, logits)
    if config.score_func == "sigmoid":
        return sigmoid(xp, logits)
    return xp.sqrt(xp.log1p(xp.exp(logits)))


def choose(scores, config, selection_bias=None) -> np.ndarray:
    """`[n, K]`: the experts of each token, one token at a time."""
    bias = np.zeros(config.num_experts) if selection_bias is None else selection_bias
    ids = []
    for row in np.asarray(scores, np.float64) + np.asarray(bias, np.float64):
        allowed = np.arange(config.num_experts)
        if config.n_group > 1:
            groups = np.split(allowed, config.n_group)
            top = 2 if config.group_score == "top2_sum" else 1
            best = [np.sort(row[group])[::-1][:top].sum() for group in groups]
            chosen = np.argsort(best, kind="stable")[::-1][: config.topk_group]
            allowed = np.concatenate([groups[g] for g in sorted(chosen)])
        order = np.argsort(-row[allowed], kind="stable")
        ids.append(allowed[order[: config.num_experts_per_tok]])
    return np.array(ids)


def weights_of(xp, scores, ids, config):
    """`[n, K]`."""
    weights = xp.take_along_axis(scores, ids, axis=1)
    if config.norm_topk_prob:
        weights = weights / weights.sum(1, keepdims=True)
    return weights * config.routed_scaling_factor


def experts(xp, x, params, config):
    """`[E, n, H]`: every expert on all tokens."""

    def linear(x, kernel, bias):
        return x @ kernel + (0 if bias is None else bias[:, None])

    x = x[None]
    if params.gate_up_proj is None:
        gate = linear(x, params.gate_proj, params.gate_bias)
        up = linear(x, params.up_proj, params.up_bias)
    else:
        both = linear(x, params.gate_up_proj, params.gate_up_bias)
        gate, up = xp.split(both, 2, axis=2)
    hidden = activate(xp, gate, up, config.activation)
    return linear(hidden, params.down_proj, params.down_bias)


def routed(xp, x, params, config, ids, weights):
    """`[n, H]`: the weighted sum of each token's experts."""
    is_chosen = ids == np.arange(config.num_experts)[:, None, None]  # [E, n, K]
    weights = xp.where(is_chosen, weights[None], 0).sum(2)
    return (experts(xp, x, params, config) * weights[:, :, None]).sum(0)


def shared(xp, x, params, config):
    if params.shared_down_proj is None:
        return 0
    if params.shared_gate_up_proj is None:
        gate, up = x @ params.shared_gate_proj, x @ params.shared_up_proj
    else:
        gate, up = xp.split(x @ params.shared_gate_up_proj, 2, axis=1)
    y = activate(xp, gate, up, config.activation) @ params.shared_down_proj
    if params.shared_expert_gate is not None:
        y = y * sigmoid(xp, x @ params.shared_expert_gate)
    return y


def moe(xp, x, params, config, ids=None, keep=None):
    """`[n, H]`, ids `[n, K]` and probabilities `[n, E]`, for `x` `[n, H]`.

    `ids` None are chosen here. `keep` `[n, K]` drops the slots where it is False.
    """
    logits = x @ params.router_kernel
    if params.router_bias is not None:
        logits = logits + params.router_bias[None]
    scores = scores_of(xp, logits, config)
    if ids is None:
        ids = choose(scores, config, params.selection_bias)
    weights = weights_of(xp, scores, ids, config)
    if keep is not None:
        weights = xp.where(keep, weights, 0)
    out = routed(xp, x, params, config, ids, weights)
    out = out + shared(xp, x, params, config)
    probs = scores / scores.sum(1, keepdims=True)
    return out, ids, probs, logits


def balance_loss(probs, ids, num_experts):
    """`E / (K N^2) * sum(counts * sum of probs)`."""
    counts = np.bincount(np.asarray(ids).reshape(-1), minlength=num_experts)
    total = (counts.astype(np.float32) * probs.sum(0)).sum()
    return total * num_experts / (ids.shape[1] * ids.shape[0] ** 2)


def z_loss(xp, logits):
    return (xp.log(xp.exp(logits).sum(1)) ** 2).mean()
