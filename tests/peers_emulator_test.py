"""Ranks that are not in the same call, on `emulator_test.py`'s machine.

The right rank is named, and nothing of one call passes for another's.
"""

import numpy as np
import pytest
from emulator.cases import Case, random_ids, values
from emulator_test import (  # noqa: F401
    FEW_WARPS,
    SMALL_RING,
    error_records,
    machine,
    pytestmark,
    rng,
    run,
)
from few_emulator_test import SMALL

SITE = 16  # phase of workspace.h


# --- a rank that does not come -------------------------------------------------------


def chain_case(stage: str) -> Case:
    """Rank 3 of 4 does not come. Rank 0 exchanges nothing with it, but waits for rows
    of ranks 1 and 2, who wait for room in rank 3's rings.
    """
    case, r = Case(4, 1), rng(0)
    if stage == "dispatch":
        wanted = [[1, 2], [0, 3], [0, 3], [-1, -1]]
    else:
        wanted = [[1, 2], [0, -1], [0, -1], [1, 2]]
    ids = np.repeat(np.array(wanted, np.int32)[:, None], 30, axis=1)
    handle = case.handle(ids, 4)
    rows = 30 if stage == "dispatch" else handle.layout.capacity
    x = values(r, (4, rows, 64), "float32")
    for step in ({}, dict(stalled=3)):
        if stage == "dispatch":
            case.dispatch(handle, [x], **step)
        else:
            case.combine(handle, [x], **step)
    return case


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_rank_that_waits_itself_is_not_the_culprit(machine, tmp_path, stage):  # noqa: F811
    cases = {"chain": chain_case(stage)}
    done = run(machine, tmp_path, cases, macros=SMALL_RING, seeds=12)
    assert done.returncode == 0, done.stdout
    records = error_records(done)
    assert len(records) == 3 * 12
    assert set(records[:, 3]) <= {1, 2}
    assert set(records[:, 4]) == {3}


# --- ranks in different calls --------------------------------------------------------


def make(case: Case, kind: str, few: bool, seed: int, **step) -> None:
    """A call of `kind` with data of `seed`."""
    r, ranks = rng(seed), case.num_ranks
    experts = (8 if kind == "wide layout" else 2) * ranks
    ids = random_ids(r, (ranks, 12, 3), experts)
    if kind.endswith("layout"):
        case.layout(ids, experts, few=few, **step)
        return
    # Of one handle: the rows of one call fit the other.
    handle = case.handle(random_ids(rng(0), (ranks, 12, 3), experts), experts)
    if kind == "dispatch":
        case.dispatch(handle, [values(r, (ranks, 12, 64), "float32")], few=few, **step)
    else:
        y = values(r, (ranks, handle.layout.capacity, 64), "float32")
        case.combine(handle, [y], few=few, **step)


def crossed(kinds, few: bool, num_ranks: int = 2) -> Case:
    """After a call of all, the last rank makes two calls in another order."""
    case = Case(num_ranks, 2)
    make(case, kinds[0], few, 1)
    make(case, kinds[0], few, 2, stalled=num_ranks - 1)
    make(case, kinds[1], few, 3, failed=True)
    return case


CROSSED = {
    "layouts": ("layout", "layout"),
    "layouts_of_other_experts": ("layout", "wide layout"),
    "dispatches": ("dispatch", "dispatch"),
    "combines": ("combine", "combine"),
    "layout_and_dispatch": ("layout", "dispatch"),
    "combine_and_layout": ("combine", "layout"),
}


@pytest.mark.parametrize("few", [False, True])
def test_calls_in_another_order_are_an_error(machine, tmp_path, few):  # noqa: F811
    cases = {name: crossed(kinds, few) for name, kinds in CROSSED.items()}
    cases["four_ranks"] = crossed(("dispatch", "dispatch"), few, num_ranks=4)
    edits = SMALL if few else [FEW_WARPS]
    done = run(machine, tmp_path, cases, edits=edits, macros=SMALL_RING, seeds=6)
    # Outputs are poisoned on every rank.
    assert done.returncode == 0, done.stdout
    records = error_records(done)
    assert len(records) == 6 * (2 * len(CROSSED) + 4)
    assert set(records[:, 1]) == {SITE}
    # The last rank is named, and names the others.
    last = np.repeat([1, 3], [6 * 2 * len(CROSSED), 6 * 4])
    assert ((records[:, 2] == last) != (records[:, 3] == last)).all()
