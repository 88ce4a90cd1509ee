"""The CUDA kernels for few tokens without a GPU, on `emulator_test.py`'s machine."""

import re

import pytest
from emulator.build import Edit
from emulator.cases import Case, random_ids, values
from emulator_test import (  # noqa: F401
    FEW_WARPS,
    FOREIGN_IDS,
    check,
    combine_cases,
    dispatch_cases,
    error_records,
    machine,
    pytestmark,
    rng,
    run,
)

# Phases of workspace.h.
LAYOUT_IDS, DISPATCH, COMBINE = {1}, {11, 12}, {13, 14}

# 2 warps of a block move tiles, of at most 2 vectors a lane.
SMALL = [
    FEW_WARPS,
    Edit("few_shape.h", "kFewLayoutWarps = 32;", "kFewLayoutWarps = 3;"),
    Edit("few_shape.h", "kFewDispatchWarps = 16;", "kFewDispatchWarps = 2;"),
    Edit("few_shape.h", "kFewCombineWarps = 8;", "kFewCombineWarps = 2;"),
    Edit("few_shape.h", "kFewVectors = 7;", "kFewVectors = 2;"),
]
# An epoch comes again after 11 calls of a half, each of which clears a quarter of it.
FEW_EPOCHS = [
    *SMALL,
    Edit("few_words.cuh", "kFewEpochs = 65535;", "kFewEpochs = 11;"),
    Edit("few_words.cuh", "kFewClearBytes = 4 * kKiB;", "kFewClearBytes = 128 * kKiB;"),
    Edit("workspace.h", "kRange = 4 * kMiB + 256 * kKiB;", "kRange = 64 * kKiB;"),
]


def layout_cases() -> dict[str, Case]:
    cases = {}
    for name, (ranks, tokens, topk, experts, capacity, alignment) in {
        "one_rank": (1, 30, 4, 8, None, 1),
        "two_ranks": (2, 37, 3, 16, None, 8),
        "dropped": (3, 40, 2, 12, 50, 4),
        "odd": (2, 1, 5, 6, 3, 1),
        "more_ranks_than_warps": (4, 33, 8, 16, 200, 16),
    }.items():
        r = rng(len(cases))
        case = cases[name] = Case(ranks, 2)
        ids = random_ids(r, (ranks, tokens, topk), experts, skew=0.3)
        ids[0, 0, 0] = experts  # invalid
        case.layout(ids, experts, capacity, alignment, few=True)
        # Other kinds in turn, in the halves that the calls before have written.
        for few in (False, True, True):
            ids = random_ids(r, (ranks, tokens, topk), experts, silent=[0])
            case.layout(ids, experts, capacity, alignment, few=few)
    return cases


def test_layout(machine, tmp_path):  # noqa: F811
    check(machine, tmp_path, layout_cases(), edits=SMALL)


def test_ids_of_another_layout_are_masked(machine, tmp_path):  # noqa: F811
    edits = [*SMALL, *FOREIGN_IDS]
    check(machine, tmp_path, layout_cases(), edits=edits, seeds=12)


FEW_DISPATCH = {
    "tiles": (2, 2, 12, 2, [2500], True, None),
    "leaves": (3, 2, 7, 4, [96, 7, 40, 2, 1200], True, None),
    "odd_rows": (4, 3, 9, 3, [334], False, 40),
    "many_topk": (2, 1, 3, 32, [64], True, 70),
    "one_rank": (1, 2, 10, 2, [48, 6], True, None),
    "eight_ranks": (8, 1, 2, 3, [48], False, None),
}


def few_dispatch_cases() -> dict[str, Case]:
    return dispatch_cases(FEW_DISPATCH, few=True)


def test_dispatch(machine, tmp_path):  # noqa: F811
    check(machine, tmp_path, few_dispatch_cases(), edits=SMALL)


FEW_COMBINE = {
    "tiles": (2, 2, 8, 2, [("float32", 600)], None, ["row_values"]),
    "leaves": (2, 3, 7, 4, [("bfloat16", 40), ("float16", 7), ("float32", 3)])
    + (None, ["weights", "row_values", "bias"]),
    "wire_f32": (3, 1, 5, 3, [("bfloat16", 72), ("float16", 9)])
    + (12, ["wire_f32", "bias"]),
    "many_topk": (2, 1, 3, 32, [("float16", 64)], 60, ["weights", "row_values"]),
    "four_ranks": (4, 2, 5, 4, [("bfloat16", 264)], None, []),
}


def test_combine(machine, tmp_path):  # noqa: F811
    check(machine, tmp_path, combine_cases(FEW_COMBINE, few=True), edits=SMALL)


def mixed(ranks: int, kinds: str, tokens: int = 3) -> Case:
    """Steps of several layers: `f` for few tokens, `m` for many, `x` half and half."""
    case = Case(ranks, 2)
    r = rng(ranks)
    experts = 2 * ranks
    for i, kind in enumerate(kinds):
        few = {"f": [True] * 3, "m": [False] * 3, "x": [i % 2 > 0, i % 3 > 0, True]}
        layout, dispatch, combine = few[kind]
        silent = [] if i % 3 else [i % ranks]
        ids = random_ids(r, (ranks, tokens, 2), experts, 0.2, silent=silent)
        handle = case.layout(ids, experts, None, 1 + i % 2, few=layout)
        x = values(r, (ranks, tokens, 40), "bfloat16")
        weights = values(r, ids.shape, "float32") if i % 2 else None
        case.dispatch(handle, [x], weights, few=dispatch)
        y = values(r, (ranks, handle.layout.capacity, 40), "bfloat16")
        case.combine(handle, [y], few=combine)
    return case


def test_few_and_many_tokens_in_any_order(machine, tmp_path):  # noqa: F811
    cases = {
        "two": mixed(2, "fmxffxmmfx"),
        "four": mixed(4, "xfmf"),
        "eight": mixed(8, "fxm", 2),
    }
    macros = ["JAX_EP_TUNE_SLOTS=4", "JAX_EP_TUNE_PIECE=256"]
    check(machine, tmp_path, cases, edits=SMALL, macros=macros, seeds=18)


def recurring() -> Case:
    """Slots that 20 calls leave alone; then their last words have the call's epoch."""
    case = Case(2, 1)
    r = rng(0)
    for call in range(25):
        ids = random_ids(r, (2, 3, 2), 4, silent=[0, 1] if 2 <= call < 22 else [])
        handle = case.handle(ids, 4)
        case.dispatch(handle, [values(r, (2, 3, 16), "float32")], few=True)
    return case


def test_an_epoch_that_comes_again(machine, tmp_path):  # noqa: F811
    check(machine, tmp_path, {"recurring": recurring()}, edits=FEW_EPOCHS)


@pytest.mark.parametrize("stamps", [0, 1])
def test_unchanged_kernels(machine, tmp_path, stamps):  # noqa: F811
    case = Case(2, 2)
    r = rng(0)
    for tokens, topk, width in ((9, 3, 100), (2, 2, 7168)):
        ids = random_ids(r, (2, tokens, topk), 8, 0.1)
        handle = case.layout(ids, 8, None, 8, few=True)
        x = values(r, (2, tokens, width), "bfloat16")
        case.dispatch(handle, [x], values(r, ids.shape, "float32"), few=True)
        y = values(r, (2, handle.layout.capacity, width), "bfloat16")
        case.combine(handle, [y], few=True)
    macros = [f"JAX_EP_STAMPS={stamps}"]
    check(machine, tmp_path, {"steps": case}, macros=macros, seeds=6)


def stalled(stage: str, earlier: bool) -> Case:
    """Rank 1 of 3 does not launch `stage`, after a dispatch on all ranks or first."""
    case = Case(3, 2)
    r = rng(0)
    ids = random_ids(r, (3, 5, 4), 6, 0.0)
    handle = case.handle(ids, 6)
    x = values(r, (3, 5, 64), "float32")
    if earlier:
        case.dispatch(handle, [x], few=True)
    if stage == "layout":
        case.layout(ids, 6, few=True, stalled=1)
    elif stage == "dispatch":
        weights = values(r, ids.shape, "float32")
        case.dispatch(handle, [x], weights, few=True, stalled=1)
    else:
        y = values(r, (3, handle.layout.capacity, 64), "float32")
        case.combine(handle, [y], row_values=y[:, :, 0], few=True, stalled=1)
    return case


@pytest.mark.parametrize(
    "stage, phases",
    [("layout", LAYOUT_IDS), ("dispatch", DISPATCH), ("combine", COMBINE)],
)
def test_a_missing_rank_is_named(machine, tmp_path, stage, phases):  # noqa: F811
    cases = {"first": stalled(stage, False), "later": stalled(stage, True)}
    done = run(machine, tmp_path, cases, edits=SMALL, seeds=12)
    assert done.returncode == 0, done.stdout
    records = error_records(done)
    # A record each on ranks 0 and 2 (in half of the seeds, waits of the first case may
    # end at any time), which one of them wrote.
    assert len(records) == 2 * (6 + 12)
    assert set(records[:, 0]) == {0, 2}
    assert set(records[:, 2]) <= {0, 2}
    assert set(records[:, 3]) == {1}
    assert set(records[:, 1]) <= phases


FAULTS = {
    "slots are never cleared": (
        [
            *FEW_EPOCHS,
            Edit("few_words.cuh", "    half[i] = make_uint4(0, 0, 0, 0);", "    ;"),
        ],
        lambda: {"recurring": recurring()},
    ),
    "ranks do not meet": (
        [
            *SMALL,
            Edit("few_dispatch.cuh", "(blockIdx.x == 0) AwaitPeers", "(0) AwaitPeers"),
        ],
        lambda: {"two": silent_reader()},
    ),
    "words are taken without their epoch": (
        [
            *SMALL,
            Edit(
                "few_words.cuh",
                "if (EpochOf(words[i]) == epoch) continue;",
                "continue;",
            ),
        ],
        few_dispatch_cases,
    ),
    "a position without the chunks before": (
        [*SMALL, Edit("few_layout.cuh", "+ counts[id];", ";")],
        layout_cases,
    ),
}


def silent_reader() -> Case:
    """Rank 1 sends nothing, so that only meeting it tells that it has read."""
    case = Case(2, 1)
    r = rng(0)
    for _ in range(8):
        ids = random_ids(r, (2, 4, 2), 4, silent=[1])
        handle = case.handle(ids, 4)
        case.dispatch(handle, [values(r, (2, 4, 300), "float32")], few=True)
    return case


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(machine, tmp_path, fault):  # noqa: F811
    edits, cases = FAULTS[fault]
    done = run(machine, tmp_path, cases(), edits=edits)
    assert done.returncode == 1, done.stdout
    found = "wrong data|nothing can go on"
    assert re.search(f"seed \\d+: .*({found})", done.stdout), done.stdout
