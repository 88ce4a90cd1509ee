"""The expert axis: groups, ranks, and operands that vary alike."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from jax.sharding import PartitionSpec as P

from jax_ep import axis


def inside(mesh, function):
    """What `function` returns at trace time in a shard_map over all of `mesh`."""
    seen = []

    def body(x):
        seen.append(function())
        return x

    spec = P(mesh.axis_names)
    jax.eval_shape(
        jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec),
        jax.ShapeDtypeStruct((mesh.size,), jnp.float32),
    )
    return seen[0]


@pytest.mark.parametrize(
    "names, groups",
    [
        (("c",), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (("a",), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (("b",), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (("a", "c"), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (("c", "a"), [[0, 4, 1, 5], [2, 6, 3, 7]]),
        (("a", "b", "c"), [list(range(8))]),
        ((), [[n] for n in range(8)]),
    ],
)
def test_groups(names, groups):
    """Flattened mesh positions, a row per group in rank order."""
    mesh = CPU_FFI.mesh(a=2, b=2, c=2)
    found = inside(mesh, lambda: axis.expert_axis("dispatch_layout", names))
    assert found.groups.tolist() == groups
    assert found.groups.dtype == np.int64
    assert found.num_ranks == len(groups[0])
    assert found.names == names


@pytest.mark.parametrize(
    "names",
    [names for n in range(4) for names in itertools.permutations(("a", "b", "c"), n)],
)
def test_rank_and_group_find_the_device_in_groups(names):
    """groups[group][rank] is the device's own flattened position, on every device."""
    mesh = CPU_FFI.mesh(a=2, b=2, c=2)
    found = inside(mesh, lambda: axis.expert_axis("dispatch_layout", names))
    rank_and_group = jax.jit(
        jax.shard_map(
            lambda x: x * 0 + found.rank_and_group()[None],
            mesh=mesh,
            in_specs=P(("a", "b", "c")),
            out_specs=P(("a", "b", "c")),
        )
    )(np.zeros((8, 2), np.int32))
    assert rank_and_group.dtype == jnp.int32
    positions = [
        found.groups[group][rank] for rank, group in np.asarray(rank_and_group)
    ]
    assert positions == list(range(8))


def test_a_string_is_one_axis():
    mesh = CPU_FFI.mesh(expert=4)
    found = inside(mesh, lambda: axis.expert_axis("dispatch_layout", "expert"))
    assert found.names == ("expert",)
    assert axis.axis_label(("data", "expert")) == "data,expert"


@pytest.mark.parametrize("check_vma", [True, False])
def test_vary_alike(check_vma):
    """Every array varies over the union of all arrays' axes and the expert axis."""
    mesh = CPU_FFI.mesh(a=2, b=2, c=2)
    seen = []

    def body(x, y, z):
        tree = axis.vary_alike(("c",), {"x": x, "yz": (y, z), "none": None})
        seen.append([jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(tree)])
        return x

    jax.eval_shape(
        jax.shard_map(
            body, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P("a"),
            check_vma=check_vma,
        ),
        *[jax.ShapeDtypeStruct((2,), jnp.float32)] * 3,
    )  # fmt: skip
    if check_vma:
        assert seen == [[frozenset("ac")] * 3]


def test_vary_alike_casts_nothing_in_vain():
    mesh = CPU_FFI.mesh(expert=4)

    def body(x, y):
        return axis.vary_alike(("expert",), (x, y))

    jaxpr = jax.make_jaxpr(
        jax.shard_map(body, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    )(*[np.zeros(4, np.float32)] * 2)
    assert "pcast" not in str(jaxpr) and "pvary" not in str(jaxpr)
