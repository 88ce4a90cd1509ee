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
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

# Several processes share the GPUs, one after another.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import ceilings  # noqa: E402
import exchanges  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import routings  # noqa: E402
from exchanges import AXIS, STEPS, Layer, on_ranks  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

FREE_SMS = 32  # that jax_ep leaves by default
FEW_SMS, ALL_SMS = 32, 1000  # `num_sms` of the sweep; more than there are is all
WARM_UPS, REPEATS, SECONDS = 3, 5, 0.1  # runs before, and of which the median counts
MAX_IN_FLIGHT = 25  # launches; jax < 0.12 bears no more than 32

# Flags of XLA for ragged_all_to_all; what a jaxlib does not know fails at its start.
RAGGED_FLAGS = {
    "default": "",
    "send/recv": "--xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel=false "
    "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true",
    "symmetric": "--xla_gpu_ragged_all_to_all_mode=symmetric",
    "peer": "--xla_gpu_ragged_all_to_all_mode=peer",
}
RAGGED_LIMIT_S, RAGGED_BUDGET_S = 40, 80  # for one of these processes, and for all


@dataclasses.dataclass(frozen=True)
class Setting:
    """A routing and a capacity, and what is timed there: names and numbers of SMs."""

    routing: str
    tokens: int
    capacity: str  # "1.25", "dropless" or "demand"
    timed: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        return f"{self.routing}, T {self.tokens}, C {self.capacity}"


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


class Bench:
    """A setting with its layer, programs and arrays."""

    def __init__(self, setting: Setting, args, mesh: Mesh):
        self.setting, self.mesh = setting, mesh
        ranks, tokens, topk = mesh.size, setting.tokens, args.topk
        self.ids = routings.make_ids(setting.routing, ranks, tokens, topk, args.experts)
        self.traffic = routings.traffic(self.ids, args.experts)
        capacity = {
            "1.25": int(1.25 * tokens * topk),
            "dropless": ranks * tokens * topk,
            "demand": int(self.traffic.demand.max()),
        }[setting.capacity]
        self.layer = Layer(tokens, args.hidden, topk, args.experts, capacity)
        self.sharding = NamedSharding(mesh, P(AXIS))

        def of(rows, width, dtype):
            shape = (ranks * rows, *width)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

        self.types = dict(
            ids=of(tokens, (topk,), jnp.int32),
            x=of(tokens, (args.hidden,), jnp.bfloat16),
            y=of(capacity, (args.hidden,), jnp.bfloat16),
            weights=of(tokens, (topk,), jnp.float32),
            row_weights=of(capacity, (), jnp.float32),
        )
        self.make_handle = on_ranks(self.layer.layout, mesh)
        handle = jax.eval_shape(self.make_handle, self.types["ids"])
        self.types["handle"] = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.sharding),
            handle,
        )

    def count(self, name: str) -> int:
        """Steps of a chain: more of the short ones."""
        return 32 if name in ("layout", "round trip") else 16

    def lower(self) -> dict:
        """Everything that is to be compiled, by name."""
        lowered = {}
        for name, num_sms in self.setting.timed:
            layer = dataclasses.replace(self.layer, num_sms=num_sms)
            _, carry, constants = STEPS[name]
            run = exchanges.program(name, layer, self.mesh, self.count(name))
            types = [self.types[each] for each in (carry, *constants)]
            lowered[name, num_sms] = run.lower(*types)
        names = ("ids", "x", "y", "weights", "row_weights")
        check = on_ranks(
            lambda *arrays: exchanges.differing(self.layer, *arrays), self.mesh
        )
        lowered["check"] = check.lower(*(self.types[name] for name in names))
        lowered["arrays"] = jax.jit(self._make, out_shardings=self.sharding).lower()
        lowered["handle"] = self.make_handle.lower(self.types["ids"])
        return lowered

    def _make(self):
        names = ("x", "y", "weights", "row_weights")
        keys = jax.random.split(jax.random.key(0), len(names))
        return {
            name: jax.random.normal(key, self.types[name].shape).astype(
                self.types[name].dtype
            )
            for name, key in zip(names, keys, strict=True)
        }

    def arrays(self, compiled) -> dict:
        """The arrays that programs take."""
        arrays = dict(compiled["arrays"]())
        ids = self.ids.reshape(-1, self.layer.topk)
        arrays["ids"] = jax.device_put(ids, self.sharding)
        arrays["handle"] = compiled["handle"](arrays["ids"])
        dropped = np.asarray(arrays["handle"].num_dropped)
        assert not dropped.any(), f"{self.setting}: rows are dropped"
        return arrays

    def check(self, compiled, arrays) -> str:
        """Every result against the reference; what differs."""
        names = ("ids", "x", "y", "weights", "row_weights")
        wrong = np.asarray(compiled["check"](*(arrays[name] for name in names)))
        if not wrong.any():
            return ""
        return f"differs from the reference, by rank and result: {wrong.tolist()}"

    def bytes(self, name: str) -> routings.Bytes | None:
        """What the exchange must move; None for layouts and round trips."""
        row = 2 * self.layer.hidden
        extra = -(-4 * self.layer.topk // 16) * 16
        tokens, capacity = self.layer.tokens, self.layer.capacity
        if name in ("dispatch", "combine backward"):
            extra = extra if name == "dispatch" else 0
            return routings.dispatch_bytes(self.traffic, tokens, capacity, row, extra)
        if name in ("combine", "dispatch backward"):
            extra = extra if name != "combine" else 0
            return routings.combine_bytes(self.traffic, tokens, row, extra)
        return None

    def run(self, compiled, limits: ceilings.Ceilings | None, num_sms: int) -> list:
        """Checks and times everything; a record for each."""
        arrays = self.arrays(compiled)
        if wrong := self.check(compiled, arrays):
            return [dict(what=str(self.setting), failed=wrong)]
        records = []
        for name, sms in self.setting.timed:
            _, carry, constants = STEPS[name]
            program = compiled[name, sms]
            rest = [arrays[each] for each in constants]
            arrays[carry], seconds, spread = measure(
                program, arrays[carry], rest, self.count(name)
            )
            records.append(
                dict(
                    routing=self.setting.routing,
                    tokens=self.layer.tokens,
                    capacity=self.layer.capacity,
                    what=name,
                    sms=min(sms, num_sms) if sms else max(1, num_sms - FREE_SMS),
                    us=seconds * 1e6,
                    spread=spread,
                    peak_bytes=peak_bytes(program),
                    **moved(self.bytes(name), seconds, limits),
                )
            )
        return records


def moved(needed: routings.Bytes | None, seconds: float, limits) -> dict:
    """Bytes, and the floor they give."""
    if needed is None:
        return {}
    found = dict(
        egress_bytes=needed.egress,
        ingress_bytes=needed.ingress,
        memory_bytes=needed.memory,
    )
    if limits is not None:
        floor = needed.floor(limits)
        found |= dict(floor_us=floor * 1e6, fraction=floor / seconds)
    return found


def measure(program, carry, constants, count: int):
    """Seconds of one step: launches in flight, wall time over all steps of all of them.

    Returns the carry, the median, and the spread of the repeats over it.
    """
    for _ in range(WARM_UPS):
        carry = jax.block_until_ready(program(carry, *constants))
    start = time.perf_counter()
    carry = jax.block_until_ready(program(carry, *constants))
    one = time.perf_counter() - start
    launches = int(min(MAX_IN_FLIGHT, max(2, SECONDS / one)))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(launches):
            carry = program(carry, *constants)
        jax.block_until_ready(carry)
        times.append((time.perf_counter() - start) / (launches * count))
    median = statistics.median(times)
    return carry, median, (max(times) - min(times)) / median


def peak_bytes(program) -> int:
    """Of a device while the program runs: arguments, results, and what it needs."""
    stats = program.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


# --- rivals ------------------------------------------------------------------------

RIVAL_STEPS = 8


def rival_record(bench: Bench, what: str, seconds, spread, program, egress) -> dict:
    """Of a rival, whose link bytes are not ours."""
    return dict(
        routing=bench.setting.routing,
        tokens=bench.layer.tokens,
        capacity=bench.layer.capacity,
        what=what,
        us=seconds * 1e6,
        spread=spread,
        egress_bytes=int(egress),
        peak_bytes=peak_bytes(program),
    )


def lower_ring(bench: Bench) -> dict:
    """The all-gather and the reduce-scatter."""
    types, mesh = bench.types, bench.mesh
    count = RIVAL_STEPS
    source = on_ranks(exchanges.ring_source, mesh).lower(types["handle"])
    dispatch = exchanges.looped(exchanges.ring_dispatch, mesh, count)
    combine = exchanges.looped(exchanges.ring_combine, mesh, count)
    rows = types["row_weights"].update(dtype=jnp.int32)
    recv_slot = types["handle"].recv_slot
    return {
        "source": source,
        "dispatch": dispatch.lower((types["x"], types["y"]), rows),
        "combine": combine.lower((types["y"], types["x"]), recv_slot),
        "ours": on_ranks(exchanges.both, mesh).lower(
            types["x"], types["handle"], types["y"]
        ),
    }


def check_rival(what: str, got, want) -> int:
    """How many elements differ: rows in a bit, sums beyond bfloat16's precision."""
    bound = (0.0, 0.0) if what == "dispatch" else (0.05, 0.03)

    @jax.jit
    def differing(got, want):
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.sum(jnp.abs(got - want) > bound[0] + bound[1] * jnp.abs(want))

    return int(differing(got, want))


def time_rival(bench, arrays, compiled, names, constants, egress) -> list:
    """Checks and times a rival's dispatch and combine."""
    x, y = arrays["x"], arrays["y"]
    recv, out = compiled["ours"](x, arrays["handle"], y)
    records = []
    for what, carry, want in (("dispatch", x, recv), ("combine", y, out)):
        state = (carry, jnp.zeros_like(want))
        program, rest = compiled[what], constants[what]
        state = program(state, *rest)
        if wrong := check_rival(what, state[1], want):
            reason = f"differs from ours in {wrong} elements"
            records.append(dict(what=names[what], failed=reason))
            continue
        _, seconds, spread = measure(program, state, rest, RIVAL_STEPS)
        records.append(
            rival_record(bench, names[what], seconds, spread, program, egress[what])
        )
    return records


def run_ring(bench: Bench, compiled) -> list:
    """What all-gather and reduce-scatter take."""
    arrays = bench.arrays(compiled["bench"])
    source = compiled["source"](arrays["handle"])
    all_rows = (bench.mesh.size - 1) * bench.layer.tokens * 2 * bench.layer.hidden
    return time_rival(
        bench,
        arrays,
        compiled,
        dict(dispatch="all-gather + gather", combine="gather + reduce-scatter"),
        dict(dispatch=(source,), combine=(arrays["handle"].recv_slot,)),
        dict(dispatch=all_rows, combine=all_rows),
    )


def run_ragged(args, mesh: Mesh) -> list:
    """What ragged_all_to_all takes, in this process and under its flags."""
    bench = Bench(Setting("uniform", args.tokens, "1.25", ()), args, mesh)
    types, layer = bench.types, bench.layer
    lowered = bench.lower()
    compiled = {name: lowered[name].compile() for name in ("arrays", "handle")}
    make_plan = on_ranks(lambda ids: exchanges.ragged_plan(layer, ids), mesh)
    plan = make_plan(jax.device_put(bench.ids.reshape(-1, layer.topk), bench.sharding))
    ours = lower_ring(bench)["ours"]
    dispatch = exchanges.looped(
        lambda *a: exchanges.ragged_dispatch(layer, *a), mesh, RIVAL_STEPS
    )
    combine = exchanges.looped(
        lambda *a: exchanges.ragged_combine(layer, *a), mesh, RIVAL_STEPS
    )
    constants = dict(
        dispatch=(plan["token"], plan["dispatch"]),
        combine=(plan["place"], plan["combine"]),
    )
    pairs = dict(dispatch=("x", "y"), combine=("y", "x"))
    for what, chain in (("dispatch", dispatch), ("combine", combine)):
        state = tuple(types[name] for name in pairs[what])
        compiled[what] = chain.lower(state, *constants[what]).compile()
    compiled["ours"] = ours.compile()
    arrays = bench.arrays(compiled)
    # A row crosses once per expert that is elsewhere.
    local = layer.experts // mesh.size
    owner = bench.ids // local
    elsewhere = owner != np.arange(mesh.size)[:, None, None]
    egress = elsewhere.sum((1, 2)).max() * 2 * layer.hidden
    return time_rival(
        bench,
        arrays,
        compiled,
        dict(dispatch="sort + ragged", combine="ragged + gather"),
        constants,
        dict(dispatch=egress, combine=egress),
    )


def ragged_processes(argv: list[str], flags: dict[str, str]) -> list:
    """`run_ragged` in a process for each set of flags, one after another."""
    records = []
    end = time.monotonic() + RAGGED_BUDGET_S
    for name, each in flags.items():
        limit = min(RAGGED_LIMIT_S, end - time.monotonic())
        if limit < RAGGED_LIMIT_S / 3:
            records.append(dict(what=f"ragged, {name}", failed="no time left"))
            continue
        env = dict(os.environ)
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {each}".strip()
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        command = [sys.executable, __file__, *argv, "--ragged-only"]
        try:
            done = subprocess.run(
                command,
                env=env,
                capture_output=True,
                text=True,
                timeout=limit,
            )
            lines = done.stdout.strip().splitlines() or [""]
            found = json.loads(lines[-1]) if done.returncode == 0 else None
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired:
            found, reason = None, f"no end within {limit:.0f} s"
        if found is None:
            records.append(dict(what=f"ragged, {name}", failed=reason[:300]))
            continue
        for record in found:
            record["what"] += f" ({name})"
        records += found
    return records


# --- kernels by the profiler ----------------------------------------------------------


def kernel_times(bench: Bench, compiled) -> dict[str, float]:
    """Median microseconds of each of our kernels in a round trip, from a trace."""
    arrays = bench.arrays(compiled)
    program = compiled["round trip", None]
    rest = [arrays["x"], arrays["weights"]]
    ids = jax.block_until_ready(program(arrays["ids"], *rest))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(ids, *rest))
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    times: dict[str, list[float]] = {}
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                for event in line.events:
                    if event.name.startswith("jax_ep_"):
                        times.setdefault(event.name, []).append(event.duration_ns / 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


# --- output -----------------------------------------------------------------------


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


COLUMNS = (
    ("routing", 8, "{}"),
    ("tokens", 6, "{}"),
    ("capacity", 8, "{}"),
    ("what", 34, "{}"),
    ("sms", 4, "{}"),
    ("us", 9, "{:.1f}"),
    ("spread", 7, "{:.1%}"),
    ("egress_bytes", 10, "{:.4g}"),
    ("ingress_bytes", 10, "{:.4g}"),
    ("memory_bytes", 10, "{:.4g}"),
    ("floor_us", 9, "{:.1f}"),
    ("fraction", 8, "{:.0%}"),
    ("peak_bytes", 10, "{:.4g}"),
)


def row(record: dict, columns=COLUMNS) -> str:
    cells = []
    for name, width, form in columns:
        value = record.get(name)
        text = "" if value is None else form.format(value)
        cells.append(text.ljust(width) if name == "what" else text.rjust(width))
    return "  ".join(cells)


def header(columns=COLUMNS) -> str:
    titles = [
        name.removesuffix("_bytes") + (" B" if name.endswith("_bytes") else "")
        for name, _, _ in columns
    ]
    return row(
        {name: title for (name, _, _), title in zip(columns, titles, strict=True)},
        [(name, width, "{}") for name, width, _ in columns],
    )


def print_records(records: list) -> None:
    for record in records:
        if "failed" in record:
            print(f"{record['what']}: failed: {record['failed']}", flush=True)
        else:
            print(row(record), flush=True)


def print_summary(records: list, limits, tokens: int) -> None:
    """The short table: what matters, and nothing twice."""
    chosen = [
        c for c in COLUMNS if c[0] in ("what", "sms", "us", "floor_us", "fraction")
    ]
    print(f"\nT {tokens}, uniform, C 1.25 T K, in short:")
    print(header(chosen))
    ours = [r for r in records if r.get("tokens") == tokens and r.get("us")]
    capacity = min((r["capacity"] for r in ours), default=0)
    ours = [r for r in ours if r["routing"] == "uniform" and r["capacity"] == capacity]
    for record in ours:
        print(row(record, chosen))
    for record in records:
        if record.get("what") == "round trip":
            print(f"T {record['tokens']}: round trip {record['us']:.1f} us in a graph")
    if limits is not None:
        print(
            f"ceilings, GB/s: egress {limits.egress / 1e9:.1f}, ingress "
            f"{limits.ingress / 1e9:.1f}, memory {limits.memory / 1e9:.0f}"
        )


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
        print(json.dumps(run_ragged(args, mesh)))
        return
    about = versions(devices)
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    on_gpu = devices[0].platform == "gpu"
    limits = measure_ceilings(devices) if on_gpu and len(devices) > 1 else None
    num_sms = max(limits.egress_by_sms) if limits else 0

    flags = {"default": ""} if args.quick else RAGGED_FLAGS
    benches = [Bench(setting, args, mesh) for setting in settings(args)]
    with concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        # Nothing runs on the GPUs while we compile, so other processes may be timed.
        ragged = pool.submit(ragged_processes, argv, flags) if on_gpu else None
        compiling = [
            {name: pool.submit(each.compile) for name, each in lowered.items()}
            for lowered in ([bench.lower() for bench in benches])
        ]
        ring = {
            name: pool.submit(each.compile)
            for name, each in lower_ring(benches[0]).items()
        }
        compiled = [
            {name: each.result() for name, each in programs.items()}
            for programs in compiling
        ]
        ring = {name: each.result() for name, each in ring.items()}
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
        rivals = ragged.result() if ragged else []
    print(f"rivals' processes after {time.monotonic() - start:.0f} s\n", flush=True)

    print(header(), flush=True)
    result = dict(
        about=about,
        shape=dict(hidden=args.hidden, topk=args.topk, experts=args.experts),
        ceilings=limits and dataclasses.asdict(limits),
        records=[],
    )
    records = result["records"]
    for bench, programs in zip(benches, compiled, strict=True):
        found = bench.run(programs, limits, num_sms)
        print_records(found)
        records += found
        write(args.json, result)
    ring["bench"] = compiled[0]
    found = [*run_ring(benches[0], ring), *rivals]
    print_records(found)
    records += found
    print_summary(records, limits, args.tokens)
    write(args.json, result)
    if args.kernels:
        try:
            result["kernels"] = kernel_times(benches[-1], compiled[-1])
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
