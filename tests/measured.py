"""A measurement whose every number can be worked out by hand, for tests of its page."""

from jax_ep.tools.measurement import (
    Ceilings,
    Exchange,
    Layer,
    Load,
    Measurement,
    Overlap,
    Span,
)


def by_hand() -> Measurement:
    """Two ranks with two experts each, two steps.

    Dispatch: 300 MB out at 300 GB/s are 1 ms, and it takes 1.25. Combine: 1 GB of
    memory at 2.5 TB/s is 0.4 ms, and it takes 0.5. 1, 1 and 126 rows at alignment 128
    are 384 slots. Rank 1 takes 30 ms and rank 0 10. 150 ms could be 110 and are 130.
    """
    dispatch = Exchange(
        stage="dispatch",
        seconds=1.25e-3,
        spread=0.02,
        egress_bytes=300_000_000,
        ingress_bytes=200_000_000,
        memory_bytes=1_000_000_000,
        floor_seconds=1e-3,
        logical_bytes=400_000_000,
        phases=[
            {"issue": 0.8e-3, "drain": 0.3e-3, "epilogue": 0.1e-3},
            {"issue": 0.5e-3, "drain": 0.25e-3, "epilogue": 0.25e-3},
        ],
        stamped_seconds=1.3e-3,
    )
    combine = Exchange(
        stage="combine",
        seconds=0.5e-3,
        spread=0.01,
        egress_bytes=30_000_000,
        ingress_bytes=30_000_000,
        memory_bytes=1_000_000_000,
        floor_seconds=0.4e-3,
        logical_bytes=60_000_000,
        phases=None,
        stamped_seconds=None,
    )
    return Measurement(
        about={"platform": "gpu", "device": "<b>H200 & co</b>", "command": "bench"},
        layer=Layer(64, 32, 48, 2, 4, 2, 512, 128, "bfloat16"),
        routing="uniform",
        ceilings=Ceilings(egress=300e9, ingress=300e9, memory=2.5e12),
        exchanges=[dispatch, combine],
        load=Load(
            expert_rows=[[1, 1, 126, 0]] * 2,
            rank_rows=[[2, 126]] * 2,
            rank_seconds=[[0.010, 0.030]] * 2,
            dropped_rows=[[0, 0], [0, 5]],
        ),
        overlap=Overlap(
            communication_seconds=0.040,
            compute_seconds=0.050,
            independent_seconds=0.060,
            serial_seconds=0.150,
            ideal_seconds=0.110,
            measured_seconds=0.130,
            spans=[
                Span("host", "issue", "one step", 0.0, 0.001),
                Span("host", "wait", "one step", 0.001, 0.130),
                Span("rank 0", "communication", "dispatch", 0.0, 0.040),
                Span("rank 0", "compute", "shared expert", 0.030, 0.080),
            ],
        ),
    )
