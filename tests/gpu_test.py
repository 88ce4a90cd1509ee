"""What only GPUs can show: the kernels, on two or four of them, in this process.

Tests of other processes are in gpu_process_test.py. JAX_EP_GPU_TESTS_PLATFORM=cpu runs
both files on CPU devices, which checks the tests and not the kernels.
"""

import dataclasses
import functools
import gc
import time

import base
import gpu_launch
import gpu_processes
import gpu_soak
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Backend
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layout_test import Case
from pipeline import (
    Pipeline,
    assert_same_bits,
    differing,
    inputs,
    on_ranks,
    program,
)
from stages import all_ranks, assert_bits_equal, stages

import jax_ep
from jax_ep import stamps

pytestmark = pytest.mark.gpu

GPU = Backend(gpu_processes.PLATFORM, "ffi")
# Where the tests themselves are tested, a few runs will do.
REPEATS = 100 if GPU.platform == "gpu" else 3
BASE_ARRAYS = (base.X, base.IDS, base.WEIGHTS, base.SCALES)


def num_ranks() -> int:
    """Four where there are four GPUs, else two, and fewer skip or fail the test."""
    try:
        GPU.devices(4)
    except pytest.skip.Exception:
        GPU.devices(2)
        return 2
    return 4


@pytest.fixture
def mesh() -> Mesh:
    return GPU.mesh(expert=num_ranks())


# --- everything, against the reference ------------------------------------------

BF16, F16, F32 = "bfloat16", "float16", "float32"


def case(tokens, topk, experts, routing="uniform", capacity=None, alignment=1):
    # ranks: filled in where the number of GPUs is known
    return Case(0, tokens, topk, experts, capacity, alignment, routing)


PIPELINES = [
    # One slot per token and the smallest rows; as many slots as there may be.
    Pipeline(case(64, 1, 8), ((F32, 1),)),
    Pipeline(case(7, 32, 64, "invalid"), ((F16, 257),)),
    # Rows of odd, of unaligned and of many bytes, each dtype.
    Pipeline(case(65, 2, 8, "masked", alignment=128), ((BF16, 129),)),
    Pipeline(case(42, 3, 24, "skewed", capacity=100, alignment=8), ((F16, 3072),)),
    Pipeline(case(33, 5, 16, "same expert in all slots"), ((F32, 8184),)),
    Pipeline(case(40, 6, 32, "ragged"), ((BF16, 40000),)),  # five pieces
    # Several leaves.
    Pipeline(case(129, 8, 64, "masked"), ((BF16, 7168), (F32, 56), (F16, 3), (F32, 1))),
    # A real layer, with drops.
    Pipeline(case(1024, 8, 256, capacity=8192, alignment=128), ((BF16, 7168),)),
    Pipeline(case(512, 4, 96, "skewed", capacity=500), ((F32, 256),), wire_f32=True),
    Pipeline(case(300, 7, 64, "invalid"), ((BF16, 2048),), wire_f32=True),
    # Nothing to send, nothing to receive.
    Pipeline(case(0, 2, 8, alignment=16), ((F32, 8),)),
    Pipeline(case(1, 8, 32), ((F16, 8192),)),
    Pipeline(case(256, 4, 16, "silent rank"), ((BF16, 512),)),
    Pipeline(case(256, 4, 16, "nobody"), ((BF16, 512),)),
    # All to one expert, all to few; the most experts.
    Pipeline(case(1000, 2, 32, "one expert"), ((BF16, 768),)),
    Pipeline(case(100, 4, 2048, "invalid"), ((F32, 32),)),
    Pipeline(case(4097, 16, 128, "masked"), ((BF16, 64),)),
]


def on(ranks: int, pipeline: Pipeline) -> Pipeline:
    ranked = dataclasses.replace(pipeline.case, ranks=ranks)
    return dataclasses.replace(pipeline, case=ranked)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_everything_equals_the_reference(mesh, pipeline):
    """Handle, rows, weights, sums and all derivatives, bit for bit."""
    pipeline = on(mesh.size, pipeline)
    args = inputs(pipeline, mesh)
    got = program(pipeline, mesh, "ffi")(*args)
    want = program(pipeline, mesh, "xla")(*args)
    compared = {name: want[name] for name in want if name != "handle"}
    assert_same_bits({name: got[name] for name in compared}, compared, "floats")
    for name, leaf in vars(want["handle"]).items():
        if isinstance(leaf, jax.Array):
            assert_bits_equal(getattr(got["handle"], name), leaf)


@pytest.mark.parametrize("num_sms", [1, 3, 1000])
def test_any_grid_gives_the_same(mesh, num_sms):
    shape = on(mesh.size, Pipeline(case(200, 4, 16, "masked", 900, 4), ((BF16, 1000),)))
    args = inputs(shape, mesh)
    want = program(shape, mesh, "ffi")(*args)
    small = dataclasses.replace(shape, num_sms=num_sms)
    got = program(small, mesh, "ffi")(*args)
    del got["handle"], want["handle"]  # they differ in num_sms
    assert_same_bits(got, want)


def test_stamps_are_of_the_latest_grid(mesh):
    """A call leaves none of the blocks that only an earlier one had."""
    run = stages(GPU, mesh.size)
    shape = (mesh.size, 64, 2)
    ids = all_ranks(np.random.default_rng(0).integers(0, 8, shape, np.int32))
    x = np.ones((len(ids), 8), np.float32)
    stamps.read_stamps()
    for num_sms in (None, 3):
        handle = run.layout(ids, num_experts=8, num_sms=num_sms, stamps=True)
        run.combine(run.dispatch(x, handle)[0], handle)
    found = stamps.read_stamps()
    assert len(found) == 3 * mesh.size
    assert all(len(each.times) <= 3 for each in found)


def test_one_rank():
    shape = on(1, Pipeline(case(77, 3, 6, "masked", 200, 8), ((BF16, 129), (F32, 2))))
    mesh = GPU.mesh(expert=1)
    args = inputs(shape, mesh)
    got, want = (program(shape, mesh, kind)(*args) for kind in ("ffi", "xla"))
    del got["handle"], want["handle"]
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_weights_in_combine(mesh, dtype):
    """To the dtype's tolerance, forward and backward, with a bias."""
    shape = Pipeline(case(128, 4, 16, "masked", alignment=8), ((dtype, 96),))
    shape = on(mesh.size, shape)
    ids, floats = inputs(shape, mesh)

    def run(implementation):
        def loss(ids, y, weights, bias, d_out):
            handle = jax_ep.dispatch_layout(
                ids, implementation=implementation, **shape.layout
            )
            out, pull_back = jax.vjp(
                lambda *args: jax_ep.combine(
                    args[0], handle, weights=args[1], bias=args[2]
                ),
                *(y, weights, bias),
            )
            return out, pull_back(d_out)

        arrays = (floats["y"][0], floats["d_recv_weights"])
        arrays += (floats["bias"][0], floats["d_out"][0])
        return on_ranks(loss, mesh)(ids, *arrays)

    got, want = run("ffi"), run("xla")
    eps = float(jnp.finfo(dtype).eps)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=4 * eps, atol=8 * eps)


def test_a_hundred_runs_have_the_same_bits(mesh):
    """T=4097, K=16, E=128, here a hundred times and in a fresh process."""
    other = gpu_processes.start(["large"], devices=mesh.size)
    here = gpu_launch.large(mesh, str(REPEATS))
    assert gpu_processes.finish(other)["large"] == here


# --- more than 2^31 elements -----------------------------------------------------


def test_large_arrays():
    """Rows past 2^31 elements, and zeros past 2^32, in x, recv and out.

    With one expert per token, combine gives back what dispatch took.
    """
    mesh = GPU.mesh(expert=2)
    tokens, hidden = (330_000, 7168) if GPU.platform == "gpu" else (330, 64)
    sharding = NamedSharding(mesh, P("expert"))

    @functools.partial(jax.jit, out_shardings=sharding)
    def make():
        rows = jax.lax.broadcasted_iota(jnp.uint32, (2 * tokens, hidden), 0)
        columns = jax.lax.broadcasted_iota(jnp.uint32, (2 * tokens, hidden), 1)
        mixed = (rows * jnp.uint32(2654435761) + columns * jnp.uint32(40503)) >> 17
        return mixed.astype(jnp.bfloat16)

    def round_trip(x, ids):
        handle = jax_ep.dispatch_layout(ids, num_experts=4)
        recv, _ = jax_ep.dispatch(x, handle)
        rows = jnp.arange(handle.capacity, dtype=jnp.int32)
        beyond = rows[:, None] >= handle.num_recv[jax.lax.axis_index("expert")]
        stray = jnp.sum((recv != 0) & beyond, dtype=jnp.int32)
        out = jax_ep.combine(recv, handle)
        wrong = jnp.sum(out != x, dtype=jnp.int32)
        return wrong[None], stray[None], handle.num_recv

    ids = np.random.default_rng(0).integers(0, 4, (2 * tokens, 1), np.int32)
    ids[-1] = 3  # the last row of the last rank
    wrong, stray, num_recv = on_ranks(round_trip, mesh, check_vma=False)(make(), ids)
    if GPU.platform == "gpu":
        assert int(np.asarray(num_recv).min()) * hidden > 2**31
    assert np.asarray(wrong).tolist() == [0, 0]
    assert np.asarray(stray).tolist() == [0, 0]


# --- transformations and meshes ----------------------------------------------------


def layer(mesh, implementation="ffi", **keywords):
    """`base.layer` over global arrays, not jitted."""
    keywords.setdefault("in_specs", P("expert"))
    keywords.setdefault("out_specs", P("expert"))
    one = functools.partial(base.layer, implementation=implementation)
    return jax.shard_map(one, mesh=mesh, **keywords)


def value_and_gradients(function):
    def loss(*args):
        out = function(*args)
        return out.sum(), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3), has_aux=True))


def check_base(function, arrays=BASE_ARRAYS):
    (value, out), got = value_and_gradients(function)(*arrays)
    assert value == 2074.75
    assert_bits_equal(out, base.outputs())
    for g, w in zip(got, base.gradients(), strict=True):
        assert_bits_equal(g, w)


@pytest.mark.parametrize("check_vma", [True, False])
def test_base_layer(mesh, check_vma):
    check_base(layer(mesh, check_vma=check_vma))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", ["x", "ids", "weights"])
def test_replicated_operands(mesh, replicated, check_vma):
    """The gradient of a replicated operand has every rank's share."""
    ranks, tokens = mesh.size, 16 // mesh.size
    names = ["x", "ids", "weights"]
    args, full, specs = list(BASE_ARRAYS), list(BASE_ARRAYS[:3]), [P("expert")] * 4
    place = names.index(replicated)
    args[place] = args[place][:tokens]
    full[place] = np.tile(args[place], (ranks, 1))
    specs[place] = P()
    function = layer(mesh, in_specs=tuple(specs), check_vma=check_vma)
    (value, _), got = value_and_gradients(function)(*args)
    assert value == base.outputs(*full).sum()
    want = list(base.gradients(*full))
    for index, name in ((0, "x"), (1, "weights")):
        if name == replicated:
            want[index] = want[index].reshape(ranks, tokens, -1).sum(0)
    for g, w in zip(got, want, strict=True):
        assert_bits_equal(g, w)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_layers(mesh, scan, remat):
    """Two layers, scanned or not, with and without remat: the reference's gradients."""
    ids = np.stack([base.IDS, (base.IDS + 1) % 8])
    weights = np.stack([base.WEIGHTS, base.WEIGHTS])
    spec = P(None, "expert")

    def model(implementation):
        def body(x, parameters):
            ids, weights = parameters
            scales = 1 + jax.lax.axis_index("expert") * (8 // mesh.size)
            scales = (scales + jnp.arange(8 // mesh.size)).astype(jnp.float32)
            x = base.layer(x, ids, weights, scales, implementation=implementation)
            return x, None

        body = jax.checkpoint(body) if remat else body

        def run(x, ids, weights):
            if scan:
                return jax.lax.scan(body, x, (ids, weights))[0]
            for n in range(2):
                x, _ = body(x, (ids[n], weights[n]))
            return x

        return jax.shard_map(
            run, mesh=mesh, in_specs=(P("expert"), spec, spec), out_specs=P("expert")
        )

    def step(implementation):
        def loss(x, ids, weights):
            out = model(implementation)(x, ids, weights)
            return out.sum(), out

        grad = jax.grad(loss, argnums=(0, 2), has_aux=True)
        return jax.jit(grad)(base.X, ids, weights)

    got, want = step("ffi"), step("xla")
    sums = np.asarray(got[1]).reshape(4, -1).sum(1).tolist()
    assert sums == [1550.40625, 1677.28125, 1456.9375, 1911.1875]
    assert_same_bits(got, want)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
def test_the_moe_layer(mesh, rounds, placed):
    """With further rounds and with replicas: the reference's values and gradients."""
    num_experts, hidden = 16, 64
    config = jax_ep.MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=2,
        hidden_size=hidden,
        moe_intermediate_size=96,
        load_balance_loss_weight=0.01,
        capacity_factor=0.75 if rounds else None,
        dropless_fallback=rounds,
    )
    params = jax_ep.init_params(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (mesh.size * 48, hidden))
    placement = None
    if placed:
        loads = np.arange(1.0, num_experts + 1) ** 2
        placement = jax_ep.plan_placement(
            loads, num_ranks=mesh.size, num_slots=num_experts + mesh.size
        )

    def step(implementation):
        chosen = dataclasses.replace(config, implementation=implementation)

        def loss(params, x):
            out, stats = jax_ep.sharded_moe(
                x, params, chosen, mesh=mesh, placement=placement
            )
            return (out**2).sum() + stats.aux_loss, stats.num_rounds

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        with jax.default_matmul_precision("highest"):
            return jax.jit(grad)(params, x)

    got, want = step("ffi"), step("xla")
    (_, num_rounds), _ = got
    assert (int(num_rounds[0]) > 1) == rounds
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 * np.abs(w).max())


def test_two_micro_batches_in_flight(mesh):
    """Both dispatched before the first is combined, a hundred times."""

    def both(a, b, ids, weights, scales):
        handle = jax_ep.dispatch_layout(ids, num_experts=8, implementation="ffi")
        sent = [jax_ep.dispatch(x, handle, weights) for x in (a, b)]
        rows = base.row_scales(scales, handle)
        ys = [recv * (recv_weights * rows)[:, None] for recv, recv_weights in sent]
        return tuple(jax_ep.combine(y, handle) for y in ys)

    step = on_ranks(both, mesh)
    args = (base.X, 12 - base.X, *BASE_ARRAYS[1:])
    first, second = gpu_launch.repeat(step, args, REPEATS)
    assert_bits_equal(first, base.outputs())
    assert_bits_equal(second, base.outputs(12 - base.X))
    assert np.asarray(second).reshape(4, -1).sum(1).tolist() == [
        452,
        587.75,
        481.25,
        532.25,
    ]


def test_launches_in_flight(mesh):
    """Thirty before the first is waited for."""
    step = jax.jit(layer(mesh))
    outs = [step(base.X + np.float32(n), *BASE_ARRAYS[1:]) for n in range(30)]
    for n, out in enumerate(jax.block_until_ready(outs)):
        assert_bits_equal(out, base.outputs(base.X + np.float32(n)))


def test_a_kept_closure(mesh):
    """A vjp closure outlives other allocations, and its handle serves a new batch."""
    make = functools.partial(
        jax_ep.dispatch_layout, num_experts=8, implementation="ffi"
    )
    handle = on_ranks(make, mesh)(base.IDS)

    def use(x, weights, scales, handle):
        recv, recv_weights = jax_ep.dispatch(x, handle, weights)
        y = recv * (recv_weights * base.row_scales(scales, handle))[:, None]
        return jax_ep.combine(y, handle)

    step = on_ranks(use, mesh)
    out, pull_back = jax.vjp(
        lambda *args: step(*args, handle), base.X, base.WEIGHTS, base.SCALES
    )
    for device in mesh.devices.flat:
        jax.device_put(np.zeros(2**28, np.float32), device).delete()  # 1 GiB
    gradients = jax.jit(pull_back)(jnp.ones_like(out))
    for got, want in zip(gradients, base.gradients(), strict=True):
        assert_bits_equal(got, want)
    again = step(12 - base.X, base.WEIGHTS, base.SCALES, handle)
    assert_bits_equal(again, base.outputs(12 - base.X))


def test_reversed_devices(mesh):
    """Ranks are positions in the mesh, whatever the devices' ids."""
    backwards = Mesh(mesh.devices[::-1], ("expert",))
    check_base(layer(backwards))
    shape = on(mesh.size, Pipeline(case(65, 3, 8, "masked", 150, 4), ((BF16, 129),)))
    args = inputs(shape, backwards)
    got, want = (program(shape, backwards, kind)(*args) for kind in ("ffi", "xla"))
    del got["handle"], want["handle"]
    assert_same_bits(got, want)


GRIDS = {
    "expert minor": (("data", "expert"), "expert"),
    "expert major": (("expert", "data"), "expert"),
    "both axes": (("a", "b"), ("a", "b")),
    "both axes, swapped": (("a", "b"), ("b", "a")),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_two_dimensional_meshes(grid, reverse):
    """Groups of two ranks on either axis, or one of four over both, in one program."""
    names, axis = GRIDS[grid]
    devices = np.array(GPU.devices(4))[:: -1 if reverse else 1].reshape(2, 2)
    mesh = Mesh(devices, names)
    axes = (axis,) if isinstance(axis, str) else axis
    data = tuple(name for name in names if name not in axes)
    spec = P((*data, *axes))  # data groups in front, ranks inside

    def run(x, ids, weights, scales):
        return base.layer(x, ids, weights, scales, axis_name=axis, implementation="ffi")

    function = jax.shard_map(
        run, mesh=mesh, in_specs=(spec, spec, spec, P(axes)), out_specs=spec
    )
    check_base(function)


def test_two_meshes_and_one_after(mesh):
    """Alive together and in turn; and one made when the others are gone."""
    orders = [mesh.devices, np.roll(mesh.devices, 1)]
    meshes = [Mesh(order, ("expert",)) for order in orders]
    steps = [jax.jit(layer(one)) for one in meshes]
    outs = [step(*BASE_ARRAYS) for _ in range(5) for step in steps]
    for out in jax.block_until_ready(outs):
        assert_bits_equal(out, base.outputs())
    del meshes, steps, outs, out
    jax.clear_caches()
    gc.collect()
    renamed = Mesh(mesh.devices[::-1], ("other",))

    def run(x, ids, weights, scales):
        return base.layer(x, ids, weights, scales, axis_name="other")

    check_base(
        jax.shard_map(run, mesh=renamed, in_specs=P("other"), out_specs=P("other"))
    )


def test_many_shapes_in_turn(mesh):
    """Executables of different shapes share a workspace; each new one works at once."""
    shapes = [
        on(mesh.size, Pipeline(case(tokens, topk, 16, "masked"), ((BF16, width),)))
        for tokens, topk, width in ((3, 1, 8), (500, 4, 4096), (64, 8, 33))
    ]
    args = [inputs(shape, mesh) for shape in shapes]
    runs = [program(shape, mesh, "ffi") for shape in shapes]
    wants = [run(*arg) for run, arg in zip(runs, args, strict=True)]
    counts = []
    for order in np.random.default_rng(0).integers(0, 3, 60):
        again = runs[order](*args[order])
        counts.append(differing(again, wants[order]))
        if len(counts) % 8 == 0:
            jax.block_until_ready(counts)
    for count in counts:
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(count))


def test_no_error_remains(mesh):
    """After everything above."""
    time.sleep(0.3)  # longer than the watcher sleeps
    jax_ep.check()


@pytest.mark.timeout(1800)
def test_soak(mesh):
    """Two thousand steps of twenty shapes; see gpu_soak.py."""
    if GPU.platform == "gpu":
        assert gpu_soak.soak(mesh, seeds=100, seconds=1500) == 2000
    else:
        small = [s for s in gpu_soak.shapes(mesh.size) if s.case.tokens <= 100][:3]
        assert gpu_soak.soak(mesh, seeds=2, seconds=60, chosen=small) == 6
