"""Device time of a compiled chain, its memory, and its kernels from a trace."""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

WARM_UPS, REPEATS, SECONDS = 3, 5, 0.1  # runs before, and of which the median counts
MAX_IN_FLIGHT = 25  # launches; jax < 0.12 bears no more than 32


@dataclasses.dataclass
class Job:
    """A compiled chain, its first argument, which it gives back, and the others."""

    program: Callable
    carry: Any
    constants: Sequence

    def run(self) -> None:
        """Launches it."""
        self.carry = self.program(self.carry, *self.constants)

    def run_and_wait(self, times: int) -> float:
        """Seconds of so many launches, all in flight."""
        start = time.perf_counter()
        for _ in range(times):
            self.run()
        jax.block_until_ready(self.carry)
        return time.perf_counter() - start


def measure(
    program,
    carry,
    constants,
    count: int,
    seconds: float = SECONDS,
    warm_ups: int = WARM_UPS,
    repeats: int = REPEATS,
):
    """Seconds of one step: launches in flight, wall time over all steps of all of them.

    Args:
      program: a compiled chain of `count` steps.
      carry: its first argument, which it gives back.
      constants: the others.
      count: steps of one launch.
      seconds: of a repeat, about.
      warm_ups: runs before.
      repeats: of which the median counts.

    Returns:
      The carry, the median, and the spread of the repeats over it.
    """
    job = Job(program, carry, constants)
    (found,) = in_turn([job], count, seconds, warm_ups, repeats)
    return job.carry, *found


def in_turn(
    jobs: Sequence[Job],
    count: int,
    seconds: float = SECONDS,
    warm_ups: int = WARM_UPS,
    repeats: int = REPEATS,
) -> list[tuple[float, float]]:
    """`measure` of several chains, a repeat of each in turn: all see the same machine.

    Returns:
      Median and spread of each.
    """
    launches = []
    for job in jobs:
        for _ in range(warm_ups):
            job.run_and_wait(1)
        one = job.run_and_wait(1)
        # Two at least, so that the second is issued while the first runs.
        least = 2 if one < seconds else 1
        launches.append(int(min(MAX_IN_FLIGHT, max(least, seconds / one))))
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(repeats):
        for job, num, mine in zip(jobs, launches, times, strict=True):
            mine.append(job.run_and_wait(num) / (num * count))
    medians = [statistics.median(each) for each in times]
    return [
        (median, (max(each) - min(each)) / median)
        for median, each in zip(medians, times, strict=True)
    ]


def peak_bytes(program) -> int:
    """Of a device while the program runs: arguments, results, and what it needs."""
    stats = program.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


def kernel_times(bench, compiled) -> dict[str, float]:
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
