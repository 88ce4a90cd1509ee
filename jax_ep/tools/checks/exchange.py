"""A process of its own: a real exchange, compared bit for bit, told line by line.

`python -m jax_ep.tools.checks.exchange cpu|cuda`. Each line is a JSON object: `stage`
is what begins, and the last one has `seconds`, or `error`.
"""

import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.axis import MAX_RANKS

TOKENS, TOPK, HIDDEN, LOCAL_EXPERTS, ALIGNMENT = 64, 4, 256, 4, 8
CAPACITY = 192  # Fewer rows than rank 0 wants, on any number of ranks.
WAIT_S = 30.0  # For another rank, inside a kernel or handler.
REPEATS = 7


def main(platform: str) -> int:
    """Runs everything on all local devices of `platform`; returns the exit status."""
    try:
        say(stage="starting the devices")
        devices = jax.local_devices(backend=platform)[:MAX_RANKS]
        say(stage="compiling", devices=len(devices), kind=devices[0].device_kind)
        mesh = Mesh(np.array(devices), ("expert",))
        arguments = make_arguments(mesh)
        run = program(mesh, "ffi").lower(*arguments).compile()
        want = program(mesh, "xla").lower(*arguments).compile()(*arguments)
        say(stage="the first exchange")  # Creates communicator and window.
        got = jax.block_until_ready(run(*arguments))
        say(stage="comparing")
        wrong = differences(got, want)
        if wrong:
            raise RuntimeError(
                f"not the bits of implementation='xla': {', '.join(wrong)}"
            )
        say(stage="timing")
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            got = jax.block_until_ready(run(*arguments))
            seconds.append(time.perf_counter() - start)
        jax_ep.check()
        if wrong := differences(got, want):
            raise RuntimeError(f"other bits when run again: {', '.join(wrong)}")
        say(seconds=statistics.median(seconds), arrays=len(jax.tree.leaves(got)))
    except Exception as error:
        say(error=" ".join(f"{type(error).__name__}: {error}".split()))
        return 1
    return 0


def program(mesh: Mesh, implementation: Any):
    """Layout, dispatch, combine and their derivatives, in float32 and bfloat16."""

    def everything(ids, x, weights, y, d_recv, d_out):
        handle = jax_ep.dispatch_layout(
            ids,
            num_experts=LOCAL_EXPERTS * mesh.size,
            capacity=CAPACITY,
            expert_alignment=ALIGNMENT,
            implementation=implementation,
            # The reference's collectives keep XLA's limit, and would say so.
            timeout_s=None if implementation == "xla" else WAIT_S,
        )

        def dispatch(x, weights):
            return jax_ep.dispatch(x, handle, weights)

        def combine(y):
            return jax_ep.combine(y, handle)

        received, pull_back = jax.vjp(dispatch, x, weights)
        d_x, d_weights = pull_back((d_recv, received[1]))
        out, pull_back = jax.vjp(combine, y)
        (d_y,) = pull_back(d_out)
        return dict(
            handle=handle,
            recv_x=received[0],
            recv_weights=received[1],
            d_x=d_x,
            d_weights=d_weights,
            out=out,
            d_y=d_y,
        )

    spec = P("expert")
    return jax.jit(jax.shard_map(everything, mesh=mesh, in_specs=spec, out_specs=spec))


def make_arguments(mesh: Mesh) -> list[Any]:
    """Ids with masked slots and a busy expert; floats of both types."""
    random = np.random.default_rng(0)
    num_tokens, num_experts = TOKENS * mesh.size, LOCAL_EXPERTS * mesh.size
    ids = random.integers(-1, num_experts, (num_tokens, TOPK), np.int32)
    ids[::3, 0] = 0

    def floats(rows: int) -> dict[str, Any]:
        values = random.uniform(-1, 1, (2, rows, HIDDEN)).astype(np.float32)
        return dict(wide=values[0], narrow=values[1].astype(jnp.bfloat16))

    rows = CAPACITY * mesh.size
    arrays = [ids, floats(num_tokens)]
    arrays.append(random.uniform(0, 1, (num_tokens, TOPK)).astype(np.float32))
    arrays += [floats(rows), floats(rows), floats(num_tokens)]
    return jax.device_put(arrays, NamedSharding(mesh, P("expert")))


def differences(got: Any, want: Any) -> list[str]:
    """Names of the arrays of two trees that differ in any bit."""

    def bits(array):
        array = np.asarray(array)
        return array.view(f"u{array.dtype.itemsize}")

    pairs = zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    )
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for (path, a), b in pairs
        if a.shape != b.shape or (bits(a) != bits(b)).any()
    ]


def say(**words: Any) -> None:
    """One line for the process that waits for us."""
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
