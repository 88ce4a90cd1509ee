"""The experts and the shared expert beside an exchange: parameters, steps, arrays."""

import dataclasses
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.params import MoEParams
from jax_ep.tools.benchmark.exchanges import AXIS, Layer, after


@dataclasses.dataclass(frozen=True)
class Widths:
    """F of the routed experts and S of the shared one; S = 0 is none."""

    expert_hidden: int
    shared_hidden: int


def make_params(layer: Layer, widths: Widths, mesh: Mesh) -> MoEParams:
    """Random parameters in the rows' dtype: experts split over ranks, the shared one
    whole on each, laid out along a rank axis as every other array of a benchmark.
    """
    experts, hidden = layer.experts, layer.hidden
    f, s = widths.expert_hidden, widths.shared_hidden
    shapes = dict(gate_up_proj=(experts, hidden, 2 * f), down_proj=(experts, f, hidden))
    if s:
        shapes |= dict(
            shared_gate_up_proj=(mesh.size * hidden, 2 * s),
            shared_down_proj=(mesh.size * s, hidden),
        )

    def make():
        keys = jax.random.split(jax.random.key(1), len(shapes))
        return {
            # Of about the size that a trained layer's have, so that nothing overflows.
            name: (jax.random.normal(key, shape) / hidden**0.5).astype(layer.dtype)
            for (name, shape), key in zip(shapes.items(), keys, strict=True)
        }

    made = jax.jit(make, out_shardings=NamedSharding(mesh, P(AXIS)))()
    return MoEParams(**made)


def communication_step(layer: Layer, x, ids, weights):
    """Layout, dispatch and combine, and nothing between them."""
    handle = layer.layout(ids)
    recv, _ = jax_ep.dispatch(x, handle, weights)
    return after(x, jax_ep.combine(recv, handle))


def experts_step(layer: Layer, y, handle, row_weights, params):
    """A rank's experts on its own rows."""
    del layer
    return after(y, _whole(jax_ep.experts(y, handle, params, recv_weights=row_weights)))


def shared_step(layer: Layer, x, params):
    """What needs no exchange."""
    del layer
    out = jax_ep.shared_experts(x, params)
    assert out is not None  # or this step would not be asked for
    return after(x, _whole(out))


def _whole(result: jax.Array) -> jax.Array:
    """The result, of which XLA might else compute the one element that is used."""
    return lax.optimization_barrier(result)


def layer_step(layer: Layer, x, ids, weights, params):
    """All of it, as `jax_ep.moe` puts it together after the router."""
    handle = layer.layout(ids)
    shared = jax_ep.shared_experts(x, params)
    recv, recv_weights = jax_ep.dispatch(x, handle, weights)
    y = jax_ep.experts(recv, handle, params, recv_weights=recv_weights)
    return after(x, jax_ep.combine(y, handle, bias=shared))


STEPS: dict[str, tuple[Callable, str, tuple[str, ...]]] = {
    # name: step, carry, constants
    "communication": (communication_step, "x", ("ids", "weights")),
    "experts": (experts_step, "y", ("handle", "row_weights", "params")),
    "shared": (shared_step, "x", ("params",)),
    "layer": (layer_step, "x", ("ids", "weights", "params")),
}
