"""Start and done against the plain calls, whose values other tests know."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import EXPERTS, HIDDEN, IDS, RANKS, TOPK, WEIGHTS, X
from jax import lax
from jax.sharding import PartitionSpec as P
from pipeline import on_ranks

import jax_ep

barrier = lax.optimization_barrier
KERNEL = (np.arange(HIDDEN * HIDDEN).reshape(HIDDEN, HIDDEN) % 7 - 3).astype(np.float32)


def plain(x, ids, weights, kernel, **static):
    """A layer with work between the calls; every product is a program of its own."""
    handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS, **static)
    rows, row_weights = jax_ep.dispatch(x, handle, weights)
    hidden = barrier(jnp.tanh(barrier(x @ kernel)))
    y = scaled(rows, row_weights)
    return jax_ep.combine(y, handle, bias=barrier(hidden @ kernel))


def in_flight(x, ids, weights, kernel, **static):
    """The same with the work between start and done."""
    handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS, **static)
    flight = jax_ep.dispatch_start(x, handle, weights)
    work = lambda x, kernel: barrier(jnp.tanh(barrier(x @ kernel)))  # noqa: E731
    flight, hidden = jax_ep.beside(work, flight, x, kernel)
    rows, row_weights = jax_ep.dispatch_done(flight)
    flight = jax_ep.combine_start(scaled(rows, row_weights), handle, has_bias=True)
    flight, shared = jax_ep.beside(
        lambda *a: barrier(jnp.dot(*a)), flight, hidden, kernel
    )
    return jax_ep.combine_done(flight, bias=shared)


def scaled(rows, row_weights):
    rows, row_weights = barrier((rows, row_weights))
    return barrier(rows * row_weights[:, None].astype(rows.dtype))


def arguments(dtype=jnp.float32):
    return jnp.asarray(X, dtype) / 16, IDS, WEIGHTS, jnp.asarray(KERNEL, dtype) / 16


def with_gradients(layer, mesh, **keywords):
    """Outputs and gradients, over the ranks of a mesh."""
    specs = (P("expert"), P("expert"), P("expert"), P())
    mapped = on_ranks(layer, mesh, in_specs=specs, **keywords)

    def both(x, ids, weights, kernel):
        out, transpose = jax.vjp(
            lambda x, weights, kernel: mapped(x, ids, weights, kernel),
            x,
            weights,
            kernel,
        )
        return out, transpose(jnp.sin(out))

    return jax.jit(both)


def assert_same(found, expected):
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)


@pytest.mark.jax_version
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_bits_of_the_plain_calls(backend, dtype, check_vma):
    mesh = backend.mesh(expert=RANKS)
    told = dict(
        implementation=backend.implementation, capacity=14
    )  # Some rows are dropped.
    found, expected = (
        with_gradients(functools.partial(f, **told), mesh, check_vma=check_vma)(
            *arguments(dtype)
        )
        for f in (in_flight, plain)
    )
    assert_same(found, expected)
    assert np.abs(np.asarray(found[0], np.float32)).max() > 0.5


def test_a_payload_and_no_weights(backend):
    """A pytree out and back; a bias like it."""

    def through(x, ids, bias, *, started):
        handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS)
        tree = {"a": x, "b": (x[:, :3, None] * 2).astype(jnp.bfloat16)}
        bias = {"a": bias, "b": bias[:, :3, None].astype(jnp.bfloat16)}
        if started:
            rows, none = jax_ep.dispatch_done(jax_ep.dispatch_start(tree, handle))
            flight = jax_ep.combine_start(rows, handle, has_bias=True)
            out = jax_ep.combine_done(flight, bias=bias)
        else:
            rows, none = jax_ep.dispatch(tree, handle)
            out = jax_ep.combine(rows, handle, bias=bias)
        assert none is None
        return out

    mesh = backend.mesh(expert=RANKS)
    found, expected = (
        on_ranks(functools.partial(through, started=started), mesh)(X, IDS, X / 8)
        for started in (True, False)
    )
    assert found["b"].shape == (len(X), 3, 1) and found["b"].dtype == jnp.bfloat16
    assert_same(found, expected)


def test_several_in_flight_and_a_sum_of_their_gradients(backend):
    """Chunks of a rank's tokens; `beside` with both of their calls."""

    def layer(x, ids, weights, kernel, *, started):
        halves = [(a[:2], a[2:]) for a in (x, ids, weights)]
        handles = [jax_ep.dispatch_layout(i, num_experts=EXPERTS) for i in halves[1]]
        calls = list(zip(halves[0], handles, halves[2], strict=True))
        if not started:
            outs = []
            for x, handle, weights in calls:
                y = barrier(scaled(*jax_ep.dispatch(x, handle, weights)) @ kernel)
                outs.append(jax_ep.combine(y, handle))
            return jnp.concatenate(outs)
        flights = tuple(jax_ep.dispatch_start(*call) for call in calls)
        flights, kernel = jax_ep.beside(lambda k: k, flights, kernel)
        rows = [jax_ep.dispatch_done(flight) for flight in flights]
        ys = [barrier(scaled(*each) @ kernel) for each in rows]
        flights = [
            jax_ep.combine_start(y, handle)
            for y, handle in zip(ys, handles, strict=True)
        ]
        return jnp.concatenate([jax_ep.combine_done(flight) for flight in flights])

    mesh = backend.mesh(expert=RANKS)
    found, expected = (
        with_gradients(functools.partial(layer, started=started), mesh)(*arguments())
        for started in (True, False)
    )
    assert_same(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("domain_size", [2])
def test_two_hops(backend, domain_size):
    mesh = backend.mesh(expert=RANKS)
    found, expected = (
        with_gradients(functools.partial(f, domain_size=domain_size), mesh)(
            *arguments()
        )
        for f in (in_flight, plain)
    )
    assert_same(found, expected)


def test_second_derivatives_remat_scan_and_vmap(backend):
    mesh = backend.mesh(expert=RANKS)
    x, ids, weights, kernel = arguments()
    specs = (P("expert"), P("expert"), P("expert"), P())

    def loss(layer):
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("expert"))
        return lambda x, kernel: jnp.sin(mapped(x, ids, weights, kernel)).sum()

    def hessian_product(layer):
        gradient = jax.grad(loss(layer))
        return jax.jit(lambda x: jax.vjp(lambda x: gradient(x, kernel), x)[1](x)[0])

    def remat(layer):
        return jax.jit(jax.grad(jax.checkpoint(loss(layer)), (0, 1)))

    def scan(layer):
        def layers(x, ids, weights, kernel):
            body = lambda x, _: (layer(x, ids, weights, kernel), None)  # noqa: E731
            return lax.scan(body, x, length=3)[0]

        return jax.jit(jax.grad(loss(layers), (0, 1)))

    def vmap(layer):
        gradient = jax.grad(loss(layer), (0, 1))
        return jax.jit(jax.vmap(lambda scale: gradient(x * scale, kernel)))

    for make, args in (
        (hessian_product, (x,)),
        (remat, (x, kernel)),
        (scan, (x, kernel)),
        (vmap, (jnp.array([1.0, 0.5]),)),
    ):
        found, expected = (make(layer)(*args) for layer in (in_flight, plain))
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert np.abs(other).max() > 0.01
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def test_done_that_nobody_differentiates(backend):
    """The gradient of what ran beside, alone."""

    def layer(x, ids, kernel):
        handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS)
        flight = jax_ep.dispatch_start(x, handle)
        flight, out = jax_ep.beside(jnp.dot, flight, x, kernel)
        rows, _ = jax_ep.dispatch_done(flight)
        return out + 0 * lax.stop_gradient(rows.sum())

    mapped = jax.shard_map(
        layer,
        mesh=backend.mesh(expert=RANKS),
        in_specs=(P("expert"), P("expert"), P()),
        out_specs=P("expert"),
    )
    found = jax.jit(jax.grad(lambda x: mapped(x, IDS, KERNEL).sum()))(X)
    np.testing.assert_allclose(found, np.ones_like(X) @ KERNEL.T, rtol=1e-6)


def test_no_tokens(backend):
    empty = (X[:0], IDS[:0], WEIGHTS[:0], KERNEL)
    out, _ = with_gradients(in_flight, backend.mesh(expert=RANKS))(*empty)
    assert out.shape == (0, HIDDEN)


# --- errors ----------------------------------------------------------------------


def one_rank(**static):
    return jax_ep.dispatch_layout(IDS, num_experts=EXPERTS, axis_name=(), **static)


def message(function, *args, error=ValueError, **keywords) -> str:
    with pytest.raises(error) as found:
        function(*args, **keywords)
    return str(found.value)


def test_what_is_refused():
    handle = one_rank()
    dispatched = jax_ep.dispatch_start(X, handle, WEIGHTS)
    rows, _ = jax_ep.dispatch_done(dispatched)
    combined = jax_ep.combine_start(rows, handle)
    assert message(jax_ep.dispatch_done, combined, error=TypeError) == (
        "jax_ep.dispatch_done: flight must be what dispatch_start returned, and is a "
        "combine under way."
    )
    assert message(jax_ep.combine_done, rows, error=TypeError) == (
        "jax_ep.combine_done: flight must be what combine_start returned, and is a "
        f"{type(rows).__name__}."
    )
    assert message(jax_ep.combine_done, combined, bias=X) == (
        "jax_ep.combine_done: bias must be None, since combine_start was told "
        "has_bias=False."
    )
    biased = jax_ep.combine_start(rows, handle, has_bias=True)
    assert message(jax_ep.combine_done, biased) == (
        "jax_ep.combine_done: bias must be given, since combine_start was told "
        "has_bias=True."
    )
    assert message(jax_ep.combine_done, biased, bias=X[:, 1:]) == (
        f"jax_ep.combine_done: bias must have rows of {HIDDEN} elements as y has, and "
        f"has shape ({len(X)}, {HIDDEN - 1})."
    )
    assert message(jax_ep.dispatch_start, IDS, handle, error=TypeError) == (
        "jax_ep.dispatch_start: x must be float32, bfloat16 or float16, and is int32."
    )
    assert message(jax_ep.dispatch_start, X, handle, WEIGHTS[:, 1:]) == (
        "jax_ep.dispatch_start: topk_weights must have shape [T, K] = "
        f"({len(X)}, {TOPK}), and has ({len(X)}, {TOPK - 1})."
    )
    assert message(jax_ep.beside, jnp.sin, rows, X, error=TypeError) == (
        "jax_ep.beside: flight must be a jax_ep.InFlight or a tuple of them, and is a "
        f"{type(rows).__name__}."
    )


def test_quantised_rows_are_for_plain_calls():
    wire = jax_ep.BlockScaled()
    text = message(jax_ep.dispatch_start, X, one_rank(wire=wire))
    assert text == (
        f"jax_ep.dispatch_start: wire (={wire!r}) quantises rows, which only plain "
        "calls do: use jax_ep.dispatch and jax_ep.combine."
    )
    handle = one_rank(grad_wire=wire)
    rows, _ = jax_ep.dispatch(X, handle)
    text = message(jax_ep.combine_start, rows, handle)
    assert text.startswith(
        f"jax_ep.combine_start: grad_wire (={wire!r}) quantises rows"
    )


def test_outside_of_jit():
    """One rank, op by op: values are there at once."""
    handle = one_rank()
    flight = jax_ep.dispatch_start(X, handle, WEIGHTS)
    flight, total = jax_ep.beside(jnp.sum, flight, X)
    rows, row_weights = jax_ep.dispatch_done(flight)
    flight = jax_ep.combine_start(rows * row_weights[:, None], handle, has_bias=True)
    out = jax_ep.combine_done(flight, bias=X)
    np.testing.assert_array_equal(out, X * WEIGHTS.sum(1, keepdims=True) + X)
    assert total == X.sum()
