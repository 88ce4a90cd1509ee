"""The records of the five exchanges: time, bytes, floor, and phases from stamps."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jax_ep import stamps
from jax_ep.tools.benchmark import exchanges, phases, routings, timing
from jax_ep.tools.benchmark.exchanges import STEPS
from jax_ep.tools.benchmark.setting import Bench
from jax_ep.tools.measurement import Ceilings, Exchange

STAGES = ("layout", "dispatch", "combine", "dispatch backward", "combine backward")
_STAMPED_CALLS = 5  # of which the median counts


def lower_stamped(bench: Bench) -> dict:
    """The chains of the profiling build, by stage."""
    layer = dataclasses.replace(bench.layer, stamps=True)
    return {
        stage: exchanges.program(stage, layer, bench.mesh, bench.count(stage)).lower(
            *_types(bench, stage)
        )
        for stage in STAGES
    }


def _types(bench: Bench, stage: str) -> list:
    _, carry, constants = STEPS[stage]
    return [bench.types[each] for each in (carry, *constants)]


def measure(
    bench: Bench,
    compiled: dict,
    stamped: dict,
    arrays: dict,
    ceilings: Ceilings | None,
    tell: Callable[[str], None],
) -> list[Exchange]:
    """Times every stage, without and with stamps.

    Args:
      bench: the exchange; its `compiled` programs and `arrays`.
      compiled: see `Bench.lower`.
      stamped: see `lower_stamped`, compiled.
      arrays: see `Bench.arrays`.
      ceilings: of this machine, for floors.
      tell: what is about to be measured.
    """
    found = []
    for stage in STAGES:
        tell(stage)
        plain, profiled = (
            bench.job(program, arrays, stage)
            for program in (compiled[stage, bench.layer.num_sms], stamped[stage])
        )
        (seconds, spread), (stamped_seconds, _) = timing.in_turn(
            [plain, profiled], bench.count(stage)
        )
        found.append(
            Exchange(
                stage=stage,
                seconds=seconds,
                spread=spread,
                phases=_phases(bench, profiled, stage),
                stamped_seconds=stamped_seconds,
                **moved(bench, stage, ceilings),
            )
        )
    return found


def _phases(bench: Bench, job: timing.Job, stage: str):
    stamps.read_stamps()  # forgets those of the chains that were timed
    calls = []
    for _ in range(_STAMPED_CALLS):
        job.run_and_wait(1)
        calls.append(stamps.read_stamps())
    return phases.median_phases(calls, stage, bench.mesh.size)


def moved(bench: Bench, stage: str, ceilings: Ceilings | None) -> dict:
    """The bytes of a stage, and the least time they need; all None for a layout."""
    names = ("egress_bytes", "ingress_bytes", "memory_bytes", "logical_bytes")
    found = dict.fromkeys((*names, "floor_seconds"))
    needed = bench.bytes(stage)
    if needed is None:
        return found
    layer = bench.layer
    row = jnp.dtype(layer.dtype).itemsize * layer.hidden
    found["logical_bytes"] = routings.logical_bytes(bench.traffic, row)
    if bench.mesh.devices.flat[0].platform == "cpu":
        memory = routings.copied_bytes(
            stage, bench.traffic, layer.tokens, layer.capacity, row
        )
        needed = routings.Bytes(0, 0, memory)
    else:
        found |= dict(egress_bytes=needed.egress, ingress_bytes=needed.ingress)
    found["memory_bytes"] = needed.memory
    if ceilings is not None:
        found["floor_seconds"] = needed.floor(ceilings)
    return found


def chain_steps(platform: str) -> tuple[int, int]:
    """Steps of chains of short and of long exchanges.

    On GPUs enough to hide the host's work. CPU devices are the host: a few suffice.
    """
    return (32, 16) if platform == "gpu" else (8, 4)
