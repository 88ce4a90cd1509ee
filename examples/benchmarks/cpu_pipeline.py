"""Dispatch and combine on CPU devices: jax_ep beside two `lax.all_to_all` programs.

Every arm does the same, forward and backward: each token's row to its K experts' ranks,
grouped by expert there, and from there back to its token, summed. The experts
themselves do nothing. The rivals gather once before the exchange, send a row once per
expert, and sum a token's rows in order with one gather. They too have each other as
derivative: the one that JAX makes of a gather is a scatter, and slower.

  slots per rank    a fixed number of rows from each rank to each rank, which the
                    receiver brings into the experts' order with one more gather
  slots per expert  a fixed number of rows from each rank for each expert, which the
                    exchange itself brings into order (GShard)

Both get the fewest slots at which these ids drop nothing, which nobody knows in
training; jax_ep gets its capacity. All arms are first checked against one another.

The ceiling is a plain copy: dispatch writes every row once and combine reads it once,
forward and backward, which is to copy all rows twice. Run it on an idle machine.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jax_ep

AXIS = "expert"
COPY = "plain copy"
GOAL = 3.0  # Times as fast as the faster rival.

# (rows, index of the local expert of each) to rows: what stands for the experts.
Experts = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    ranks: int
    tokens: int  # Per rank.
    hidden: int
    topk: int
    experts: int
    capacity_factor: float

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def rows_bytes(self) -> int:
        return self.ranks * self.tokens * self.topk * self.hidden * 4


# --- The arms: rows and ids of each rank, `[T, H]` and `[T, K]`, to `[T, H]` ----------


def ours(sizes: Sizes, x: jax.Array, topk_idx: jax.Array, experts: Experts):
    handle = jax_ep.dispatch_layout(
        topk_idx,
        num_experts=sizes.experts,
        axis_name=AXIS,
        capacity=int(sizes.capacity_factor * sizes.tokens * sizes.topk),
    )
    rows, _ = jax_ep.dispatch(x, handle)
    ends = jnp.cumsum(handle.group_sizes)
    expert = jnp.searchsorted(ends, jnp.arange(handle.capacity), side="right")
    return jax_ep.combine(experts(rows, expert), handle)


def slots_per_rank(
    sizes: Sizes, x: jax.Array, topk_idx: jax.Array, experts: Experts, *, slots: int
):
    ids = topk_idx.reshape(-1)
    by_expert = jnp.argsort(ids, stable=True)
    index, slot = slots_of(
        ids // sizes.local_experts, by_expert, num_keys=sizes.ranks, slots=slots
    )
    expert = take(jnp.append(ids % sizes.local_experts, sizes.local_experts), index)
    expert = lax.all_to_all(expert.reshape(sizes.ranks, slots), AXIS, 0, 0).reshape(-1)
    received = jnp.argsort(expert, stable=True)  # Empty slots come last.
    place = inverse(received)

    def to_experts(x):
        # An empty slot carries any row, and nobody reads it.
        rows = take(x, jnp.minimum(index, ids.size - 1) // sizes.topk)
        rows = rows.reshape(sizes.ranks, slots, -1)
        rows = lax.all_to_all(rows, AXIS, 0, 0).reshape(sizes.ranks * slots, -1)
        return take(rows, received)

    def to_tokens(y):
        rows = take(y, place).reshape(sizes.ranks, slots, -1)
        rows = lax.all_to_all(rows, AXIS, 0, 0).reshape(sizes.ranks * slots, -1)
        return sum_of_rows(rows, slot.reshape(topk_idx.shape))

    dispatch, combine = each_others_transpose(to_experts, to_tokens)
    return combine(experts(dispatch(x), take(expert, received)))


def slots_per_expert(
    sizes: Sizes, x: jax.Array, topk_idx: jax.Array, experts: Experts, *, slots: int
):
    ids = topk_idx.reshape(-1)
    by_expert = jnp.argsort(ids, stable=True)
    index, slot = slots_of(ids, by_expert, num_keys=sizes.experts, slots=slots)

    def to_experts(x):
        # Empty slots lie among the others here, so they have to be zero.
        rows = x.at[index // sizes.topk].get(mode="fill", fill_value=0)
        rows = rows.reshape(sizes.experts, slots, -1)
        return lax.all_to_all(rows, AXIS, 0, 1, tiled=True)  # [L, R * slots, H]

    def to_tokens(y):
        rows = lax.all_to_all(y, AXIS, 1, 0, tiled=True)
        rows = rows.reshape(sizes.experts * slots, -1)
        return sum_of_rows(rows, slot.reshape(topk_idx.shape))

    dispatch, combine = each_others_transpose(to_experts, to_tokens)
    expert = jnp.arange(sizes.local_experts)[:, None]
    return combine(experts(dispatch(x), expert))


def slots_of(key: jax.Array, order: jax.Array, *, num_keys: int, slots: int):
    """Places the elements of each key in its slots, in `order`, which is sorted by key.

    Returns:
      The element in every slot `[num_keys * slots]`, the number of elements where the
      slot is empty; and every element's slot `[N]`.
    """
    count = jnp.bincount(key, length=num_keys)
    first = jnp.cumsum(count) - count
    number = jnp.arange(slots)
    filled = number < count[:, None]
    index = jnp.where(filled, first[:, None] + number, key.size).reshape(-1)
    element = order.at[index].get(mode="fill", fill_value=key.size)
    return element, key * slots + inverse(order) - first[key]


def inverse(permutation: jax.Array) -> jax.Array:
    numbers = jnp.arange(permutation.size, dtype=permutation.dtype)
    return jnp.zeros_like(permutation).at[permutation].set(numbers, unique_indices=True)


def take(rows: jax.Array, index: jax.Array) -> jax.Array:
    return rows.at[index].get(mode="promise_in_bounds")


def sum_of_rows(rows: jax.Array, slot: jax.Array) -> jax.Array:
    """`[T, H]`: the rows at `slot` `[T, K]`, added by ascending k."""
    total = take(rows, slot[:, 0])
    for k in range(1, slot.shape[1]):
        total = total + take(rows, slot[:, k])
    return total


def each_others_transpose(to_experts, to_tokens):
    dispatch, combine = jax.custom_vjp(to_experts), jax.custom_vjp(to_tokens)
    dispatch.defvjp(lambda x: (to_experts(x), None), lambda _, d: (to_tokens(d),))
    combine.defvjp(lambda y: (to_tokens(y), None), lambda _, d: (to_experts(d),))
    return dispatch, combine


# --- Measurement ---------------------------------------------------------------------


def program(arm: Callable, mesh: Mesh, experts: Experts):
    """Global (x, ids, d_out) to (out, dx), and the arrays' sharding."""

    def local(x, topk_idx, d_out):
        out, backward = jax.vjp(lambda x: arm(x, topk_idx, experts=experts), x)
        return out, *backward(d_out)

    spec = P(AXIS)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def untouched(rows: jax.Array, expert: jax.Array) -> jax.Array:
    """The rows themselves, but in memory: no arm may skip the experts' order."""
    return lax.optimization_barrier(rows)


def scaled(rows: jax.Array, expert: jax.Array) -> jax.Array:
    """Tells experts apart, for the check."""
    factor = 1 + expert + 100 * lax.axis_index(AXIS)
    return rows * factor[..., None].astype(rows.dtype)


def inputs(sizes: Sizes, mesh: Mesh):
    random = np.random.default_rng(0)
    num_tokens = sizes.ranks * sizes.tokens
    x = random.standard_normal((num_tokens, sizes.hidden), np.float32)
    d_out = random.standard_normal((num_tokens, sizes.hidden), np.float32)
    scores = random.random((num_tokens, sizes.experts), np.float32)
    topk_idx = np.argsort(-scores, axis=1)[:, : sizes.topk].astype(np.int32)
    return jax.device_put((x, topk_idx, d_out), NamedSharding(mesh, P(AXIS)))


def arms(sizes: Sizes, topk_idx: jax.Array) -> dict[str, Callable]:
    """By name. The rivals' slots hold the largest demand of these ids."""
    ids = np.asarray(topk_idx).reshape(sizes.ranks, -1)
    demand = np.stack([np.bincount(i, minlength=sizes.experts) for i in ids])
    by_expert = int(demand.max())
    by_rank = int(demand.reshape(sizes.ranks, sizes.ranks, -1).sum(axis=2).max())
    return {
        "jax_ep": functools.partial(ours, sizes),
        f"slots per rank: {by_rank}": functools.partial(
            slots_per_rank, sizes, slots=by_rank
        ),
        f"slots per expert: {by_expert}": functools.partial(
            slots_per_expert, sizes, slots=by_expert
        ),
    }


def check(programs: dict[str, Callable], args) -> None:
    """Raises AssertionError where outputs or gradients differ."""
    (_, first), *others = programs.items()
    expected = [np.asarray(value) for value in first(*args)]
    for name, other in others:
        for what, want, value in zip(
            ("out", "dx"), expected, other(*args), strict=True
        ):
            np.testing.assert_allclose(
                value,
                want,
                rtol=1e-5,
                atol=1e-5 * np.abs(want).max(),
                err_msg=f"{what} of {name}",
            )


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of all cores."""
    start, cpu_start = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - cpu_start


def copy_rows(sizes: Sizes, num_threads: int) -> Callable[[], None]:
    """Copies as many bytes as all rows have, in equal parts on all cores."""
    source = np.ones(sizes.rows_bytes // 4, np.float32)
    target = np.zeros_like(source)
    parts = list(
        zip(
            np.array_split(target, num_threads),
            np.array_split(source, num_threads),
            strict=True,
        )
    )
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)

    def copy():
        list(pool.map(lambda part: np.copyto(*part), parts))

    return copy


def peak_memory(name: str) -> dict[str, int]:
    """Bytes that an arm needs beyond its inputs, measured in a process of its own.

    `resident` is the process's peak less what it held before the first call;
    `temporary` is XLA's figure for the compiled program, over all ranks.
    """
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", name]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def measure_peak(name: str, sizes: Sizes, mesh: Mesh) -> dict[str, int]:
    args = inputs(sizes, mesh)
    call = program(arms(sizes, args[1])[name], mesh, untouched).lower(*args).compile()
    temporary = call.memory_analysis().temp_size_in_bytes * sizes.ranks
    before = memory_bytes("VmRSS")
    for _ in range(2):
        jax.block_until_ready(call(*args))
    return dict(temporary=temporary, resident=memory_bytes("VmHWM") - before)


def memory_bytes(name: str) -> int:
    """A figure of this process. (`getrusage` would give the parent's peak, too.)"""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=8, help="CPU devices [8]")
    add("--tokens", type=int, default=2048, help="per rank [2048]")
    add("--hidden", type=int, default=1024, help="float32 features [1024]")
    add("--topk", type=int, default=8, help="[8]")
    add("--experts", type=int, default=64, help="[64]")
    add("--capacity-factor", type=float, default=1.25, help="of jax_ep's arm [1.25]")
    add("--rounds", type=int, default=11, help="each runs every arm once [11]")
    add("--json", metavar="FILE", help="write the numbers there too")
    add("--peak-of", metavar="ARM", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = Sizes(**{f.name: getattr(given, f.name) for f in dataclasses.fields(Sizes)})
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", sizes.ranks)
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    if given.peak_of:
        print(json.dumps(measure_peak(given.peak_of, sizes, mesh)))
        return

    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    console = Console()
    console.print(f"{sizes}, {cores} cores, load {load:.1f}", soft_wrap=True)
    args = inputs(sizes, mesh)
    by_name = arms(sizes, args[1])
    check({name: program(arm, mesh, scaled) for name, arm in by_name.items()}, args)
    console.print("outputs and gradients of all arms agree")
    calls = {name: program(arm, mesh, untouched) for name, arm in by_name.items()}
    runs = {
        name: functools.partial(lambda call: jax.block_until_ready(call(*args)), call)
        for name, call in calls.items()
    }
    copy = copy_rows(sizes, cores)
    runs[COPY] = lambda: (copy(), copy())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.rounds):  # In turn, so that all see the same machine.
        for name, run in runs.items():
            run()  # As in a loop of steps: memory is what the arm itself left behind.
            wall, cpu = timed(run)
            seconds[name].append(wall)
            cpu_seconds[name].append(cpu)
    peaks = {name: peak_memory(name) for name in calls}
    result = dict(
        sizes=dataclasses.asdict(sizes),
        versions=versions(),
        cores=cores,
        load_at_start=load,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        peak_bytes=peaks,
        times_faster=times_faster(seconds, list(peaks)),
    )
    if given.json:
        with open(given.json, "w") as file:
            json.dump(result, file, indent=2)
    console.print(table(result))


def times_faster(seconds: dict[str, list[float]], names: list[str]) -> float:
    """The faster rival's median over ours."""
    ours, *rivals = (statistics.median(seconds[name]) for name in names)
    return min(rivals) / ours


def versions() -> dict[str, str]:
    return dict(
        jax_ep=jax_ep.__version__,
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        python=platform.python_version(),
        machine=platform.machine(),
    )


def table(result: dict) -> Table:
    facts = " ".join(f"{name} {value}" for name, value in result["versions"].items())
    made = Table(
        title="dispatch and combine, forward and backward, beside lax.all_to_all",
        caption=f"{facts}. jax_ep is {result['times_faster']:.2f} times as fast as the "
        f"faster rival (goal: {GOAL:g}). Peaks beyond the inputs, all ranks.",
    )
    made.add_column("arm")
    for heading in ("median s", "min - max", "CPU s", "x copy", "peak GB", "XLA's"):
        made.add_column(heading, justify="right")
    copy = statistics.median(result["seconds"][COPY])
    for name, seconds in result["seconds"].items():
        median, peak = statistics.median(seconds), result["peak_bytes"].get(name)
        made.add_row(
            name,
            f"{median:.3f}",
            f"{min(seconds):.3f} - {max(seconds):.3f}",
            f"{statistics.median(result['cpu_seconds'][name]):.3f}",
            f"{median / copy:.2f}",
            f"{peak['resident'] / 1e9:.2f}" if peak else "",
            f"{peak['temporary'] / 1e9:.2f}" if peak else "",
        )
    return made


if __name__ == "__main__":
    main()
