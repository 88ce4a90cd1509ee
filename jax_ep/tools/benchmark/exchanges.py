"""The programs that are timed: chains of one exchange, each after the one before.

A step takes a carry and gives the next one. The carry's first element is set to a
number that depends on the result, by a kernel of one thread, so that no two exchanges
overlap and XLA can neither merge nor drop one. A program holds so many steps, unrolled,
which XLA captures in a CUDA graph.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.layout import Implementation

AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class Layer:
    """What an exchange is compiled for.

    Attributes:
      tokens, hidden, topk, experts, capacity: T, H, K, E, C.
      num_sms: of the kernels, None for their default.
      expert_alignment: A.
      dtype: of the rows.
      stamps: whether calls note when their phases began and ended.
      domain_size, network_capacity_factor: of two hops; None is one domain.
    """

    tokens: int
    hidden: int
    topk: int
    experts: int
    capacity: int
    num_sms: int | None = None
    expert_alignment: int = 1
    dtype: str = "bfloat16"
    stamps: bool = False
    domain_size: int | None = None
    network_capacity_factor: float | None = None

    def layout(
        self, ids, implementation: Implementation | None = "ffi"
    ) -> jax_ep.Handle:
        """The handle of `[T, K]` ids."""
        return jax_ep.dispatch_layout(
            ids,
            num_experts=self.experts,
            domain_size=self.domain_size,
            network_capacity_factor=self.network_capacity_factor,
            capacity=self.capacity,
            expert_alignment=self.expert_alignment,
            num_sms=self.num_sms,
            implementation=implementation,
            stamps=self.stamps,
        )

    def of(self, handle: jax_ep.Handle) -> jax_ep.Handle:
        """A handle made elsewhere, whose calls run as this layer's."""
        exchange = dataclasses.replace(
            handle.exchange, num_sms=self.num_sms, stamps=self.stamps
        )
        return dataclasses.replace(handle, exchange=exchange)


def on_ranks(function: Callable, mesh: Mesh, **keywords):
    """`function` of each rank's shares, jitted."""
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    return jax.jit(mapped, **keywords)


def after(carry: jax.Array, result: jax.Array) -> jax.Array:
    """The carry, which now depends on the result."""
    first = result[(0,) * result.ndim]
    number = jnp.where(first.astype(jnp.float32) > 1e30, 1, 2).astype(carry.dtype)
    return carry.at[(0,) * carry.ndim].set(number)


def unrolled(step: Callable, mesh: Mesh, count: int):
    """`(carry, *constants) -> carry` after `count` steps; the carry is donated."""

    def chain(carry, *constants):
        for _ in range(count):
            carry = step(carry, *constants)
        return carry

    return on_ranks(chain, mesh, donate_argnums=0)


def layout_step(layer: Layer, ids):
    """Ids to handle."""
    return after(ids, layer.layout(ids).slot)


def dispatch_step(layer: Layer, x, handle, weights):
    """Rows and weights to the experts."""
    handle = layer.of(handle)
    return after(x, jax_ep.dispatch(x, handle, weights)[0])


def combine_step(layer: Layer, y, handle):
    """Rows of experts, summed, to their tokens."""
    handle = layer.of(handle)
    return after(y, jax_ep.combine(y, handle))


def dispatch_backward_step(layer: Layer, d_recv, d_recv_weights, handle, x, weights):
    """Cotangents of rows and of their weights to cotangents of x and weights."""
    handle = layer.of(handle)
    _, pull_back = jax.vjp(lambda *a: jax_ep.dispatch(a[0], handle, a[1]), x, weights)
    return after(d_recv, pull_back((d_recv, d_recv_weights))[0])


def combine_backward_step(layer: Layer, d_out, handle, y):
    """Cotangents of the sums to cotangents of the rows."""
    handle = layer.of(handle)
    _, pull_back = jax.vjp(lambda y: jax_ep.combine(y, handle), y)
    return after(d_out, pull_back(d_out)[0])


def round_trip_step(layer: Layer, ids, x, weights):
    """Layout, dispatch and combine."""
    handle = layer.layout(ids)
    recv, _ = jax_ep.dispatch(x, handle, weights)
    return after(ids, jax_ep.combine(recv, handle))


STEPS: dict[str, tuple[Callable, str, tuple[str, ...]]] = {
    # name: step, carry, constants
    "layout": (layout_step, "ids", ()),
    "dispatch": (dispatch_step, "x", ("handle", "weights")),
    "combine": (combine_step, "y", ("handle",)),
    "dispatch backward": (
        dispatch_backward_step,
        "y",
        ("row_weights", "handle", "x", "weights"),
    ),
    "combine backward": (combine_backward_step, "x", ("handle", "y")),
    "round trip": (round_trip_step, "ids", ("x", "weights")),
}


def program(name: str, layer: Layer, mesh: Mesh, count: int):
    """The jitted chain of one of `STEPS`."""
    return unrolled(functools.partial(STEPS[name][0], layer), mesh, count)


def differing(layer: Layer, ids, x, y, weights, row_weights):
    """`[1, n]`: elements of each result that differ from the reference's in a bit."""

    def everything(implementation):
        handle = layer.layout(ids, implementation)
        received, pull_back = jax.vjp(
            lambda *a: jax_ep.dispatch(a[0], handle, a[1]), x, weights
        )
        d_x, d_weights = pull_back((y, row_weights))
        out, pull_back = jax.vjp(lambda y: jax_ep.combine(y, handle), y)
        leaves = jax.tree.leaves(handle)
        return [*leaves, *received, d_x, d_weights, out, *pull_back(x)]

    def count(got, want):
        bits = f"uint{8 * got.dtype.itemsize}"
        got, want = (lax.bitcast_convert_type(a, bits) for a in (got, want))
        return jnp.sum(got != want, dtype=jnp.int32)

    pairs = zip(everything("ffi"), everything("xla"), strict=True)
    return jnp.stack([count(*pair) for pair in pairs])[None]
