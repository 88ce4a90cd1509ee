"""Thousands of steps of many shapes and routings, in turn, against the reference.

    gpu_soak.py [--seeds 100] [--seconds 600] [--ranks 4]

A step runs the pipeline and its derivatives (`pipeline.py`) of one of twenty shapes
with a routing of its own: ids, masks and skew drawn from the seed. Eight steps of
different shapes are in flight at a time, and no step's data is another's. Ends with an
error at the first differing bit, and names shape and seed.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pipeline
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layout_test import Case
from pipeline import Pipeline

import jax_ep

IN_FLIGHT = 8  # steps; each is three launches, and jax < 0.12 bears no more than 32

BF16, F16, F32 = "bfloat16", "float16", "float32"


def shapes(ranks: int) -> list[Pipeline]:
    """Twenty: few and many tokens, slots, experts and bytes, drops, alignments."""

    def shape(tokens, topk, experts, *leaves, capacity=None, alignment=1, **more):
        case = Case(ranks, tokens, topk, experts, capacity, alignment)
        return Pipeline(case, leaves, **more)

    return [
        shape(1, 1, 8, (F32, 1)),
        shape(3, 2, 8, (BF16, 8), alignment=4),
        shape(16, 8, 64, (BF16, 7168)),
        shape(64, 1, 8, (F16, 33)),
        shape(65, 32, 64, (F32, 16), capacity=900),
        shape(100, 6, 2048, (BF16, 96)),
        shape(127, 4, 16, (BF16, 2048), alignment=128),
        shape(128, 8, 256, (BF16, 7168), alignment=16),
        shape(200, 3, 24, (F32, 1000), (BF16, 5), (F16, 64)),
        shape(256, 2, 32, (BF16, 20000)),
        shape(256, 2, 32, (BF16, 1024), num_sms=4),
        shape(300, 7, 64, (BF16, 512), wire_f32=True),
        shape(333, 5, 8, (F16, 257), capacity=1000, alignment=8),
        shape(512, 8, 128, (BF16, 4096), capacity=4096, alignment=128),
        shape(777, 10, 64, (F32, 24)),
        shape(1000, 4, 96, (BF16, 256), capacity=4500),
        shape(1024, 8, 32, (BF16, 1536), capacity=12000, alignment=64),
        shape(1500, 2, 8, (F32, 512), wire_f32=True),
        shape(2048, 1, 256, (BF16, 2048)),
        shape(4097, 16, 128, (BF16, 40)),
    ]


def routing(case: Case, random: np.random.Generator) -> np.ndarray:
    """`[R*T, K]` ids: skewed towards some experts, masked, with silent ranks."""
    shape = (case.ranks, case.tokens, case.topk)
    # From even to nearly everything on a few experts, whichever those are.
    skew = random.choice([0.0, 0.5, 1.0, 3.0])
    weight = (1.0 + np.arange(case.experts)) ** -skew
    weight = random.permutation(weight / weight.sum())
    ids = np.searchsorted(np.cumsum(weight), random.random(shape)).astype(np.int32)
    ids = np.minimum(ids, case.experts - 1)
    masked = random.choice([0.0, 0.1, 0.7])
    ids[random.random(shape) < masked] = -1
    if random.random() < 0.2:
        ids[random.integers(case.ranks)] = -1
    if random.random() < 0.2:
        ids[random.integers(case.ranks), : case.tokens // 2] = case.experts + 5
    if random.random() < 0.05:
        ids[:] = random.integers(case.experts)
    return ids.reshape(-1, case.topk)


def arrays(results: dict) -> dict:
    """Without the handle's static fields, in which implementations differ."""
    handle = vars(results["handle"])
    return dict(
        results,
        handle={name: leaf for name, leaf in handle.items() if hasattr(leaf, "shape")},
    )


@dataclasses.dataclass
class Step:
    """A compiled shape."""

    shape: Pipeline
    make: object
    got: object
    want: object
    differing: object

    def counts(self, mesh: Mesh, seed: int, random: np.random.Generator):
        """Launches a step; how many elements of each array differ."""
        spec = NamedSharding(mesh, P("expert"))
        ids = jax.device_put(routing(self.shape.case, random), spec)
        floats = self.make(np.uint32(seed))
        results = [arrays(run(ids, floats)) for run in (self.got, self.want)]
        return self.differing(*results)


def compile_all(mesh: Mesh, chosen: list[Pipeline]) -> list[Step]:
    """All programs, in parallel where XLA compiles."""
    spec = NamedSharding(mesh, P("expert"))

    def on_mesh(tree):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=spec), tree
        )

    def lowered(shape):
        seed = jax.ShapeDtypeStruct((), jnp.uint32)
        make = pipeline.float_maker(shape, mesh).lower(seed)
        slots = (mesh.size * shape.case.tokens, shape.case.topk)
        args = on_mesh((jax.ShapeDtypeStruct(slots, jnp.int32), make.out_info))
        runs = [
            pipeline.program(shape, mesh, implementation).lower(*args)
            for implementation in ("ffi", "xla")
        ]
        results = [on_mesh(arrays(run.out_info)) for run in runs]
        return [make, *runs, pipeline.differing.lower(*results)]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = [
            [pool.submit(program.compile) for program in lowered(shape)]
            for shape in chosen
        ]
        return [
            Step(shape, *(future.result() for future in programs))
            for shape, programs in zip(chosen, compiled, strict=True)
        ]


def check(pending) -> list[str]:
    """What differs in the steps launched."""
    wrong = []
    for shape, seed, counts in pending:
        for path, count in jax.tree_util.tree_leaves_with_path(counts):
            if int(count):
                name = jax.tree_util.keystr(path)
                wrong.append(f"{shape}, seed {seed}: {name} in {int(count)} elements")
    jax_ep.check()
    return wrong


def soak(mesh: Mesh, seeds: int, seconds: float, chosen=None, say=print) -> int:
    """Runs until all seeds or the seconds are over; how many steps.

    Raises:
      AssertionError: two implementations differed in a bit.
    """
    start = time.monotonic()
    steps = compile_all(mesh, chosen or shapes(mesh.size))
    say(f"{len(steps)} shapes compiled in {time.monotonic() - start:.0f} s")
    done, pending, wrong, reported = 0, [], [], time.monotonic()
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        for index in random.permutation(len(steps)):
            step = steps[index]
            pending.append((step.shape, seed, step.counts(mesh, seed, random)))
            done += 1
            if len(pending) == IN_FLIGHT:
                wrong += check(pending)
                pending = []
        wrong += check(pending)
        pending = []
        assert not wrong, "\n".join(wrong)
        now = time.monotonic()
        if now - reported > 5:
            reported = now
            say(f"{done} steps, seed {seed}, {now - start:.0f} s")
        if now - start > seconds:
            say(f"stopped after {seconds:.0f} s")
            break
    say(f"{done} steps equal the reference, {time.monotonic() - start:.0f} s")
    return done


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--ranks", type=int, help="default: all devices, at most 4")
    args = parser.parse_args()
    platform = os.environ.get("JAX_EP_GPU_TESTS_PLATFORM", "gpu")
    devices = jax.devices("cpu" if platform == "cpu" else "cuda")
    mesh = Mesh(np.array(devices[: args.ranks or 4]), ("expert",))
    soak(mesh, args.seeds, args.seconds, say=lambda text: print(text, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
