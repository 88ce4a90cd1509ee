"""The rivals, checked against ours: all-gather with reduce-scatter, and ragged."""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import rival_programs
from jax.sharding import Mesh

from jax_ep.tools.benchmark import timing
from jax_ep.tools.benchmark.exchanges import on_ranks
from jax_ep.tools.benchmark.setting import Bench, Setting

# Flags of XLA for ragged_all_to_all; what a jaxlib does not know fails at its start.
RAGGED_FLAGS = {
    "default": "",
    "send/recv": "--xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel=false "
    "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true",
    "symmetric": "--xla_gpu_ragged_all_to_all_mode=symmetric",
    "peer": "--xla_gpu_ragged_all_to_all_mode=peer",
}
RAGGED_LIMIT_S, RAGGED_BUDGET_S = 40, 80  # for one of these processes, and for all
RIVAL_STEPS = 8


def rival_record(bench: Bench, what: str, seconds, spread, program, egress) -> dict:
    """Of a rival, whose link bytes are not ours."""
    return dict(
        routing=bench.routing,
        tokens=bench.layer.tokens,
        capacity=bench.layer.capacity,
        what=what,
        us=seconds * 1e6,
        spread=spread,
        egress_bytes=int(egress),
        peak_bytes=timing.peak_bytes(program),
    )


def lower_ring(bench: Bench) -> dict:
    """The all-gather and the reduce-scatter."""
    types, mesh = bench.types, bench.mesh
    count = RIVAL_STEPS
    source = on_ranks(rival_programs.ring_source, mesh).lower(types["handle"])
    dispatch = rival_programs.looped(rival_programs.ring_dispatch, mesh, count)
    combine = rival_programs.looped(rival_programs.ring_combine, mesh, count)
    rows = types["row_weights"].update(dtype=jnp.int32)
    recv_slot = types["handle"].recv_slot
    return {
        "source": source,
        "dispatch": dispatch.lower((types["x"], types["y"]), rows),
        "combine": combine.lower((types["y"], types["x"]), recv_slot),
        "ours": on_ranks(rival_programs.both, mesh).lower(
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
        _, seconds, spread = timing.measure(program, state, rest, RIVAL_STEPS)
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
    bench = Bench.of(Setting("uniform", args.tokens, "1.25", ()), args, mesh)
    types, layer = bench.types, bench.layer
    lowered = bench.lower()
    compiled = {name: lowered[name].compile() for name in ("arrays", "handle")}
    make_plan = on_ranks(lambda ids: rival_programs.ragged_plan(layer, ids), mesh)
    plan = make_plan(jax.device_put(bench.ids.reshape(-1, layer.topk), bench.sharding))
    ours = lower_ring(bench)["ours"]
    dispatch = rival_programs.looped(
        lambda *a: rival_programs.ragged_dispatch(layer, *a), mesh, RIVAL_STEPS
    )
    combine = rival_programs.looped(
        lambda *a: rival_programs.ragged_combine(layer, *a), mesh, RIVAL_STEPS
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


def ragged_processes(script: str, argv: list[str], flags: dict[str, str]) -> list:
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
        command = [sys.executable, script, *argv, "--ragged-only"]
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
