"""Router: each published variant against its literal definition, and bad rows."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.config import MoEConfig
from jax_ep.router import router, topk_routing

TOKENS, EXPERTS = 33, 8
SIZES = dict(num_experts=EXPERTS, hidden_size=16, moe_intermediate_size=4)

VARIANTS = dict(
    mixtral=dict(num_experts_per_tok=2),
    qwen3=dict(num_experts_per_tok=4),
    olmoe=dict(num_experts_per_tok=4, norm_topk_prob=False),
    switch=dict(num_experts_per_tok=1),
    mixtral_of_one=dict(num_experts_per_tok=1, norm_topk_prob=True),
    llama4=dict(num_experts_per_tok=1, score_func="sigmoid", norm_topk_prob=False),
    deepseek_v2=dict(
        num_experts_per_tok=3,
        norm_topk_prob=False,
        n_group=4,
        topk_group=2,
        group_score="max",
        routed_scaling_factor=16.0,
    ),
    deepseek_v3=dict(
        num_experts_per_tok=3,
        score_func="sigmoid",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        selection_bias=True,
    ),
    sqrtsoftplus=dict(
        num_experts_per_tok=3, score_func="sqrtsoftplus", selection_bias=True
    ),
)


@pytest.fixture(params=VARIANTS)
def config(request) -> MoEConfig:
    return MoEConfig(**SIZES, **VARIANTS[request.param])


def inputs(config, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, config.hidden_size)).astype(np.float32)
    kernel = rng.standard_normal((config.hidden_size, EXPERTS)).astype(np.float32)
    bias = None
    if config.selection_bias:
        bias = rng.standard_normal(EXPERTS).astype(np.float32) * 0.3
    return x, kernel, bias


def test_published_definition(config):
    x, kernel, bias = inputs(config)
    logits = x.astype(np.float64) @ kernel.astype(np.float64)
    scores = dense.scores_of(np, logits, config)
    ids = dense.choose(scores, config, bias)
    routing = router(x, kernel, config, selection_bias=bias)
    np.testing.assert_array_equal(routing.topk_idx, ids)
    np.testing.assert_allclose(
        routing.topk_weights, dense.weights_of(np, scores, ids, config), rtol=2e-5
    )
    probs = scores / scores.sum(1, keepdims=True)
    np.testing.assert_allclose(routing.probs, probs, rtol=2e-5)
    np.testing.assert_allclose(routing.logits, logits, rtol=1e-5, atol=1e-5)
    assert routing.topk_idx.dtype == jnp.int32
    floats = (routing.topk_weights, routing.probs, routing.logits)
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}


def test_mixtral_is_softmax_over_the_chosen_logits():
    config = MoEConfig(**SIZES, num_experts_per_tok=2)
    x, kernel, _ = inputs(config)
    logits = x @ kernel
    chosen = -np.sort(-logits, axis=1)[:, :2]
    routing = router(x, kernel, config)
    np.testing.assert_allclose(
        routing.topk_weights, dense.softmax(np, chosen), rtol=1e-5
    )


def test_group_limit_by_hand():
    # Groups of two: (.9, .0), (.5, .5), (.6, .1), (.2, .2). By the sum of two, the best
    # groups are 1 and 0; by the best expert, 0 and 2.
    scores = np.array([[0.9, 0.0001, 0.5, 0.5, 0.6, 0.1, 0.2, 0.2]])
    logits = np.log(scores / (1 - scores)).astype(np.float32)
    options = dict(num_experts_per_tok=3, score_func="sigmoid", n_group=4, topk_group=2)
    routing = topk_routing(logits, **options)
    assert routing.topk_idx.tolist() == [[0, 2, 3]]
    np.testing.assert_allclose(
        routing.topk_weights[0], np.array([0.9, 0.5, 0.5]) / 1.9, rtol=1e-5
    )
    routing = topk_routing(logits, group_score="max", **options)
    assert routing.topk_idx.tolist() == [[0, 4, 5]]


def test_selection_bias_moves_the_choice_alone():
    logits = np.array([[0.0, 1.0, -1.0]], np.float32)
    bias = np.array([0.0, -1.0, 1.0], np.float32)
    routing = topk_routing(
        logits,
        num_experts_per_tok=1,
        score_func="sigmoid",
        norm_topk_prob=False,
        selection_bias=bias,
    )
    assert routing.topk_idx.tolist() == [[2]]
    assert routing.topk_weights[0, 0] == pytest.approx(1 / (1 + np.exp(1)), rel=1e-6)

    def weight(bias):
        return topk_routing(
            logits, num_experts_per_tok=2, score_func="sigmoid", selection_bias=bias
        ).topk_weights.sum()

    np.testing.assert_array_equal(jax.grad(weight)(bias), np.zeros(3))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_routes_in_float32_whatever_the_activations(config, dtype):
    x, kernel, bias = inputs(config)
    low = jnp.asarray(x, dtype)
    from_low = router(low, kernel, config, selection_bias=bias)
    from_f32 = router(low.astype(jnp.float32), kernel, config, selection_bias=bias)
    for one, two in zip(
        jax.tree.leaves(from_low), jax.tree.leaves(from_f32), strict=True
    ):
        np.testing.assert_array_equal(one, two)


def test_nan_row_stays_in_its_row(config):
    x, kernel, bias = inputs(config)
    clean = router(x, kernel, config, selection_bias=bias)
    poisoned = x.copy()
    poisoned[5] = np.nan
    routing = router(poisoned, kernel, config, selection_bias=bias)
    others = np.arange(TOKENS) != 5
    for one, two in zip(jax.tree.leaves(routing), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(one[others], two[others])
    ids = np.asarray(routing.topk_idx)
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    assert len(set(ids[5])) == config.num_experts_per_tok


def test_token_mask(config):
    x, kernel, bias = inputs(config)
    mask = np.arange(TOKENS) % 3 > 0
    clean = router(x, kernel, config, selection_bias=bias)
    x = np.where(mask[:, None], x, np.nan)

    def weights(kernel):
        routing = router(
            x, kernel, config, selection_bias=bias, token_mask=jnp.asarray(mask)
        )
        return (routing.topk_weights**2).sum(), routing

    (_, routing), gradient = jax.value_and_grad(weights, has_aux=True)(kernel)
    assert (routing.topk_idx[~mask] == -1).all()
    assert (routing.topk_weights[~mask] == 0).all()
    np.testing.assert_array_equal(routing.topk_idx[mask], clean.topk_idx[mask])
    np.testing.assert_array_equal(routing.topk_weights[mask], clean.topk_weights[mask])
    assert np.isfinite(gradient).all()


def test_gradient_reaches_the_kernel(config):
    x, kernel, bias = inputs(config)
    factors = np.random.default_rng(2).standard_normal(
        (TOKENS, config.num_experts_per_tok)
    )
    factors = factors.astype(np.float32)
    ids = np.asarray(router(x, kernel, config, selection_bias=bias).topk_idx)

    def ours(kernel):
        routing = router(x, kernel, config, selection_bias=bias)
        return (routing.topk_weights * factors).sum()

    def literal(kernel):
        scores = dense.scores_of(jnp, x @ kernel, config)
        return (dense.weights_of(jnp, scores, ids, config) * factors).sum()

    gradient = jax.grad(ours)(kernel)
    np.testing.assert_allclose(
        gradient, jax.grad(literal)(kernel), rtol=1e-3, atol=1e-4
    )
    if config.norm_topk_prob and config.num_experts_per_tok == 1:
        assert not np.asarray(gradient).any()  # Its only weight is always 1.
    else:
        assert np.abs(gradient).max() > 0.1  # With one expert too.


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_large_logits_stay_finite(score_func):
    logits = np.array([[-300.0, -90.0, 0.0, 300.0], [-300.0] * 4], np.float32)

    def loss(logits):
        routing = topk_routing(logits, num_experts_per_tok=3, score_func=score_func)
        return routing.topk_weights[:, 0].sum() + routing.probs[:, 1].sum()

    value, gradient = jax.value_and_grad(loss)(logits)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_ties_go_to_the_lower_id():
    routing = topk_routing(np.zeros((3, 8), np.float32), num_experts_per_tok=3)
    assert routing.topk_idx.tolist() == [[0, 1, 2]] * 3


def test_jitter():
    config = MoEConfig(**SIZES, num_experts_per_tok=8, router_jitter_noise=0.1)
    x = np.ones((TOKENS, 16), np.float32)
    kernel = np.eye(16, EXPERTS, dtype=np.float32)
    logits = np.asarray(router(x, kernel, config, key=jax.random.key(0)).logits)
    assert logits.min() >= 0.9 and logits.max() <= 1.1 and logits.std() > 0.04
    again = router(x, kernel, config, key=jax.random.key(0)).logits
    np.testing.assert_array_equal(logits, again)
    np.testing.assert_array_equal(
        router(x, kernel, config).logits, np.ones_like(logits)
    )


def test_random_routing():
    config = MoEConfig(**SIZES, num_experts_per_tok=2, use_random_routing=True)
    x, kernel, _ = inputs(config)
    with pytest.raises(ValueError, match=r"jax_ep\.router: use_random_routing needs"):
        router(x, kernel, config)
    one = router(x, kernel, config, key=jax.random.key(0))
    two = router(0 * x, kernel, config, key=jax.random.key(0))
    np.testing.assert_array_equal(one.topk_idx, two.topk_idx)
    assert len(np.unique(one.topk_idx)) == EXPERTS


def test_logits_bias():
    config = MoEConfig(**SIZES, num_experts_per_tok=2, router_bias=True)
    x, kernel, _ = inputs(config)
    bias = np.arange(EXPERTS, dtype=np.float32)
    routing = router(x, kernel, config, bias=bias)
    np.testing.assert_allclose(
        routing.logits, x @ kernel + bias[None], rtol=1e-4, atol=1e-4
    )


def test_misfit_shapes():
    config = MoEConfig(**SIZES, num_experts_per_tok=2)
    with pytest.raises(ValueError) as raised:
        router(np.zeros((3, 16), np.float32), np.zeros((16, 4), np.float32), config)
    assert str(raised.value) == (
        "jax_ep.router: x and kernel must have shapes [T, H] and [H, E] with E = 8, "
        "and have (3, 16) and (16, 4)."
    )
    with pytest.raises(ValueError, match=r"score_func \(='tanh'\) must be 'softmax'"):
        topk_routing(np.zeros((3, 8)), num_experts_per_tok=2, score_func="tanh")


def test_one_expert_is_normalised_only_if_asked_for():
    """The default must let the router learn; models trained otherwise say so."""
    logits = np.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    best = np.array([[np.e**2 / (np.e**2 + 2)], [1 / 3]])
    for norm, want in ((None, best), (False, best), (True, np.ones((2, 1)))):
        routing = topk_routing(logits, num_experts_per_tok=1, norm_topk_prob=norm)
        np.testing.assert_allclose(routing.topk_weights, want, rtol=1e-6)
        config = MoEConfig(**SIZES, num_experts_per_tok=1, norm_topk_prob=norm)
        assert config.norm_topk_prob is norm
    assert MoEConfig(**SIZES, num_experts_per_tok=2).norm_topk_prob is True


def test_expert_scale():
    config = MoEConfig(**SIZES, num_experts_per_tok=2, expert_scale=True)
    x, kernel, _ = inputs(config)
    scale = np.arange(1, EXPERTS + 1, dtype=np.float32)

    def weights(scale):
        return router(x, kernel, config, expert_scale=scale).topk_weights

    plain = router(x, kernel, config)
    ids = np.asarray(plain.topk_idx)
    want = np.asarray(plain.topk_weights) * scale[ids]
    np.testing.assert_allclose(weights(scale), want, rtol=1e-6)
    gradient = jax.grad(lambda scale: weights(scale).sum())(scale)
    want = [np.asarray(plain.topk_weights)[ids == e].sum() for e in range(EXPERTS)]
    np.testing.assert_allclose(gradient, want, rtol=1e-5)


def test_what_probabilities_are_made_of():
    logits = np.array([[2.0, -1.0, 0.5]])
    bias = np.array([0.3, 0.0, -0.2])
    scores = 1 / (1 + np.exp(-logits))
    want = dict(
        scores=scores / scores.sum(),
        softmax_of_scores=dense.softmax(np, scores + bias),
        softmax_of_logits=dense.softmax(np, logits),
    )
    for probs_from, probs in want.items():
        routing = topk_routing(
            logits.astype(np.float32),
            num_experts_per_tok=2,
            score_func="sigmoid",
            selection_bias=bias.astype(np.float32),
            probs_from=probs_from,
        )
        np.testing.assert_allclose(routing.probs, probs, rtol=1e-6)
    with pytest.raises(ValueError, match=r"probs_from \(='logits'\) must be 'scores'"):
        topk_routing(
            np.zeros((1, 3), np.float32), num_experts_per_tok=1, probs_from="logits"
        )
