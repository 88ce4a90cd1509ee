"""The CUDA kernels without a GPU: right results and no deadlock under any schedule.

The sources of ffi/cuda are compiled for a machine (`tests/emulator`) that runs every
CUDA thread of every rank as a fiber and lets a seed decide, within what the memory
model allows, who runs and when each copy and store happens. Seeds go through six kinds
of schedules in turn: some warp pauses for long; copies as late as can be; one rank, one
warp of each block or one block far behind; one block resident at a time.
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import literal
import numpy as np
import pytest
from emulator import build
from emulator.build import Edit
from emulator.cases import Case, random_ids, values

# Phases of workspace.h.
LAYOUT_IDS, DISPATCH_ROWS, COMBINE_ROWS = 1, 5, 8

# Rings of 4 slots and rows of several pieces, so that little data fills them.
SMALL_RING = ("JAX_EP_TUNE_SLOTS=4", "JAX_EP_TUNE_PIECE=256")
# 2 warps instead of 16, to run more schedules.
FEW_WARPS = Edit("launch_shape.h", "kLayoutWarps = 16;", "kLayoutWarps = 2;")
# 64 ids of each of two sources fit a round.
ID_ROUNDS = Edit("workspace.h", "kIdsHalfBytes = 1 * kMiB;", "kIdsHalfBytes = 256;")

pytestmark = pytest.mark.skipif(
    shutil.which(build.COMPILER) is None,
    reason=f"needs a C++ compiler ({build.COMPILER})",
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return build.machine_objects(tmp_path_factory.mktemp("machine"))


# Lanes of a warp leave the wait for a barrier each on its own, as the language allows;
# "together" is what hardware does.
LANES = "independent"


def run(
    machine,
    folder,
    cases: dict[str, Case],
    *,
    edits: Sequence[Edit] = (),
    macros: Sequence[str] = (),
    seeds: int = 24,
) -> subprocess.CompletedProcess:
    """All cases under all seeds; the process, for its status and output."""
    kernels = [kernel for case in cases.values() for kernel in case.kernels]
    program = build.program(folder, machine, kernels, edits, macros)
    paths = [case.write(folder / name) for name, case in cases.items()]
    return subprocess.run(
        [program, LANES, "0", str(seeds - 1), *paths],
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )


def check(*args, **kwargs):
    done = run(*args, **kwargs)
    assert done.returncode == 0, done.stdout


def error_records(done) -> np.ndarray:
    """`[n, 5]`: reading rank, phase, rank that gave up, peer, rank furthest behind."""
    record = r"rank (\d): phase (\d+) rank (\d) peer (-?\d) behind (-?\d)\n"
    return np.array(re.findall(record, done.stdout), int)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- layout ----------------------------------------------------------------------


def layout_cases() -> dict[str, Case]:
    cases = {}
    for name, (ranks, blocks, tokens, topk, experts, capacity, alignment) in {
        "one_rank": (1, 2, 30, 4, 8, None, 1),
        "two_ranks": (2, 4, 37, 3, 16, None, 8),
        "dropped": (3, 3, 40, 2, 12, 50, 4),
        "odd": (2, 5, 1, 5, 6, 3, 1),
        "more_ranks_than_blocks": (4, 2, 33, 8, 16, 200, 16),
    }.items():
        r = rng(len(cases))
        case = cases[name] = Case(ranks, blocks)
        ids = random_ids(r, (ranks, tokens, topk), experts, skew=0.3)
        ids[0, 0, 0] = experts  # invalid
        case.layout(ids, experts, capacity, alignment)
        # Again with other ids, in the halves that the first call has written.
        for _ in range(3):
            ids = random_ids(r, (ranks, tokens, topk), experts, silent=[0])
            case.layout(ids, experts, capacity, alignment)
    return cases


def test_layout(machine, tmp_path):
    check(machine, tmp_path, layout_cases(), edits=[FEW_WARPS])


def test_layout_in_rounds_with_ids_in_recv_slot(machine, tmp_path):
    # 64 ids of a tile fit shared memory.
    edits = [
        FEW_WARPS,
        ID_ROUNDS,
        Edit("launch_shape.h", "kMaxHeldIds = 16 * 1024;", "kMaxHeldIds = 64;"),
    ]
    check(machine, tmp_path, layout_cases(), edits=edits)


# A rank that is in another layout: ids that are no experts here, and more of them.
FOREIGN_IDS = [
    Edit("layout_exchange.cuh", "num_ids) return kNoId;", "num_ids) return 0;"),
    Edit(
        "layout_exchange.cuh", "num_experts_ ? id : kNoId;", "num_experts_ ? id : 4094;"
    ),
    Edit("few_layout.cuh", "num_experts_ ? id : kNoId;", "num_experts_ ? id : 4094;"),
]


def test_ids_of_another_layout_are_masked_in_recv_slot(machine, tmp_path):
    size = Edit("launch_shape.h", "kMaxHeldIds = 16 * 1024;", "kMaxHeldIds = 64;")
    edits = [FEW_WARPS, ID_ROUNDS, size, *FOREIGN_IDS[:2]]
    check(machine, tmp_path, layout_cases(), edits=edits, seeds=12)


# --- dispatch --------------------------------------------------------------------


DISPATCH = {
    "pieces": (2, 2, 40, 2, [1600], True, None),
    # Bulk copies alone: no fence for a warp's own stores is in the way.
    "plain": (2, 2, 40, 3, [1600], False, None),
    "leaves": (3, 2, 17, 4, [96, 7, 40, 2], True, None),
    "odd_rows": (2, 3, 25, 3, [334], False, 40),
    "many_topk": (2, 1, 3, 32, [64], True, 70),
    "one_rank": (1, 2, 20, 2, [48, 6], True, None),
}


def dispatch_cases(specs: dict = DISPATCH, few: bool = False) -> dict[str, Case]:
    """Cases of `specs`: ranks, blocks, T, K, bytes of rows, weights, capacity."""
    cases = {}
    for name, (
        ranks,
        blocks,
        tokens,
        topk,
        row_bytes,
        weighted,
        capacity,
    ) in specs.items():
        r = rng(len(cases))
        case = cases[name] = Case(ranks, blocks)
        for silent in ([], [ranks - 1], []):
            ids = random_ids(r, (ranks, tokens, topk), 2 * ranks, 0.2, silent=silent)
            handle = case.handle(ids, 2 * ranks, capacity, 4)
            leaves = [
                r.integers(0, 256, (ranks, tokens, width), np.uint8)
                for width in row_bytes
            ]
            weights = values(r, ids.shape, "float32") if weighted else None
            case.dispatch(handle, leaves, weights, few=few)
    return cases


def test_dispatch(machine, tmp_path):
    check(machine, tmp_path, dispatch_cases(), macros=SMALL_RING)


# A third of however few tokens is shared, and few zeros come last.
SHARED_TOKENS = [
    Edit("dispatch_send.cuh", "kMinTokensToShare = 8;", "kMinTokensToShare = 0;"),
    Edit("dispatch_zeros.cuh", "FillMemory = 64;", "FillMemory = 1;"),
]


def test_dispatch_with_shared_tokens(machine, tmp_path):
    check(machine, tmp_path, dispatch_cases(), edits=SHARED_TOKENS, macros=SMALL_RING)


# --- combine ---------------------------------------------------------------------


COMBINE = {
    "pieces": (2, 2, 16, 2, [("float32", 200)], None, ["row_values"]),
    # A row is more pieces than a ring has slots.
    "row_beyond_ring": (3, 2, 5, 4, [("float32", 390)], None, ["weights"]),
    "leaves": (2, 3, 15, 4, [("bfloat16", 40), ("float16", 7), ("float32", 3)])
    + (None, ["weights", "row_values", "bias"]),
    "wire_f32": (3, 1, 9, 3, [("bfloat16", 72)], 12, ["wire_f32", "bias"]),
    "many_topk": (2, 1, 3, 32, [("float16", 64)], 60, ["weights", "row_values"]),
}


def combine_cases(specs: dict = COMBINE, few: bool = False) -> dict[str, Case]:
    """Cases of `specs`: ranks, blocks, T, K, leaves, capacity, flags."""
    cases = {}
    for name, (ranks, blocks, tokens, topk, leaves, capacity, flags) in specs.items():
        r = rng(len(cases))
        case = cases[name] = Case(ranks, blocks)
        for silent in ([], [ranks - 1], []):
            ids = random_ids(r, (ranks, tokens, topk), 2 * ranks, 0.2, silent=silent)
            handle = case.handle(ids, 2 * ranks, capacity, 2)
            rows = (ranks, handle.layout.capacity)
            options: dict[str, Any] = {"wire_f32": "wire_f32" in flags}
            for option in {"weights", "row_values"} & set(flags):
                options[option] = values(r, rows, "float32")
            if "bias" in flags:
                options["bias"] = [
                    values(r, (ranks, tokens, width), dtype) for dtype, width in leaves
                ]
            y = [values(r, (*rows, width), dtype) for dtype, width in leaves]
            case.combine(handle, y, **options, few=few)
    return cases


def test_combine(machine, tmp_path):
    check(machine, tmp_path, combine_cases(), macros=SMALL_RING, seeds=18)


def test_combine_with_one_sender(machine, tmp_path):
    """More blocks than have two senders, as in the default grid."""
    case, r = Case(2, 50), rng(0)
    leaves = [("float32", 200), ("bfloat16", 7)]
    for silent in ([], [1]):
        # Some blocks have two tokens, some one, the last none.
        ids = random_ids(r, (2, 55 - 12 * len(silent), 3), 4, 0.2, silent=silent)
        handle = case.handle(ids, 4, None, 2)
        shape = (2, handle.layout.capacity)
        y = [values(r, (*shape, width), dtype) for dtype, width in leaves]
        case.combine(handle, y, row_values=values(r, shape, "float32"))
    check(machine, tmp_path, {"blocks": case}, macros=SMALL_RING, seeds=6)


# --- all three, as they are ------------------------------------------------------


def step(case: Case, r, tokens, topk, width, capacity=None) -> None:
    ranks = case.num_ranks
    experts = 4 * ranks
    ids = random_ids(r, (ranks, tokens, topk), experts, 0.1)
    handle = case.layout(ids, experts, capacity, 8)
    x = values(r, (ranks, tokens, width), "bfloat16")
    case.dispatch(handle, [x], values(r, ids.shape, "float32"))
    y = values(r, (ranks, handle.layout.capacity, width), "bfloat16")
    case.combine(handle, [y])


def pipeline() -> Case:
    case = Case(2, 3)
    r = rng(0)
    step(case, r, 21, 3, 100)
    step(case, r, 2, 2, 10240, 8)  # 20 KiB: two pieces
    step(case, r, 40, 3, 100, 64)
    return case


@pytest.mark.parametrize("stamps", [0, 1])
def test_unchanged_kernels_call_after_call(machine, tmp_path, stamps):
    macros = [f"JAX_EP_STAMPS={stamps}"]
    check(machine, tmp_path, {"pipeline": pipeline()}, macros=macros, seeds=6)


def test_more_ranks_than_lanes(machine, tmp_path):
    ranks = 34
    r = rng(0)
    case = Case(ranks, 1)
    ids = random_ids(r, (ranks, 3, 6), ranks, 0.0)
    handle = case.handle(ids, ranks)
    case.dispatch(handle, [values(r, (ranks, 3, 8), "float32")])
    y = values(r, (ranks, handle.layout.capacity, 8), "float32")
    case.combine(handle, [y], row_values=y[:, :, 0])
    check(machine, tmp_path, {"ranks": case}, macros=SMALL_RING, seeds=3)


def circle(stage: str) -> dict[str, Case]:
    """Each rank's first token goes to the next rank, all others to the one after.

    A ring fills up while its reader waits for a first token, in a circle.
    """
    case = Case(3, 1)
    rank, token = np.arange(3)[:, None, None], np.arange(40)[:, None]
    ids = ((rank + np.where(token == 0, 1, 2)) % 3).astype(np.int32)
    handle = case.handle(ids, 3)
    rows = 40 if stage == "dispatch" else handle.layout.capacity
    # So wide that a block has one channel.
    x = values(rng(0), (3, rows, 2400), "float32")
    case.dispatch(handle, [x]) if stage == "dispatch" else case.combine(handle, [x])
    return {"circle": case}


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_no_rank_waits_in_a_circle(machine, tmp_path, stage):
    check(machine, tmp_path, circle(stage), macros=["JAX_EP_TUNE_SLOTS=8"])


# --- handles that no layout made -------------------------------------------------

NO_ROWS = np.array([-2, -(2**31), 2**31 - 1, 2**31 - 64])  # and C, C + 1
NO_RANKS = np.array([-2, -(2**31), 2**31 - 1, 64, 63, 32])  # and R


def hostile_slots(case: Case, r, ids, num_experts, alignment=4):
    """Slots and owners out of range at both ends: as if the entry had no row."""
    layout = literal.layout(ids, num_experts, alignment=alignment)
    ranks, rows = ids.shape[0], (ids.shape[0], layout.capacity)
    slot, slot_rank = layout.slot.copy(), layout.slot_rank.copy()
    recv_slot, unwritten = layout.recv_slot.copy(), np.zeros(rows, bool)
    for entry in list(layout.kept_slots()):
        source, token, k, owner, row = entry
        kind = r.integers(0, 4)
        if kind > 1:
            continue
        at = (source, token, k)
        layout.slot[at] = layout.recv_slot[owner][at] = -1
        unwritten[owner, row] = True
        if kind == 0:
            values = [*NO_ROWS, layout.capacity, layout.capacity + 1]
            slot[at], recv_slot[owner][at] = r.choice(values, 2)
        else:
            slot_rank[at], recv_slot[owner][at] = r.choice([*NO_RANKS, ranks]), -1
    return case.hostile(
        layout, unwritten, slot=slot, slot_rank=slot_rank, recv_slot=recv_slot
    )


def test_slots_and_owners_out_of_range(machine, tmp_path):
    r = rng(0)
    cases = {}
    for name, (ranks, blocks, tokens, topk) in {
        "two": (2, 2, 30, 3),
        "one": (1, 2, 12, 32),
    }.items():
        case = cases[name] = Case(ranks, blocks)
        ids = random_ids(r, (ranks, tokens, topk), 2 * ranks, 0.1)
        handle = hostile_slots(case, r, ids, 2 * ranks)
        rows = (ranks, handle.layout.capacity)
        x = [
            values(r, (ranks, tokens, 50), "float32"),
            r.integers(0, 9, (ranks, tokens, 7), np.uint8),
        ]
        case.dispatch(handle, x, values(r, ids.shape, "float32"))
        y = [values(r, (*rows, 40), "bfloat16"), values(r, (*rows, 3), "float32")]
        columns = {
            name: values(r, rows, "float32") for name in ("weights", "row_values")
        }
        case.combine(handle, y, **columns)
    check(machine, tmp_path, cases, edits=SHARED_TOKENS, macros=SMALL_RING, seeds=12)


def test_groups_out_of_range(machine, tmp_path):
    """What is beyond the buffer's ends is taken as its ends."""
    r = rng(0)
    least, most = -(2**31), 2**31 - 1
    case = Case(3, 2)
    for masked in (0.2, 1.0):
        ids = random_ids(r, (3, 20, 2), 9, masked)
        layout = literal.layout(ids, 9, alignment=4)
        rows = layout.capacity
        # By rank. Nothing is left to fill: every gap ends before it begins.
        offsets = np.array([[most, 0, rows], [least, -5, most], [0, rows, rows + 1]])
        counts = np.array([[most, rows, most], [least, most, most], [rows, 1, 0]])
        unwritten = np.ones((3, rows), bool)
        if masked == 1.0:
            # All is: the only gap, or the rest, begins below 0 or ends above C.
            offsets = np.array([[least, most, 0], [least, least, -9], [5, -1, most]])
            counts = np.array([[least, 0, rows], [most, 0, 3], [-9, -1, 0]])
            unwritten[:] = False
        for _, _, _, owner, row in layout.kept_slots():
            unwritten[owner, row] = False
        handle = case.hostile(
            layout, unwritten, group_offsets=offsets, group_counts=counts
        )
        x = [values(r, (3, 20, 50), "float32"), r.integers(0, 9, (3, 20, 7), np.uint8)]
        case.dispatch(handle, x, values(r, ids.shape, "float32"))
    check(machine, tmp_path, {"groups": case}, macros=SMALL_RING, seeds=12)


# --- a rank that does not come ---------------------------------------------------


def stalled_case(stage: str, earlier: bool) -> Case:
    """Rank 1 of 3 does not launch `stage`, after a dispatch on all ranks or first."""
    case = Case(3, 2)
    r = rng(0)
    ids = random_ids(r, (3, 20, 4), 6, 0.0)
    handle = case.handle(ids, 6)
    x = values(r, (3, 20, 64), "float32")
    if earlier:
        case.dispatch(handle, [x])
    if stage == "layout":
        case.layout(ids, 6, stalled=1)
    elif stage == "dispatch":
        case.dispatch(handle, [x], values(r, ids.shape, "float32"), stalled=1)
    else:
        y = values(r, (3, handle.layout.capacity, 64), "float32")
        case.combine(handle, [y], row_values=y[:, :, 0], stalled=1)
    return case


@pytest.mark.parametrize("stage", ["layout", "dispatch", "combine"])
def test_a_missing_rank_is_named_and_outputs_are_poisoned(machine, tmp_path, stage):
    cases = {
        "first": stalled_case(stage, earlier=False),
        "later": stalled_case(stage, earlier=True),
    }
    done = run(machine, tmp_path, cases, macros=SMALL_RING, seeds=12)
    assert done.returncode == 0, done.stdout
    records = error_records(done)
    phase = {"layout": LAYOUT_IDS, "dispatch": DISPATCH_ROWS, "combine": COMBINE_ROWS}
    # A record each on ranks 0 and 2, which one of them wrote.
    assert len(records) == 2 * (6 + 12)
    assert set(records[:, 0]) == set(records[:, 2]) == {0, 2}
    # Waits for credit, whose peer may wait itself, give up later.
    assert set(records[:, 3]) == set(records[:, 4]) == {1}
    assert set(records[:, 1]) == {phase[stage]}


# --- a wrong kernel is found -----------------------------------------------------


# What is wrong, a case that shows it, and how the rings are.
FAULTS = {
    "a ring slot is written before it is free": (
        [
            Edit(
                "ring.cuh", "CountWord(state_->number, sent_[i] + 1 - ring_.slots)", "0"
            )
        ],
        *(dispatch_cases, SMALL_RING),
    ),
    "a head is published before its pieces are written": (
        [Edit("ring.cuh", "        ptx::BulkWaitWritten<0>();\n", "")],
        *(dispatch_cases, SMALL_RING),
    ),
    "a stage is loaded again before its stores have read it": (
        [Edit("dispatch_send.cuh", "ptx::BulkWaitRead<kStages - 1 - kAhead>();", "")],
        *(dispatch_cases, SMALL_RING),
    ),
    "a lane loads a stage that stores of other lanes still read": (
        [
            Edit(
                "dispatch_send.cuh",
                "        __syncwarp();\n        const int64_t token = token_of",
                "        const int64_t token = token_of",
            )
        ],
        *(dispatch_cases, SMALL_RING),
    ),
    "a lane loads a shared token's stage that stores of others still read": (
        [
            *SHARED_TOKENS,
            Edit(
                "dispatch_send.cuh",
                "        __syncwarp();\n        part.queue",
                "        part.queue",
            ),
        ],
        *(dispatch_cases, SMALL_RING),
    ),
    "a sender waits for a slot and holds back what it sent": (
        [Edit("ring.cuh", "Flush();  // or two ranks", "// or two ranks")],
        *(lambda: circle("dispatch"), ["JAX_EP_TUNE_SLOTS=8"]),
    ),
    "sums are sent without a fence": (
        [Edit("combine_send.cuh", "ptx::FenceSharedForBulk();", "")],
        *(combine_cases, SMALL_RING),
    ),
    "a team waits for the wrong phase": (
        [Edit("combine_stages.cuh", "(use / kStages - 1) & 1", "(use / kStages) & 1")],
        *(combine_cases, SMALL_RING),
    ),
    "a piece is loaded without a fence after the acquire of its head": (
        [Edit("ring.cuh", "ptx::FenceGlobalForBulk();", "")],
        *(combine_cases, SMALL_RING),
    ),
    "shared tokens are not there for the next call": (
        [*SHARED_TOKENS, Edit("call.cuh", "    control->token_chunks = 0;\n", "")],
        *(dispatch_cases, SMALL_RING),
    ),
    "a shared token is loaded to a stage that stores still read": (
        [
            *SHARED_TOKENS,
            Edit(
                "dispatch_send.cuh",
                "ptx::BulkWaitRead<kStages - 1 - kAhead>();\n        __syncwarp();\n"
                "        part.queue[stage * 32 + Lane()] = make_int2(k",
                "__syncwarp();\n        part.queue[stage * 32 + Lane()] = make_int2(k",
            ),
        ],
        *(dispatch_cases, SMALL_RING),
    ),
    "ids are sent without a barrier between rounds": (
        [
            FEW_WARPS,
            ID_ROUNDS,
            Edit("layout_exchange.cuh", "if (i > 0) GridBarrier();", ""),
        ],
        *(layout_cases, ()),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(machine, tmp_path, fault):
    edits, cases, macros = FAULTS[fault]
    done = run(machine, tmp_path, cases(), edits=edits, macros=macros)
    assert done.returncode == 1, done.stdout
    found = "wrong data|nothing can go on|without Fence|more arrivals"
    assert re.search(f"seed \\d+: .*({found})", done.stdout), done.stdout
