"""The whole layer, forward and backward, on the GPUs of this process.

    python layer.py [--hidden H] [--expert-hidden F] [--experts E] [--topk K] \
        [--tokens T]

What the experts' kernels, further rounds and replicas cost: wall time of a step, the
least of five, in bfloat16. Values and gradients are compared with the dropless layer's.
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import grouped_matmul

REPEATS = 5


def make_step(config, mesh, placement=None, matmul=None):
    """`(params, x) -> (loss, (out, rounds)), gradients`, jitted."""

    def loss(params, x):
        out, stats = jax_ep.sharded_moe(
            x, params, config, mesh=mesh, placement=placement, matmul=matmul
        )
        value = jnp.mean(out.astype(jnp.float32) ** 2) + stats.aux_loss
        return value, (out, stats.num_rounds)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def measure(step, params, x):
    """Output and gradients, rounds, and milliseconds."""
    (_, (out, rounds)), gradients = jax.block_until_ready(step(params, x))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(step(params, x))
        times.append(time.perf_counter() - start)
    return (out, gradients), int(rounds[0]), min(times) * 1e3


def difference(one, two) -> float:
    """Largest, over the largest entry of the array it is in."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        a, b = (np.asarray(each, np.float32) for each in (a, b))
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--expert-hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    args = parser.parse_args()

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("expert",))
    config = jax_ep.MoEConfig(
        num_experts=args.experts,
        num_experts_per_tok=args.topk,
        hidden_size=args.hidden,
        moe_intermediate_size=args.expert_hidden,
        load_balance_loss_weight=0.01,
    )

    def place(array, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.device_put(array.astype(jnp.bfloat16), sharding)

    params = jax_ep.init_params(jax.random.key(0), config)
    params = jax.tree.map(place, params, jax_ep.param_specs(config))
    shape = (len(devices) * args.tokens, args.hidden)
    x = place(jax.random.normal(jax.random.key(1), shape), P("expert"))

    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}, {args}")
    print(f"experts: {grouped_matmul.kernels_for(jnp.bfloat16)}")
    dropless, _, ms = measure(make_step(config, mesh), params, x)
    print(f"dropless: {ms:.2f} ms")

    def show(name, config, placement=None, matmul=None):
        step = make_step(config, mesh, placement, matmul)
        found, rounds, ms = measure(step, params, x)
        against = difference(found, dropless)
        print(f"{name}: {ms:.2f} ms, rounds {rounds}, difference {against:.1e}")

    for factor in (2.0, 1.0):
        plain = dataclasses.replace(config, capacity_factor=factor)
        show(f"capacity {factor}, with drops", plain)
        show(
            f"capacity {factor}, in rounds",
            dataclasses.replace(plain, dropless_fallback=True),
        )
    loads = np.ones(args.experts)
    loads[0] = 8
    placement = jax_ep.plan_placement(
        loads, num_ranks=len(devices), num_slots=args.experts + len(devices)
    )
    show("replicas", config, placement)
    show("dropless, experts by jax.lax.ragged_dot", config, matmul=jax.lax.ragged_dot)


if __name__ == "__main__":
    main()
