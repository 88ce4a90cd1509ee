"""The stages under JAX's transformations."""

import functools
import os
import subprocess
import sys

import base
import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from base import IDS, SCALES, WEIGHTS, X, custom_calls
from conftest import CPU_FFI, Backend, enough_for_reference
from jax.sharding import PartitionSpec as P
from stages import all_ranks, assert_bits_equal

import jax_ep

BASE_ARRAYS = (X, IDS, WEIGHTS, SCALES)
SPEC = P("expert")


def layer(backend: Backend, mesh=None, in_specs=SPEC, check_vma=True, **static):
    """`base.layer` over global arrays, not jitted."""
    return jax.shard_map(
        functools.partial(base.layer, implementation=backend.implementation, **static),
        mesh=mesh or backend.mesh(expert=4),
        in_specs=in_specs,
        out_specs=P("expert"),
        check_vma=check_vma,
    )


def total(function):
    """The sum of a layer's outputs."""
    return lambda *args: function(*args).sum()


def check_gradients(got, want):
    for g, w in zip(got, want, strict=True):
        assert_bits_equal(g, w)


@pytest.mark.jax_version
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_value_and_gradient(backend, explicit, check_vma):
    """On explicit axes (make_mesh) and automatic ones (Mesh)."""
    if explicit:
        mesh = jax.make_mesh((4,), ("expert",), devices=backend.devices(4))
        assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    else:
        mesh = backend.mesh(expert=4)
    sharding = jax.sharding.NamedSharding(mesh, P("expert"))
    args = [jax.device_put(a, sharding) for a in BASE_ARRAYS]
    function = layer(backend, mesh, check_vma=check_vma)

    def loss(x, ids, weights, scales):
        out = function(x, ids, weights, scales)
        return out.sum(), out

    (value, out), got = jax.jit(
        jax.value_and_grad(loss, argnums=(0, 2, 3), has_aux=True)
    )(*args)
    assert value == 2074.75
    assert_bits_equal(out, base.outputs())
    check_gradients(got, base.gradients())


@pytest.mark.jax_version
@pytest.mark.parametrize("check_vma", [True, False])
def test_eager_shard_map(backend, check_vma):
    """Without jit, forward and backward."""
    enough_for_reference(backend, not check_vma)
    function = layer(backend, check_vma=check_vma)
    if check_vma:
        gradient = jax.grad(total(function), argnums=(0, 2, 3))
        check_gradients(gradient(*BASE_ARRAYS), base.gradients())
    else:
        assert_bits_equal(function(*BASE_ARRAYS), base.outputs())


REPLICATED = [("x",), ("ids",), ("weights",), ("x", "weights"), ("x", "ids", "weights")]


@pytest.mark.jax_version
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", REPLICATED, ids="+".join)
def test_replicated_operands(backend, replicated, check_vma):
    """A replicated operand's gradient is the sum of all ranks' shares."""
    enough_for_reference(backend, check_vma)
    names = ("x", "ids", "weights")
    local = {"x": X[:4], "ids": IDS[4:8], "weights": WEIGHTS[8:12]}
    arrays = dict(zip(names, BASE_ARRAYS[:3], strict=True))
    args, full, specs = [], [], []
    for name in names:
        is_replicated = name in replicated
        args.append(local[name] if is_replicated else arrays[name])
        full.append(np.tile(local[name], (4, 1)) if is_replicated else arrays[name])
        specs.append(P() if is_replicated else P("expert"))
    function = layer(backend, in_specs=(*specs, P("expert")), check_vma=check_vma)
    step = jax.jit(jax.value_and_grad(total(function), argnums=(0, 2, 3)))
    value, got = step(*args, SCALES)
    assert value == base.outputs(*full).sum()
    dx, d_weights, d_scales = base.gradients(*full)
    if "x" in replicated:
        dx = dx.reshape(4, 4, -1).sum(0)
    if "weights" in replicated:
        d_weights = d_weights.reshape(4, 4, -1).sum(0)
    check_gradients(got, (dx, d_weights, d_scales))


@pytest.mark.jax_version
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", ["y", "weights", "bias"])
def test_replicated_operands_of_combine(backend, replicated, check_vma):
    enough_for_reference(backend, check_vma)
    capacity = 32
    random = np.random.default_rng(0)
    arrays = {
        "y": random.integers(-4, 5, (4, capacity, 3)),
        "weights": random.integers(-4, 5, (4, capacity)),
        "bias": random.integers(-4, 5, (4, 4, 3)),
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    arrays[replicated][:] = arrays[replicated][0]

    def loss(ids, y, weights, bias, d_out):
        handle = jax_ep.dispatch_layout(
            ids, num_experts=8, implementation=backend.implementation
        )
        out = jax_ep.combine(y, handle, weights=weights, bias=bias)
        return (out * d_out).sum()[None]

    specs = {name: P("expert") for name in arrays}
    args = {name: all_ranks(array) for name, array in arrays.items()}
    specs[replicated], args[replicated] = P(), arrays[replicated][0]
    step = jax.shard_map(
        loss,
        mesh=backend.mesh(expert=4),
        in_specs=(P("expert"), *specs.values(), P("expert")),
        out_specs=P("expert"),
        check_vma=check_vma,
    )
    d_out = (1 + np.arange(48, dtype=np.float32) % 5).reshape(16, 3)
    got = jax.jit(
        jax.grad(
            lambda *args: step(*args).sum(), argnums=1 + list(arrays).index(replicated)
        )
    )(IDS, *args.values(), d_out)

    layout = literal.layout(IDS.reshape(4, 4, 2), 8)
    by_rank = d_out.reshape(4, 4, 3)
    d_y, d_weights = literal.weighted_combine_gradients(
        by_rank, arrays["y"], arrays["weights"], layout
    )
    want = dict(y=d_y, weights=d_weights, bias=by_rank)[replicated].sum(0)
    assert want.any()
    assert_bits_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("check_vma", [True, False])
def test_operands_replicated_over_another_axis(backend, check_vma):
    """Mesh (data, expert): ids differ per data group, x and weights do not."""
    mesh = backend.mesh(data=2, expert=2)
    ids = np.concatenate([IDS[:8], IDS[8:]])
    step = jax.shard_map(
        functools.partial(base.layer, implementation=backend.implementation),
        mesh=mesh,
        in_specs=(P("expert"), P(("data", "expert")), P("expert"), P("expert")),
        out_specs=P(("data", "expert")),
        check_vma=check_vma,
    )
    x, weights = X[:8], WEIGHTS[:8]
    got = jax.jit(jax.grad(total(step), argnums=(0, 2, 3)))(x, ids, weights, SCALES)
    halves = [base.gradients(x, half, weights) for half in (IDS[:8], IDS[8:])]
    check_gradients(got, [a + b for a, b in zip(*halves, strict=True)])


def layered(backend, scan: bool, remat: bool):
    """Three layers, each with its own ids, weights and scales, inside one shard_map."""

    def body(x, parameters):
        return base.layer(x, *parameters, implementation=backend.implementation), None

    if remat:
        body = jax.checkpoint(body)

    def layers(x, ids, weights, scales):
        if scan:
            return jax.lax.scan(body, x, (ids, weights, scales))[0]
        for n in range(3):
            x, _ = body(x, (ids[n], weights[n], scales[n]))
        return x

    spec = P(None, "expert")
    return jax.shard_map(
        layers,
        mesh=backend.mesh(expert=4),
        in_specs=(P("expert"), spec, spec, spec),
        out_specs=P("expert"),
    )


@pytest.mark.jax_version
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("remat", [True, False])
def test_layers(backend, scan, remat):
    """Scanned and unrolled, with and without remat: one value, one gradient."""
    enough_for_reference(backend, scan == remat)
    ids = np.stack([IDS, (IDS + 1) % 8, IDS[::-1]])
    weights = np.stack([WEIGHTS, WEIGHTS[::-1], WEIGHTS]) / 2
    scales = np.stack([SCALES, SCALES[::-1], SCALES]) / 4
    step = jax.jit(
        jax.value_and_grad(total(layered(backend, scan, remat)), argnums=(0, 2, 3))
    )
    value, (dx, d_weights, d_scales) = step(X, ids, weights, scales)
    per_layer = np.stack(
        [
            base.token_scales(i, w, s)
            for i, w, s in zip(ids, weights, scales, strict=True)
        ]
    )
    factor = per_layer.prod(0)
    np.testing.assert_allclose(value, (X * factor[:, None]).sum(), rtol=1e-6)
    np.testing.assert_allclose(dx, np.broadcast_to(factor[:, None], X.shape), rtol=1e-6)
    for n in range(3):
        # The other layers' factors are as good as in x.
        others = X * (factor / per_layer[n])[:, None]
        _, want_weights, want_scales = base.gradients(
            others, ids[n], weights[n], scales[n]
        )
        np.testing.assert_allclose(d_weights[n], want_weights, rtol=1e-6)
        np.testing.assert_allclose(d_scales[n], want_scales, rtol=1e-6)


def test_gradient_inside_scan(backend):
    """Each step's carry is the gradient of the step before."""
    function = layer(backend)

    def step(x, _):
        return jax.grad(total(function))(x, IDS, WEIGHTS, SCALES) + x / 4, None

    got = jax.jit(lambda x: jax.lax.scan(step, x, length=3)[0])(X)
    dx = base.gradients()[0]
    want = X
    for _ in range(3):
        want = dx + want / 4
    assert_bits_equal(got, want.astype(np.float32))


@pytest.mark.jax_version
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("mapped", ["x", "all"])
def test_vmap(backend, where, mapped):
    """Inside a shard_map and of one: as so many calls, forward and backward."""
    enough_for_reference(backend, mapped == "all")
    batch = (
        np.stack([X, 12 - X, X[::-1]]),
        np.stack([IDS, (IDS + 3) % 8, np.where(IDS == 5, -1, IDS)]),
        np.stack([WEIGHTS, WEIGHTS[::-1], WEIGHTS * 2]),
    )
    arrays = (batch[0], *(batch[1:] if mapped == "all" else (IDS, WEIGHTS)))
    in_axes = (0, *([0, 0] if mapped == "all" else [None, None]), None)
    if where == "outside":
        function = jax.vmap(layer(backend), in_axes)
    else:
        one = functools.partial(base.layer, implementation=backend.implementation)
        specs = tuple(P(None, "expert") if a == 0 else P("expert") for a in in_axes)
        function = jax.shard_map(
            jax.vmap(one, in_axes),
            mesh=backend.mesh(expert=4),
            in_specs=specs,
            out_specs=P(None, "expert"),
        )
    value, got = jax.jit(
        jax.value_and_grad(
            lambda *args: (function(*args).sum(), function(*args)),
            argnums=(0, 2, 3),
            has_aux=True,
        )
    )(*arrays, SCALES)
    each = [
        tuple(
            a[n] if axis == 0 else a for a, axis in zip(arrays, in_axes, strict=False)
        )
        for n in range(3)
    ]
    assert_bits_equal(value[1], np.stack([base.outputs(*one) for one in each]))
    wants = [base.gradients(*one) for one in each]
    assert_bits_equal(got[0], np.stack([dx for dx, _, _ in wants]))
    d_weights = np.stack([d for _, d, _ in wants])
    assert_bits_equal(got[1], d_weights if mapped == "all" else d_weights.sum(0))
    np.testing.assert_allclose(got[2], sum(d for _, _, d in wants), rtol=1e-6)


def test_vmap_of_every_axis(backend):
    """A batch axis that is not the first one."""
    run = layer(backend)
    x = np.stack([X, 12 - X], axis=2)
    out = jax.jit(jax.vmap(run, (2, None, None, None), out_axes=1))(
        x, IDS, WEIGHTS, SCALES
    )
    want = [base.outputs(), base.outputs(12 - X)]
    assert_bits_equal(out, np.stack(want, axis=1))


def test_donation(backend):
    """A donated x gives its buffer to the output, and the values are right."""
    sharding = jax.sharding.NamedSharding(backend.mesh(expert=4), P("expert"))
    step = jax.jit(layer(backend), donate_argnums=0)
    for _ in range(3):
        x = jax.device_put(X, sharding)
        out = step(x, IDS, WEIGHTS, SCALES)
        assert_bits_equal(out, base.outputs())
        assert x.is_deleted()


def test_ahead_of_time(backend):
    lowered = jax.jit(jax.grad(total(layer(backend)))).lower(*BASE_ARRAYS)
    compiled = lowered.compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= 0
    assert_bits_equal(compiled(*BASE_ARRAYS), base.gradients()[0])


@pytest.mark.jax_version
def test_export(backend):
    """Serialised, and run by another function of the deserialised program."""
    pytest.importorskip("flatbuffers")
    step = jax.jit(jax.value_and_grad(total(layer(backend)), argnums=(0, 2, 3)))
    allowed = [
        jax.export.DisabledSafetyCheck.custom_call(name) for name in jax_ep.CUSTOM_CALLS
    ]
    sharding = jax.sharding.NamedSharding(backend.mesh(expert=4), P("expert"))
    args = [jax.device_put(a, sharding) for a in BASE_ARRAYS]
    if backend.implementation == "ffi":
        with pytest.raises(ValueError, match="jax_ep_layout"):
            jax.export.export(step)(*args)
    exported = jax.export.export(step, disabled_checks=allowed)(*args)
    again = jax.export.deserialize(exported.serialize())
    value, got = jax.jit(again.call)(*args)
    assert value == 2074.75
    check_gradients(got, base.gradients())


@pytest.mark.jax_version
def test_persistent_cache(tmp_path):
    """A second process finds the first one's program, and it runs."""
    program = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
import conftest, jax, base, transforms_test as t
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
loss = t.total(t.layer(conftest.CPU_FFI))
step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3)))
value, got = step(*t.BASE_ARRAYS)
assert value == 2074.75
t.check_gradients(got, base.gradients())
print(events.count("/jax/compilation_cache/cache_hits"))
print(base.custom_calls(step.lower(*t.BASE_ARRAYS).compile().as_text()))
"""
    env = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )

    def run():
        result = subprocess.run(
            [sys.executable, "-P", "-c", program],
            env=env,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    first, second = run(), run()
    assert int(first[0]) == 0 and int(second[0]) > 0
    assert first[1] == second[1] == "(1, 2, 2)"


def test_two_layers_with_different_shapes(backend):
    """K, E, A and capacity of their own, in one program."""
    mesh = backend.mesh(expert=4)
    other_ids = np.random.default_rng(0).integers(-1, 20, (16, 5), np.int32)
    other_weights = (1 + np.arange(80, dtype=np.float32) % 4).reshape(16, 5) / 4
    other_scales = np.arange(1, 21, dtype=np.float32)

    def both(x, ids, weights, scales, ids2, weights2, scales2):
        x = base.layer(x, ids, weights, scales, implementation=backend.implementation)
        return base.layer(
            x / 16,
            ids2,
            weights2,
            scales2,
            num_experts=20,
            expert_alignment=8,
            capacity=120,
            implementation=backend.implementation,
        )

    function = jax.shard_map(
        both, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )
    args = (*BASE_ARRAYS, other_ids, other_weights, other_scales)
    value, got = jax.jit(jax.value_and_grad(total(function)))(*args)
    middle = base.outputs() / 16
    want = base.outputs(middle, other_ids, other_weights, other_scales)
    np.testing.assert_allclose(value, want.sum(), rtol=1e-6)
    factor = base.token_scales(other_ids, other_weights, other_scales) / 16
    np.testing.assert_allclose(got, base.gradients()[0] * factor[:, None], rtol=1e-6)


@pytest.mark.parametrize("num", [2, 3])
def test_micro_batches_in_flight(backend, num):
    """All dispatched before the first is combined."""
    batches = [X, 12 - X, X[::-1]][:num]

    def function(ids, weights, scales, *xs):
        handle = jax_ep.dispatch_layout(
            ids, num_experts=8, implementation=backend.implementation
        )
        sent = [jax_ep.dispatch(x, handle, weights) for x in xs]
        scales = base.row_scales(scales, handle)
        return [
            jax_ep.combine(recv * (recv_weights * scales)[:, None], handle)
            for recv, recv_weights in sent
        ]

    step = jax.shard_map(
        function,
        mesh=backend.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )

    def loss(*xs):
        outs = step(IDS, WEIGHTS, SCALES, *xs)
        return sum((n + 1) * out.sum() for n, out in enumerate(outs)), outs

    got, outs = jax.jit(jax.grad(loss, argnums=tuple(range(num)), has_aux=True))(
        *batches
    )
    for n, (x, out, dx) in enumerate(zip(batches, outs, got, strict=True)):
        assert_bits_equal(out, base.outputs(x))
        assert_bits_equal(dx, (n + 1) * base.gradients(x)[0])


def compiled_text(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


def test_unused_results_are_dropped(ffi_backend):
    """A call without a side effect disappears with its last use."""

    def body(x, ids):
        handle = jax_ep.dispatch_layout(ids, num_experts=8, implementation="ffi")
        recv, _ = jax_ep.dispatch(x, handle)
        jax_ep.combine(recv, handle)
        return x + 1

    function = jax.shard_map(
        body,
        mesh=ffi_backend.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    assert custom_calls(compiled_text(function, X, IDS)) == (0, 0, 0)
    assert_bits_equal(jax.jit(function)(X, IDS), X + 1)


def test_identical_calls_are_merged(ffi_backend):
    """Two calls of equal operands are one, and the sum is right."""

    def body(x, ids, weights, scales):
        first = base.layer(x, ids, weights, scales, implementation="ffi")
        return first + base.layer(x, ids, weights, scales, implementation="ffi")

    function = jax.shard_map(
        body,
        mesh=ffi_backend.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    assert custom_calls(compiled_text(function, *BASE_ARRAYS)) == (1, 1, 1)
    assert_bits_equal(jax.jit(function)(*BASE_ARRAYS), 2 * base.outputs())


def test_a_loop_invariant_layout_is_hoisted(ffi_backend):
    """XLA may move a call out of a loop; the values stay."""

    def body(x, ids, weights, scales):
        def step(carry, _):
            return base.layer(carry, ids, weights, scales, implementation="ffi"), None

        return jax.lax.scan(step, x / 64, length=2)[0]

    function = jax.shard_map(
        body,
        mesh=ffi_backend.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    want = base.outputs(base.outputs(X / 64))
    assert_bits_equal(jax.jit(function)(*BASE_ARRAYS), want)


@pytest.mark.jax_version
def test_many_large_independent_calls_beside_a_psum():
    """XLA runs them in another order on every device, which must not hang.

    24 rows' exchanges of more than a megabyte, where XLA runs them concurrently.
    """
    tokens, hidden = 600, 512
    random = np.random.default_rng(0)
    x = random.integers(0, 8, (4 * tokens, hidden)).astype(np.float32)
    ids = random.integers(0, 8, (4 * tokens, 1), np.int32)

    def body(x, ids):
        handle = jax_ep.dispatch_layout(ids, num_experts=8, implementation="ffi")
        outs = []
        for n in range(24):
            recv, _ = jax_ep.dispatch(x + n, handle)
            outs.append(recv.sum())
        outs = jnp.stack(outs)
        return outs[None], jax.lax.psum(outs, "expert")

    function = jax.shard_map(
        body,
        mesh=CPU_FFI.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=(P("expert"), P()),
    )
    each, both = jax.block_until_ready(jax.jit(function)(x, ids))
    want = x.sum() + np.arange(24) * x.size
    np.testing.assert_allclose(np.asarray(each).sum(0), want, rtol=1e-5)
    np.testing.assert_allclose(both, want, rtol=1e-5)


@pytest.mark.jax_version
def test_launches_in_flight(backend):
    """Thirty launches without waiting, from one thread."""
    step = jax.jit(layer(backend))
    outs = [step(X + n, IDS, WEIGHTS, SCALES) for n in range(30)]
    for n, out in enumerate(jax.block_until_ready(outs)):
        assert_bits_equal(out, base.outputs(X + np.float32(n)))


def test_beside_other_collectives(backend):
    """An all-gather and a psum that depend on nothing of ours, in one program."""

    def body(x, ids, weights, scales):
        everyone = jax.lax.all_gather(x, "expert", tiled=True)
        out = base.layer(x, ids, weights, scales, implementation=backend.implementation)
        return out, everyone.sum()[None], jax.lax.psum(out.sum(), "expert")[None]

    function = jax.shard_map(
        body,
        mesh=backend.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    out, sums, psums = jax.jit(function)(*BASE_ARRAYS)
    assert_bits_equal(out, base.outputs())
    assert sums.tolist() == [X.sum()] * 4 and psums.tolist() == [2074.75] * 4


def test_handle_crosses_jits(backend):
    """A handle made in one jit serves another, and its vjp a third."""
    mesh, spec = backend.mesh(expert=4), P("expert")
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    make = shard(
        functools.partial(
            jax_ep.dispatch_layout,
            num_experts=8,
            implementation=backend.implementation,
        )
    )

    def use(x, weights, scales, handle):
        recv, recv_weights = jax_ep.dispatch(x, handle, weights)
        y = recv * (recv_weights * base.row_scales(scales, handle))[:, None]
        return jax_ep.combine(y, handle)

    handle = jax.jit(make)(IDS)
    handle = jax.tree.map(jnp.copy, handle)
    out, vjp = jax.vjp(
        jax.jit(lambda *args: shard(use)(*args, handle)), X, WEIGHTS, SCALES
    )
    assert_bits_equal(out, base.outputs())
    check_gradients(jax.jit(vjp)(jnp.ones_like(out)), base.gradients())
