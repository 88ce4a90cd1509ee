"""One process of a test: runs scenarios on all its devices, a line of JSON for each.

    gpu_launch.py [--coordinator HOST:PORT --processes N --process I --devices D]
        SCENARIO[:ARGUMENT]...

Flags of XLA and whatever else belongs to a process are its starter's business
(`gpu_processes.py`). With JAX_EP_GPU_TESTS_PLATFORM=cpu, on CPU devices.
"""

import argparse
import functools
import hashlib
import json
import os
import sys
import time
import traceback

import base
import jax
import jax.numpy as jnp
import numpy as np
import pipeline
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layout_test import Case

import jax_ep

TIMEOUT_S, HOLD_S = 2.0, 5.0  # of a wait, and how long a rank is held back


BY_RANK = P("expert")


def put(mesh: Mesh, array, spec=BY_RANK):
    """A global array of which each process holds its devices' part."""
    array = np.asarray(array)
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )


def digest(tree) -> dict[str, str]:
    """A hash of each shard that this process holds, by array and position."""
    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        for shard in array.addressable_shards:
            # The same shard may lie on several devices.
            start = [part.start or 0 for part in shard.index]
            data = np.ascontiguousarray(np.asarray(shard.data))
            name = f"{jax.tree_util.keystr(path)}@{start}"
            found[name] = hashlib.sha256(data.tobytes()).hexdigest()[:16]
    return found


def repeat(step, args, times: int):
    """The result of `times` runs, which must all have the same bits."""
    first = jax.block_until_ready(step(*args))
    jax_ep.check()
    for run in range(1, times):
        again = jax.block_until_ready(step(*args))
        jax_ep.check()
        pipeline.assert_same_bits(again, first, f"run {run} against run 0")
    return first


def shards_equal(array, want) -> None:
    """The shards that this process holds, against a whole array."""
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])


# --- scenarios: mesh and argument to what is printed ---------------------------


def base_layer(mesh, times: str = "50"):
    """The base layer's value and gradients, exact."""
    layer = jax.shard_map(
        base.layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )

    def loss(x, ids, weights, scales):
        out = layer(x, ids, weights, scales)
        return out.sum(), out

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3), has_aux=True))
    arrays = (base.X, base.IDS, base.WEIGHTS, base.SCALES)
    (value, out), gradients = repeat(step, [put(mesh, a) for a in arrays], int(times))
    assert float(value.addressable_shards[0].data) == 2074.75
    shards_equal(out, base.outputs())
    for got, want in zip(gradients, base.gradients(), strict=True):
        shards_equal(got, want)
    return digest((out, gradients))


def two_dispatches(mesh, times: str = "50"):
    """Two exchanges in one program that do not depend on each other."""
    ids = [base.IDS, (base.IDS + 3) % 8]

    def both(x, weights, scales, *ids):
        outs = [base.layer(x, one, weights, scales) for one in ids]
        return outs[0], outs[1]

    step = pipeline.on_ranks(both, mesh)
    arrays = (base.X, base.WEIGHTS, base.SCALES, *ids)
    outs = repeat(step, [put(mesh, a) for a in arrays], int(times))
    for out, one in zip(outs, ids, strict=True):
        shards_equal(out, base.outputs(ids=one))
    return digest(outs)


def large(mesh, times: str = "1"):
    """Everything at once for many tokens, slots and experts, of odd numbers."""
    case = Case(mesh.size, 4097, 16, 128, None, 1, "masked")
    shape = pipeline.Pipeline(case, (("bfloat16", 72),))
    step = pipeline.program(shape, mesh, None)
    return digest(repeat(step, pipeline.inputs(shape, mesh), int(times)))


def layers(mesh, argument=""):
    """Four scanned layers under remat, each with a parameter sharded as in FSDP."""
    tokens, topk, experts, hidden, num_layers = 1024, 4, 96, 256, 4

    def layer(x, parameters):
        ids, weights, scale = parameters
        scale = lax.all_gather(scale, "expert", tiled=True)  # [H]
        handle = jax_ep.dispatch_layout(ids, num_experts=experts)
        recv, recv_weights = jax_ep.dispatch(x, handle, weights)
        y = jnp.tanh(recv * scale[None, :]) * recv_weights[:, None]
        return x + jax_ep.combine(y, handle), None

    def run(x, ids, weights, scales):
        return lax.scan(jax.checkpoint(layer), x, (ids, weights, scales))[0]

    by_layer = P(None, "expert")
    model = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(P("expert"), by_layer, by_layer, by_layer),
        out_specs=P("expert"),
    )

    def loss(x, ids, weights, scales):
        return (model(x, ids, weights, scales) ** 2).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 2, 3)))
    random = np.random.default_rng(0)
    rows = mesh.size * tokens
    ids = random.integers(-1, experts, (num_layers, rows, topk), np.int32)
    weights = random.random((num_layers, rows, topk), np.float32)
    scales = random.random((num_layers, hidden), np.float32)
    args = [put(mesh, random.random((rows, hidden), np.float32))]
    args += [put(mesh, array, by_layer) for array in (ids, weights, scales)]
    return digest(repeat(step, args, 10))


def beside_collectives(mesh, times: str = "200"):
    """Four layers, an all-gather in flight beside one and a psum beside another."""
    case = Case(mesh.size, 1024, 4, 32, None, 1, "masked")
    ids = case.ids().reshape(-1, 4)
    hidden, other = 512, 1 << 22
    random = np.random.default_rng(0)
    x = random.integers(-4, 5, (len(ids), hidden)).astype(np.float32)
    others = random.integers(0, 3, (2, mesh.size * other)).astype(np.float32)
    # Integers and maxima: exact, whatever XLA fuses.

    def body(x, a, b, ids, implementation):
        def layer(x, shift):
            handle = jax_ep.dispatch_layout(
                (ids + shift) % 32, num_experts=32, implementation=implementation
            )
            recv, _ = jax_ep.dispatch(x, handle)
            return jax_ep.combine(recv, handle)

        # What each collective needs and who needs it leave one layer to hide it behind.
        x = layer(x, 0) / 16
        everyone = lax.all_gather(a + x[0, 0], "expert", tiled=True)
        x = layer(x, 1) / 16  # beside the all-gather
        x = x + everyone[::other].sum()
        b = lax.psum(b + x[0, 0], "expert")
        x = layer(x, 2) / 16  # beside the psum
        return layer(x + b[0], 3), everyone.max()[None], b.max()[None]

    def step(implementation):
        return pipeline.on_ranks(
            functools.partial(body, implementation=implementation),
            mesh,
            check_vma=False,
        )

    args = [put(mesh, a) for a in (x, *others, ids)]
    compiled = step(None).lower(*args).compile()
    got = repeat(compiled, args, int(times))
    pipeline.assert_same_bits(got, step("xla")(*args), "against the reference")
    return dict(digest=digest(got), overlapped=overlapped(compiled.as_text()))


def overlapped(text: str) -> list[str]:
    """The asynchronous collectives in flight while one of our calls starts."""
    lines = text[text.index("\nENTRY ") :].splitlines()
    found = []
    for name in ("all-gather", "all-reduce"):
        marks = {"start": [], "done": []}
        calls = []
        for number, line in enumerate(lines):
            for kind, places in marks.items():
                if f" {name}-{kind}(" in line:
                    places.append(number)
            if 'custom_call_target="jax_ep_' in line:
                calls.append(number)
        for start, done in zip(*marks.values(), strict=False):
            if any(start < call < done for call in calls):
                found.append(name)
    return found


def exported(mesh, path: str):
    """A program that another process exported."""
    with open(path, "rb") as file:
        program = jax.export.deserialize(bytearray(file.read()))
    arrays = (base.X, base.IDS, base.WEIGHTS, base.SCALES)
    out, gradients = jax.jit(program.call)(*[put(mesh, a) for a in arrays])
    shards_equal(out, base.outputs())
    for got, want in zip(gradients, base.gradients(), strict=True):
        shards_equal(got, want)
    return digest((out, gradients))


def _layer_held_back(mesh, hold):
    """A layer in which `hold(stage, array, after)` lies before each stage."""

    def run(x, ids, weights):
        ids = hold("layout", ids, x)
        handle = jax_ep.dispatch_layout(ids, num_experts=8, timeout_s=TIMEOUT_S)
        x = hold("dispatch", x, handle.slot)
        recv, recv_weights = jax_ep.dispatch(x, handle, weights)
        y = hold("combine", recv * recv_weights[:, None], recv)
        return jax_ep.combine(y, handle), handle.slot, handle.group_counts

    return pipeline.on_ranks(run, mesh, check_vma=False)


def _stall_arrays(mesh):
    # Every rank sends to every rank.
    rows = mesh.size * 64
    ids = np.arange(rows)[:, None] + np.arange(4)[None, :] * 2
    random = np.random.default_rng(0)
    arrays = random.random((rows, 16), np.float32), (ids % 8).astype(np.int32)
    return [put(mesh, a) for a in (*arrays, random.random((rows, 4), np.float32))]


def say(**words) -> None:
    print(json.dumps(words), flush=True)


def _all_nan(out) -> bool:
    return all(np.isnan(np.asarray(s.data)).all() for s in out.addressable_shards)


def _failure(call) -> str:
    """The message with which it fails, or nothing."""
    try:
        jax.block_until_ready(call())
    except Exception as error:
        return str(error)
    return ""


def stall(mesh, stage: str):
    """The last rank comes late to a stage, by a callback that sleeps."""
    seconds = 0.0

    def sleep(rank, _):
        if rank == mesh.size - 1:
            time.sleep(seconds)
        return np.int32(0)

    def hold(where, array, after):
        if where != stage:
            return array
        rank = lax.axis_index("expert")
        result = jax.ShapeDtypeStruct((), jnp.int32)
        zero = jax.pure_callback(sleep, result, rank, after[0, 0])
        return array + zero.astype(array.dtype)

    step, args = _layer_held_back(mesh, hold), _stall_arrays(mesh)
    assert not _all_nan(jax.block_until_ready(step(*args))[0])
    jax_ep.check()
    seconds = HOLD_S
    say(event="launched", time=time.time())
    result = {}

    def late():
        result["out"] = step(*args)
        return result["out"]

    result["call"] = _failure(late)
    result["check"] = _failure(jax_ep.check)
    seconds = 0.0
    result["next"] = _failure(lambda: step(*args))
    if not result["call"]:  # CUDA: the outputs are there, and worthless
        out, slot, counts = result["out"]
        result["poisoned"] = _all_nan(out)
        if stage == "layout":
            for array, value in ((slot, -1), (counts, 0)):
                for shard in array.addressable_shards:
                    assert (np.asarray(shard.data) == value).all(), shard
    del result["out"]
    return result


def stopped(mesh, argument=""):
    """Each call waits for a line from the starter, who stops a process before one."""
    step = _layer_held_back(mesh, lambda _, array, after: array)
    args = _stall_arrays(mesh)
    for call in range(2):
        assert not _all_nan(jax.block_until_ready(step(*args))[0]), call
    say(event="ready", process=jax.process_index())
    sys.stdin.readline()
    say(event="launched", time=time.time(), process=jax.process_index())
    poisoned = _all_nan(jax.block_until_ready(step(*args))[0])
    result = dict(poisoned=poisoned, check=_failure(jax_ep.check))
    result["next"] = _failure(lambda: step(*args))
    say(event="failed", **result, process=jax.process_index())
    sys.stdin.readline()  # until the other one is through too
    return result


SCENARIOS = {
    function.__name__: function
    for function in (
        base_layer,
        two_dispatches,
        large,
        layers,
        beside_collectives,
        exported,
        stall,
        stopped,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--devices", type=int, required=True, help="of this process")
    parser.add_argument("scenarios", nargs="+")
    args = parser.parse_args()
    platform = os.environ.get("JAX_EP_GPU_TESTS_PLATFORM", "gpu")
    if args.processes > 1:
        first = args.process * args.devices
        local = list(range(first, first + args.devices))
        jax.distributed.initialize(
            args.coordinator,
            args.processes,
            args.process,
            local_device_ids=local if platform == "gpu" else None,
            initialization_timeout=60,
        )
    devices = jax.devices("cpu" if platform == "cpu" else "cuda")
    devices = devices[: args.devices * args.processes]
    assert len(devices) == args.devices * args.processes, devices
    mesh = Mesh(np.array(devices), ("expert",))
    failed = False
    for scenario in args.scenarios:
        name, _, argument = scenario.partition(":")
        start = time.perf_counter()
        try:
            run = SCENARIOS[name]
            words = dict(result=run(mesh, argument) if argument else run(mesh))
        except Exception:
            failed = True
            words = dict(error=traceback.format_exc())
        seconds = round(time.perf_counter() - start, 2)
        say(scenario=scenario, process=args.process, seconds=seconds, **words)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
