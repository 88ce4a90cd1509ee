#!/usr/bin/env python
"""An exchange beside products: starts and done against plain calls, by SMs.

    pip install '.[cuda13]'
    python examples/benchmarks/overlap.py --out overlap.json

One product pair (H to F and back, of all tokens) stands beside dispatch and one beside
combine, on all GPUs of the host. For each number of SMs: the exchange alone, and with
the products by start and done; the bound of it, products + n/132 * exchange (an H200
has 132), and "plain", the products after plain calls on their default SMs.
Milliseconds, the median of repeats. Results are compared with the plain calls' bit by
bit (gradients are not: JAX adds x's three cotangents in another order). With one GPU
the exchange is copies within its memory.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

CALLS, REPEATS = 10, 7
DEFAULT_SMS = 100  # Of 132: what `num_sms=None` leaves a kernel.


def products(x, kernel):
    """`[T, H]` to `[T, F]` and back."""
    return (x @ kernel) @ kernel.T


def program(kind, args, num_sms, mesh):
    """The jitted function of `(x, ids, kernel, other)`; a tuple of three results."""
    layout = dict(
        num_experts=args.experts,
        capacity=int(args.capacity_factor * args.tokens * args.topk),
        num_sms=num_sms,
    )

    def plain(x, ids, kernel, other):
        handle = jax_ep.dispatch_layout(ids, **layout)
        rows, _ = jax_ep.dispatch(x, handle)
        one = jnp.zeros_like(x[:1])
        two = one
        if kind == "plain":  # Products in the places where starts have them.
            y, rows = lax.optimization_barrier((x, rows))
            one = products(y, kernel)
            rows, one = lax.optimization_barrier((rows, one))
        out = jax_ep.combine(rows, handle)
        if kind == "plain":
            y, out = lax.optimization_barrier((x, out))
            two = products(y, other)
        return out, one, two

    def alone(x, ids, kernel, other):
        one = products(x, kernel)
        x, one = lax.optimization_barrier((x, one))
        return jnp.zeros_like(x[:1]), one, products(x, other)

    def overlapped(x, ids, kernel, other):
        handle = jax_ep.dispatch_layout(ids, **layout)
        flight = jax_ep.dispatch_start(x, handle)
        flight, one = jax_ep.beside(products, flight, x, kernel)
        rows, _ = jax_ep.dispatch_done(flight)
        flight = jax_ep.combine_start(rows, handle)
        flight, two = jax_ep.beside(products, flight, x, other)
        return jax_ep.combine_done(flight), one, two

    chosen = dict(plain=plain, exchange=plain, products=alone, start=overlapped)[kind]
    specs = (P("expert"), P("expert"), P(), P())
    mapped = jax.shard_map(
        chosen, mesh=mesh, in_specs=specs, out_specs=P("expert"), check_vma=False
    )
    if not args.backward:
        return jax.jit(mapped)

    def both(x, ids, kernel, other):
        out, transpose = jax.vjp(lambda x, *w: mapped(x, ids, *w), x, kernel, other)
        return out, transpose(out)

    return jax.jit(both)


def timed(function, arrays):
    """Median milliseconds of a call, and its results."""
    results = jax.block_until_ready(function(*arrays))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            results = function(*arrays)
        jax.block_until_ready(results)
        times.append((time.perf_counter() - began) / CALLS * 1e3)
    return statistics.median(times), results


def same_bits(one, other) -> bool:
    """Whether two trees of arrays are equal."""
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return all(bool((a == b).all()) for a, b in pairs)


def measure(args, intermediate, mesh):
    """A row of the table for each number of SMs."""
    num_ranks, dtype = mesh.size, jnp.bfloat16
    split = NamedSharding(mesh, P("expert"))
    key = functools.partial(jax.random.fold_in, jax.random.key(0))

    @functools.partial(jax.jit, out_shardings=(split, split, None, None))
    def make():
        rows = num_ranks * args.tokens
        scores = jax.random.uniform(key(1), (rows, args.experts))
        kernel = jax.random.normal(key(2), (args.hidden, intermediate), dtype) / 85
        x = jax.random.normal(key(0), (rows, args.hidden), dtype)
        return x, lax.top_k(scores, args.topk)[1].astype(jnp.int32), kernel, 2 * kernel

    arrays = make()
    run = functools.partial(program, args=args, mesh=mesh)
    alone, _ = timed(run("products", num_sms=None), arrays)
    plain, expected = timed(run("plain", num_sms=None), arrays)
    rows = []
    for num_sms in (*args.sms, None):
        exchange, _ = timed(run("exchange", num_sms=num_sms), arrays)
        together, found = timed(run("start", num_sms=num_sms), arrays)
        results = [r[0] if args.backward else r for r in (found, expected)]
        same = same_bits(*results)
        share = (num_sms or DEFAULT_SMS) / 132
        bound = alone + share * exchange
        rows.append(
            dict(
                intermediate=intermediate,
                num_sms=num_sms,
                products=alone,
                exchange=exchange,
                plain=plain,
                overlapped=together,
                bound=bound,
                same_bits=same,
            )
        )
        shown = "default" if num_sms is None else num_sms
        times = (alone, exchange, plain, together)
        cells = [intermediate, shown, *(f"{time:.3f}" for time in times)]
        cells += [f"{together / bound:.2f}", same]
        print("|", " | ".join(map(str, cells)), "|", flush=True)
    return rows


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--intermediate", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--sms", type=int, nargs="+", default=[16, 24, 32, 48, 64])
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("expert",))
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}")
    print(
        "| F | SMs | products | exchange | plain | overlapped | / bound | same bits |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = [row for f in args.intermediate for row in measure(args, f, mesh)]
    if args.out is not None:
        told = {**vars(args), "out": None, "devices": len(devices)}
        args.out.write_text(json.dumps(dict(told=told, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
