"""Bytes that cross each hop of `domain_size`, read and counted, beside `jax_ep.sizing`.

    python two_hops.py [--ranks R] [--domain-size G] [--tokens T] [--hidden H] [...]

Domains of CPU devices are no network, so nothing is timed. Hop 1 is what the compiled
program's collectives carry, and must be what sizing says; hop 2 are the rows of a
uniform routing, counted in its handle, beside the expected ones.
"""

import argparse
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep
from jax_ep import sizing
from jax_ep.tools.benchmark import exchanges, hops, routings
from jax_ep.tools.benchmark.request import find_devices
from jax_ep.tools.benchmark.setting import Bench


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--domain-size", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="per rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--capacity-factor", type=float, default=1.5)
    parser.add_argument(
        "--network-capacity-factor", type=float, help="[room for all tokens]"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32")
    )
    return parser.parse_args()


def stages(bench: Bench) -> dict[str, tuple[Callable, tuple[str, ...]]]:
    """Each stage alone, and the names of its operands among the bench's."""

    def dispatch(x, weights, handle):
        return jax_ep.dispatch(x, handle, weights)

    def dispatch_backward(d_y, d_weights, x, weights, handle):
        pull_back = jax.vjp(lambda *args: dispatch(*args, handle), x, weights)[1]
        return pull_back((d_y, d_weights))

    def combine_backward(d_out, y, handle):
        return jax.vjp(lambda y: jax_ep.combine(y, handle), y)[1](d_out)

    return {
        "layout": (bench.layer.layout, ("ids",)),
        "dispatch": (dispatch, ("x", "weights", "handle")),
        "combine": (jax_ep.combine, ("y", "handle")),
        "dispatch backward": (
            dispatch_backward,
            ("y", "row_weights", "x", "weights", "handle"),
        ),
        "combine backward": (combine_backward, ("x", "y", "handle")),
    }


def expected(shape: sizing.Shape, dtype: str) -> dict[str, sizing.Hops]:
    """What sizing says of each stage."""
    return {
        "layout": sizing.layout_hops(shape),
        "dispatch": sizing.dispatch_hops(shape, dtype=dtype),
        "combine": sizing.combine_hops(shape, dtype=dtype),
        "dispatch backward": sizing.combine_hops(
            shape, dtype=dtype, weight_gradients=True
        ),
        "combine backward": sizing.dispatch_hops(shape, dtype=dtype, weights=False),
    }


def main() -> None:
    given = arguments()
    devices = find_devices(given.ranks, "cpu")
    shape = sizing.Shape(
        sizing.UniformRouting(given.experts, given.topk),
        given.tokens,
        given.hidden,
        given.ranks,
        given.capacity_factor,
        domain_size=given.domain_size,
        network_capacity_factor=given.network_capacity_factor,
    )
    layer = exchanges.Layer(
        given.tokens,
        given.hidden,
        given.topk,
        given.experts,
        sizing.receive_rows(shape),
        dtype=given.dtype,
        domain_size=given.domain_size,
        network_capacity_factor=given.network_capacity_factor,
    )
    sizes = (given.ranks, given.tokens, given.topk, given.experts)
    bench = Bench(
        layer,
        routings.make_ids("uniform", *sizes),
        Mesh(np.array(devices), (exchanges.AXIS,)),
        (),
        routing="uniform",
    )
    print(
        f"{shape.num_domains} domains of {given.domain_size}, room for {shape.places} "
        f"of {given.tokens} tokens; bytes out of a rank"
    )
    print(f"{'':18}{'hop 1':>12}{'sizing':>12}{'hop 2':>12}{'expected':>12}")
    ids = jax.device_put(bench.ids.reshape(-1, given.topk), bench.sharding)
    rows = hops.inside_rows(bench.make_handle(ids)).mean()
    said = expected(shape, given.dtype)
    for stage, (function, operands) in stages(bench).items():
        program = exchanges.on_ranks(function, bench.mesh)
        lowered = program.lower(*(bench.types[name] for name in operands))
        text = lowered.compile().as_text()
        between, by_sizing = hops.between_bytes(text, shape.num_domains), said[stage]
        if between != by_sizing.between.nic:
            raise SystemExit(f"{stage}: {between} bytes, not {by_sizing.between.nic}.")
        inside = by_sizing.inside.link
        if stage != "layout":  # Whose ids all go to all.
            with_weights = stage.startswith("dispatch")
            num_weights = given.topk if with_weights else 0
            inside = rows * sizing.wire_bytes(given.hidden, given.dtype, num_weights)
        print(
            f"{stage:18}{between:12}{by_sizing.between.nic:12}{inside:12.0f}"
            f"{by_sizing.inside.link:12.0f}"
        )


if __name__ == "__main__":
    main()
