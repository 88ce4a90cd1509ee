"""dispatch against the loop over tokens: rows, weights, zeros, derivatives."""

import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from conftest import CPU_FFI
from layout_test import Case
from stages import all_ranks, assert_bits_equal, assert_layout_equal, stages

import jax_ep

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]

CASES = [
    Case(),
    Case(routing="masked", alignment=4),
    Case(routing="invalid", capacity=16, alignment=8),
    Case(routing="skewed", capacity=20),
    Case(routing="same expert in all slots", alignment=3),
    Case(routing="silent rank"),
    Case(routing="nobody"),
    Case(tokens=0),
    Case(tokens=0, alignment=4),
    Case(tokens=5, topk=32, experts=64, routing="masked", capacity=100),
    Case(ranks=1, experts=3, routing="masked", capacity=9, alignment=2),
    Case(ranks=8, experts=8, tokens=3, capacity=6, routing="skewed"),
    # As many experts as there may be, and more than an id of 8 bits holds per rank.
    Case(tokens=8, topk=4, experts=2048, routing="invalid"),
    Case(ranks=2, tokens=64, topk=8, experts=512),
]


def tagged_rows(case: Case, width: int, dtype=np.float32) -> np.ndarray:
    """`[R, T, width]`: columns in turn hold 1 + rank, 1 + token and 1 + column % 7.

    Small integers, exact in every dtype, so that a misplaced row says whose it is.
    """
    rank, token, column = np.ogrid[: case.ranks, : case.tokens, :width]
    tags = np.where(
        column % 3 == 0, 1 + rank, np.where(column % 3 == 1, 1 + token, 1 + column % 7)
    )
    return tags.astype(dtype)


def tagged_weights(case: Case) -> np.ndarray:
    """`[R, T, K]` float32: 1 + the slot's number, in units of 1/4."""
    shape = (case.ranks, case.tokens, case.topk)
    return (1 + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape) / 4


def setup(backend, case):
    """The stages, a handle, and the literal layout of the case's ids."""
    run = stages(backend, case.ranks)
    ids = case.ids()
    handle = run.layout(
        all_ranks(ids),
        num_experts=case.experts,
        capacity=case.capacity,
        expert_alignment=case.alignment,
    )
    return (
        run,
        handle,
        literal.layout(ids, case.experts, case.capacity, case.alignment),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_and_weights(backend, case):
    run, handle, layout = setup(backend, case)
    x, weights = tagged_rows(case, 5), tagged_weights(case)
    recv, recv_weights = run.dispatch(all_ranks(x), handle, all_ranks(weights))
    assert_bits_equal(run.by_rank(recv), literal.dispatch(x, layout))
    assert_bits_equal(
        run.by_rank(recv_weights), literal.dispatch_weights(weights, layout)
    )
    recv, recv_weights = run.dispatch(all_ranks(x), handle)
    assert recv_weights is None
    assert_bits_equal(run.by_rank(recv), literal.dispatch(x, layout))


@pytest.mark.parametrize("alignment", [1, 4])
def test_no_tokens(backend, alignment):
    """T = 0 beside parameters: C is L*(A-1) rows of zeros, and gradients are zero."""
    run = stages(backend, 4)

    @run.shard_map
    def loss(scale, ids, x, weights):
        handle = jax_ep.dispatch_layout(
            ids,
            num_experts=12,
            expert_alignment=alignment,
            implementation=backend.implementation,
        )
        recv, recv_weights = jax_ep.dispatch(x, handle, weights)
        out = jax_ep.combine(recv * scale[:, None], handle, weights=recv_weights)
        return (recv + scale[:, None]).sum()[None] + out.sum()[None], handle, recv

    x, weights = np.zeros((0, 5), np.float32), np.zeros((0, 2), np.float32)
    ids = np.zeros((0, 2), np.int32)
    capacity = 3 * (alignment - 1) // alignment * alignment

    def total(scale, x, weights):
        partial, handle, recv = loss(scale, ids, x, weights)
        return partial.sum(), (handle, recv)

    scale = np.arange(1, 5, dtype=np.float32)
    (value, (handle, recv)), gradients = jax.value_and_grad(
        total, argnums=(0, 1, 2), has_aux=True
    )(scale, x, weights)
    assert handle.capacity == capacity
    assert_layout_equal(
        run, handle, literal.layout(ids.reshape(4, 0, 2), 12, None, alignment)
    )
    assert_bits_equal(recv, np.zeros((4 * capacity, 5), np.float32))
    assert value == 10 * 5 * capacity
    assert_bits_equal(gradients[0], np.full(4, 5 * capacity, np.float32))
    assert [g.shape for g in gradients[1:]] == [(0, 5), (0, 2)]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("width", [1, 7, 8, 129])
def test_widths_and_dtypes(backend, dtype, width):
    """Any H, also rows of odd or unaligned byte counts."""
    case = Case(routing="masked", alignment=4)
    run, handle, layout = setup(backend, case)
    x = tagged_rows(case, width, dtype)
    recv, _ = run.dispatch(all_ranks(x), handle)
    assert_bits_equal(run.by_rank(recv), literal.dispatch(x, layout))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_rows_are_copied_as_bits(backend, dtype):
    """NaN with its payload, infinities, -0 and denormals arrive unchanged."""
    case = Case(routing="skewed", capacity=20)
    run, handle, layout = setup(backend, case)
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    shape = (case.ranks, case.tokens, 6)
    random = np.random.default_rng(0)
    x = random.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True).view(dtype)
    x[..., 0] = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0], dtype)
    recv, _ = run.dispatch(all_ranks(x), handle)
    assert_bits_equal(run.by_rank(recv), literal.dispatch(x, layout))


def test_special_weights_arrive(backend):
    case = Case()
    run, handle, layout = setup(backend, case)
    weights = tagged_weights(case)
    weights[0, 0] = np.nan, -0.0, np.inf
    _, recv_weights = run.dispatch(
        all_ranks(tagged_rows(case, 2)), handle, all_ranks(weights)
    )
    assert_bits_equal(
        run.by_rank(recv_weights), literal.dispatch_weights(weights, layout)
    )


def test_padding_and_tail_are_zero(backend):
    """The very rows, so that this does not hang on the literal loop alone."""
    run = stages(backend, 2)
    ids = np.array([[[0], [1], [1]], [[3], [-1], [1]]], np.int32)
    handle = run.layout(all_ranks(ids), num_experts=4, capacity=12, expert_alignment=4)
    x = np.array([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]], np.float32)
    weights = x[..., 0][..., None] / 2
    recv, recv_weights = run.dispatch(all_ranks(x), handle, all_ranks(weights))
    rows = [[1, 0, 0, 0, 2, 3, 6, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]
    assert run.by_rank(recv)[..., 0].tolist() == rows
    assert (2 * run.by_rank(recv_weights)).tolist() == rows
    assert run.by_rank(handle.group_sizes).tolist() == [[4, 4], [0, 4]]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("grad_wire_dtype", [None, jnp.float32])
@pytest.mark.parametrize(
    "case",
    [
        Case(routing="masked", alignment=4),
        Case(routing="skewed", capacity=20),
    ],
    ids=str,
)
def test_derivative(backend, case, dtype, grad_wire_dtype):
    """dx is the combine of d_recv, bit for bit; d_weights the gather of its rows."""
    run, handle, layout = setup(backend, case)
    x, weights = tagged_rows(case, 5, dtype), tagged_weights(case)
    static = {} if grad_wire_dtype is None else dict(grad_wire=grad_wire_dtype)
    shape = (case.ranks, layout.capacity, 5)
    random = np.random.default_rng(0)
    d_recv = random.standard_normal(shape, np.float32).astype(dtype)
    d_recv_weights = random.standard_normal(shape[:2], np.float32)

    @jax.jit
    def pull_back(x, weights, handle, d_recv, d_recv_weights):
        _, vjp = jax.vjp(
            lambda x, weights: run._dispatch(**static)(x, handle, weights), x, weights
        )
        return vjp((d_recv, d_recv_weights))

    dx, d_weights = pull_back(
        all_ranks(x),
        all_ranks(weights),
        handle,
        all_ranks(d_recv),
        all_ranks(d_recv_weights),
    )
    want = literal.combine(d_recv, layout, wire_dtype=grad_wire_dtype)
    assert_bits_equal(run.by_rank(dx), want)
    assert_bits_equal(
        run.by_rank(d_weights), literal.undispatch_weights(d_recv_weights, layout)
    )


def test_wire_dtype_of_the_gradient_matters():
    """The case above tells the two wire types apart in bfloat16."""
    case = Case(routing="masked", alignment=4)
    layout = literal.layout(case.ids(), case.experts, case.capacity, case.alignment)
    rows = np.random.default_rng(0).standard_normal(
        (case.ranks, layout.capacity, 5), np.float32
    )
    rows = rows.astype(jnp.bfloat16)
    rounded = literal.combine(rows, layout)
    assert (rounded != literal.combine(rows, layout, wire_dtype=np.float32)).any()


def test_derivative_ignores_padding(backend):
    """Cotangents of padding rows, NaN here, reach no token."""
    case = Case(routing="masked", alignment=4)
    run, handle, layout = setup(backend, case)
    x, weights = tagged_rows(case, 5), tagged_weights(case)
    d_recv = np.full((case.ranks, layout.capacity, 5), np.nan, np.float32)
    d_recv_weights = np.full(d_recv.shape[:2], np.nan, np.float32)
    for _, _, _, owner, row in layout.kept_slots():
        d_recv[owner, row] = d_recv_weights[owner, row] = 1
    _, vjp = jax.vjp(
        lambda x, weights: run._dispatch()(x, handle, weights),
        all_ranks(x),
        all_ranks(weights),
    )
    dx, d_weights = vjp((all_ranks(d_recv), all_ranks(d_recv_weights)))
    kept = layout.slot >= 0
    want = np.broadcast_to(kept.sum(2, dtype=np.float32)[..., None], x.shape)
    assert_bits_equal(run.by_rank(dx), want)
    assert_bits_equal(run.by_rank(d_weights), kept.astype(np.float32))


def test_derivative_without_weights(backend):
    case = Case()
    run, handle, layout = setup(backend, case)
    x = all_ranks(tagged_rows(case, 5))
    dx = jax.grad(lambda x: run._dispatch()(x, handle, None)[0].sum())(x)
    want = np.broadcast_to(
        (layout.slot >= 0).sum(2, dtype=np.float32)[..., None],
        (*layout.slot.shape[:2], 5),
    )
    assert_bits_equal(run.by_rank(dx), want)


def test_derivative_of_weights_alone(backend):
    """Where no leaf has a derivative, the weights' still arrives."""
    case = Case(routing="masked")
    run, handle, layout = setup(backend, case)
    x = all_ranks(tagged_rows(case, 5).astype(np.int32))
    weights = all_ranks(tagged_weights(case))

    def loss(weights):
        recv, recv_weights = run._dispatch()(x, handle, weights)
        return (recv[:, 0].astype(jnp.float32) * recv_weights).sum()

    d_weights = run.by_rank(jax.grad(loss)(weights))
    first = np.broadcast_to(run.by_rank(x)[..., :1], layout.slot.shape)
    assert_bits_equal(
        d_weights, np.where(layout.slot >= 0, first, 0).astype(np.float32)
    )


@pytest.mark.parametrize("case", [Case(tokens=0), Case(routing="nobody")], ids=str)
def test_derivative_of_nothing(backend, case):
    run, handle, _ = setup(backend, case)
    x, weights = all_ranks(tagged_rows(case, 5)), all_ranks(tagged_weights(case))

    def loss(x, weights):
        recv, recv_weights = run._dispatch()(x, handle, weights)
        return recv.sum() + recv_weights.sum()

    dx, d_weights = jax.grad(loss, argnums=(0, 1))(x, weights)
    assert_bits_equal(dx, np.zeros_like(x))
    assert_bits_equal(d_weights, np.zeros_like(weights))


def test_cached_handle(backend):
    """A handle serves a second payload of another width and dtype."""
    case = Case(routing="skewed", capacity=20)
    run, handle, layout = setup(backend, case)
    for width, dtype in ((5, jnp.float32), (3, jnp.bfloat16), (5, jnp.float32)):
        x = -tagged_rows(case, width, dtype)
        recv, _ = run.dispatch(all_ranks(x), handle)
        assert_bits_equal(run.by_rank(recv), literal.dispatch(x, layout))


def test_weights_do_not_change_the_rows(backend):
    """One custom call carries rows and weights."""
    case = Case()
    run, handle, _ = setup(backend, case)
    if backend.implementation != "ffi":
        pytest.skip("the reference has no custom calls")
    args = all_ranks(tagged_rows(case, 5)), handle, all_ranks(tagged_weights(case))
    text = run._dispatch().lower(*args).compile().as_text()
    assert text.count('custom_call_target="jax_ep_') == 1


def test_large_rows_and_many_tokens():
    """Enough bytes that the host's threads share the copying."""
    case = Case(ranks=8, tokens=257, topk=4, experts=16, routing="masked")
    run, handle, layout = setup(CPU_FFI, case)
    x = np.random.default_rng(0).standard_normal((8, 257, 515), np.float32)
    recv, _ = run.dispatch(all_ranks(x), handle)
    assert_bits_equal(run.by_rank(recv), literal.dispatch(x, layout))
    out = run.combine(recv, handle)
    rows = literal.dispatch(x, layout)
    assert_bits_equal(run.by_rank(out), literal.combine(rows, layout))


def test_checkpoint_name(backend):
    run = stages(backend, 4)
    jaxpr = jax.make_jaxpr(run._dispatch())(
        np.zeros((24, 5), np.float32),
        setup(backend, Case())[1],
        np.zeros((24, 3), np.float32),
    )
    assert str(jaxpr).count("name=jax_ep_recv") == 2
    assert jax_ep.dispatch.__doc__.count("`jax_ep_recv`") == 1
