"""Compiles a program for four H200s on a machine without one.

`aot.py PROGRAM DUMP_FOLDER` prints the scheduled HLO and dumps what XLA dumps, thunks
included. Needs the CUDA plugin of JAX. A process of its own: the plugin must not become
a backend of the tests.
"""

import functools
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_dump_to={sys.argv[2]} --xla_dump_hlo_as_text"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_ep  # noqa: E402

NUM_RANKS, TOKENS, TOPK, EXPERTS, HIDDEN = 4, 64, 4, 16, 128

target = (pathlib.Path(__file__).parent / "h200.txtpb").read_text()
topology = topologies.get_topology_desc(
    platform="cuda", target_config=target, topology=f"1x1x{NUM_RANKS}"
)
mesh = topologies.make_mesh(
    topo=topology, mesh_shape=(NUM_RANKS,), axis_names=("expert",)
)
sharding = NamedSharding(mesh, P("expert"))


@functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
)
def forward(ids, x, weights):
    handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS)
    rows, row_weights = jax_ep.dispatch(x, handle, weights)
    return jax_ep.combine(rows, handle, weights=row_weights)


def forward_and_backward(ids, x, weights):
    out, transpose = jax.vjp(lambda x, weights: forward(ids, x, weights), x, weights)
    return out, transpose(out)


@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P("expert"), P("expert"), P("expert"), P()),
    out_specs=P("expert"),
)
def layer_in_flight(ids, x, weights, kernel):
    handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS)
    flight = jax_ep.dispatch_start(x, handle, weights)
    flight, hidden = jax_ep.beside(jnp.dot, flight, x, kernel)
    rows, row_weights = jax_ep.dispatch_done(flight)
    y = rows * row_weights[:, None].astype(rows.dtype)
    flight = jax_ep.combine_start(y, handle, has_bias=True)
    flight, shared = jax_ep.beside(jnp.dot, flight, hidden, kernel)
    return jax_ep.combine_done(flight, bias=shared)


def overlapped(ids, x, weights):
    def loss(x, weights, kernel):
        return layer_in_flight(ids, x, weights, kernel)

    kernel = jnp.ones((HIDDEN, HIDDEN), x.dtype)
    out, transpose = jax.vjp(loss, x, weights, kernel)
    return out, transpose(out)


def of(columns, dtype):
    shape = (NUM_RANKS * TOKENS, columns)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


program = {
    "forward": forward,
    "forward_and_backward": forward_and_backward,
    "overlapped": overlapped,
}[sys.argv[1]]
arguments = of(TOPK, jnp.int32), of(HIDDEN, jnp.bfloat16), of(TOPK, jnp.float32)
print(jax.jit(program).lower(*arguments).compile().as_text())
