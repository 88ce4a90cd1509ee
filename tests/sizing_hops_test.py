"""Two hops: rows, against counts of simulated routings, bytes and times."""

import numpy as np
import pytest
from sizing_test import assert_mean, draw

from jax_ep import sizing
from jax_ep.sizing import MACHINES, Shape, UniformRouting

RANKS, DOMAIN = 16, 4
DOMAINS = RANKS // DOMAIN


def count(ids: np.ndarray, num_experts: int, places: int) -> dict[str, np.ndarray]:
    """`[R, T, K]` ids: rows that each source rank causes, one token after another."""
    names = ("wanted", "arrived", "inside", "slots")
    found = {name: np.zeros(RANKS) for name in names}
    local = num_experts // RANKS
    for source in range(RANKS):
        taken = [0] * DOMAINS
        for token in ids[source] // local:
            for domain in range(DOMAINS):
                ranks = {rank for rank in token if rank // DOMAIN == domain}
                if not ranks or taken[domain] == places:
                    continue
                taken[domain] += 1
                relay = domain * DOMAIN + source % DOMAIN
                found["arrived"][source] += 1
                found["wanted"][source] += domain != source // DOMAIN
                found["inside"][source] += len(ranks - {relay})
                found["slots"][source] += sum(t // DOMAIN == domain for t in token)
    return found


@pytest.mark.parametrize(
    "routing",
    [
        UniformRouting(64, 6),
        UniformRouting(64, 6, 8, 4),
        # Groups across the borders of domains: some are wanted more than others.
        UniformRouting(48, 4, 3, 1),
    ],
    ids=["free", "groups", "across"],
)
@pytest.mark.parametrize("factor", [None, 1.0, 0.9])
def test_rows_by_simulation(routing, factor):
    tokens, draws = 40, 12
    shape = Shape(
        routing,
        tokens,
        64,
        RANKS,
        domain_size=DOMAIN,
        network_capacity_factor=factor,
    )
    found = sizing.crossing(shape)
    samples: dict[str, list[np.ndarray]] = {}
    for seed in range(draws):
        ids = draw(routing, RANKS * tokens, seed).reshape(RANKS, tokens, -1)
        for name, values in count(ids, routing.num_experts, found.places).items():
            # Ranks of one routing differ where domains do: their mean is a sample.
            samples.setdefault(name, []).append(values.mean())
    for name in ("wanted", "arrived", "inside"):
        assert_mean(np.array(samples[name]), getattr(found, name))
    slots = np.array(samples["slots"]) / (tokens * routing.num_topk)
    assert_mean(slots, found.kept)
    assert (found.kept < 1) == (factor is not None)
    assert found.sent == 3 * found.places >= found.wanted


def test_room_is_what_the_layout_gives():
    """`ceil(factor * T * q)`, of ungrouped routing, and never more than T."""
    routing = UniformRouting(16, 2, 4, 1)
    # Of 120 pairs 66 avoid a given domain of 4 experts: 0.45 of 40 tokens go there.
    for factor, places in ((0.5, 9), (1.0, 18), (1.06, 20), (9.0, 40), (None, 40)):
        shape = Shape(routing, 40, 8, 16, domain_size=4, network_capacity_factor=factor)
        assert sizing.crossing(shape).places == places
    replicas = Shape(UniformRouting(8, 2), 40, 8, 16, domain_size=4)
    assert replicas.expected_tokens == pytest.approx(40 * (1 - 66 / 120))


def shape(**told) -> Shape:
    told = dict(domain_size=4) | told
    return Shape(UniformRouting(64, 6), 32, 100, RANKS, 1.25, **told)


def test_bytes():
    """Hop 1 carries arrays as they are, hop 2 lines of 16 bytes."""
    rows = sizing.crossing(shape())
    there = sizing.dispatch_hops(shape())
    assert there.between.nic == 3 * 32 * (200 + 24)
    assert there.wanted == pytest.approx(rows.wanted * 224)
    assert there.rail == 4 * there.between.nic == there.boundary
    assert there.inside.link == pytest.approx(rows.inside * (208 + 32))
    assert there.between.link == there.inside.nic == 0
    back = sizing.combine_hops(shape(), weight_gradients=True)
    assert back.between.nic == there.between.nic
    assert back.inside.link == there.inside.link
    assert sizing.combine_hops(shape()).between.nic == 3 * 32 * 200
    wide = sizing.combine_hops(shape(), dtype="float32")
    assert wide.between.nic == 3 * 32 * 400
    # 100 values in 112 bytes, one scale in 16; of mxfp8 four scales in 16.
    for narrow in ("float8", "mxfp8"):
        quantised = sizing.dispatch_hops(shape(), dtype=narrow)
        assert quantised.between.nic == 3 * 32 * (128 + 24)
    layout = sizing.layout_hops(shape())
    assert layout.between.nic == 3 * 32 * 6 * 8
    assert layout.inside.link == 3 * (4 * 32 * 6 // 8) * 16
    two = sizing.dispatch_hops(shape(domain_size=8))
    assert (two.rail, two.boundary) == (2 * two.between.nic, 8 * two.between.nic)


def test_times():
    """Serial is the sum; in parts, the slower hop and one part of the faster."""
    machine = MACHINES["h200"]
    found = sizing.hops_bound(sizing.dispatch_hops(shape()), machine, num_sms=1)
    first, second = found.between.seconds, found.inside.seconds
    assert found.serial == first + second
    assert found.chunked(1) == pytest.approx(found.serial)
    assert found.chunked(4) == pytest.approx(
        max(first, second) + min(first, second) / 4
    )
    # Hop 1 takes none of our SMs.
    assert found.between.sms is None and found.inside.sms is not None


def test_a_chunk_at_a_time_by_simulation():
    """Two stages, each in order: part n of hop 2 waits for hop 1's and for part n-1."""
    machine = MACHINES["h200"]
    for size in (4, 8):
        found = sizing.hops_bound(
            sizing.dispatch_hops(shape(domain_size=size)), machine
        )
        for chunks in (1, 2, 5):
            arrived = done = 0.0
            for _ in range(chunks):
                arrived += found.between.seconds / chunks
                done = max(done, arrived) + found.inside.seconds / chunks
            assert found.chunked(chunks) == pytest.approx(done)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: sizing.crossing(shape(domain_size=16)),
            r"crossing: domain_size \(=16\) must be less than num_ranks \(=16\)",
        ),
        (
            lambda: sizing.dispatch_hops(shape(domain_size=None)),
            r"domain_size \(=None\) must be less",
        ),
        (
            lambda: sizing.combine_hops(shape(), dtype="mxfp8"),
            r"combine_hops: dtype \(='mxfp8'\).*sums are not sent in 8 bits",
        ),
        (
            lambda: sizing.HopsBound(None, None).chunked(0),  # pyright: ignore
            r"chunks \(=0\) must be at least 1",
        ),
        (
            lambda: shape(domain_size=3),
            r"num_ranks \(=16\) must be a multiple of domain_size \(=3\)",
        ),
        (
            lambda: shape(network_capacity_factor=0.001),
            r"network_capacity_factor \(=0.001\) must leave room for a token",
        ),
        (
            lambda: shape(network_capacity_factor=float("nan")),
            r"network_capacity_factor \(=nan\) must be positive",
        ),
        (
            lambda: sizing.crossing(
                Shape(UniformRouting(6, 2), 8, 8, 12, domain_size=3)
            ),
            r"the 4 domains of 3 ranks must divide num_experts \(=6\)",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
