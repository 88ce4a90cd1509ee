"""The pages that the browser opens: of a run on CPU devices, and of constructed ones.

python pages.py MEASUREMENT.json OUT: writes OUT/<name>.html, and OUT/pages.json with
the sections and charts that each must have.
"""

import dataclasses
import json
import sys
from pathlib import Path

from jax_ep.tools import measurement as document
from jax_ep.tools import profile
from jax_ep.tools.diagnosis import diagnose
from jax_ep.tools.page import build, profiled
from jax_ep.tools.profile_events import Event

SECTIONS = ["summary", "bandwidth", "padding", "load", "overlap", "conditions", "gaps"]
ABOUT = {
    "date": "2026-01-01",
    "command": "constructed --with-an-option-that-has-no-place-to-break=" + "x" * 120,
    "device": "a constructed GPU",
    "platform": "gpu",
}


def gpus(ranks: int, experts: int, steps: int) -> document.Measurement:
    """A measurement with everything in it, with numbers that no machine gave."""
    layer = document.Layer(
        tokens=8192,
        hidden=7168,
        expert_hidden=2048,
        topk=8,
        experts=experts,
        ranks=ranks,
        capacity=90000,
        expert_alignment=128,
        dtype="bfloat16",
    )
    rows = [[1 + (e * 7 + s * 3) % 400 for e in range(experts)] for s in range(steps)]
    share = experts // ranks
    by_rank = [[sum(row[r * share :][:share]) for r in range(ranks)] for row in rows]
    phases = [
        {"issue": 8e-4 + r * 1e-6, "drain": 9e-5, "epilogue": 4e-5}
        for r in range(ranks)
    ]
    exchanges = [
        document.Exchange(
            stage=stage,
            seconds=1.02e-3,
            spread=0.012,
            egress_bytes=317_000_000,
            ingress_bytes=318_000_000,
            memory_bytes=1_800_000_000,
            floor_seconds=9.1e-4,
            logical_bytes=424_000_000,
            phases=phases,
            stamped_seconds=1.05e-3,
        )
        for stage in ("dispatch", "combine", "dispatch backward", "combine backward")
    ]
    spans = [
        document.Span("host", "issue", "one step", 0, 9e-5),
        document.Span("host", "wait", "one step", 9e-5, 5e-3),
    ]
    for rank in range(ranks):
        late = rank * 1e-6
        for kind, name, start, stop in (
            ("compute", "shared expert", 1e-4, 6e-4),
            ("communication", "dispatch", 6e-4, 1.6e-3),
            ("compute", "experts", 1.6e-3, 3.9e-3),
            ("communication", "combine", 3.9e-3, 4.9e-3),
        ):
            span = document.Span(f"rank {rank}", kind, name, start + late, stop + late)
            spans.append(span)
    return document.Measurement(
        about=ABOUT,
        layer=layer,
        routing="uniform",
        ceilings=document.Ceilings(352e9, 386e9, 3.86e12),
        exchanges=exchanges,
        load=document.Load(
            rows,
            by_rank,
            [[count * 1e-6 for count in counts] for counts in by_rank],
            [[0] * ranks for _ in range(steps)],
        ),
        overlap=document.Overlap(2e-3, 2.3e-3, 5e-4, 4.8e-3, 4.3e-3, 4.9e-3, spans),
    )


def nothing(whole: document.Measurement) -> document.Measurement:
    """The same with everything None that may be."""
    parts = ("floor_seconds", "phases", "stamped_seconds", "logical_bytes")
    return dataclasses.replace(
        whole,
        ceilings=None,
        exchanges=[
            dataclasses.replace(exchange, **dict.fromkeys(parts))
            for exchange in whole.exchanges
        ],
        load=dataclasses.replace(whole.load, rank_seconds=None),
        overlap=None,
    )


def profiles() -> profile.Profile:
    """Three steps on eight devices, some compute beside the dispatch."""
    events = []
    for device in map(str, range(8)):
        for start in (0.0, 0.01, 0.02):
            for stage, is_exchange, begin, end in (
                ("layout", True, 0.0, 3e-5),
                ("dispatch", True, 1e-4, 1.1e-3),
                ("shared experts", False, 2e-4, 5e-4),
                ("experts", False, 1.2e-3, 4e-3),
                ("combine", True, 4.1e-3, 5.1e-3),
                ("other", False, 5.2e-3, 8e-3),
            ):
                event = Event(
                    device, stage, is_exchange, stage, start + begin, start + end
                )
                events.append(event)
    events.sort(key=lambda event: event.start)
    return profile.Profile("runs/profile", "gpu", profile.devices(events), events, [])


def main(measured: str, out: str) -> None:
    """Writes all of them."""
    found = {
        "cpu": document.read(measured),
        "gpus": gpus(ranks=4, experts=256, steps=8),
        "many": gpus(ranks=64, experts=512, steps=100),
        "nothing": nothing(gpus(ranks=2, experts=16, steps=1)),
    }
    expected = {}
    for name, measurement in found.items():
        page = build.page(measurement, diagnose(measurement))
        (Path(out) / f"{name}.html").write_text(page.html())
        charts = ["summary", "stages"]
        charts += [
            f"phases-{e.stage.replace(' ', '-')}"
            for e in measurement.exchanges
            if e.phases
        ]
        charts += ["padding-experts", "padding-alignments", "load-rows"]
        charts += ["load-time"] if measurement.load.rank_seconds else []
        if measurement.overlap:
            charts += ["overlap-bars"]
            charts += ["timeline"] if measurement.overlap.spans else []
        expected[name] = {"sections": SECTIONS, "charts": charts}
    (Path(out) / "profile.html").write_text(profiled.page(profiles()).html())
    charts = ["profile-stages", "profile-overlap", "profile-timeline"]
    expected["profile"] = {"sections": ["profile", "gaps"], "charts": charts}
    (Path(out) / "pages.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(*sys.argv[1:])
