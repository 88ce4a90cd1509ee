"""Diagnosis: constructed measurements whose four losses are known by hand."""

import dataclasses

import pytest

from jax_ep.tools import diagnosis
from jax_ep.tools.measurement import (
    Ceilings,
    Exchange,
    Layer,
    Load,
    Measurement,
    Overlap,
)

LAYER = Layer(
    tokens=64,
    hidden=256,
    expert_hidden=128,
    topk=2,
    experts=4,
    ranks=4,
    capacity=384,
    expert_alignment=128,
    dtype="bfloat16",
)
EVEN = Load([[128] * 4], [[128] * 4], [[0.010] * 4], [[0] * 4])


def exchange(stage, seconds, floor):
    return Exchange(stage, seconds, 0.01, 1, 1, 1, floor, 1, None, None)


def measurement(**changes) -> Measurement:
    """Nothing lost: the exchanges are at their floors, everything else is even."""
    nothing = Measurement(
        about={},
        layer=LAYER,
        routing="uniform",
        ceilings=Ceilings(1e9, 1e9, 1e9),
        exchanges=[
            exchange("dispatch", 0.001, 0.001),
            exchange("combine", 0.002, 0.002),
        ],
        load=EVEN,
        overlap=Overlap(0.003, 0.010, 0.0, 0.013, 0.013, 0.013, []),
    )
    return dataclasses.replace(nothing, **changes)


def test_nothing_is_lost():
    found = diagnosis.diagnose(measurement())
    assert found.lost_seconds == {
        "bandwidth": 0,
        "padding": 0,
        "load": 0,
        "overlap": 0,
    }
    assert found.held_back_by is None
    assert found.sentence == "None of what was measured holds this run back."


def test_bandwidth():
    slow = [
        exchange("layout", 0.5, None),
        exchange("dispatch", 0.004, 0.001),
        exchange("combine", 0.006, 0.004),
        exchange("dispatch backward", 1.0, 0.1),
    ]
    found = diagnosis.diagnose(measurement(exchanges=slow))
    assert found.lost_seconds["bandwidth"] == pytest.approx(0.005)
    assert found.held_back_by == "bandwidth"
    assert found.sentence == (
        "Bandwidth holds this run back most: 5.00 ms, 38% of a step of 13.0 ms. "
        "dispatch and combine take 10.0 ms; at the measured rates of this machine "
        "their bytes need 5.00 ms, 50% of that."
    )


def test_padding_of_the_background_text():
    assert diagnosis.amplification([1, 1, 126], 128) == 3.0
    assert diagnosis.amplification([0, 128], 128) == 1.0
    assert diagnosis.amplification([0, 0], 128) == 1.0


def test_padding():
    # One rank of three experts: 384 processed rows for 128, so two thirds of 9 ms.
    layer = dataclasses.replace(LAYER, experts=3, ranks=1)
    load = Load([[1, 1, 126]], [[128]], [[0.009]], [[0]])
    found = diagnosis.diagnose(measurement(layer=layer, load=load))
    assert found.amplification == 3.0
    assert found.expert_amplification == [128.0, 128.0, pytest.approx(128 / 126)]
    assert found.lost_seconds["padding"] == pytest.approx(0.006)
    assert found.held_back_by == "padding"
    assert found.sentence.endswith(
        "make 3.00 rows of one; that share of the slowest rank's experts' time is "
        "6.00 ms."
    )


def test_padding_is_within_the_capacity():
    # 3 * 128 rows do not fit in 256, of which 128 hold a token.
    layer = dataclasses.replace(LAYER, experts=3, ranks=1, capacity=256)
    load = Load([[1, 1, 126]], [[128]], [[0.009]], [[0]])
    found = diagnosis.diagnose(measurement(layer=layer, load=load))
    assert found.lost_seconds["padding"] == pytest.approx(0.0045)


def test_no_alignment_no_padding():
    layer = dataclasses.replace(LAYER, expert_alignment=1)
    found = diagnosis.diagnose(measurement(layer=layer))
    assert found.lost_seconds["padding"] == 0
    assert found.reasons["padding"].startswith("Groups are not aligned (A = 1)")


def test_an_expert_without_rows_has_no_amplification():
    load = dataclasses.replace(EVEN, expert_rows=[[0, 256, 128, 128]])
    found = diagnosis.diagnose(measurement(load=load))
    assert found.expert_amplification == [None, 1.0, 1.0, 1.0]


def test_load_of_the_background_text():
    # 10, 10, 10 and 30 ms: nearly 30, not the 15 of the mean.
    load = Load(
        [[128, 128, 128, 384]],
        [[128, 128, 128, 384]],
        [[0.010, 0.010, 0.010, 0.030]],
        [[0] * 4],
    )
    found = diagnosis.diagnose(measurement(load=load))
    assert found.lost_seconds["load"] == pytest.approx(0.015)
    assert found.held_back_by == "load"
    assert found.last.time_imbalance == pytest.approx(1.0)
    assert found.last.correlation == pytest.approx(1.0)
    assert found.last.stays is None and found.last.case == "unclear"
    assert found.sentence.startswith(
        "Load holds this run back most: 15.0 ms, 115% of a step of 13.0 ms. The "
        "slowest rank's experts take 30.0 ms, the mean 15.0 ms; rank 3 is last; one "
        "step cannot tell whether it stays."
    )


SLOW, FAST = 0.030, 0.010


@pytest.mark.parametrize(
    "rows, seconds, case, times_last",
    [
        # Always rank 1, with the most rows.
        ([[1, 3], [1, 3], [1, 3]], [[FAST, SLOW]] * 3, "placement", [0, 3]),
        # Even rows, and rank 0 takes three times as long.
        ([[2, 2], [2, 2], [2, 2]], [[SLOW, FAST]] * 3, "device", [3, 0]),
        # The last one changes, and the rows with it.
        (
            [[1, 3], [3, 1], [1, 3], [3, 1]],
            [[FAST, SLOW], [SLOW, FAST], [FAST, SLOW], [SLOW, FAST]],
            "routing",
            [2, 2],
        ),
        # The last one changes, and the rows do not.
        (
            [[1, 3], [1, 3], [1, 3], [1, 3]],
            [[FAST, SLOW], [SLOW, FAST], [FAST, SLOW], [SLOW, FAST]],
            "unclear",
            [2, 2],
        ),
        # Different rows, and the same time.
        ([[1, 3], [1, 3]], [[FAST, FAST]] * 2, "even", [2, 0]),
    ],
)
def test_who_is_last(rows, seconds, case, times_last):
    found = diagnosis.who_is_last(rows, seconds)
    assert found.case == case
    assert found.times_last == times_last


def test_no_correlation_where_nothing_varies():
    assert diagnosis.who_is_last([[2, 2]], [[SLOW, FAST]]).correlation is None


def test_overlap_of_the_background_text():
    assert diagnosis.overlapped_seconds(0.040, 0.060) == 0.060
    # Contention: 70 and 80, and a tail. 20 ms of tail and nothing is gained over 100.
    assert diagnosis.overlapped_seconds(0.070, 0.080, tail=0.020) == 0.1


@pytest.mark.parametrize(
    "measured, lost, share, words",
    [
        (0.100, 0.040, 0.0, "none of that happened"),
        (0.080, 0.020, 0.5, "50% of that happened"),
        (0.060, 0.0, 1.0, "100% of that happened"),
        # 40 ms could be hidden, so 10 of the 50 over the ideal are of another kind.
        (
            0.110,
            0.040,
            -0.25,
            "none of that happened, and 10.0 ms beyond that are unexplained",
        ),
        (
            0.050,
            0.0,
            1.25,
            "all of that happened; the times of the parts vary by more than the rest",
        ),
    ],
)
def test_overlap(measured, lost, share, words):
    overlap = Overlap(0.040, 0.0, 0.060, 0.100, 0.060, measured, [])
    found = diagnosis.diagnose(measurement(overlap=overlap))
    assert found.lost_seconds["overlap"] == pytest.approx(lost)
    assert diagnosis.hidden_share(overlap) == pytest.approx(share)
    assert found.reasons["overlap"].endswith(f": {words}.")
    assert found.held_back_by == ("overlap" if lost else None)


def test_the_verdict_never_exceeds_what_could_be_hidden():
    """5.32 ms could be hidden of a step that takes 59.4 ms more than the ideal."""
    overlap = Overlap(0.00532, 0.1, 0.1, 0.20532, 0.2, 0.2594, [])
    found = diagnosis.diagnose(measurement(overlap=overlap))
    assert found.lost_seconds["overlap"] == pytest.approx(0.00532)
    assert found.unexplained_seconds == pytest.approx(0.05408)
    assert found.sentence.startswith("Overlap holds this run back most: 5.32 ms, ")


def test_dropped_rows_are_in_the_verdict():
    load = dataclasses.replace(
        EVEN, dropped_rows=[[rows // 4 for rows in step] for step in EVEN.rank_rows]
    )
    found = diagnosis.diagnose(measurement(load=load))
    assert found.dropped == pytest.approx(0.2)
    assert found.sentence.endswith(" 20.0% of the rows found no room and were dropped.")


def test_latency_is_not_called_bandwidth():
    """249 us over a floor of 8; and the same over one of 208, which is bandwidth."""
    few = [exchange("dispatch", 257e-6, 8e-6)]
    found = diagnosis.diagnose(measurement(exchanges=few, overlap=None))
    assert found.is_latency
    assert found.sentence.startswith("Latency holds this run back most: 249 µs. ")
    assert found.remedies["bandwidth"] == diagnosis.REMEDIES["latency"]
    many = [exchange("dispatch", 457e-6, 208e-6)]
    found = diagnosis.diagnose(measurement(exchanges=many, overlap=None))
    assert not found.is_latency
    assert found.sentence.startswith("Bandwidth holds this run back most: 249 µs. ")


def test_ranks_that_tie():
    seconds = [
        [2.0 if rank == step % 3 else 1.0 for rank in range(3)] for step in range(6)
    ]
    last = diagnosis.who_is_last([[1, 1, 1]] * 6, seconds)
    assert diagnosis.most_often_last(last) == (
        "3 ranks are last equally often, each in 2 of 6 steps"
    )


def test_nothing_to_hide():
    assert diagnosis.hidden_share(Overlap(1, 1, 0, 2, 2, 2, [])) is None


def test_what_was_not_measured_is_said():
    load = dataclasses.replace(EVEN, rank_seconds=None)
    slow = [exchange("dispatch", 0.004, None), exchange("combine", 0.006, None)]
    found = diagnosis.diagnose(measurement(load=load, overlap=None, exchanges=slow))
    assert found.lost_seconds == dict.fromkeys(diagnosis.KINDS)
    assert found.sentence == "None of the four was measured."
    found = diagnosis.diagnose(measurement(load=load, overlap=None))
    assert found.lost_seconds["bandwidth"] == 0
    assert found.reasons["padding"].endswith("the experts' time was not measured.")
    assert found.last is None and found.step_seconds is None
    overlap = Overlap(0.040, 0.0, 0.060, 0.100, 0.060, 0.080, [])
    found = diagnosis.diagnose(measurement(load=load, overlap=overlap))
    assert found.sentence.endswith(" Not measured: padding, load.")


@pytest.mark.parametrize(
    "seconds, text",
    [
        (1.234, "1.23 s"),
        (0.002, "2.00 ms"),
        (987e-6, "987 µs"),
        (999.6e-6, "1.00 ms"),
        (0.9996, "1.00 s"),
        (2.5e-8, "0.0250 µs"),
        (0.0099999, "10.0 ms"),
        (0, "0.00 µs"),
        (7200, "7200 s"),
    ],
)
def test_duration(seconds, text):
    assert diagnosis.duration(seconds) == text
