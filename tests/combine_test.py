"""combine against the loop over tokens: order of sums, weights, bias, derivatives."""

import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from conftest import CPU_FFI, CPU_XLA
from dispatch_test import FLOATS, setup, tagged_rows
from layout_test import Case
from stages import all_ranks, assert_bits_equal, stages

CASES = [
    Case(),
    Case(routing="masked", alignment=4),
    Case(routing="invalid", capacity=16, alignment=8),
    Case(routing="skewed", capacity=20),
    Case(routing="same expert in all slots", alignment=3),
    Case(routing="silent rank"),
    Case(routing="nobody"),
    Case(tokens=5, topk=32, experts=64, routing="masked", capacity=100),
    Case(ranks=1, experts=3, routing="masked", capacity=9, alignment=2),
    Case(ranks=8, experts=8, tokens=3, capacity=6, routing="skewed"),
    # As many experts as there may be, and more than an id of 8 bits holds per rank.
    Case(tokens=8, topk=4, experts=2048, routing="invalid"),
    Case(ranks=2, tokens=64, topk=8, experts=512),
]
WEIGHTED = Case(tokens=7, topk=4, routing="masked", alignment=4)


def noise(shape, dtype=np.float32, seed: int = 0) -> np.ndarray:
    """Values of many magnitudes, whose sum depends on the order of additions."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape, np.float32)
    return (values * np.exp2(random.integers(-6, 7, shape))).astype(dtype)


def assert_close(got, want, dtype, terms: int) -> None:
    """Within what `terms` roundings in float32 and three in `dtype` can differ by."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == dtype
    got, want = got.astype(np.float64), want.astype(np.float64)
    scale = np.abs(want).max(initial=1.0)
    rounding = 3 * float(jnp.finfo(dtype).eps) + terms * float(jnp.finfo("float32").eps)
    np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding * scale)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums(backend, case):
    """Unweighted sums have the very bits of the literal order."""
    run, handle, layout = setup(backend, case)
    y = noise((case.ranks, layout.capacity, 5))
    out = run.combine(all_ranks(y), handle)
    assert_bits_equal(run.by_rank(out), literal.combine(y, layout))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("wire_dtype", [None, jnp.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_roundings(backend, dtype, wire_dtype, with_bias):
    """One rounding on the wire (none with wire_dtype), one at the end, bias last."""
    run, handle, layout = setup(backend, WEIGHTED)
    y = noise((4, layout.capacity, 7), dtype)
    bias = noise((4, WEIGHTED.tokens, 7), dtype, seed=1)
    static = {} if wire_dtype is None else dict(wire=wire_dtype)
    out = run.combine(
        all_ranks(y), handle, bias=all_ranks(bias) if with_bias else None, **static
    )
    want = literal.combine(
        y, layout, bias=bias if with_bias else None, wire_dtype=wire_dtype
    )
    assert_bits_equal(run.by_rank(out), want)


def test_the_order_of_sums_shows():
    """The noise above would reveal another order, a fused add or a missed rounding."""
    _, _, layout = setup(CPU_XLA, WEIGHTED)
    y = noise((4, layout.capacity, 7))
    want = literal.combine(y, layout)
    backwards = np.zeros_like(want)
    for source, token, _, owner, row in reversed(list(layout.kept_slots())):
        backwards[source, token] += y[owner, row]
    assert (backwards != want).any()
    halves = y.astype(jnp.bfloat16)
    assert (
        literal.combine(halves, layout)
        != literal.combine(halves, layout, wire_dtype=np.float32)
    ).any()


@pytest.mark.parametrize("width", [1, 3, 8, 129])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_widths(backend, width, dtype):
    case = Case(routing="masked", alignment=4)
    run, handle, layout = setup(backend, case)
    y = noise((4, layout.capacity, width), dtype)
    out = run.combine(all_ranks(y), handle)
    assert_bits_equal(run.by_rank(out), literal.combine(y, layout))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_weights(backend, dtype):
    run, handle, layout = setup(backend, WEIGHTED)
    y = noise((4, layout.capacity, 7), dtype)
    weights = noise((4, layout.capacity), seed=1)
    bias = noise((4, WEIGHTED.tokens, 7), dtype, seed=2)
    out = run.combine(
        all_ranks(y), handle, weights=all_ranks(weights), bias=all_ranks(bias)
    )
    want = literal.combine(y, layout, weights=weights, bias=bias)
    assert_close(run.by_rank(out), want, dtype, terms=2 * WEIGHTED.topk + 1)


def test_weights_of_powers_of_two(backend):
    """Where the products are exact, so are the sums' bits."""
    run, handle, layout = setup(backend, WEIGHTED)
    y = noise((4, layout.capacity, 7))
    weights = np.exp2(np.arange(4 * layout.capacity) % 5 - 2).astype(np.float32)
    weights = weights.reshape(4, layout.capacity)
    out = run.combine(all_ranks(y), handle, weights=all_ranks(weights))
    assert_bits_equal(run.by_rank(out), literal.combine(y, layout, weights=weights))


def test_masked_and_dropped_slots_add_nothing(backend):
    """A token without any slot gets zero, or its bias; -0 of one row becomes +0."""
    run = stages(backend, 2)
    ids = np.array([[[0, -1], [-1, -1], [0, 0]], [[0, 3], [0, 9], [2, 0]]], np.int32)
    handle = run.layout(all_ranks(ids), num_experts=4, capacity=3)
    layout = literal.layout(ids, 4, 3)
    assert layout.num_dropped[0].tolist() == [3, 0]
    y = np.full((2, 3, 2), -0.0, np.float32)
    assert_bits_equal(run.combine(all_ranks(y), handle), np.zeros((6, 2), np.float32))
    y = np.arange(1, 13, dtype=np.float32).reshape(2, 3, 2)
    out = run.combine(all_ranks(y), handle)
    assert run.by_rank(out)[..., 0].tolist() == [[1, 0, 3], [14, 0, 7]]
    bias = np.full((2, 3, 2), 100, np.float32)
    out = run.combine(all_ranks(y), handle, bias=all_ranks(bias))
    assert run.by_rank(out)[..., 0].tolist() == [[101, 100, 103], [114, 100, 107]]


def test_padding_is_never_read(backend):
    """NaN in padding rows and their weights reaches neither out nor a gradient."""
    run, handle, layout = setup(backend, WEIGHTED)
    y = noise((4, layout.capacity, 7))
    weights = noise((4, layout.capacity), seed=1)
    kept = np.zeros((4, layout.capacity), bool)
    for _, _, _, owner, row in layout.kept_slots():
        kept[owner, row] = True
    assert not kept.all()

    def gradients(y, weights):
        def loss(y, weights):
            out = run._combine()(y, handle, dict(weights=weights, bias=None))
            return (out * out).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
            all_ranks(y), all_ranks(weights)
        )

    clean = gradients(y, weights)
    poisoned = gradients(
        np.where(kept[..., None], y, np.float32(np.nan)),
        np.where(kept, weights, np.float32(np.nan)),
    )
    for got, want in zip(
        jax.tree.leaves(poisoned), jax.tree.leaves(clean), strict=True
    ):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, want)
    d_y, d_weights = poisoned[0]
    assert (run.by_rank(d_y)[~kept] == 0).all()
    assert (run.by_rank(d_weights)[~kept] == 0).all()


def test_nan_and_inf_propagate(backend):
    """To their token, and to no other."""
    case = Case(ranks=4, tokens=3, topk=2, experts=4)
    run, handle, layout = setup(backend, case)
    y = np.ones((4, layout.capacity, 3), np.float32)
    slots = list(layout.kept_slots())
    (s0, t0, _, o0, r0), (s1, t1, _, o1, r1) = slots[0], slots[-1]
    y[o0, r0, 0] = np.nan
    y[o1, r1, 1] = -np.inf
    out = run.by_rank(run.combine(all_ranks(y), handle))
    assert np.isnan(out[s0, t0, 0]) and out[s1, t1, 1] == -np.inf
    assert np.isfinite(out).sum() == out.size - 2


def test_overflow_of_the_wire_type(backend):
    """A partial beyond float16 crosses as infinity, and in float32 as itself."""
    run = stages(backend, 2)
    ids = np.array([[[0, 0, 2]], [[0, 2, 2]]], np.int32)
    handle = run.layout(all_ranks(ids), num_experts=4)
    layout = literal.layout(ids, 4)
    y = np.full((2, layout.capacity, 1), 40000, np.float16)
    y[1] = -40000
    rounded = run.by_rank(run.combine(all_ranks(y), handle))
    assert rounded[..., 0].tolist() == [[np.inf], [-np.inf]]
    exact = run.by_rank(run.combine(all_ranks(y), handle, wire=jnp.float32))
    assert exact[..., 0].tolist() == [[40000], [-40000]]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_derivative(backend, dtype):
    """dy is the dispatch of d_out, bit for bit; d_bias is d_out."""
    run, handle, layout = setup(backend, WEIGHTED)
    y = noise((4, layout.capacity, 7), dtype)
    bias, d_out = (noise((4, WEIGHTED.tokens, 7), dtype, seed=s) for s in (1, 2))

    @jax.jit
    def pull_back(y, bias, d_out):
        _, vjp = jax.vjp(
            lambda y, bias: run._combine()(y, handle, dict(weights=None, bias=bias)),
            y,
            bias,
        )
        return vjp(d_out)

    dy, d_bias = pull_back(all_ranks(y), all_ranks(bias), all_ranks(d_out))
    assert_bits_equal(run.by_rank(dy), literal.dispatch(d_out, layout))
    assert_bits_equal(run.by_rank(d_bias), d_out)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_derivative_with_weights(backend, dtype):
    """dy = w * dispatch(d_out), d_weights = <y, dispatch(d_out)>, zero on padding."""
    run, handle, layout = setup(backend, WEIGHTED)
    y = noise((4, layout.capacity, 7), dtype)
    weights = noise((4, layout.capacity), seed=1)
    d_out = noise((4, WEIGHTED.tokens, 7), dtype, seed=2)

    @jax.jit
    def pull_back(y, weights, d_out):
        _, vjp = jax.vjp(
            lambda y, weights: run._combine()(
                y, handle, dict(weights=weights, bias=None)
            ),
            y,
            weights,
        )
        return vjp(d_out)

    dy, d_weights = pull_back(all_ranks(y), all_ranks(weights), all_ranks(d_out))
    want = literal.weighted_combine_gradients(d_out, y, weights, layout)
    assert_close(run.by_rank(dy), want[0], dtype, terms=1)
    assert_close(run.by_rank(d_weights), want[1], jnp.float32, terms=2 * 7)
    assert (run.by_rank(d_weights)[want[1] == 0] == 0).all()


def test_round_trip_counts_slots(backend):
    """combine(dispatch(x)) is x times the kept slots; its transpose likewise."""
    case = Case(routing="skewed", capacity=20)
    run, handle, layout = setup(backend, case)
    x = tagged_rows(case, 5)

    def round_trip(x):
        recv, _ = run._dispatch()(x, handle, None)
        return run._combine()(recv, handle, dict(weights=None, bias=None))

    out, vjp = jax.vjp(round_trip, all_ranks(x))
    kept = (layout.slot >= 0).sum(2, dtype=np.float32)[..., None]
    assert (kept < case.topk).any()
    assert_bits_equal(run.by_rank(out), x * kept)
    (dx,) = vjp(all_ranks(x))
    assert_bits_equal(run.by_rank(dx), x * kept)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_ffi_and_xla_agree_bit_for_bit(dtype):
    """On random bits of every magnitude, denormals left out."""
    case = Case(tokens=33, topk=6, experts=16, routing="masked", capacity=200)
    random = np.random.default_rng(0)
    layout = literal.layout(case.ids(), case.experts, case.capacity)
    shape = (4, layout.capacity, 9)
    exponents = random.integers(-8, 9, shape)
    y = (random.standard_normal(shape, np.float32) * np.exp2(exponents)).astype(dtype)
    outs = []
    for backend in (CPU_FFI, CPU_XLA):
        run, handle, _ = setup(backend, case)
        outs.append(np.asarray(run.combine(all_ranks(y), handle)))
    assert_bits_equal(*outs)
    assert_bits_equal(run.by_rank(outs[0]), literal.combine(y, layout))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_denormals_agree(dtype):
    """Whatever XLA does with denormals on a platform, the custom call does too.

    Where it flushes them, to zero of either sign.
    """
    case = Case(routing="masked")
    random = np.random.default_rng(0)
    layout = literal.layout(case.ids(), case.experts)
    tiny = np.float64(jnp.finfo(dtype).tiny)
    y = random.standard_normal((4, layout.capacity, 9)) * tiny
    y = y.astype(np.float32 if dtype == jnp.float32 else dtype)
    outs = []
    for backend in (CPU_FFI, CPU_XLA):
        run, handle, _ = setup(backend, case)
        outs.append(np.asarray(run.combine(all_ranks(y), handle)))
    assert any((out != 0).any() for out in outs)
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("ranks, topk", [(1, 1), (1, 2), (2, 2)])
def test_a_sum_is_never_negative_zero(backend, ranks, topk, dtype):
    """It starts at +0, and +0 + -0 is +0; also with a bias of -0."""
    run = stages(backend, ranks)
    handle = run.layout(np.zeros((ranks * 3, topk), np.int32), num_experts=ranks)
    y = np.full((ranks * handle.capacity, 2), -0.0, dtype)
    zeros = np.zeros((ranks * 3, 2), dtype)
    assert_bits_equal(run.combine(y, handle), zeros)
    assert_bits_equal(run.combine(y, handle, bias=-zeros), zeros)


def test_checkpoint_name(backend):
    run, handle, layout = setup(backend, Case())
    y = np.zeros((4 * layout.capacity, 5), np.float32)
    jaxpr = jax.make_jaxpr(run._combine())(y, handle, dict(weights=None, bias=None))
    assert str(jaxpr).count("name=jax_ep_out") == 1
