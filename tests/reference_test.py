"""The reference by itself: its pieces, its platforms, and what it must not do."""

import functools
import itertools

import base
import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from base import IDS, SCALES, WEIGHTS, X
from conftest import CPU_XLA
from jax.sharding import PartitionSpec as P

from jax_ep import reference

# Its stages are compared with the literal loop in layout_test.py, dispatch_test.py,
# combine_test.py and property_test.py, where every case runs on both implementations.


@pytest.mark.parametrize("block", [1, 3, 8])
def test_fill_against_the_literal_rule(block):
    """All demands of three claimants up to 20, and every capacity."""
    some = np.array(list(itertools.product((0, 1, 2, 5, 8, 9, 13, 20), repeat=3)))
    fill = jax.jit(
        jax.vmap(functools.partial(reference._fill, block=block), in_axes=(0, None))
    )
    for capacity in range(0, 66, 1 if block == 1 else block):
        got = np.asarray(fill(some.astype(np.int32), jnp.int32(capacity)))
        for demands, kept in zip(some.tolist(), got.tolist(), strict=True):
            assert kept == literal.fill(demands, capacity, block), (demands, capacity)
    assert jax.eval_shape(
        fill, some.astype(np.int32), jnp.int32(1)
    ).dtype == jnp.int32  # fmt: skip


def test_fill_near_the_largest_int32():
    """A demand and a capacity of nearly 2**31 rows."""
    fill = jax.jit(functools.partial(reference._fill, block=1))
    demand = np.array([2**31 - 2, 0], np.int32)
    assert fill(demand, jnp.int32(2**31 - 1)).tolist() == [2**31 - 2, 0]
    assert fill(demand, jnp.int32(2**30)).tolist() == [2**30, 0]


def layer_jaxpr(**static):
    function = jax.shard_map(
        functools.partial(base.layer, implementation="xla", **static),
        mesh=CPU_XLA.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    return jax.jit(jax.grad(lambda *args: function(*args).sum(), argnums=(0, 2, 3)))


def test_the_program_does_not_depend_on_the_data():
    """No branch around a collective: all ranks run the same ones, whoever is idle."""
    text = layer_jaxpr().lower(X, IDS, WEIGHTS, SCALES).as_text()
    assert "all_gather" in text and "all_to_all" in text
    assert "stablehlo.case" not in text and "stablehlo.if" not in text
    step = layer_jaxpr()
    for ids in (IDS, np.full_like(IDS, -1)):
        got = step(X, ids, WEIGHTS, SCALES)
        for g, want in zip(got, base.gradients(ids=ids), strict=True):
            np.testing.assert_array_equal(g, want)
    assert step._cache_size() == 1


def test_no_collective_that_adds():
    """Sums have a fixed order, so neither psum nor psum_scatter makes them."""
    function = jax.shard_map(
        functools.partial(base.layer, implementation="xla"),
        mesh=CPU_XLA.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    text = jax.jit(function).lower(X, IDS, WEIGHTS, SCALES).as_text()
    assert "reduce_scatter" not in text and "all_reduce" not in text
    assert "ragged" not in text


@pytest.mark.jax_version
@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_lowers_for_other_platforms(platform):
    """With no implementation named, and none of our custom calls in the program."""
    function = jax.shard_map(
        base.layer,
        mesh=jax.sharding.AbstractMesh(
            (4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,)
        ),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    step = jax.jit(jax.value_and_grad(lambda *args: function(*args).sum()))
    shapes = [
        jax.ShapeDtypeStruct(array.shape, array.dtype)
        for array in (X, IDS, WEIGHTS, SCALES)
    ]
    text = step.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    assert "jax_ep_" not in text and "all_gather" in text
