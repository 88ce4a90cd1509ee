#!/usr/bin/env python
"""What `dropless_fallback` costs a training step in which nothing overflows.

    python examples/benchmarks/dropless_fallback.py

One step (value and gradients of a whole MoE layer) at a capacity that holds every row,
without and with the fallback, and dropless; and with the fallback at capacities that
make it run two and more rounds. The arms take turns, so that whatever else the machine
does falls on all of them alike. On 8 CPU devices, or on the GPUs there are.
"""

import argparse
import os
import statistics
import time

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

import jax_ep  # noqa: E402

ARMS = {
    "roomy": dict(capacity_factor=2.0),
    "roomy, fallback": dict(capacity_factor=2.0, dropless_fallback=True),
    "dropless": dict(),
    "tight, fallback": dict(capacity_factor=1.0, dropless_fallback=True),
    "half, fallback": dict(capacity_factor=0.5, dropless_fallback=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="of each rank")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--expert-hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    shape = (mesh.size * args.tokens, args.hidden)
    x = jax.random.normal(jax.random.key(0), shape).astype(args.dtype)
    base = dict(
        num_experts=args.experts,
        num_experts_per_tok=args.topk,
        hidden_size=args.hidden,
        moe_intermediate_size=args.expert_hidden,
    )
    config = jax_ep.MoEConfig(**base)
    params = jax_ep.init_params(jax.random.key(1), config, jnp.dtype(args.dtype))

    def step_of(config):
        def loss(params, x):
            out, stats = jax_ep.sharded_moe(x, params, config, mesh=mesh)
            return jnp.square(out.astype(jnp.float32)).mean(), stats

        step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return jax.jit(step).lower(params, x).compile()

    steps = {
        name: step_of(jax_ep.MoEConfig(**base, **arm)) for name, arm in ARMS.items()
    }
    rounds, dropped = {}, {}
    for name, step in steps.items():
        (_, stats), _ = jax.block_until_ready(step(params, x))
        rounds[name] = int(stats.num_rounds[0])
        dropped[name] = int(stats.num_dropped.sum())
    times = {name: [] for name in steps}
    for _ in range(args.repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(params, x))
            times[name].append(time.perf_counter() - start)
    print(
        f"{mesh.size} x {jax.devices()[0].device_kind}, jax {jax.__version__}, "
        f"T {args.tokens}, H {args.hidden}, F {args.expert_hidden}, E {args.experts}, "
        f"K {args.topk}, {args.dtype}, {args.repeats} turns"
    )
    print("arm               rounds  dropped  median ms  quartiles      MB temporary")
    for name, each in times.items():
        low, median, high = statistics.quantiles(each, n=4)
        memory = steps[name].memory_analysis().temp_size_in_bytes / 1e6
        print(
            f"{name:16} {rounds[name]:7} {dropped[name]:8} {median * 1e3:10.2f}  "
            f"{low * 1e3:5.2f} {high * 1e3:6.2f} {memory:13.1f}"
        )
    pairs = zip(times["roomy, fallback"], times["roomy"], strict=True)
    extra = [one - other for one, other in pairs]
    low, median, high = statistics.quantiles(extra, n=4)
    print(
        f"the fallback, unused: {median * 1e3:+.2f} ms a step in the median of turns "
        f"({low * 1e3:+.2f} to {high * 1e3:+.2f})"
    )


if __name__ == "__main__":
    main()
