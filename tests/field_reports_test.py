"""Faults that other expert-parallel libraries shipped, as cases with exact values.

Numbered as in the collection they come from. Left out here: 12 and 13 (CUDA graphs,
the latency-hiding scheduler) need GPUs, 18 (scales of fp8) a feature there is not yet.
19 (a stalled rank) is in failure_test.py, 20 (misuse) in misuse_test.py, the poisoned
buffers of 4 in poison_test.py, and ties in a router under remat (7) in remat_test.py.
"""

import functools
import hashlib
import os
import subprocess
import sys

import base
import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from base import IDS, SCALES, WEIGHTS, X, per_rank
from conftest import Backend
from jax.sharding import PartitionSpec as P
from stages import all_ranks, assert_bits_equal, stages

import jax_ep


@functools.cache
def step(backend: Backend, num_ranks: int = 4, **static):
    """Jitted `(x, ids, weights, scales)` to `(total, out)` and the gradients."""
    spec = P("expert")
    function = jax.shard_map(
        functools.partial(base.layer, implementation=backend.implementation, **static),
        mesh=backend.mesh(expert=num_ranks),
        in_specs=spec,
        out_specs=spec,
    )

    def loss(x, ids, weights, scales):
        out = function(x, ids, weights, scales)
        return out.sum(), out

    gradient = jax.value_and_grad(loss, argnums=(0, 2, 3), has_aux=True)
    return jax.jit(gradient)


def run(backend, x=X, ids=IDS, weights=WEIGHTS, scales=SCALES, num_ranks=4, **static):
    """The layer's output and gradients, checked against the closed form."""
    (value, out), got = step(backend, num_ranks, **static)(x, ids, weights, scales)
    want = base.outputs(x, ids, weights, scales)
    assert_bits_equal(out, want)
    np.testing.assert_allclose(value, want.astype(np.float64).sum(), rtol=1e-6)
    for g, w in zip(got, base.gradients(x, ids, weights, scales), strict=True):
        assert np.isfinite(g).all()
        np.testing.assert_array_equal(g, w)
    return out, got


def handle_of(backend, ids, num_ranks=4, num_experts=8):
    return stages(backend, num_ranks).layout(ids, num_experts=num_experts)


def distinct_rows(handle, num_ranks=4) -> list[int]:
    """Tokens that each rank receives, one with two experts there counted once."""
    recv_slot = np.asarray(handle.recv_slot).reshape(num_ranks, num_ranks, -1, 2)
    return (recv_slot >= 0).any(-1).sum((1, 2)).tolist()


def test_01_router_weight_gradient(backend):
    out, (dx, d_weights, _) = run(backend)
    assert per_rank(out) == [484, 540.25, 454.75, 595.75]
    assert (out[0, 0], out[15, 0]) == (2.375, 26.25)
    assert per_rank(d_weights) == [1590, 1900, 1494, 2022]
    assert d_weights[0].tolist() == [48, 288]
    assert dx[:4, 0].tolist() == [2.375, 1.5, 3.125, 2.75]


def test_01_linear_router(backend):
    """The gradient of a router in front equals that of the dense formula."""
    router = np.random.default_rng(0).standard_normal((8, 8), np.float32) / 8

    def routed(x, router):
        return jax.lax.top_k(jax.nn.softmax(x @ router), 2)

    def dense(router):
        weights, ids = routed(X, router)
        factor = (weights * (ids + 1).astype(jnp.float32)).sum(1, keepdims=True)
        return (X * factor).sum()

    def body(x, scales, router):
        weights, ids = routed(x, router)
        return base.layer(
            x, ids, weights, scales, implementation=backend.implementation
        )

    function = jax.shard_map(
        body,
        mesh=backend.mesh(expert=4),
        in_specs=(P("expert"), P("expert"), P()),
        out_specs=P("expert"),
    )
    got = jax.jit(jax.grad(lambda router: function(X, SCALES, router).sum()))(router)
    want = jax.grad(dense)(router)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.jax_version
@pytest.mark.parametrize("check_vma", [True, False, None])
def test_02_gradient_of_a_replicated_scale(backend, check_vma):
    """2074.75, not 4 times the first rank's share (1936)."""

    def body(x, ids, weights, scales, s):
        return s * base.layer(
            x, ids, weights, scales, implementation=backend.implementation
        )

    static = {} if check_vma is None else dict(check_vma=check_vma)
    spec = P("expert")
    function = jax.shard_map(
        body,
        mesh=backend.mesh(expert=4),
        in_specs=(spec, spec, spec, spec, P()),
        out_specs=spec,
        **static,
    )
    loss = lambda s: function(X, IDS, WEIGHTS, SCALES, s).sum()  # noqa: E731
    assert jax.jit(jax.grad(loss))(np.float32(1)) == 2074.75


def nothing_to_send():
    silent = IDS.copy()
    silent[:4] = -1
    unused = IDS % 6
    unused[:, 1] += unused[:, 0] == unused[:, 1]
    return {
        "rank 0 silent": (silent, [0, 540.25, 454.75, 595.75]),
        "rank 3 unused": (unused, [295, 436.75, 277, 482.5]),
        "nobody": (np.full_like(IDS, -1), [0, 0, 0, 0]),
    }


@pytest.mark.parametrize("which", nothing_to_send())
def test_03_nothing_to_send_or_receive(backend, which):
    """Forward and backward, 200 times."""
    ids, sums = nothing_to_send()[which]
    out, want = run(backend, ids=ids)
    assert per_rank(out) == sums
    for _ in range(200):
        (_, out), got = jax.block_until_ready(step(backend)(X, ids, WEIGHTS, SCALES))
        assert per_rank(out) == sums
    jax.tree.map(assert_bits_equal, got, want)


def test_03_psum_after_an_idle_rank(backend):
    """The same collectives on every rank, whoever is idle."""
    ids = IDS % 2

    def body(x, ids, weights, scales):
        out = base.layer(
            x,
            ids,
            weights,
            scales,
            num_experts=4,
            implementation=backend.implementation,
        )
        return jax.lax.psum(out.sum(), "expert")[None]

    function = jax.shard_map(
        body,
        mesh=backend.mesh(expert=2),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    gradient = jax.jit(jax.grad(lambda *a: function(*a).sum(), argnums=(0, 2, 3)))
    got = gradient(X, ids, WEIGHTS, SCALES[:4])
    wants = base.gradients(X, ids, WEIGHTS, SCALES[:4])
    for g, want in zip(got, wants, strict=True):
        np.testing.assert_array_equal(g, 2 * want)
    assert np.asarray(got[2])[2:].tolist() == [0, 0]


def test_04_masked_rows(backend):
    """Every other row masked; see poison_test.py for the poisoned buffers."""
    ids = IDS.copy()
    ids[1::2] = -1
    out, _ = run(backend, ids=ids)
    assert per_rank(out) == [270.25, 186.25, 253.75, 175.75]


def test_05_a_mask_never_indexes(backend):
    ids = IDS.copy()
    ids[:4] = -1
    out, _ = run(backend, ids=ids)
    assert not np.asarray(out)[:4].any()
    counts = np.asarray(handle_of(backend, ids).group_counts)
    assert counts.tolist() == [2, 3, 4, 2, 4, 3, 2, 4]
    ids = np.broadcast_to(np.array([-1, 3], np.int32), IDS.shape)
    out, (_, d_weights, _) = run(backend, ids=ids)
    assert per_rank(out) == [246, 233, 231, 251]
    assert not np.asarray(d_weights)[:, 0].any()


def test_05_every_wrong_id_is_masked_alike(backend):
    masked = IDS.copy()
    chosen = np.random.default_rng(0).random(IDS.shape) < 0.25
    masked[chosen] = -1
    want, _ = run(backend, ids=masked)
    for wrong in (8, -2, 2**31 - 1, -(2**31)):
        out, _ = run(backend, ids=np.where(chosen, np.int32(wrong), IDS))
        assert_bits_equal(out, want)


def test_06_two_layers_in_one_program(backend):
    def body(x, ids, weights, scales):
        static = dict(implementation=backend.implementation)
        x = base.layer(x, ids, weights, scales, **static)
        return base.layer(x, (ids + 1) % 8, weights, scales, **static)

    function = jax.shard_map(
        body,
        mesh=backend.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    two_layers = jax.jit(function)
    for _ in range(100):
        out = two_layers(X, IDS, WEIGHTS, SCALES)
        assert per_rank(out) == [1550.40625, 1677.28125, 1456.9375, 1911.1875]


def test_06_two_micro_batches_in_flight(backend):
    """Dispatch A, dispatch B, combine A, combine B."""

    def body(a, b, ids, weights, scales):
        handle = jax_ep.dispatch_layout(
            ids, num_experts=8, implementation=backend.implementation
        )
        sent = [jax_ep.dispatch(x, handle, weights) for x in (a, b)]
        scales = base.row_scales(scales, handle)
        return [
            jax_ep.combine(recv * (recv_weights * scales)[:, None], handle)
            for recv, recv_weights in sent
        ]

    function = jax.shard_map(
        body,
        mesh=backend.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    both = jax.jit(function)
    for _ in range(100):
        a, b = jax.block_until_ready(both(X, 12 - X, IDS, WEIGHTS, SCALES))
        assert per_rank(a) == base.SUMS
        assert per_rank(b) == [452, 587.75, 481.25, 532.25]


def test_07_remat(backend):
    """The default policy and the documented names: 2 forward and 2 backward calls."""
    spec = P("expert")
    names = ("jax_ep_handle", "jax_ep_recv", "jax_ep_out")
    saved = jax.checkpoint_policies.save_only_these_names(*names)

    def gradient(policy):
        block = functools.partial(base.layer, implementation=backend.implementation)
        function = jax.shard_map(
            jax.checkpoint(block, policy=policy),
            mesh=backend.mesh(expert=4),
            in_specs=spec,
            out_specs=spec,
        )
        loss = jax.value_and_grad(lambda *a: function(*a).sum(), argnums=(0, 2, 3))
        return jax.jit(loss).lower(X, IDS, WEIGHTS, SCALES).compile()

    for policy in (None, saved):
        compiled = gradient(policy)
        value, got = compiled(X, IDS, WEIGHTS, SCALES)
        assert value == 2074.75
        for g, want in zip(got, base.gradients(), strict=True):
            assert_bits_equal(g, want)
    if backend.implementation == "ffi":
        assert base.custom_calls(compiled.as_text()) == (1, 2, 2)


def test_08_experts_on_the_minor_axis(backend):
    """dp 2 x ep 2: sums as alone, 7 tokens to each rank, the gradient of the mean."""
    spec = P(("data", "expert"))
    mesh = backend.mesh(data=2, expert=2)
    make = functools.partial(
        jax_ep.dispatch_layout, num_experts=8, implementation=backend.implementation
    )
    handle = jax.jit(jax.shard_map(make, mesh=mesh, in_specs=spec, out_specs=spec))(IDS)
    recv_slot = np.asarray(handle.recv_slot).reshape(4, 2, 4, 2)
    assert (recv_slot >= 0).any(-1).sum((1, 2)).tolist() == [7] * 4

    function = jax.shard_map(
        functools.partial(base.layer, implementation=backend.implementation),
        mesh=mesh,
        in_specs=(spec, spec, spec, P("expert")),
        out_specs=spec,
    )

    def loss(scales):
        out = function(X, IDS, WEIGHTS, scales)
        return out.mean(), out

    d_scales, out = jax.jit(jax.grad(loss, has_aux=True))(SCALES)
    assert per_rank(out) == base.SUMS
    want = np.array(base.SCALE_GRADIENTS, np.float32) / 128
    np.testing.assert_allclose(d_scales, want, rtol=1e-6)


@pytest.mark.parametrize(
    "capacity, dropped, out",
    [
        (4, 3, [1, 2, 0, 0, 5, 6, 0, 16]),  # the two sources keep two rows each
        (8, 0, [1, 2, 3, 4, 5, 6, 7, 16]),
        (None, 0, [1, 2, 3, 4, 5, 6, 7, 16]),
    ],
)
def test_09_capacity_is_never_silent(backend, capacity, dropped, out):
    x = np.arange(1, 9, dtype=np.float32)[:, None]
    ids = np.array([0, 0, 0, 0, 0, 0, 0, 1], np.int32)[:, None]
    weights = np.ones((8, 1), np.float32)
    handle = stages(backend, 2).layout(ids, num_experts=2, capacity=capacity)
    assert np.asarray(handle.num_recv).tolist() == [7, 1] * 2
    assert np.asarray(handle.num_dropped).tolist() == [dropped, 0] * 2
    (_, got), (dx, d_weights, _) = step(backend, 2, num_experts=2, capacity=capacity)(
        x, ids, weights, SCALES[:2]
    )
    assert np.asarray(got)[:, 0].tolist() == out
    kept = np.array(out) > 0
    assert np.asarray(dx)[:, 0].tolist() == (kept * (ids[:, 0] + 1)).tolist()
    assert np.asarray(d_weights)[:, 0].tolist() == out


@pytest.mark.parametrize("num_ranks, num_experts, used", [(4, 8, 3), (2, 18, 6)])
def test_10_weights_of_idle_experts(backend, num_ranks, num_experts, used):
    """Exact zeros, finite; the others' equal to the dense sum."""
    token = np.arange(16)
    if num_experts == 8:
        ids = np.stack([0 * token, 2 + 0 * token], 1).astype(np.int32)
    else:
        ids = np.stack([token % 6, (token + 1) % 6], 1).astype(np.int32)
    random = np.random.default_rng(0)
    matrices = random.integers(-2, 3, (num_experts, 8, 5)).astype(np.float32)

    def body(x, ids, weights, matrices):
        handle = jax_ep.dispatch_layout(
            ids, num_experts=num_experts, implementation=backend.implementation
        )
        recv, recv_weights = jax_ep.dispatch(x, handle, weights)
        y = jax.lax.ragged_dot(recv, matrices, handle.group_sizes)
        return jax_ep.combine(y * recv_weights[:, None], handle)

    spec = P("expert")
    function = jax.shard_map(
        body, mesh=backend.mesh(expert=num_ranks), in_specs=spec, out_specs=spec
    )
    loss = lambda m: function(X, ids, WEIGHTS, m).sum()  # noqa: E731
    got = np.asarray(jax.jit(jax.grad(loss))(matrices))
    want = np.zeros_like(got)
    for t, k in np.ndindex(ids.shape):
        want[ids[t, k]] += WEIGHTS[t, k] * X[t][:, None]
    idle = sorted(set(range(num_experts)) - set(ids.ravel().tolist()))
    assert len(idle) >= num_experts - used
    assert (got[idle] == 0).all()
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_11_all_to_one_rank(backend):
    ids = np.broadcast_to(np.array([0, 1], np.int32), IDS.shape)
    out, _ = run(backend, ids=ids)
    assert per_rank(out) == [185.5, 175.75, 174.25, 189.25]
    assert distinct_rows(handle_of(backend, ids)) == [16, 0, 0, 0]


def test_11_one_row_behind_many(backend):
    """39 rows to expert 0 and one to expert 3 of the same rank: that one is 4x."""
    ids = np.zeros((80, 1), np.int32)
    ids[17] = 3
    x = np.arange(1, 161, dtype=np.float32).reshape(80, 2)
    out, _ = run(
        backend, x=x, ids=ids, weights=np.ones((80, 1), np.float32), num_ranks=2
    )
    assert np.asarray(out)[17].tolist() == (4 * x[17]).tolist()


def test_11_one_sender(backend):
    """Rank 0 alone sends, to two experts of one rank: 2x, bit for bit, in bfloat16."""
    bits = np.random.default_rng(0).integers(0, 2, (4 * 256, 1024))
    x = bits.astype(jnp.bfloat16)
    ids = np.full((4 * 256, 2), -1, np.int32)
    ids[:256] = 0, 1
    run = stages(backend, 4)
    handle = run.layout(ids, num_experts=8)
    recv, _ = run.dispatch(x, handle)
    out = run.combine(recv, handle)
    want = np.where(np.arange(4 * 256)[:, None] < 256, 2 * bits, 0).astype(jnp.bfloat16)
    assert_bits_equal(out, want)


LARGE = dict(tokens=4097, topk=16, experts=128)


@functools.cache
def large_step(backend):
    def body(ids, x, weights):
        handle = jax_ep.dispatch_layout(
            ids, num_experts=LARGE["experts"], implementation=backend.implementation
        )

        def layer(x, weights):
            recv, recv_weights = jax_ep.dispatch(x, handle, weights)
            return jax_ep.combine(recv * recv_weights[:, None], handle), recv

        out, vjp, recv = jax.vjp(layer, x, weights, has_aux=True)
        return recv, out, *vjp(out)

    spec = P("expert")
    return jax.jit(
        jax.shard_map(body, mesh=backend.mesh(expert=4), in_specs=spec, out_specs=spec)
    )


def large_digest(backend) -> str:
    """Of the received rows, the outputs and the gradients."""
    random = np.random.default_rng(0)
    shape = (4 * LARGE["tokens"], LARGE["topk"])
    ids = random.integers(0, LARGE["experts"], shape, np.int32)
    x = random.standard_normal((shape[0], 3), np.float32)
    weights = random.random(shape, np.float32)
    arrays = jax.block_until_ready(large_step(backend)(ids, x, weights))
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def test_14_same_input_same_bits(backend):
    """T 4097, K 16, E 128: 20 runs (2 of the slow reference), and a fresh process."""
    num_runs = 20 if backend.implementation == "ffi" else 2
    digests = {large_digest(backend) for _ in range(num_runs)}
    assert len(digests) == 1
    if backend.platform != "cpu":
        return
    program = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
from conftest import Backend
import field_reports_test
print(field_reports_test.large_digest(Backend("cpu", {backend.implementation!r})))
"""
    env = dict(os.environ, JAX_PLATFORMS="cpu")
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True
    )
    assert {result.stdout.strip()} == digests, result.stderr


def test_14_the_order_of_sums_on_one_rank(backend):
    """Four experts of one rank, random bfloat16: 50 runs, one result."""
    run = stages(backend, 4)
    ids = np.tile(np.array([3, 0, 2, 1], np.int32), (16, 1))
    handle = run.layout(ids, num_experts=16)
    random = np.random.default_rng(0)
    y = random.standard_normal((4 * handle.capacity, 8), np.float32)
    y = y.astype(jnp.bfloat16)
    layout = literal.layout(ids.reshape(4, 4, 4), 16)
    want = all_ranks(literal.combine(run.by_rank(y), layout))
    for _ in range(50):
        assert_bits_equal(run.combine(y, handle), want)


def test_15_state_survives_relocation(backend):
    """The vjp closure is kept, memory is churned, the backward is another program."""
    spec = P("expert")
    mesh = backend.mesh(expert=4)
    function = jax.shard_map(
        functools.partial(base.layer, implementation=backend.implementation),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    out, vjp = jax.vjp(
        jax.jit(lambda x, weights: function(x, IDS, weights, SCALES)), X, WEIGHTS
    )
    churn = jnp.zeros(2**28, jnp.float32, device=backend.devices(1)[0])
    churn.block_until_ready().delete()
    dx, d_weights = jax.jit(lambda ct: vjp(ct * 1))(jnp.ones_like(out))
    assert per_rank(d_weights) == base.WEIGHT_GRADIENT_SUMS
    assert_bits_equal(dx, base.gradients()[0])


def test_15_a_second_payload(backend):
    """An old handle and a new x: as a fresh dispatch, and as another x only."""
    run = stages(backend, 4)
    old = run.layout(IDS, num_experts=8)
    first = run.dispatch(X, old, WEIGHTS)
    reused = run.dispatch(12 - X, old, WEIGHTS)
    fresh = run.dispatch(12 - X, run.layout(IDS, num_experts=8), WEIGHTS)
    jax.tree.map(assert_bits_equal, reused, fresh)
    assert_bits_equal(first[1], reused[1])
    rows = np.asarray(first[1]) != 0
    assert rows.sum() == IDS.size
    assert_bits_equal(np.asarray(reused[0])[rows], 12 - np.asarray(first[0])[rows])


@pytest.mark.parametrize("tokens", [0, 1, 3, 7, 42, 65])
def test_16_row_counts(backend, tokens):
    token = np.arange(4 * tokens)[:, None]
    x = (1 + (7 * token + 3 * np.arange(64)) % 11).astype(np.float32)
    ids = ((3 * token + 5 * np.arange(2)) % 8).astype(np.int32)
    weights = ((1 + (token + 2 * np.arange(2)) % 4) / 8).astype(np.float32)
    run(backend, x=x, ids=ids, weights=weights)


def test_16_ranks_with_fewer_tokens(backend):
    """Valid rows 4, 1, 0, 3."""
    ids = IDS.copy()
    for rank, valid in enumerate((4, 1, 0, 3)):
        ids[4 * rank + valid : 4 * rank + 4] = -1
    out, (_, d_weights, _) = run(backend, ids=ids)
    assert per_rank(out) == [484, 71.5, 0, 400.75]
    assert per_rank(d_weights) == [1590, 364, 0, 1554]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_17_gradients_do_not_depend_on_the_number_of_ranks(backend, ranks):
    out, (_, _, d_scales) = run(backend, num_ranks=ranks)
    assert np.asarray(out).sum() == 2074.75
    assert np.asarray(d_scales).tolist() == base.SCALE_GRADIENTS
