"""HLO that Python would not have written: an error, never a crash or a wrong access.

The custom calls are reached without our Python here, on CPU devices.
"""

import copy
import dataclasses
import re

import base
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import IDS, X
from conftest import CPU_FFI, CPU_XLA
from jax.sharding import PartitionSpec as P
from stages import assert_bits_equal, stages

RANKS, TOKENS, TOPK, LOCAL, CAPACITY, WIDTH = 4, 4, 2, 2, 32, 8

ATTRIBUTES = dict(
    abi_version=np.int64(5),
    axis="expert",
    num_ranks=np.int64(RANKS),
    groups=np.arange(RANKS, dtype=np.int64),
    num_experts=np.int64(8),
    expert_alignment=np.int64(1),
    capacity=np.int64(CAPACITY),
    num_sms=np.int64(0),
    timeout_s=np.float64(10),
    stamps=np.bool_(False),
)


@dataclasses.dataclass
class Call:
    """A custom call: operands `[R, ...]` by name, result types, and attributes."""

    target: str
    operands: dict[str, np.ndarray]
    results: dict[str, tuple[tuple[int, ...], type]]
    attributes: dict

    def run(self):
        types = [jax.ShapeDtypeStruct(*result) for result in self.results.values()]

        def body(*operands):
            operands = [operand[0] for operand in operands]
            results = jax.ffi.ffi_call(self.target, types)(*operands, **self.attributes)
            return [result[None] for result in results]

        function = jax.shard_map(
            body,
            mesh=CPU_FFI.mesh(expert=RANKS),
            in_specs=P("expert"),
            out_specs=P("expert"),
            check_vma=False,
        )
        results = jax.jit(function)(*self.operands.values())
        return dict(zip(self.results, jax.block_until_ready(results), strict=True))


def handle():
    run = stages(CPU_FFI, RANKS)
    made = run.layout(IDS, num_experts=8)
    return {
        field.name: run.by_rank(getattr(made, field.name))
        for field in dataclasses.fields(made)
        # `hop` is None: one domain.
        if isinstance(getattr(made, field.name), jax.Array)
    }


def rank_operand():
    return np.stack([np.arange(RANKS), np.zeros(RANKS)], 1).astype(np.int32)


def layout_call() -> Call:
    ids, local, ranks = (TOKENS, TOPK), (LOCAL,), (RANKS,)
    shapes = dict(
        slot=ids, slot_rank=ids, recv_slot=(RANKS, *ids), group_sizes=local,
        group_counts=local, group_offsets=local, num_recv=ranks, num_dropped=ranks,
        num_invalid=(1,),
    )  # fmt: skip
    return Call(
        "jax_ep_layout",
        dict(rank=rank_operand(), topk_idx=IDS.reshape(RANKS, *ids)),
        {name: (shape, np.int32) for name, shape in shapes.items()},
        dict(ATTRIBUTES),
    )


def dispatch_call() -> Call:
    made = handle()
    operands = dict(rank=rank_operand())
    for name in ("slot", "slot_rank", "recv_slot", "group_counts", "group_offsets"):
        operands[name] = made[name]
    operands["weights"] = base.WEIGHTS.reshape(RANKS, TOKENS, TOPK)
    operands["x"] = X.reshape(RANKS, TOKENS, WIDTH)
    return Call(
        "jax_ep_dispatch",
        operands,
        dict(
            recv_weights=((CAPACITY,), np.float32),
            recv=((CAPACITY, WIDTH), np.float32),
        ),
        dict(ATTRIBUTES, has_weights=True),
    )


def combine_call() -> Call:
    made = handle()
    operands = dict(rank=rank_operand())
    for name in ("slot", "slot_rank", "recv_slot"):
        operands[name] = made[name]
    rows = np.ones((RANKS, CAPACITY), np.float32)
    operands |= dict(weights=rows, row_values=rows)
    operands["y"] = np.ones((RANKS, CAPACITY, WIDTH), np.float32)
    operands["bias"] = np.zeros((RANKS, TOKENS, WIDTH), np.float32)
    return Call(
        "jax_ep_combine",
        operands,
        dict(
            values=((TOKENS, TOPK), np.float32),
            out=((TOKENS, WIDTH), np.float32),
        ),
        dict(
            ATTRIBUTES,
            has_weights=True,
            has_row_values=True,
            has_bias=True,
            wire_f32=False,
            out_f32=False,
        ),
    )


CALLS = dict(layout=layout_call, dispatch=dispatch_call, combine=combine_call)
OPERATIONS = dict(layout="dispatch_layout", dispatch="dispatch", combine="combine")


def test_the_calls_are_good_without_a_change():
    """So that each case below fails for its own reason."""
    layout = layout_call().run()
    for name, value in handle().items():
        np.testing.assert_array_equal(layout[name], value)
    dispatched = dispatch_call().run()
    assert np.asarray(dispatched["recv"]).sum() == 2 * X.sum()
    combined = combine_call().run()
    assert (np.asarray(combined["out"]) == TOPK).all()
    assert (np.asarray(combined["values"]) == 1).all()


def failure(call: Call) -> tuple[str, str]:
    """The whole message, without XLA's status in front, and it without who says so."""
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        call.run()
    status, message = str(raised.value).split(": ", 1)
    assert re.fullmatch("[A-Z_]+", status)
    who = r' \[rank -?\d+ of 4 on axis "expert" \(group -?\d+\)[^\]]*\]'
    return message, re.sub(f"{who}$", "", message)


def fails(call: Call, message: str) -> None:
    assert message in failure(call)


def fails_for_xla(call: Call, message: str) -> None:
    """The same, where the rest is in the words of XLA's own headers."""
    rest = r"(Wrong|Unexpected) [^.]+\."
    assert re.fullmatch(re.escape(message) + rest, failure(call)[1])


# Attributes


@pytest.mark.parametrize("stage", CALLS)
@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "abi_version",
            np.int64(7),
            "abi_version (=7) of the program must be that of the installed jax_ep "
            "(=5); compile or export it again.",
        ),
        ("num_ranks", np.int64(0), "num_ranks (=0) must be in [1, 64]."),
        ("num_ranks", np.int64(-4), "num_ranks (=-4) must be in [1, 64]."),
        ("num_ranks", np.int64(65), "num_ranks (=65) must be in [1, 64]."),
        (
            "num_ranks",
            np.int64(3),
            "groups must hold num_ranks (=3) positions per group, got 4 in all.",
        ),
        (
            "num_experts",
            np.int64(6),
            "num_experts (=6) must be a multiple of num_ranks (=4) and at most 2048.",
        ),
        (
            "num_experts",
            np.int64(0),
            "num_experts (=0) must be a multiple of num_ranks (=4) and at most 2048.",
        ),
        (
            "num_experts",
            np.int64(2**40),
            "num_experts (=1099511627776) must be a multiple of num_ranks (=4) and at "
            "most 2048.",
        ),
        ("capacity", np.int64(-1), "capacity (=-1) must be in [0, 2^31)."),
        ("capacity", np.int64(2**31), "capacity (=2147483648) must be in [0, 2^31)."),
        (
            "expert_alignment",
            np.int64(0),
            "expert_alignment (=0) must be positive and divide the capacity (=32).",
        ),
        (
            "expert_alignment",
            np.int64(5),
            "expert_alignment (=5) must be positive and divide the capacity (=32).",
        ),
        ("timeout_s", np.float64(0), "timeout_s (=0) must be positive."),
        ("timeout_s", np.float64("nan"), "timeout_s (=nan) must be positive."),
        (
            "groups",
            np.zeros(0, np.int64),
            "groups must hold num_ranks (=4) positions per group, got 0 in all.",
        ),
        (
            "groups",
            np.array([0, 1, 2, -3]),
            "groups[3] (=-3) must be another of the positions 0 to 3 than those before "
            "it.",
        ),
        (
            "groups",
            np.array([0, 1, 1, 3]),
            "groups[2] (=1) must be another of the positions 0 to 3 than those before "
            "it.",
        ),
    ],
)
def test_attributes(stage, name, value, message):
    call = CALLS[stage]()
    call.attributes[name] = value
    fails(call, f"jax_ep.{OPERATIONS[stage]}: {message}")


@pytest.mark.parametrize("stage", CALLS)
def test_missing_and_additional_attributes(stage):
    for name in CALLS[stage]().attributes:
        call = CALLS[stage]()
        del call.attributes[name]
        fails_for_xla(call, f"jax_ep.{OPERATIONS[stage]}: attribute {name}: ")
    for name, value in (
        ("axis", 3),
        ("capacity", np.int32(32)),
        ("groups", np.arange(4, dtype=np.int32)),
    ):
        call = CALLS[stage]()
        call.attributes[name] = value
        fails_for_xla(call, f"jax_ep.{OPERATIONS[stage]}: attribute {name}: ")
    call = CALLS[stage]()
    call.attributes["of_a_later_version"] = 3
    call.run()


@pytest.mark.parametrize("value", [1e300, float("inf")])
def test_timeouts_beyond_the_clock(value):
    call = layout_call()
    call.attributes["timeout_s"] = np.float64(value)
    call.run()


def test_alignment_beyond_every_count():
    """2**63 - 1 divides a capacity of 0, and would overflow every sum."""
    call = layout_call()
    call.attributes |= dict(capacity=np.int64(0), expert_alignment=np.int64(2**63 - 1))
    fails(
        call,
        "jax_ep.dispatch_layout: expert_alignment (=9223372036854775807) must be "
        "below 2^31.",
    )


# Shapes and dtypes


MOVED = "float32|bfloat16|float16|uint8|uint16|uint32"
SUMMED = "float32|bfloat16|float16"
NAMED = {*MOVED.split("|"), "int32"}
# Operands in order. T and K are those of the first operand that has them, W is y's.
OPERANDS = dict(
    layout=dict(rank=("int32", (2,)), topk_idx=("int32", ("T", "K"))),
    dispatch=dict(
        rank=("int32", (2,)),
        slot=("int32", ("T", "K")),
        slot_rank=("int32", ("T", "K")),
        recv_slot=("int32", (RANKS, "T", "K")),
        group_counts=("int32", (LOCAL,)),
        group_offsets=("int32", (LOCAL,)),
        weights=("float32", ("T", "K")),
        x=(MOVED, ("T", "any")),
    ),
    combine=dict(
        rank=("int32", (2,)),
        slot=("int32", ("T", "K")),
        slot_rank=("int32", ("T", "K")),
        recv_slot=("int32", (RANKS, "T", "K")),
        weights=("float32", (CAPACITY,)),
        row_values=("float32", (CAPACITY,)),
        y=(SUMMED, (CAPACITY, "W")),
        bias=("y", ("T", "W")),
    ),
)


def spelled(dtype: str, shape) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def unfit(kind: str, rules, given) -> str:
    """What is first wrong of operands or results; each rule is a name and what it fits.

    Args:
      kind: "operand" or "result".
      rules: names, and pairs of dtypes and dimensions.
      given: pairs of dtype and shape, in order.
    """
    known: dict = {}
    dtypes = {}
    for i, (name, (allowed, dims)) in enumerate(rules):
        if i == len(given):
            plural = "" if i == 1 else "s"
            return f"{kind} {name} is missing; got {i} {kind}{plural}."
        dtype, shape = given[i]
        dtypes[name] = dtype
        allowed = dtypes.get(allowed, allowed)
        found = spelled(dtype if dtype in NAMED else "another dtype", shape)
        if len(shape) == len(dims) and "T" in dims and "K" in dims:
            known = dict(zip(dims, shape, strict=True)) | known
        known["any"] = "any"
        want = [known.get(d, "any") if isinstance(d, str) else d for d in dims]
        fits = len(shape) == len(want) and all(
            w in ("any", size) for w, size in zip(want, shape, strict=True)
        )
        if not fits or dtype not in allowed.split("|"):
            return f"{kind} {name} must be {spelled(allowed, want)}, got {found}."
        known = dict(zip(dims, shape, strict=True)) | known
    return f"expected {len(rules)} {kind}s, got {len(given)}."


def misfit(stage: str, call: Call) -> str:
    """The message of a call whose operands or, if these fit, results do not fit."""
    rules = list(OPERANDS[stage].items())
    given = [(str(x.dtype), x.shape[1:]) for x in call.operands.values()]
    left = len(given) - len(rules)
    if stage == "dispatch" and left > 0:
        rules += left * [rules[-1]]  # Each is a leaf.
    good = CALLS[stage]()
    # The shapes of results that follow from a good call's operands.
    results = [
        (name, (np.dtype(dtype).name, shape))
        for name, (shape, dtype) in good.results.items()
    ]
    have = [(np.dtype(dtype).name, shape) for shape, dtype in call.results.values()]
    if call.results == good.results:
        message = unfit("operand", rules, given)
    else:
        message = unfit("result", results, have)
    return f"jax_ep.{OPERATIONS[stage]}: {message}"


def reshaped(array: np.ndarray, tail) -> np.ndarray:
    return np.zeros((array.shape[0], *tail), array.dtype)


@pytest.mark.parametrize("stage", CALLS)
def test_operands(stage):
    """Each operand in turn with another size, ndim or dtype, and left out."""
    for name, good in CALLS[stage]().operands.items():
        tail = good.shape[1:]
        bad = [
            reshaped(good, (tail[0] + 1, *tail[1:])),
            reshaped(good, (*tail[:-1], tail[-1] + 1)),
            reshaped(good, (*tail, 1)),
            reshaped(good, tail[1:]),
            good.astype(np.float16 if good.dtype == np.int32 else np.int16),
            good.astype(np.int8),
        ]
        if name == "topk_idx":  # fixes T and K; then the results do not fit
            bad = bad[2:]
        if name == "x":  # any width; then the result does not fit
            del bad[1]
            bad[3] = good.astype(np.complex64)
        for array in bad:
            call = CALLS[stage]()
            call.operands[name] = array
            fails(call, misfit(stage, call))
        call = CALLS[stage]()
        del call.operands[name]
        fails(call, misfit(stage, call))
    call = CALLS[stage]()
    call.operands["more"] = np.zeros((RANKS, 3), np.float32)
    fails(call, misfit(stage, call))


@pytest.mark.parametrize("stage", CALLS)
def test_results(stage):
    for name, (shape, dtype) in CALLS[stage]().results.items():
        for other in (
            ((shape[0] + 1, *shape[1:]), dtype),
            ((0, *shape[1:]), dtype),
            ((*shape, 2), dtype),
            (shape, np.int16),
            (shape, np.float64 if jax.config.jax_enable_x64 else np.uint8),
        ):
            call = CALLS[stage]()
            call.results[name] = other
            fails(call, misfit(stage, call))
        call = CALLS[stage]()
        del call.results[name]
        if call.results:
            fails(call, misfit(stage, call))
    call = CALLS[stage]()
    call.results["more"] = ((3,), np.float32)
    fails(call, misfit(stage, call))


def test_whole_messages_of_shapes():
    """Operation, buffer, what it must be and what it is, and who says so."""
    call = dispatch_call()
    call.operands["recv_slot"] = call.operands["recv_slot"][:, :3]
    fails(
        call,
        "jax_ep.dispatch: operand recv_slot must be int32[4, 4, 2], got "
        'int32[3, 4, 2]. [rank 0 of 4 on axis "expert" (group 0), as have 3 other '
        "ranks]",
    )
    call = combine_call()
    call.operands["y"] = call.operands["y"].astype(np.int32)
    fails(
        call,
        "jax_ep.combine: operand y must be float32|bfloat16|float16[32, any], got "
        "int32[32, 8].",
    )
    call = layout_call()
    call.operands["topk_idx"] = np.zeros((RANKS, 4, 33), np.int32)
    for name in ("slot", "slot_rank"):
        call.results[name] = ((4, 33), np.int32)
    call.results["recv_slot"] = ((4, 4, 33), np.int32)
    fails(call, "jax_ep.dispatch_layout: top-k (=33) must be at most 32.")


@pytest.mark.parametrize(
    "stage, flag, message",
    [
        (
            "dispatch",
            "has_weights",
            "result recv must be float32[32, 2], got float32[32].",
        ),
        (
            "combine",
            "has_weights",
            f"operand y must be {SUMMED}[32, any], got float32[32].",
        ),
        (
            "combine",
            "has_row_values",
            f"operand y must be {SUMMED}[32, any], got float32[32].",
        ),
        (
            "combine",
            "has_bias",
            f"operand y must be {SUMMED}[32, any], got float32[4, 8].",
        ),
    ],
)
def test_flags_that_lie(stage, flag, message):
    """A flag says that an operand is not there: the rest does not fit."""
    call = CALLS[stage]()
    call.attributes[flag] = False
    fails(call, f"jax_ep.{stage}: {message}")


# Values


@pytest.mark.parametrize("stage", CALLS)
@pytest.mark.parametrize("rank", [[4, 0], [-1, 0], [0, 1], [0, -1], [2**31 - 1, 7]])
def test_positions(stage, rank):
    """One device claims a rank or group that does not exist."""
    call = CALLS[stage]()
    call.operands["rank"][2] = rank
    fails(
        call,
        f"jax_ep.{OPERATIONS[stage]}: operand rank (={rank[0]}, {rank[1]}) must hold a "
        "rank below 4 and a group below 1.",
    )


@pytest.mark.parametrize("stage", CALLS)
def test_a_rank_twice(stage):
    """Two devices claim one rank: not a hang until the timeout."""
    call = CALLS[stage]()
    call.operands["rank"][2, 0] = 1
    fails(
        call,
        f'jax_ep.{OPERATIONS[stage]}: rank 1 of 4 on axis "expert" (group 0) arrived '
        "twice; the first value of operand rank must be the device's own index on the "
        "axis.",
    )


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
@pytest.mark.parametrize("value", [CAPACITY, -2, 2**31 - 1, -(2**31)])
def test_slots_out_of_range(stage, value):
    call = CALLS[stage]()
    call.operands["slot"] = call.operands["slot"].copy()
    call.operands["slot"][1, 2, 1] = value
    fails(
        call,
        f"jax_ep.{stage}: slot[2, 1] (={value}) on rank 1 must be -1 or a row below "
        "the capacity (=32).",
    )


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
@pytest.mark.parametrize("value", [RANKS, -2, 2**31 - 1, -(2**31), -1])
def test_owners_out_of_range(stage, value):
    call = CALLS[stage]()
    call.operands["slot_rank"] = call.operands["slot_rank"].copy()
    call.operands["slot_rank"][3, 0, 0] = value
    slot = call.operands["slot"][3, 0, 0]
    fails(
        call,
        f"jax_ep.{stage}: slot_rank[0, 0] (={value}) on rank 3 must be the rank that "
        f"owns slot (={slot}), one of 4, or -1 for none.",
    )


def test_receive_rows_out_of_range():
    for value in (CAPACITY, -2, 2**31 - 1, -(2**31)):
        call = dispatch_call()
        call.operands["recv_slot"] = call.operands["recv_slot"].copy()
        call.operands["recv_slot"][2, 0, 1, 0] = value
        fails(
            call,
            f"jax_ep.dispatch: recv_slot[0, 1, 0] (={value}) on rank 2 must be -1 or a "
            "row below the capacity (=32).",
        )


def test_a_row_given_twice():
    call = dispatch_call()
    recv_slot = call.operands["recv_slot"] = call.operands["recv_slot"].copy()
    free = np.argwhere(recv_slot[0] == -1)[0]
    recv_slot[(0, *free)] = recv_slot[0].max()
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        call.run()
    assert re.search(
        r"jax_ep.dispatch: recv_slot\[\d, \d, \d\] \(=\d+\) on rank 0 must not name "
        "the row of another slot.",
        str(raised.value),
    )


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_ranks_that_disagree(stage):
    """Source and owner have other rows for one slot: no row is read or written."""
    call = CALLS[stage]()
    slot = call.operands["slot"] = call.operands["slot"].copy()
    slot[0, 0, 0] = CAPACITY - 1
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        call.run()
    assert re.search(
        rf"jax_ep.{stage}: slot\[0, 0\] \(=31\) on rank 0 and recv_slot\[0, 0, 0\] "
        r"\(=\d+\) on rank \d must be equal; the handle must be the same on all ranks.",
        str(raised.value),
    )


@pytest.mark.parametrize("counts, offsets", [(33, 0), (1, 32), (-1, 0), (0, -1)])
def test_groups_out_of_range(counts, offsets):
    call = dispatch_call()
    for name, value in (("group_counts", counts), ("group_offsets", offsets)):
        call.operands[name] = call.operands[name].copy()
        call.operands[name][1, 1] = value
    fails(
        call,
        f"jax_ep.dispatch: group_offsets[1] (={offsets}) and group_counts[1] "
        f"(={counts}) must name rows below the capacity (=32).",
    )


def test_ids_are_data_not_indices():
    """The layout takes any int32, also what Python would have clamped."""
    call = layout_call()
    ids = call.operands["topk_idx"] = call.operands["topk_idx"].copy()
    ids[0] = [[-(2**31), 2**31 - 1], [8, -2], [-1, 0], [7, 9]]
    result = call.run()
    assert np.asarray(result["slot_rank"])[0].tolist() == [
        [-1, -1],
        [-1, -1],
        [-1, 0],
        [3, -1],
    ]
    assert np.asarray(result["num_invalid"])[:, 0].tolist() == [3, 0, 0, 0]


@pytest.mark.parametrize("backend", [CPU_FFI, CPU_XLA], ids=["ffi", "xla"])
def test_random_handles(backend):
    """Handles of noise: an error, or some result; then a good handle still works."""
    run = stages(backend, RANKS)
    good = run.layout(IDS, num_experts=8)
    y = np.ones((RANKS * CAPACITY, WIDTH), np.float32)
    random = np.random.default_rng(0)
    names = ["slot", "slot_rank", "recv_slot", "group_counts", "group_offsets"]
    num_errors = 0
    num_trials = 60 if backend is CPU_FFI else 8
    for trial in range(num_trials):
        changes = {}
        for name in random.choice(names, random.integers(1, 4), replace=False):
            values = np.asarray(getattr(good, name)).copy()
            chosen = random.random(values.shape) < random.choice([0.02, 0.3, 1.0])
            low, high = [(-3, 40), (-(2**31), 2**31 - 1)][trial % 2]
            noise = random.integers(low, high, values.shape, np.int64)
            values[chosen] = noise[chosen].astype(np.int32)
            changes[str(name)] = values
        handle = dataclasses.replace(good, **changes)
        for call in (
            lambda h=handle: run.dispatch(X, h),
            lambda h=handle: run.combine(y, h),
        ):
            try:
                call()
            except jax.errors.JaxRuntimeError as error:
                assert "jax_ep." in str(error)
                num_errors += 1
    assert (num_errors > num_trials) == (backend is CPU_FFI)
    recv, _ = run.dispatch(X, good)
    assert_bits_equal(run.combine(recv, good), 2 * X)


def test_calls_do_not_share_their_dicts():
    """The cases above change copies."""
    first = layout_call()
    copy.deepcopy(first).attributes["capacity"] = np.int64(0)
    assert first.attributes["capacity"] == jnp.int32(CAPACITY)
