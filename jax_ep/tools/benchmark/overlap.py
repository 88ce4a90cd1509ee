"""Communication beside compute that needs none: what that could save, and saves."""

import functools
import tempfile
from collections.abc import Callable

import jax

from jax_ep.params import MoEParams
from jax_ep.tools import profile
from jax_ep.tools.benchmark import timing
from jax_ep.tools.benchmark.exchanges import unrolled
from jax_ep.tools.benchmark.layer import STEPS
from jax_ep.tools.benchmark.setting import Bench
from jax_ep.tools.diagnosis import overlapped_seconds
from jax_ep.tools.measurement import Overlap, Span
from jax_ep.tools.profile_events import ISSUE, WAIT

# In a graph, kernels of libraries have lost the scope that they come from.
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


def overlap(
    bench: Bench,
    arrays: dict,
    params: MoEParams,
    tell: Callable[[str], None],
) -> Overlap:
    """Times the parts and the whole, and traces one step of the whole.

    The shared expert needs no exchange, and no exchange needs it: it may run beside
    either. The experts need what dispatch brings and combine needs them, so ideal is
    `max(communication, shared) + experts`.

    Args:
      bench: the exchange.
      arrays: its arrays.
      params: of the experts, and of a shared one or none.
      tell: what is about to be measured.
    """
    arrays = {**arrays, "params": params}
    names = ["communication", "experts", "layer"]
    if params.shared_down_proj is not None:
        names.append("shared")
    tell("overlap: compiling")
    # Of the chain's programs the shared expert alone may be shorter than its launch,
    # which several steps in a launch hide; CPU devices have nothing to hide.
    platform = bench.mesh.devices.flat[0].platform
    count = 4 if platform == "gpu" else 1
    jobs = [_job(bench, arrays, name, count) for name in names]
    tell("overlap: " + ", ".join(names))
    times = [median for median, _ in timing.in_turn(jobs, count)]
    seconds = {"shared": 0.0, **dict(zip(names, times, strict=True))}
    del jobs  # and their copies of rows
    tell("overlap: timeline")
    communication, independent = seconds["communication"], seconds["shared"]
    return Overlap(
        communication_seconds=communication,
        compute_seconds=seconds["experts"],
        independent_seconds=independent,
        serial_seconds=communication + seconds["experts"] + independent,
        ideal_seconds=overlapped_seconds(
            communication, independent, tail=seconds["experts"]
        ),
        measured_seconds=seconds["layer"],
        spans=timeline(bench, arrays),
    )


def timeline(bench: Bench, arrays: dict) -> list[Span]:
    """One step of the whole layer, from a profile: host and ranks on one clock.

    It is compiled without CUDA graphs, so that every kernel keeps its scope; the host
    therefore issues kernel by kernel.
    """
    platform = bench.mesh.devices.flat[0].platform
    options = _NO_GRAPHS if platform == "gpu" else None
    job = _job(bench, arrays, "layer", 1, options)
    for _ in range(timing.WARM_UPS):
        job.run_and_wait(1)
    settings = jax.profiler.ProfileOptions()
    settings.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=settings):
            with jax.profiler.TraceAnnotation(ISSUE):
                job.run()
            with jax.profiler.TraceAnnotation(WAIT):
                jax.block_until_ready(job.carry)
        found = profile.read(folder)
    start = min(span.start for span in found.host)
    return found.spans(start)


def _job(bench, arrays, name: str, count: int, options=None) -> timing.Job:
    """A compiled chain; its carry is a copy, since it gives that away."""
    step, carry, constants = STEPS[name]
    chain = unrolled(functools.partial(step, bench.layer), bench.mesh, count)
    args = [arrays[carry].copy(), *(arrays[each] for each in constants)]
    compiled = chain.lower(*args).compile(compiler_options=options)
    return timing.Job(compiled, args[0], args[1:])
