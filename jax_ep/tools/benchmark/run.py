"""One benchmark: everything that a measurement holds, in the order it is taken."""

import concurrent.futures
import datetime
import importlib.metadata
import os
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep.tools.benchmark import (
    ceilings,
    exchange,
    load,
    memory_rate,
    overlap,
    setting,
)
from jax_ep.tools.benchmark.exchanges import AXIS
from jax_ep.tools.benchmark.layer import make_params
from jax_ep.tools.benchmark.request import Case, Request, resolve
from jax_ep.tools.console import UserError
from jax_ep.tools.measurement import Ceilings, Measurement
from jax_ep.tools.measurement import Layer as Shapes

# Says what is about to be measured, and which share of the run is behind.
Tell = Callable[[str, float], None]

_PACKAGES = ("jax_ep", "jax", "jaxlib", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc")


def measure(request: Request, tell: Tell = lambda text, share: None) -> Measurement:
    """Checks the results against the reference, then times everything.

    Args:
      request: shapes, routing, ranks.
      tell: is called with what comes next and the share of the run that is done.

    Returns:
      The measurement. What could not be measured is None in it, and
      `about["not measured"]` says why.

    Raises:
      UserError: what was asked for cannot be run, the devices fail (out of memory), or
        results are wrong.
      FileNotFoundError: no such recording.
    """
    tell("devices and routing", 0.0)
    try:
        case = resolve(request)
        return _measure(case, tell)
    except MemoryError:
        raise UserError("these shapes need more memory than the host has.") from None
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the run failed: {str(error).splitlines()[0]}") from None


def _measure(case: Case, tell: Tell) -> Measurement:
    missing: list[str] = []
    limits = _ceilings(case, missing, tell)
    mesh = Mesh(np.array(case.devices), (AXIS,))
    timed = tuple((stage, case.layer.num_sms) for stage in exchange.STAGES)
    bench = setting.Bench(
        case.layer,
        case.replay.ids[case.replay.typical()],
        mesh,
        timed,
        routing=case.replay.name,
        may_drop=True,
        steps=exchange.chain_steps(case.platform),
    )
    tell("compiling", 0.1)
    compiled, stamped = _compile(bench)
    arrays = bench.arrays(compiled)
    tell("comparing with the reference", 0.3)
    if wrong := bench.check(compiled, arrays):
        raise UserError(f"{bench.what}: {wrong}; nothing was timed.")
    done = iter(np.linspace(0.35, 0.6, len(exchange.STAGES)))
    exchanges = exchange.measure(
        bench, compiled, stamped, arrays, limits, lambda text: tell(text, next(done))
    )
    found = load.layouts(bench, compiled["handle"], case.replay)
    times = beside = None
    try:
        tell("parameters of the experts", 0.6)
        params = make_params(case.layer, case.widths, mesh)
        done = iter(np.linspace(0.6, 0.8, found.rank_rows.size))
        times = load.rank_seconds(
            bench, found, arrays, params, lambda: tell("experts", next(done))
        )
        done = iter(np.linspace(0.8, 1.0, 3))
        beside = overlap.overlap(
            bench,
            arrays,
            params,
            lambda text: tell(text, next(done)),
        )
    except jax.errors.JaxRuntimeError as error:  # e.g. out of memory
        what = "overlap" if times else "times of the experts, overlap"
        missing.append(f"{what}: {str(error).splitlines()[0]}")
    tell("done", 1.0)
    return Measurement(
        about=about(case, missing),
        layer=shapes(case),
        routing=case.replay.name,
        ceilings=limits,
        exchanges=exchanges,
        load=load.load(case.replay, found, times),
        overlap=beside,
    )


def _compile(bench: setting.Bench) -> tuple[dict, dict]:
    lowered, stamped = bench.lower(), exchange.lower_stamped(bench)
    with concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        jobs = [
            {name: pool.submit(each.compile) for name, each in programs.items()}
            for programs in (lowered, stamped)
        ]
        ready = [
            {name: job.result() for name, job in programs.items()} for programs in jobs
        ]
    return ready[0], ready[1]


def _ceilings(case: Case, missing: list[str], tell: Tell) -> Ceilings | None:
    tell("ceilings", 0.02)
    if case.platform == "cpu":
        layer = case.layer
        row = jnp.dtype(layer.dtype).itemsize * layer.hidden
        rows = len(case.devices) * layer.capacity
        return Ceilings(None, None, memory_rate.copy_rate(rows * row))
    try:
        # A thread of its own: the driver's current context belongs to a thread.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            found = pool.submit(ceilings.measure, case.devices).result()
    except (ImportError, RuntimeError) as error:
        missing.append(f"ceilings: {error}")
        return None
    return Ceilings(found.egress, found.ingress, found.memory)


def shapes(case: Case) -> Shapes:
    """As the measurement has them."""
    layer = case.layer
    return Shapes(
        tokens=layer.tokens,
        hidden=layer.hidden,
        expert_hidden=case.widths.expert_hidden,
        topk=layer.topk,
        experts=layer.experts,
        ranks=len(case.devices),
        capacity=layer.capacity,
        expert_alignment=layer.expert_alignment,
        dtype=layer.dtype,
    )


def about(case: Case, missing: list[str]) -> dict[str, str]:
    """Everything that the numbers depend on, as text."""
    found = dict(
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        command=" ".join(["jax_ep", *sys.argv[1:]]),
        device=case.devices[0].device_kind,
        platform=case.platform,
        python=sys.version.split()[0],
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        shared_hidden=str(case.widths.shared_hidden),
        num_sms=str(case.layer.num_sms or "default"),
    )
    if case.platform == "cpu":
        found["cores"] = str(memory_rate.num_cores())
        found["load"] = f"{os.getloadavg()[0]:.1f}"
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    if missing:
        found["not measured"] = "; ".join(missing)
    return found
