"""The routed experts with each exchange beside other work, in chunks of tokens."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.config import MoEConfig
from jax_ep.experts import Matmul, layer_experts, shared_hidden, shared_output
from jax_ep.in_flight import (
    beside,
    combine_done,
    combine_start,
    dispatch_done,
    dispatch_start,
)
from jax_ep.layout import Handle
from jax_ep.params import MoEParams
from jax_ep.tensor import TensorAxis


def chunk_sizes(num_tokens: int, num_chunks: int) -> list[int]:
    """Tokens of each chunk, as equal as can be; at least one chunk, and none empty."""
    num_chunks = max(1, min(num_chunks, num_tokens))
    size, larger = divmod(num_tokens, num_chunks)
    return [size + (i < larger) for i in range(num_chunks)]


def split(array: Any, sizes: list[int]) -> list[Any]:
    """The chunks of an array's rows; of None, Nones."""
    if array is None:
        return [None] * len(sizes)
    ends = list(itertools.accumulate(sizes))
    return [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def in_chunks(
    routed: MoEParams,
    shared: MoEParams,
    x: jax.Array,
    weights: jax.Array,
    handles: list[Handle],
    *,
    config: MoEConfig,
    matmul: Matmul | None,
    tensor: TensorAxis,
) -> jax.Array:
    """Dispatch, experts and combine of every chunk, and the shared experts.

    Chunk i's experts run beside chunk i + 1's dispatch and chunk i - 1's combine; the
    shared experts' first products beside the first dispatch, their last one beside the
    last combine. The backward has the transposes in the same places.

    Args:
      routed: the routed experts' parameters.
      shared: the shared experts'; without any, Nones.
      x: `[T, H]`.
      weights: `[T, K]`.
      handles: of the chunks, all made before.
      config: the layer.
      matmul: see `experts`.
      tensor: the tensor axis.

    Returns:
      `[T, H]`.
    """
    sizes = [handle.num_tokens for handle in handles]
    chunks = list(
        zip(split(tensor.mine(x), sizes), handles, split(weights, sizes), strict=True)
    )
    has_shared = shared.shared_down_proj is not None
    static: dict[str, Any] = dict(config=config, matmul=matmul, tensor=tensor)
    first_half = functools.partial(shared_hidden, activation=config.activation)
    dispatched = dispatch_start(*chunks[0])
    hidden: Any = None
    if has_shared:
        dispatched, hidden = beside(first_half, dispatched, x, shared)
    combined = []
    for i, handle in enumerate(handles):
        rows, row_weights = dispatch_done(dispatched)
        under_way = combined[-1:]
        if i + 1 < len(handles):
            under_way = [*under_way, dispatch_start(*chunks[i + 1])]
        of_chunk = functools.partial(layer_experts, handle, **static)
        if under_way:
            # The parameters too, or XLA would join the products of two chunks.
            flights = tuple(under_way)
            flights, (y, _) = beside(of_chunk, flights, rows, row_weights, routed)
            combined[-1:] = flights[: len(combined[-1:])]
            dispatched = flights[-1]
        else:
            y, _ = of_chunk(rows, row_weights, routed)
        combined.append(combine_start(y, handle, has_bias=has_shared))
    biases: list[Any] = [None] * len(handles)
    if has_shared:
        combined[-1], out = beside(shared_output, combined[-1], hidden, x, shared)
        biases = split(tensor.mine(out), sizes)
    outs = [
        combine_done(flight, bias=bias)
        for flight, bias in zip(combined, biases, strict=True)
    ]
    return tensor.whole(jnp.concatenate(outs))
