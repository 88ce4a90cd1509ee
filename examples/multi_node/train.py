"""Trains one MoE layer whose experts are spread over several nodes.

Each process runs this file, under Slurm (`train.sbatch`) or started by hand with the
address of the first, the number of processes and its own number (`launch.sh`).
docs/more_than_one_node.md explains what is typed here and why.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator", help="HOST:PORT of process 0; Slurm knows it")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process", type=int, help="the number of this one, from 0")
    parser.add_argument(
        "--domain-size", type=int, help="GPUs that NVLink joins [all of the axis]"
    )
    parser.add_argument(
        "--heartbeat-seconds",
        type=int,
        default=100,
        help="silence after which a process counts as dead, and all end [%(default)s]",
    )
    parser.add_argument("--tokens", type=int, default=1024, help="per device")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def train(given: argparse.Namespace) -> list[float]:
    """The loss of each step, on all devices of all processes."""
    # Devices of a process follow each other, and so do a node's processes: rank r is in
    # the domain r // domain_size.
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    config = jax_ep.MoEConfig(
        num_experts=given.experts,
        num_experts_per_tok=given.topk,
        hidden_size=given.hidden,
        moe_intermediate_size=2 * given.hidden,
        domain_size=given.domain_size,
    )
    shardings = jax.tree.map(
        functools.partial(NamedSharding, mesh),
        jax_ep.param_specs(config, expert="expert"),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    init = functools.partial(jax_ep.init_params, config=config)
    params = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    adam = optax.adam(1e-3)
    state = jax.jit(adam.init)(params)
    by_token = NamedSharding(mesh, P("expert"))
    num_tokens = given.tokens * mesh.size

    @functools.partial(jax.jit, out_shardings=by_token)
    def batch(key):
        return jax.random.normal(key, (num_tokens, given.hidden))

    @jax.jit
    def step(params, state, x):
        def loss(params):
            out, stats = jax_ep.sharded_moe(x, params, config, mesh=mesh)
            # Something to learn: each token's neighbouring features.
            return ((out - jnp.roll(x, 1, axis=1)) ** 2).mean() + stats.aux_loss

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = adam.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for n in range(given.steps):
        began = time.perf_counter()
        params, state, value = step(params, state, batch(jax.random.key(n + 1)))
        losses.append(float(value))
        if jax.process_index() == 0:
            spent = time.perf_counter() - began
            print(f"step {n}: loss {losses[-1]:.6f}, {spent * 1e3:.1f} ms", flush=True)
    return losses


def main() -> None:
    given = arguments()
    # Before anything else asks for devices. Under Slurm it needs no arguments.
    jax.distributed.initialize(
        given.coordinator,
        given.processes,
        given.process,
        heartbeat_timeout_seconds=given.heartbeat_seconds,
    )
    if jax.process_index() == 0:
        print(
            f"{jax.process_count()} processes, {jax.device_count()} devices, "
            f"{jax.local_device_count()} here; domains of "
            f"{given.domain_size or jax.device_count()}",
            flush=True,
        )
    train(given)


if __name__ == "__main__":
    main()
