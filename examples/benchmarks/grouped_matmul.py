#!/usr/bin/env python
"""The grouped products of the experts on one GPU: XLA's against tokamax's.

    pip install '.[cuda13]' 'tokamax[cuda]>=0.0.17'
    python examples/benchmarks/grouped_matmul.py --out grouped_matmul.json

For each model, its two products (up: H to F, down: F to H), and for each of them
forward, dgrad and wgrad by every kernel: milliseconds, TFLOP/s over the rows that
belong to a group, their fraction of the dense peak, and the repeats' spread. Groups are
what a uniformly random router gives one of 4 ranks; the buffer has a quarter more rows
than the groups, as with a capacity factor of 1.25, and zeros there. "dense" is XLA's
batched product of groups of equal size: what the device gives when nothing is ragged.
The fastest kernel is timed again with each group padded to a multiple of rows, for the
same useful work: whether an expert alignment pays.

Every result is compared with float32 products of its first, middle and last group. A
kernel that fails is reported with the reason, and the run goes on. Kernels compile in
threads while none is timed.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
import logging
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.grouped_matmul import Kernel, product

PEAK = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # NVIDIA's, dense bfloat16
SECONDS, REPEATS = 0.02, 5  # of launches in flight; of which the median counts
ALIGNMENTS = (8, 128)  # of group sizes, tried with the fastest kernel
TOLERANCE = 4 * float(jnp.finfo(jnp.bfloat16).eps)  # of the largest entry
THREADS = 12


@dataclasses.dataclass(frozen=True)
class Model:
    """Shapes on one of 4 ranks, 8192 tokens a rank."""

    name: str
    rows: int  # 8192 K
    groups: int  # E / 4
    hidden: int
    expert_hidden: int


MODELS = (
    Model("DeepSeek-V3", 65536, 64, 7168, 2048),
    Model("Mixtral-8x7B", 16384, 2, 4096, 14336),
    Model("Qwen3-30B-A3B", 65536, 32, 2048, 768),
)

# What tokamax's tuning on H100 chose for such shapes, beside its own choice for a
# device that it was not tuned on.
MOSAIC = dict(block_m=128, block_n=64, block_k=128, num_stages=4, split_k=1)
KERNELS = (
    Kernel("triton"),
    Kernel(
        "triton",
        tuple(dict(block_m=128, block_n=256, block_k=32).items())
        + (("num_warps", 8), ("num_stages", 5)),
    ),
    Kernel(
        "triton",
        tuple(dict(block_m=128, block_n=256, block_k=64).items())
        + (("num_warps", 8), ("num_stages", 4)),
    ),
    Kernel(
        "mosaic",
        tuple(MOSAIC.items())
        + (("persistent", True), ("grid_minor_dim", 1), ("grid_tile_width", 8)),
    ),
    Kernel(
        "mosaic",
        tuple((MOSAIC | dict(num_stages=2)).items())
        + (("persistent", False), ("grid_minor_dim", 0), ("grid_tile_width", 1)),
    ),
    Kernel("mosaic"),
    Kernel("xla"),
    Kernel("tokamax_xla"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of one projection: `lhs [C, k] x rhs [L, k, n]`."""

    model: Model
    projection: str
    which: str

    def __str__(self) -> str:
        return f"{self.model.name:14} {self.projection:4} {self.which:7}"

    @property
    def widths(self) -> tuple[int, int]:
        """k and n of the forward product."""
        sizes = (self.model.hidden, self.model.expert_hidden)
        return sizes if self.projection == "up" else sizes[::-1]

    @property
    def flops(self) -> int:
        """Multiplications and additions of the rows that belong to a group."""
        return 2 * self.model.rows * self.widths[0] * self.widths[1]

    def operands(self):
        """Of `product`, and the group sizes; rows past the groups are zero."""
        model, (k, n) = self.model, self.widths
        capacity = model.rows * 5 // 4
        rng = np.random.default_rng(0)
        sizes = rng.multinomial(model.rows, np.full(model.groups, 1 / model.groups))
        rows, weights = make_operands(capacity, model.rows, model.groups, k, n)
        lhs = rows[1] if self.which == "dgrad" else rows[0]
        rhs = rows[1] if self.which == "wgrad" else weights
        return lhs, rhs, jnp.asarray(sizes, jnp.int32)


@functools.lru_cache(maxsize=1)
def make_operands(capacity, rows, groups, k, n):
    """Of one projection's three products: rows of both widths, and weights."""

    def make():
        keys = jax.random.split(jax.random.key(0), 3)
        kept = (jnp.arange(capacity) < rows)[:, None]
        lhs, out = (
            jnp.where(kept, jax.random.normal(key, (capacity, width), jnp.bfloat16), 0)
            for key, width in zip(keys, (k, n), strict=False)
        )
        weights = jax.random.normal(keys[2], (groups, k, n), jnp.bfloat16) / k**0.5
        return (lhs, out), weights

    return jax.block_until_ready(jax.jit(make)())


def error(case: Case, out, lhs, rhs, sizes) -> float:
    """Largest difference to float32 products, over their largest entry."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(sizes))])
    worst = 0.0
    for group in {0, case.model.groups // 2, case.model.groups - 1}:
        rows = slice(int(offsets[group]), int(offsets[group + 1]))
        weights = rhs[group] if case.which != "wgrad" else rhs[rows]
        pairs = dict(forward="rk,kn->rn", dgrad="rn,kn->rk", wgrad="rk,rn->kn")
        expected = jnp.einsum(
            pairs[case.which], lhs[rows], weights, preferred_element_type=jnp.float32
        )
        got = out[group] if case.which == "wgrad" else out[rows]
        largest = jnp.abs(expected).max()
        worst = max(worst, float(jnp.abs(got - expected).max() / largest))
    return worst


def measure(program, args) -> tuple[float, float]:
    """Seconds of one launch among launches in flight, and the repeats' spread."""
    jax.block_until_ready(program(*args))
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    launches = int(min(20, max(2, SECONDS / (time.perf_counter() - start))))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(launches):
            out = program(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / launches)
        del out
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median


def compile_one(kernel: Kernel, case: Case, shapes):
    """The program of a kernel, or what it failed with."""
    try:
        run = functools.partial(product, kernel, case.which)
        return jax.jit(run).lower(*shapes).compile()
    except Exception as e:  # Whatever a kernel fails with is a result here.
        return f"{type(e).__name__}: {e}".splitlines()[0][:160]


def dense(case: Case):
    """The same flops in groups of equal size: seconds of one batched product."""
    model, (k, n) = case.model, case.widths
    each = model.rows // model.groups
    (lhs, out), weights = make_operands(
        model.rows * 5 // 4, model.rows, model.groups, k, n
    )
    rows = [
        a[: each * model.groups].reshape(model.groups, each, -1) for a in (lhs, out)
    ]
    pairs = dict(
        forward=("grk,gkn->grn", rows[0], weights),
        dgrad=("grn,gkn->grk", rows[1], weights),
        wgrad=("grk,grn->gkn", *rows),
    )
    spec, *args = pairs[case.which]
    return measure(jax.jit(functools.partial(jnp.einsum, spec)), args)


def report(records: list, case: Case, kernel: str, seconds, spread, peak, **more):
    """Prints a line as it comes, and keeps it."""
    rate = case.flops / seconds
    records.append(
        dict(
            model=case.model.name,
            projection=case.projection,
            product=case.which,
            kernel=kernel,
            ms=seconds * 1e3,
            spread=spread,
            tflops=rate / 1e12,
            fraction=rate / peak if peak else None,
            **more,
        )
    )
    of_peak = f"{rate / peak:6.0%}" if peak else "      "
    print(
        f"{case} {seconds * 1e3:9.3f} ms {rate / 1e12:6.0f} TFLOP/s {of_peak}  "
        f"{spread:4.0%}  {kernel}",
        flush=True,
    )


def run_case(case: Case, kernels, pool, records, peak) -> None:
    """All kernels of one product."""
    args = case.operands()
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    programs = list(pool.map(lambda k: compile_one(k, case, shapes), kernels))
    report(records, case, "dense", *dense(case), peak)
    fastest = None
    for kernel, program in zip(kernels, programs, strict=True):
        failed = program if isinstance(program, str) else None
        if failed is None:
            try:
                off = error(case, program(*args), *args)
                if off <= TOLERANCE:
                    seconds, spread = measure(program, args)
                    report(records, case, str(kernel), seconds, spread, peak, error=off)
                    if fastest is None or seconds < fastest[0]:
                        fastest = seconds, kernel, program
                    continue
                failed = f"wrong by {off:.2g} of the largest entry"
            except Exception as e:  # Out of memory, say.
                failed = f"{type(e).__name__}: {e}".splitlines()[0][:160]
        print(f"{case} failed: {kernel}: {failed}", flush=True)
        records.append(
            dict(
                model=case.model.name,
                projection=case.projection,
                product=case.which,
                kernel=str(kernel),
                failed=failed,
            )
        )
    if fastest is not None:
        _, kernel, program = fastest
        lhs, rhs, sizes = args
        for alignment in ALIGNMENTS:
            sizes = -(-sizes // alignment) * alignment
            seconds, spread = measure(program, (lhs, rhs, sizes))
            name = f"{kernel}, groups of a multiple of {alignment}"
            report(records, case, name, seconds, spread, peak, alignment=alignment)


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {}
    for name in (
        "jax",
        "jaxlib",
        "nvidia-cudnn-cu13",
        "tokamax",
        "jax-triton",
        "triton",
    ):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write(path: pathlib.Path | None, kind: str, records: list) -> None:
    """All records so far, so that a run that is cut off leaves what it has."""
    if path is not None:
        partial = path.with_suffix(".partial")
        document = dict(device=kind, versions=versions(), records=records)
        partial.write_text(json.dumps(document, indent=1))
        partial.replace(path)


def print_fastest(cases, records: list) -> None:
    """Of each product the fastest kernel, beside XLA's."""
    for case in cases:
        key = (case.model.name, case.projection, case.which)
        timed = {
            r["kernel"]: r["ms"]
            for r in records
            if (r["model"], r["projection"], r["product"]) == key
            and "ms" in r
            and "alignment" not in r
        }
        timed.pop("dense", None)
        if timed:
            best = min(timed, key=timed.__getitem__)
            gain = f"{timed['xla'] / timed[best]:.1f} x XLA's" if "xla" in timed else ""
            print(f"fastest: {case} {timed[best]:8.3f} ms {gain:12} {best}")


def main(argv: list[str] | None = None) -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[m.name for m in MODELS])
    parser.add_argument("--seconds", type=float, default=60, help="start none after it")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file of all records")
    parser.add_argument("--tiny", action="store_true", help="shapes to try the script")
    args = parser.parse_args(argv)
    models = [m for m in MODELS if not args.models or m.name in args.models]
    if args.tiny:
        models = [
            dataclasses.replace(m, rows=512, groups=4, hidden=256, expert_hidden=128)
            for m in models
        ]
    logging.getLogger("absl").setLevel(logging.ERROR)  # "Autotuning cache miss"
    kind = jax.devices()[0].device_kind
    peak = next((p for name, p in PEAK.items() if kind.startswith(name)), None)
    print(f"{kind}, {versions()}, rows {[m.rows for m in models]} + 25 %", flush=True)
    start, records = time.perf_counter(), []
    cases = [
        Case(model, projection, which)
        for projection in ("up", "down")
        for model in models
        for which in ("forward", "dgrad", "wgrad")
    ]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for case in cases:
            if time.perf_counter() - start > args.seconds:
                print(f"{args.seconds:.0f} s are over: {case} and later are left out.")
                break
            run_case(case, KERNELS, pool, records, peak)
            write(args.out, kind, records)
    print_fastest(cases, records)
    return 0 if any("ms" in r for r in records) else 1


if __name__ == "__main__":
    sys.exit(main())
