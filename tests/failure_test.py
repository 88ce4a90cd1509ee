"""A rank that fails, or never arrives: an error on every rank, in time, and then on."""

import functools
import os
import subprocess
import sys
import time

import base
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import IDS, SCALES, WEIGHTS, X
from conftest import CPU_FFI
from jax.sharding import PartitionSpec as P
from stages import assert_bits_equal

import jax_ep

# A host callback stands for whatever keeps a rank from arriving, so CPU devices only.


def late(value, after, seconds: float, ranks: tuple[int, ...]):
    """`value`, once `after` is there, and on some ranks `seconds` later."""

    def wait(rank, _):
        if int(rank) in ranks:
            time.sleep(seconds)
        return np.zeros((), np.int32)

    shape = jax.ShapeDtypeStruct((), jnp.int32)
    zero = jax.pure_callback(
        wait, shape, jax.lax.axis_index("expert"), after.reshape(-1)[0]
    )
    return value + zero.astype(value.dtype)


@functools.cache
def step(stage: str, ranks: tuple[int, ...], mesh_axes: tuple, **static):
    """A layer in which some ranks reach one stage late."""

    def body(x, ids, weights, scales):
        def held(value, after, here):
            return late(value, after, 3.0, ranks) if stage == here else value

        handle = jax_ep.dispatch_layout(
            held(ids, ids, "dispatch_layout"),
            num_experts=8,
            implementation="ffi",
            **static,
        )
        x = held(x, handle.slot, "dispatch")
        recv, recv_weights = jax_ep.dispatch(x, handle, weights)
        y = recv * (recv_weights * base.row_scales(scales, handle))[:, None]
        return jax_ep.combine(held(y, y, "combine"), handle)

    mesh = CPU_FFI.mesh(**dict(mesh_axes))
    spec = P(tuple(dict(mesh_axes)))
    function = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(spec, spec, spec, P("expert")),
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(function)


def good_step():
    out = step("", (), (("expert", 4),))(X, IDS, WEIGHTS, SCALES)
    assert_bits_equal(out, base.outputs())


@pytest.mark.jax_version
@pytest.mark.parametrize(
    "stage, ranks, named",
    [
        ("dispatch_layout", (2,), "rank 2 of 4"),
        ("dispatch", (1, 3), "ranks 1, 3 of 4"),
        ("combine", (0,), "rank 0 of 4"),
    ],
)
def test_a_rank_that_does_not_arrive(stage, ranks, named):
    """The watchdog names it, the stage and the time; the next program is right."""
    failing = step(stage, ranks, (("expert", 4),), timeout_s=1.0)
    start = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(failing(X, IDS, WEIGHTS, SCALES))
    assert time.monotonic() - start < 30
    message = (
        f'jax_ep.{stage}: {named} on axis "expert" (group 0) did not arrive; waited '
    )
    assert message in str(raised.value)
    assert "DEADLINE_EXCEEDED" in str(raised.value)
    assert "timeout_s (=1)." in str(raised.value)
    good_step()


def test_a_group_of_its_own():
    """One group's late rank is named with its group; both groups' program fails."""
    axes = (("data", 2), ("expert", 2))
    failing = step("dispatch", (1,), axes, timeout_s=1.0)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(failing(X, IDS, WEIGHTS, SCALES))
    assert 'jax_ep.dispatch: rank 1 of 2 on axis "expert" (group ' in str(raised.value)
    good_step()


def test_slow_is_not_late():
    """A rank that comes within timeout_s is waited for."""
    slow = step("combine", (1,), (("expert", 4),), timeout_s=60.0)
    assert_bits_equal(slow(X, IDS, WEIGHTS, SCALES), base.outputs())


def broken_dispatch(handle, x):
    """A dispatch with a handle whose integers were tampered with."""

    def body(handle, x):
        return jax_ep.dispatch(x, handle)[0]

    return jax.jit(
        jax.shard_map(
            body,
            mesh=CPU_FFI.mesh(expert=4),
            in_specs=P("expert"),
            out_specs=P("expert"),
        )
    )(handle, x)


def handle_with(rank: int, value: int):
    """BASE's handle, but for one slot of one rank."""
    import dataclasses

    layout = jax.shard_map(
        functools.partial(jax_ep.dispatch_layout, num_experts=8, implementation="ffi"),
        mesh=CPU_FFI.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    handle = jax.jit(layout)(IDS)
    slot = np.asarray(handle.slot).copy()
    slot[4 * rank, 0] = value
    return dataclasses.replace(handle, slot=slot)


def test_one_ranks_error_reaches_all():
    """The ranks that did nothing wrong do not wait for ever, nor the next program."""
    for rank in range(4):
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            jax.block_until_ready(broken_dispatch(handle_with(rank, 10**9), X))
        message = (
            f"jax_ep.dispatch: slot[0, 0] (=1000000000) on rank {rank} must be -1 or a "
            "row below the capacity (=32)."
        )
        assert message in str(raised.value)
        good_step()


def test_many_failures_leave_nothing_behind():
    """Sixty failed programs, then a good one, in seconds."""
    handle = handle_with(1, -5)
    start = time.monotonic()
    for _ in range(60):
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(broken_dispatch(handle, X))
    good_step()
    assert time.monotonic() - start < 60


def test_19_a_stalled_rank_ends_the_process():
    """An unattended program: it exits, not with 0, and its text names the rank."""
    program = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
import conftest, failure_test as f
step = f.step("dispatch", (1,), (("expert", 4),), timeout_s=1.0)
step(f.X, f.IDS, f.WEIGHTS, f.SCALES).block_until_ready()
"""
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=dict(os.environ, JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode not in (0, -11, -6), result.stderr
    assert 'jax_ep.dispatch: rank 1 of 4 on axis "expert"' in result.stderr
    assert time.monotonic() - start < 60
