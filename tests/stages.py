"""The three stages over global arrays: one jitted shard_map each, made once.

A handle leaves one jit's shard_map and enters another's, in every test.
"""

import functools

import jax
import numpy as np
from conftest import Backend
from jax.sharding import PartitionSpec as P

import jax_ep


class Stages:
    """`layout`, `dispatch` and `combine` on the first R devices of a backend.

    Arrays are global: `[R*T, ...]` at the source, `[R*C, ...]` at the experts. Each
    call waits for its result, since jax < 0.12 bears only 32 launches in flight.
    """

    def __init__(self, backend: Backend, num_ranks: int):
        self.backend = backend
        self.num_ranks = num_ranks
        self.mesh = backend.mesh(expert=num_ranks)

    def shard_map(self, function, **static):
        """`function` on each rank's share of every argument, jitted."""
        return jax.jit(
            jax.shard_map(
                functools.partial(function, **static),
                mesh=self.mesh,
                in_specs=P("expert"),
                out_specs=P("expert"),
            )
        )

    @functools.cache  # noqa: B019
    def _layout(self, **static):
        return self.shard_map(
            jax_ep.dispatch_layout,
            implementation=self.backend.implementation,
            **static,
        )

    @functools.cache  # noqa: B019
    def _dispatch(self, **static):
        return self.shard_map(jax_ep.dispatch, **static)

    @functools.cache  # noqa: B019
    def _combine(self, **static):
        def call(y, handle, arrays):
            return jax_ep.combine(y, handle, **arrays, **static)

        return self.shard_map(call)

    def layout(self, ids, **static) -> jax_ep.Handle:
        return jax.block_until_ready(self._layout(**static)(ids))

    def dispatch(self, x, handle, topk_weights=None, **static):
        return jax.block_until_ready(self._dispatch(**static)(x, handle, topk_weights))

    def combine(self, y, handle, *, weights=None, bias=None, **static):
        arrays = dict(weights=weights, bias=bias)
        return jax.block_until_ready(self._combine(**static)(y, handle, arrays))

    def by_rank(self, array) -> np.ndarray:
        """`[R, n, ...]` from `[R*n, ...]`."""
        array = np.asarray(array)
        num = array.shape[0] // self.num_ranks
        return array.reshape(self.num_ranks, num, *array.shape[1:])


@functools.cache
def stages(backend: Backend, num_ranks: int) -> Stages:
    return Stages(backend, num_ranks)


def all_ranks(array: np.ndarray) -> np.ndarray:
    """`[R*n, ...]` from `[R, n, ...]`."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def assert_layout_equal(run: Stages, handle: jax_ep.Handle, want) -> None:
    """Every field of a handle against the literal layout."""
    for name in (
        "slot",
        "slot_rank",
        "recv_slot",
        "group_sizes",
        "group_counts",
        "group_offsets",
        "num_recv",
        "num_dropped",
        "num_invalid",
    ):
        value = getattr(handle, name)
        assert value.dtype == np.int32, name
        np.testing.assert_array_equal(
            run.by_rank(value), getattr(want, name), err_msg=name
        )
    assert handle.capacity == want.capacity


def assert_bits_equal(got, want) -> None:
    """Same shape, dtype and bits: tells -0 from +0, and NaN equals its own bits."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{got.dtype}{got.shape} is not {want.dtype}{want.shape}"
    )
    bits = np.dtype(f"u{got.dtype.itemsize}") if got.dtype.kind != "c" else np.uint64
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(bits), np.ascontiguousarray(want).view(bits)
    )
