"""Stamps: noted by calls that ask for them, in order, and by no others."""

import jax
import numpy as np
import pytest
from conftest import CPU_FFI
from stages import all_ranks, stages

import jax_ep
from jax_ep import stamps

RANKS, TOKENS, TOPK, EXPERTS, HIDDEN = 4, 64, 2, 8, 32
IDS = np.random.default_rng(0).integers(0, EXPERTS, (RANKS, TOKENS, TOPK), np.int32)
X = np.random.default_rng(1).standard_normal((RANKS * TOKENS, HIDDEN)).astype("float32")


def round_trip(**static):
    run = stages(CPU_FFI, RANKS)
    handle = run.layout(all_ranks(IDS), num_experts=EXPERTS, **static)
    recv_x, _ = run.dispatch(X, handle)
    return handle, np.asarray(run.combine(recv_x, handle))


@pytest.mark.jax_version
def test_stamps_of_host_calls():
    stamps.read_stamps()
    round_trip(stamps=True)
    found = stamps.read_stamps()
    assert {(s.stage, s.rank) for s in found} == {
        (stage, rank)
        for stage in ("layout", "dispatch", "combine")
        for rank in range(RANKS)
    }
    for each in found:
        assert each.names == ("arrived", "began", "ended")
        assert each.times.shape == (1, 3) and each.times.dtype == np.int64
        ((arrived, began, ended),) = each.times
        # The call begins when the last rank has arrived.
        assert 0 < arrived <= began < ended
        assert each.seconds("arrived", "ended") == pytest.approx(
            (ended - arrived) / 1e9
        )
    for stage in ("layout", "dispatch", "combine"):
        times = [s.times[0] for s in found if s.stage == stage]
        # One thread works for all ranks of a call.
        assert len({tuple(t[1:]) for t in times}) == 1
        assert max(t[0] for t in times) <= times[0][1]
    layout, dispatch, combine = (
        next(s.times[0] for s in found if s.stage == stage)
        for stage in ("layout", "dispatch", "combine")
    )
    assert layout[2] <= dispatch[1] and dispatch[2] <= combine[1]
    assert stamps.read_stamps() == []


def test_other_calls_leave_none():
    stamps.read_stamps()
    handle, plain = round_trip()
    assert stamps.read_stamps() == []
    assert not handle.stamps and stamps.with_stamps(handle).stamps
    _, stamped = round_trip(stamps=True)
    np.testing.assert_array_equal(plain, stamped)
    stamps.read_stamps()


def test_a_handle_can_ask_for_stamps():
    stamps.read_stamps()
    handle, _ = round_trip()
    run = stages(CPU_FFI, RANKS)
    jax.block_until_ready(run.dispatch(X, stamps.with_stamps(handle)))
    assert {s.stage for s in stamps.read_stamps()} == {"dispatch"}


def test_seconds_over_blocks():
    times = np.array([[100, 400, 0], [50, 300, 900]], np.int64)
    each = stamps.Stamps("dispatch", 1, 1, ("began", "last_send", "last_row"), times)
    assert each.seconds("began", "last_send") == pytest.approx(350e-9)
    assert each.seconds("began", "last_row") == pytest.approx(850e-9)
    with pytest.raises(
        ValueError, match="dispatch of rank 1 has no stamps 'began' and"
    ):
        each.seconds("began", "ended")
    assert isinstance(jax_ep.stamps.Stamps, type)
