"""Expected ranks, padding and growth, against enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest

from jax_ep import sizing
from jax_ep.sizing import MACHINES, Shape, UniformRouting

TOKENS = 20_000  # Of a simulation; its means are compared to 5 standard errors.


def draw(routing: UniformRouting, num: int, seed: int = 0) -> np.ndarray:
    """`[num, K]` ids: groups by random scores, then experts by random scores."""
    random = np.random.default_rng(seed)
    size = routing.num_experts // routing.n_group
    groups = np.argsort(random.random((num, routing.n_group)), axis=1)
    open_groups = np.zeros((num, routing.n_group), bool)
    np.put_along_axis(open_groups, groups[:, : routing.topk_group], True, 1)
    scores = random.random((num, routing.num_experts))
    scores = np.where(np.repeat(open_groups, size, axis=1), scores, -1)
    return np.argsort(-scores, axis=1)[:, : routing.num_topk]


def distinct(owners: np.ndarray) -> np.ndarray:
    """Different values in each row."""
    return np.array([len(set(row)) for row in owners.tolist()])


def assert_mean(samples: np.ndarray, expected: float) -> None:
    error = samples.std(ddof=1) / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) <= 5 * error + 1e-9


# --- ranks of a token ----------------------------------------------------------


def test_independent_choice():
    assert round(sizing.distinct_ranks_independent(16, 8), 2) == 6.45
    owners = np.random.default_rng(0).integers(16, size=(TOKENS, 8))
    assert_mean(distinct(owners), sizing.distinct_ranks_independent(16, 8))
    assert sizing.distinct_ranks_independent(1, 8) == 1


@pytest.mark.parametrize("num_experts, num_topk", [(6, 2), (8, 3), (12, 4)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_every_choice_of_experts(num_experts, num_topk, num_ranks):
    if num_experts % num_ranks:
        with pytest.raises(ValueError, match="must divide num_experts"):
            sizing.distinct_ranks(UniformRouting(num_experts, num_topk), num_ranks)
        return
    choices = itertools.combinations(range(num_experts), num_topk)
    num_local = num_experts // num_ranks
    counts = [len({e // num_local for e in choice}) for choice in choices]
    found = sizing.distinct_ranks(UniformRouting(num_experts, num_topk), num_ranks)
    assert found == pytest.approx(np.mean(counts), rel=1e-12)


# Ranks inside a group, ranks of several groups, and ranks across borders of groups.
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("n_group, topk_group", [(4, 2), (3, 1), (6, 3), (2, 2)])
def test_every_choice_of_groups(num_ranks, n_group, topk_group):
    routing = UniformRouting(12, 3, n_group, topk_group)
    size, num_local = 12 // n_group, 12 // num_ranks
    means = []
    for groups in itertools.combinations(range(n_group), topk_group):
        open_experts = [e for e in range(12) if e // size in groups]
        choices = itertools.combinations(open_experts, 3)
        means.append(np.mean([len({e // num_local for e in c}) for c in choices]))
    found = sizing.distinct_ranks(routing, num_ranks)
    assert found == pytest.approx(np.mean(means), rel=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 8, 16, 64])
def test_deepseek_v3_by_simulation(num_ranks):
    routing = UniformRouting(256, 8, 8, 4)
    owners = draw(routing, TOKENS) // (256 // num_ranks)
    assert_mean(distinct(owners), sizing.distinct_ranks(routing, num_ranks))
    source = np.arange(TOKENS) % num_ranks
    remote = distinct(owners) - (owners == source[:, None]).any(1)
    assert_mean(remote, sizing.remote_ranks(routing, num_ranks))


def test_groups_by_their_two_best_scores_spread_a_little_wider():
    """What the docstring says of DeepSeek-V3's own choice of groups."""
    scores = np.random.default_rng(0).random((TOKENS, 8, 32))
    best_two = np.sort(scores, axis=2)[..., -2:].sum(2)
    closed = np.argsort(best_two, axis=1)[:, :4]
    np.put_along_axis(scores, closed[..., None], -1, 1)
    ids = np.argsort(-scores.reshape(TOKENS, 256), axis=1)[:, :8]
    for num_ranks in (2, 4, 8, 16, 32, 64):
        found = distinct(ids // (256 // num_ranks)).mean()
        uniform = sizing.distinct_ranks(UniformRouting(256, 8, 8, 4), num_ranks)
        assert 1.015 < found / uniform < 1.095


def test_replicas():
    """From E ranks on each expert has ranks of its own, so a token goes to K."""
    routing = UniformRouting(256, 8)
    assert sizing.distinct_ranks(routing, 256) == pytest.approx(8)
    assert sizing.distinct_ranks(routing, 2048) == 8
    with pytest.raises(ValueError, match="multiple"):
        sizing.distinct_ranks(routing, 384)


# --- one domain and many -------------------------------------------------------


@pytest.mark.parametrize("groups", [(1, 1), (8, 4)])
def test_rows_across_domains_by_simulation(groups):
    """Every row of every token, from every rank of 4 domains of 4."""
    num_ranks, domain = 16, 4
    routing = UniformRouting(64, 6, *groups)
    num_tokens = 16 * 400
    owners = draw(routing, num_tokens) // 4
    inside, across = np.zeros((2, num_tokens))
    for token, ranks in enumerate(owners.tolist()):
        source = token % num_ranks
        for rank in set(ranks) - {source}:
            counts = inside if rank // domain == source // domain else across
            counts[token] += 1
    found = sizing.rows_per_token(routing, num_ranks, domain_size=domain)
    assert_mean(inside, found[0])
    assert_mean(across, found[1])


def test_one_domain_sends_nothing_across():
    routing = UniformRouting(64, 6)
    inside, across = sizing.rows_per_token(routing, 8, domain_size=8)
    assert inside == pytest.approx(sizing.remote_ranks(routing, 8))
    assert across == 0
    assert sizing.rows_per_token(routing, 8) == (inside, 0)


def test_growth():
    """DeepSeek-V3 on H200s: NVLink binds in a node, the NIC across nodes."""
    shape = Shape(UniformRouting(256, 8, 8, 4), 4096, 7168, 8, capacity_factor=1.25)
    steps = {step.num_ranks: step for step in sizing.growth(shape, MACHINES["h200"])}
    assert sorted(steps) == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    for step in steps.values():
        assert step.num_domains == max(1, step.num_ranks // 8)
        direct, hops = step.direct, step.hops
        if hops is None:
            assert step.num_domains == 1 and direct.dispatch.nic == 0
            continue
        assert direct.dispatch_bound.binds == hops.combine_bound.between.binds == "nic"
        # What is wanted crosses once, and goes on to the ranks inside.
        assert hops.combine.wanted <= direct.combine.nic
        assert hops.dispatch.inside.link >= direct.dispatch.link
    assert steps[8].direct.dispatch_bound.binds == "link"
    # A group is a node: of 4 groups a token's 8 experts are in 3.63, on 7.36 ranks.
    step = steps[64]
    assert step.distinct_domains == pytest.approx(3.63, abs=0.01)
    rate = step.direct.combine.nic / step.hops.combine.wanted
    ranks = sizing.distinct_ranks(shape.routing, 64) * 56 / 64
    domains = sizing.distinct_ranks(shape.routing, 8) * 7 / 8
    assert rate == pytest.approx(ranks / domains)


def test_growth_leaves_out_what_does_not_divide():
    shape = Shape(UniformRouting(160, 6), 1024, 1024, 8)
    steps = sizing.growth(shape, MACHINES["h200"])
    assert [step.num_ranks for step in steps] == [2, 4, 8, 16, 32]


# --- padding -------------------------------------------------------------------


def test_padding():
    assert sizing.padding_amplification([1, 1, 126], 128) == 3.0
    assert sizing.padding_amplification([128, 0, 256], 128) == 1.0
    assert sizing.padding_amplification([129], 128) == 256 / 129
    assert sizing.padding_amplification([5, 7], 1) == 1.0
    assert sizing.padding_amplification([0, 0], 128) == 1.0
    assert sizing.padding_amplification(np.array([3, 3]), 4) == 8 / 6


@pytest.mark.parametrize("tokens, alignment", [(16, 8), (100, 128), (700, 16)])
def test_expected_padding_by_simulation(tokens, alignment):
    routing = UniformRouting(32, 4, 4, 2)
    shape = Shape(routing, tokens, 64, 2, expert_alignment=alignment)
    blocks = []
    for seed in range(150):
        ids = draw(routing, 2 * tokens, seed)
        counts = np.bincount(ids.reshape(-1), minlength=32)
        blocks.append((-(-counts // alignment)).mean())
    mean = 2 * tokens * 4 / 32
    found = sizing.expected_padding_amplification(shape)
    assert_mean(np.array(blocks), found * mean / alignment)


def test_expected_padding_by_the_sum_itself():
    shape = Shape(UniformRouting(8, 2), 10, 64, 2, expert_alignment=4)
    blocks = sum(
        math.comb(20, n) * 0.25**n * 0.75 ** (20 - n) * math.ceil(n / 4)
        for n in range(21)
    )
    found = sizing.expected_padding_amplification(shape)
    assert found == pytest.approx(4 * blocks / 5, rel=1e-12)
    # All experts of every token: nothing is left to chance.
    shape = Shape(UniformRouting(4, 4), 10, 64, 2, expert_alignment=16)
    assert sizing.expected_padding_amplification(shape) == 32 / 20


# --- bad input -----------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: UniformRouting(8, 9), r"num_topk \(=9\) must be at most num_experts"),
        (lambda: UniformRouting(0, 1), r"num_experts \(=0\) must be at least 1"),
        (lambda: UniformRouting(8, -1), r"num_topk \(=-1\) must be at least 1"),
        (lambda: UniformRouting(8, 2, 3, 1), r"n_group \(=3\) must be a divisor"),
        (lambda: UniformRouting(8, 2, 4, 5), r"topk_group \(=5\) must be at most"),
        (lambda: UniformRouting(8, 3, 4, 1), "those groups have 2"),
        (lambda: Shape(UniformRouting(8, 2), 0, 64, 2), r"tokens \(=0\)"),
        (lambda: Shape(UniformRouting(8, 2), 4, 64, 0), r"num_ranks \(=0\)"),
        (lambda: Shape(UniformRouting(8, 2), 4, 64, 3), r"num_ranks \(=3\) must div"),
        (lambda: Shape(UniformRouting(8, 2), 4, 64, 2, 0.0), "capacity_factor"),
        (lambda: sizing.distinct_ranks_independent(0, 1), r"num_ranks \(=0\)"),
        (lambda: sizing.padding_amplification([1, -2], 8), r"counts \(=-2\)"),
        (lambda: sizing.padding_amplification([1], 0), r"alignment \(=0\)"),
        (lambda: sizing.workspace_bytes(65), r"num_ranks \(=65\) must be at most 64"),
        (
            lambda: sizing.rows_per_token(UniformRouting(96, 2), 12, domain_size=8),
            r"num_ranks \(=12\) must be a multiple of domain_size \(=8\)",
        ),
    ],
)
def test_impossible_shapes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_no_int():
    with pytest.raises(TypeError, match=r"num_topk \(=2.5\) must be an int"):
        UniformRouting(8, 2.5)  # pyright: ignore[reportArgumentType]
