"""Layout, dispatch and combine on GPUs, beside their rivals and the machine's ceilings.

    python dispatch_combine.py [--quick] [--json FILE]

One process, all local GPUs (or so many as --ranks says) as the ranks of one axis.
README.md says how times are taken and how to read the tables. Every result is compared
with the reference before it is timed.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import json
import os
import time
import traceback
from pathlib import Path

# Several processes share the GPUs, one after another.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import rivals  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from jax_ep.tools.benchmark import ceilings, tables, timing  # noqa: E402
from jax_ep.tools.benchmark.exchanges import AXIS  # noqa: E402
from jax_ep.tools.benchmark.setting import Bench, Setting  # noqa: E402

FEW_SMS, ALL_SMS = 32, 1000  # `num_sms` of the sweep; more than there are is all


def settings(args) -> list[Setting]:
    """What the command line asks for."""
    forward = (("dispatch", None), ("combine", None))
    backward = (("dispatch backward", None), ("combine backward", None))
    main = (("layout", None), *forward, *backward)
    few = (("layout", None), ("round trip", None))
    if args.quick:
        return [
            Setting("uniform", args.tokens, "1.25", main),
            Setting("uniform", args.few_tokens, "1.25", few),
        ]
    sweep = tuple((name, n) for n in (FEW_SMS, ALL_SMS) for name, _ in forward)
    middle = [t for t in (args.tokens // 8, 2 * args.tokens) if t > args.few_tokens]
    return [
        Setting("uniform", args.tokens, "1.25", main + sweep),
        Setting("uniform", args.tokens, "dropless", forward + backward),
        Setting("zipf", args.tokens, "demand", forward),
        Setting("one-hot", args.tokens, "demand", forward),
        *(Setting("uniform", t, "1.25", main[:3]) for t in middle),
        Setting("uniform", args.few_tokens, "1.25", few + forward),
    ]


def versions(devices) -> dict:
    """Of everything that the numbers depend on."""
    found = dict(
        date=datetime.date.today().isoformat(),
        device=devices[0].device_kind,
        ranks=len(devices),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
    )
    for package in ("jax_ep", "jax", "jaxlib", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="GPUs; default: all, at most 4")
    parser.add_argument("--tokens", type=int, default=8192, help="per rank")
    parser.add_argument("--few-tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="the least that tells")
    parser.add_argument("--kernels", action="store_true", help="a trace of one program")
    parser.add_argument("--json", metavar="FILE", help="all numbers, for programs")
    parser.add_argument("--ragged-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    same = ["ranks", "tokens", "few_tokens", "hidden", "topk", "experts"]
    argv = [
        part
        for name in same
        if getattr(args, name) is not None
        for part in (f"--{name.replace('_', '-')}", str(getattr(args, name)))
    ]
    return args, argv


def measure_ceilings(devices) -> ceilings.Ceilings | None:
    """None, with the reason printed, where they cannot be measured."""
    try:
        # A thread of its own: the driver's current context belongs to a thread.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            found = pool.submit(ceilings.measure, devices).result()
    except Exception as error:
        print(f"ceilings not measured: {error}", flush=True)
        return None
    by_sms = ", ".join(f"{n}: {v / 1e9:.1f}" for n, v in found.egress_by_sms.items())
    print(
        f"ceilings, GB/s: egress per GPU by SMs {{{by_sms}}}, ingress "
        f"{found.ingress / 1e9:.1f}, memory read + written {found.memory / 1e9:.0f}",
        flush=True,
    )
    return found


def main() -> None:
    args, argv = parse()
    start = time.monotonic()
    devices = jax.devices()[: args.ranks or 4]
    mesh = Mesh(np.array(devices), (AXIS,))
    if args.ragged_only:
        print(json.dumps(rivals.run_ragged(args, mesh)))
        return
    about = versions(devices)
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    on_gpu = devices[0].platform == "gpu"
    limits = measure_ceilings(devices) if on_gpu and len(devices) > 1 else None
    num_sms = max(limits.egress_by_sms) if limits else 0

    flags = {"default": ""} if args.quick else rivals.RAGGED_FLAGS
    benches = [Bench.of(setting, args, mesh) for setting in settings(args)]
    with concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        # Nothing runs on the GPUs while we compile, so other processes may be timed.
        ragged = (
            pool.submit(rivals.ragged_processes, __file__, argv, flags)
            if on_gpu
            else None
        )
        compiling = [
            {name: pool.submit(each.compile) for name, each in lowered.items()}
            for lowered in ([bench.lower() for bench in benches])
        ]
        ring = {
            name: pool.submit(each.compile)
            for name, each in rivals.lower_ring(benches[0]).items()
        }
        compiled = [
            {name: each.result() for name, each in programs.items()}
            for programs in compiling
        ]
        ring = {name: each.result() for name, each in ring.items()}
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
        others = ragged.result() if ragged else []
    print(f"rivals' processes after {time.monotonic() - start:.0f} s\n", flush=True)

    print(tables.header(), flush=True)
    result = dict(
        about=about,
        shape=dict(hidden=args.hidden, topk=args.topk, experts=args.experts),
        ceilings=limits and dataclasses.asdict(limits),
        records=[],
    )
    records = result["records"]
    for bench, programs in zip(benches, compiled, strict=True):
        found = bench.run(programs, limits, num_sms)
        tables.print_records(found)
        records += found
        write(args.json, result)
    ring["bench"] = compiled[0]
    found = [*rivals.run_ring(benches[0], ring), *others]
    tables.print_records(found)
    records += found
    tables.print_summary(records, limits, args.tokens)
    write(args.json, result)
    if args.kernels:
        try:
            result["kernels"] = timing.kernel_times(benches[-1], compiled[-1])
            print(f"kernels, us, T {args.few_tokens}: {result['kernels']}", flush=True)
            write(args.json, result)
        except Exception:
            traceback.print_exc()
    print(f"{time.monotonic() - start:.0f} s in all", flush=True)
    if any("differs" in record.get("failed", "") for record in records):
        raise SystemExit("results are wrong: see above")


def write(path: str | None, result: dict) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
