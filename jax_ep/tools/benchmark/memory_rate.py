"""How fast the cores of this machine copy memory, all of them at once."""

import concurrent.futures
import os
import threading
import time

import numpy as np

# Of a repeat, about. The fastest counts: a ceiling is what the machine can do, and
# whatever else it does makes it slower.
SECONDS, REPEATS = 0.05, 7


def copy_rate(num_bytes: int) -> float:
    """Bytes per second, read plus written, of plain copies on every core.

    A thread for each core that this process may use copies its part of one array into
    another, again and again: the devices of a process do no more than that, on the same
    cores. NumPy copies without holding the interpreter's lock.

    Args:
      num_bytes: of the array, as many as the rows that an exchange writes: what fits a
        cache there fits it here.
    """
    num_threads = num_cores()
    source = np.ones(max(num_bytes // 8, num_threads))
    target = np.zeros_like(source)
    parts = list(
        zip(
            np.array_split(target, num_threads),
            np.array_split(source, num_threads),
            strict=True,
        )
    )
    start_together = threading.Barrier(num_threads)

    def copy(part, times: int) -> tuple[float, float]:
        start_together.wait()
        start = time.perf_counter()
        for _ in range(times):
            np.copyto(*part)
        return start, time.perf_counter()

    def all_copy(times: int) -> float:
        spans = list(pool.map(copy, parts, [times] * num_threads))
        return max(stop for _, stop in spans) - min(start for start, _ in spans)

    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        all_copy(1)
        times = max(1, round(SECONDS / all_copy(1)))
        seconds = min(all_copy(times) for _ in range(REPEATS)) / times
    return 2 * source.nbytes / seconds


def num_cores() -> int:
    """Cores that this process may use, where the system tells; else all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
