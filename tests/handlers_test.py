"""The CPU handlers called directly: HLO can reach them without our Python.

Whatever they are given, they answer with an error on every rank: no crash, no hang, no
access outside a buffer. After each case a good call must still work.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _ffi

R, T, K, E, C, W = 4, 3, 2, 8, 24, 5
L = E // R

ATTRIBUTES = dict(
    abi_version=np.int64(_ffi.abi_version),
    axis="expert",
    num_ranks=np.int64(R),
    groups=np.arange(R, dtype=np.int64),
    num_experts=np.int64(E),
    expert_alignment=np.int64(1),
    capacity=np.int64(C),
    num_sms=np.int64(0),
    timeout_s=np.float64(60),
)
FLAGS = dict(
    jax_ep_layout={},
    jax_ep_dispatch=dict(has_weights=True),
    jax_ep_combine=dict(
        has_weights=True, has_row_values=True, has_bias=True, wire_f32=False
    ),
)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


OPERANDS = dict(
    jax_ep_layout=dict(topk_idx=ints(T, K)),
    jax_ep_dispatch=dict(
        slot=ints(T, K),
        slot_rank=ints(T, K),
        recv_slot=ints(R, T, K),
        group_counts=ints(L),
        group_offsets=ints(L),
        weights=floats(T, K),
        x=floats(T, W),
    ),
    jax_ep_combine=dict(
        slot=ints(T, K),
        slot_rank=ints(T, K),
        recv_slot=ints(R, T, K),
        weights=floats(C),
        row_values=floats(C),
        y=floats(C, W),
        bias=floats(T, W),
    ),
)
RESULTS = dict(
    jax_ep_layout=dict(
        slot=ints(T, K),
        slot_rank=ints(T, K),
        recv_slot=ints(R, T, K),
        group_sizes=ints(L),
        group_counts=ints(L),
        group_offsets=ints(L),
        num_recv=ints(R),
        num_dropped=ints(R),
        num_invalid=ints(1),
    ),
    jax_ep_dispatch=dict(recv_weights=floats(C), recv=floats(C, W)),
    jax_ep_combine=dict(values=floats(T, K), out=floats(T, W)),
)
OPS = dict(
    jax_ep_layout="dispatch_layout",
    jax_ep_dispatch="dispatch",
    jax_ep_combine="combine",
)


def program(target, *, operands=None, results=None, attributes=None, rank=None):
    """The call, jitted over R ranks, but for what a case changes.

    `operands` and `results` change types by name (None drops one), `attributes` values;
    `rank` makes the rank operand of the axis index. Returns the jitted function and its
    arguments by name: a valid handle in which all slots are masked.
    """
    operand_types = {**OPERANDS[target], **(operands or {})}
    result_types = {**RESULTS[target], **(results or {})}
    attrs = {**ATTRIBUTES, **FLAGS[target], **(attributes or {})}

    def call(arguments):
        index = lax.axis_index("expert")
        own = jnp.stack([index, jnp.zeros_like(index)]) if rank is None else rank(index)
        outputs = jax.ffi.ffi_call(target, [t for t in result_types.values() if t])(
            own, *arguments, **{k: v for k, v in attrs.items() if v is not None}
        )
        return jnp.stack([jnp.ravel(o)[0].astype(jnp.float32) for o in outputs])

    run = jax.jit(
        jax.shard_map(
            call,
            mesh=CPU_FFI.mesh(expert=R),
            in_specs=P("expert"),
            out_specs=P("expert"),
            check_vma=False,
        )
    )
    arguments = {
        name: np.full(
            (R * t.shape[0], *t.shape[1:]),
            -1 if name in ("slot", "slot_rank", "recv_slot", "topk_idx") else 0,
            t.dtype,
        )
        for name, t in operand_types.items()
        if t
    }
    return lambda arguments: run(tuple(arguments.values())), arguments


@functools.cache
def valid(target):
    return program(target)


def message(run, arguments) -> str:
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(run(arguments))
    good, good_arguments = valid("jax_ep_layout")
    jax.block_until_ready(good(good_arguments))
    return str(error.value)


@pytest.mark.parametrize("target", list(OPS))
def test_unchanged_call_works(target):
    run, arguments = valid(target)
    assert np.isfinite(np.asarray(run(arguments))).all()


@pytest.mark.parametrize("target", list(OPS))
def test_every_operand_and_result_is_checked(target):
    changes = itertools.cycle(
        [
            lambda t: jax.ShapeDtypeStruct((*t.shape, 1), t.dtype),
            lambda t: jax.ShapeDtypeStruct(t.shape, jnp.int8),
            lambda t: jax.ShapeDtypeStruct((t.shape[0] + 1, *t.shape[1:]), t.dtype),
        ]
    )
    for kind, types in (("operand", OPERANDS[target]), ("result", RESULTS[target])):
        for name, t in types.items():
            changed = {name: next(changes)(t)}
            text = message(*program(target, **{f"{kind}s": changed}))
            assert f"jax_ep.{OPS[target]}: {kind} {name} must be" in text, text


@pytest.mark.parametrize("target", list(OPS))
def test_number_of_operands_and_results(target):
    name = list(RESULTS[target])[-1]
    text = message(*program(target, results={name: None}))
    assert f"jax_ep.{OPS[target]}: result {name} is missing" in text
    text = message(*program(target, results={"more": floats(1)}))
    assert f"jax_ep.{OPS[target]}: expected" in text
    text = message(*program(target, operands={"more": floats(1)}))
    assert f"jax_ep.{OPS[target]}:" in text


@pytest.mark.parametrize("target", list(OPS))
@pytest.mark.parametrize(
    ("attributes", "rule"),
    [
        (
            dict(abi_version=np.int64(99)),
            "abi_version (=99) of the program must be that of the installed jax_ep",
        ),
        (dict(num_ranks=np.int64(0)), "num_ranks (=0) must be in [1, 64]"),
        (
            dict(groups=np.arange(3, dtype=np.int64)),
            "groups must hold num_ranks (=4) positions per group, got 3 in all",
        ),
        (
            dict(num_experts=np.int64(6)),
            "num_experts (=6) must be a multiple of num_ranks (=4)",
        ),
        (dict(capacity=np.int64(-1)), "capacity (=-1) must be in [0, 2^31)"),
        (
            dict(expert_alignment=np.int64(7)),
            "expert_alignment (=7) must be positive and divide the capacity (=24)",
        ),
        (dict(timeout_s=np.float64("nan")), "timeout_s (=nan) must be positive"),
        (dict(timeout_s=None), "attribute timeout_s"),
        (dict(axis=np.int64(1)), "attribute axis"),
    ],
)
def test_attributes(target, attributes, rule):
    text = message(*program(target, attributes=attributes))
    assert f"jax_ep.{OPS[target]}: {rule}" in text


@pytest.mark.parametrize("target", list(OPS))
@pytest.mark.parametrize(
    ("rank", "rule"),
    [
        (lambda i: jnp.stack([i + 1, 0 * i]), "must hold a rank below 4"),
        (lambda i: jnp.stack([i, 0 * i - 1]), "and a group below 1"),
        (lambda i: jnp.stack([i, i]), "and a group below 1"),
        (lambda i: jnp.stack([0 * i, 0 * i]), "rank 0 of 4 on axis"),
        (lambda i: i[None], "operand rank must be int32[2], got int32[1]"),
    ],
    ids=["rank", "group", "one rank's group", "duplicate", "shape"],
)
def test_rank_operand(target, rank, rule):
    assert rule in message(*program(target, rank=rank))


@pytest.mark.parametrize("target", ["jax_ep_dispatch", "jax_ep_combine"])
def test_values_are_checked_before_use(target):
    run, arguments = valid(target)

    def spoil(name, bad, on_rank):
        spoiled = arguments[name].copy()
        spoiled[(on_rank * spoiled.shape[0] // R, *[0] * (spoiled.ndim - 1))] = bad
        return message(run, {**arguments, name: spoiled})

    for bad in (C, -2, 2**31 - 1, -(2**31)):
        text = spoil("slot", bad, 2)
        assert f"jax_ep.{OPS[target]}: slot[0, 0] (={bad}) on rank 2 must be -1" in text
    for bad in (R, -2, 2**31 - 1):
        text = spoil("slot_rank", bad, 1)
        assert f"slot_rank[0, 0] (={bad}) on rank 1 must be the rank that" in text
    text = spoil("slot", 3, 0)  # a row, but of no rank
    assert (
        "slot_rank[0, 0] (=-1) on rank 0 must be the rank that owns slot (=3)" in text
    )
    if target == "jax_ep_dispatch":
        text = spoil("recv_slot", -7, 3)
        assert "recv_slot[0, 0, 0] (=-7) on rank 3 must be -1" in text
        assert "recv_slot names 1 rows and slot 0" in spoil("recv_slot", 7, 3)
        text = spoil("group_counts", C + 1, 1)
        assert "group_offsets[0] (=0) and group_counts[0] (=25) must name rows" in text
        assert "[rank 1 of 4 on axis" in text
        assert "group_offsets[0] (=-1) and" in spoil("group_offsets", -1, 1)
    assert np.isfinite(np.asarray(run(arguments))).all()


def test_too_many_slots_per_token():
    changed = dict(topk_idx=ints(T, 33))
    results = dict(slot=ints(T, 33), slot_rank=ints(T, 33), recv_slot=ints(R, T, 33))
    text = message(*program("jax_ep_layout", operands=changed, results=results))
    assert "jax_ep.dispatch_layout: top-k (=33) must be at most 32." in text


def test_watchdog_names_the_missing_ranks():
    """Ranks 1 and 3 never call; their peers get an error, and later programs work."""

    def call(ids):
        def layout(ids):
            handle = jax_ep.dispatch_layout(
                ids, num_experts=E, implementation="ffi", timeout_s=0.5
            )
            return handle.slot

        even = lax.axis_index("expert") % 2 == 0
        return lax.cond(even, layout, lambda ids: ids, ids)

    mesh = CPU_FFI.mesh(expert=R)
    run = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    )
    ids = np.zeros((R * T, K), np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(run(ids))
    assert (
        'jax_ep.dispatch_layout: ranks 1, 3 of 4 on axis "expert" (group 0) did not '
        "arrive; waited 0."
    ) in str(error.value)
    run, arguments = valid("jax_ep_layout")
    jax.block_until_ready(run(arguments))
