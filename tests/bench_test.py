"""`bench`: a small run, and the parts that need no clock."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from conftest import Backend
from jax.sharding import Mesh
from typer.testing import CliRunner

from jax_ep import record
from jax_ep.stamps import Stamps
from jax_ep.tools import bench, measurement
from jax_ep.tools.benchmark import (
    exchanges,
    layer,
    memory_rate,
    overlap,
    phases,
    replay,
    request,
    routings,
    setting,
)
from jax_ep.tools.benchmark import run as run_module
from jax_ep.tools.benchmark.request import Request
from jax_ep.tools.console import UserError

SHAPE = dict(tokens=16, hidden=32, expert_hidden=16, topk=2, experts=4, ranks=2)
SMALL = dict(SHAPE, platform="cpu")
STAGES = ["layout", "dispatch", "combine", "dispatch backward", "combine backward"]


def run(*args):
    app = typer.Typer()
    app.command()(bench.bench)
    return CliRunner().invoke(app, [*args], catch_exceptions=False)


def options(**values):
    return [
        part
        for name, value in values.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What a small run prints, and the document it writes."""
    path = tmp_path_factory.mktemp("bench") / "m.json"
    result = run(*options(**SMALL, routing="zipf", steps=3, alignment=8, out=path))
    assert result.exit_code == 0, result.output
    return result, measurement.read(path)


@pytest.mark.jax_version
def test_a_small_run(small):
    result, found = small
    assert [each.stage for each in found.exchanges] == STAGES
    assert all(each.seconds > 0 for each in found.exchanges)
    assert found.layer.ranks == 2 and found.layer.dtype == "float32"
    assert found.about["platform"] == "cpu" and "not measured" not in found.about
    assert found.ceilings.egress is None and found.ceilings.memory > 0
    assert "Written to" in result.stdout
    for words in ("Exchanges", "Phases", "Load", "Lost per forward step"):
        assert words in result.stdout


def test_rows_are_those_of_the_ids(small):
    _, found = small
    for step in range(3):
        ids = routings.make_ids("zipf", 2, 16, 2, 4, step)
        counts = [int((ids == expert).sum()) for expert in range(4)]
        assert found.load.expert_rows[step] == counts
        assert found.load.rank_rows[step] == [sum(counts[:2]), sum(counts[2:])]
        assert found.load.dropped_rows[step] == [0, 0]
    assert np.shape(found.load.rank_seconds) == (3, 2)
    # As many rows as the busiest rank needs, in groups of multiples of 8.
    groups = -(-np.array(found.load.expert_rows).reshape(3, 2, 2) // 8) * 8
    assert found.layer.capacity == groups.sum(2).max()


def test_bytes_and_floors(small):
    _, found = small
    capacity, row = found.layer.capacity, 32 * 4
    rows = {
        "dispatch": 2 * (16 + capacity),
        "combine backward": 2 * (16 + capacity),
        "combine": 2 * 16 * 2 + 2 * 16,
        "dispatch backward": 2 * 16 * 2 + 2 * 16,
    }
    for each in found.exchanges[1:]:
        assert each.memory_bytes == rows[each.stage] * row
        assert each.floor_seconds == each.memory_bytes / found.ceilings.memory
        assert each.egress_bytes is None
        assert 0 < each.logical_bytes <= 2 * 16 * row
    assert found.exchanges[0].floor_seconds is None


def test_phases_of_every_rank(small):
    _, found = small
    for each in found.exchanges:
        assert [set(rank) for rank in each.phases] == [{"wait", "copy"}] * 2
        assert all(seconds >= 0 for rank in each.phases for seconds in rank.values())
        assert each.stamped_seconds > 0
        # The same call copies for both ranks.
        assert each.phases[0]["copy"] == pytest.approx(each.phases[1]["copy"])


def test_overlap_and_timeline(small):
    overlap = small[1].overlap
    assert overlap.serial_seconds == pytest.approx(
        overlap.communication_seconds
        + overlap.compute_seconds
        + overlap.independent_seconds
    )
    assert overlap.ideal_seconds == pytest.approx(
        max(overlap.communication_seconds, overlap.independent_seconds)
        + overlap.compute_seconds
    )
    assert overlap.measured_seconds > 0
    spans = overlap.spans
    assert {span.lane for span in spans} == {"host", "rank 0", "rank 1"}
    assert {s.kind for s in spans if s.lane == "host"} == {"issue", "wait"}
    for rank in ("rank 0", "rank 1"):
        mine = {s.name: s for s in spans if s.lane == rank and s.kind != "compute"}
        assert list(mine) == ["layout", "dispatch", "combine"]
        assert mine["dispatch"].stop <= mine["combine"].start
        computed = {s.name for s in spans if s.lane == rank and s.kind == "compute"}
        assert {"experts", "shared experts"} <= computed
    assert min(span.start for span in spans) == 0


@pytest.mark.gpu
def test_a_small_run_on_gpus():
    Backend("gpu", "ffi").devices(2)
    shape = dict(SHAPE, tokens=512, hidden=1024, expert_hidden=256, platform="gpu")
    found = bench.measure(Request(**shape, routing="zipf", steps=2, alignment=8))
    assert "not measured" not in found.about
    assert min(found.ceilings.egress, found.ceilings.ingress) > 1e9
    for each in found.exchanges:
        # Rows of all ranks cross a link, and no faster than the ceilings say.
        if each.stage != "layout":
            assert 0 < each.floor_seconds < each.seconds
            assert each.egress_bytes > 0 and each.ingress_bytes > 0
        names = [set(rank) for rank in each.phases]
        assert names == [{"issue", "drain", "epilogue"}] * 2
        for rank in each.phases:
            assert 0 < sum(rank.values()) < 1e-3
    lanes = {span.lane for span in found.overlap.spans}
    assert lanes == {"host", "rank 0", "rank 1"}
    for lane in ("rank 0", "rank 1"):
        mine = [span for span in found.overlap.spans if span.lane == lane]
        moved = [span.name for span in mine if span.kind == "communication"]
        assert sorted(moved) == ["combine", "dispatch", "layout"]
        computed = {span.name for span in mine if span.kind == "compute"}
        assert {"experts", "shared experts"} <= computed


def test_json_is_all_there_is_on_standard_output(tmp_path):
    result = run(
        *options(**SMALL, routing="one-hot", shared_hidden=0, capacity_factor=1),
        "--json",
    )
    document = json.loads(result.stdout)
    # Both of a token's experts are the first rank's, which has room for half of them.
    assert document["load"]["dropped_rows"] == [[32, 0]]
    assert document["load"]["rank_rows"] == [[32, 0]]
    assert document["load"]["expert_rows"] == [[32, 32, 0, 0]]
    assert document["overlap"]["independent_seconds"] == 0
    (tmp_path / "m.json").write_text(result.stdout)
    assert measurement.read(tmp_path / "m.json").routing == "one-hot"


@pytest.mark.parametrize(
    "name, products", [("shared", 16), ("experts", 24), ("layer", 16 + 24)]
)
def test_all_of_a_result_is_computed(name, products):
    # 16 tokens and 24 rows of each rank meet three matrices of 32 x 8.
    mesh = Mesh(np.array(Backend("cpu", "ffi").devices(2)), ("expert",))
    ids = routings.make_ids("uniform", 2, 16, 1, 2)
    bench = setting.Bench(
        exchanges.Layer(16, 32, 1, 2, 24, dtype="float32"),
        ids,
        mesh,
        (),
        routing="",
        may_drop=True,
    )
    lowered = bench.lower()
    arrays = bench.arrays({n: lowered[n].compile() for n in ("arrays", "handle")})
    arrays["params"] = layer.make_params(bench.layer, layer.Widths(8, 8), mesh)
    for count in (1, 2):
        program = overlap._job(bench, arrays, name, count).program
        least = count * products * 2 * 32 * 8 * 3
        assert program.cost_analysis()["flops"] >= least


def test_a_wrong_result_is_not_timed(monkeypatch):
    from jax_ep.tools.benchmark.setting import Bench

    monkeypatch.setattr(Bench, "check", lambda *_: "differs from the reference")
    with pytest.raises(
        UserError, match="differs from the reference; nothing was timed"
    ):
        bench.measure(Request(**SMALL))


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(experts=5), "experts (=5) must be divisible by the 2 ranks."),
        (dict(topk=5), "topk (=5) must be at most 4 with 4 experts."),
        (dict(tokens=0), "tokens (=0) must be at least 1."),
        (dict(shared_hidden=-1), "shared_hidden (=-1) must be at least 0."),
        (dict(ranks=99), "ranks (=99) must be at most the 8 CPU devices there are."),
        (
            dict(capacity=3000000000),
            "capacity (=3000000000) must be below 2**31: rows are int32.",
        ),
        (
            dict(tokens=2**30),
            "tokens (=1073741824) must leave R*T*K + L*(A-1) (=4294967296) below "
            "2**31: rows are int32.",
        ),
        (dict(platform="tpu"), "platform (=tpu) must be cpu or gpu."),
        (dict(dtype="int8"), "dtype (=int8) must be bfloat16, float16, float32."),
        (
            dict(routing="zipff"),
            "routing (=zipff) must be uniform, zipf, one-hot, or a recorded file.",
        ),
        (
            dict(capacity_factor="much"),
            "--capacity-factor (=much) must be a number, or none for dropless.",
        ),
        (dict(capacity_factor="nan"), "capacity_factor (=nan) must be positive."),
        (
            dict(capacity=8, capacity_factor="1.25"),
            "capacity (=8) must be left out with capacity_factor (=1.25).",
        ),
        (
            dict(capacity=4, alignment=8),
            "capacity (=4) must be at least the alignment (=8) in rows.",
        ),
    ],
)
def test_what_cannot_be_run(change, words):
    with pytest.raises(UserError, match=f"^{re.escape(words)}$"):
        bench.measure(Request(**{**SMALL, **change}))


def test_what_the_devices_refuse_is_one_line(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes\nmore lines")

    monkeypatch.setattr(run_module, "_measure", full)
    with pytest.raises(
        UserError, match="^the run failed: RESOURCE_EXHAUSTED: 9 bytes$"
    ):
        bench.measure(Request(**SMALL))


def test_experts_that_do_not_fit_leave_the_exchanges(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: params")

    monkeypatch.setattr(run_module, "make_params", full)
    found = bench.measure(Request(**SMALL, steps=1))
    assert [each.stage for each in found.exchanges] == STAGES
    assert found.load.rank_seconds is None and found.overlap is None
    assert found.about["not measured"] == (
        "times of the experts, overlap: RESOURCE_EXHAUSTED: params"
    )


def test_more_ranks_than_a_domain_has():
    with pytest.raises(UserError, match="ranks .=65. must be at most 64"):
        request.check_sizes(ranks=65, topk=1, experts=65)


def test_unwritable_output_is_refused_before_measuring(tmp_path):
    for path, words in (
        (tmp_path / "none" / "m.json", "no such folder"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(UserError, match=words):
            run(*options(**SMALL, out=path))
    assert list(tmp_path.iterdir()) == []


def test_models_fill_in_what_is_left_open():
    asked = bench.make_request("mixtral-8x7b", Request(hidden=64, ranks=2))
    assert (asked.hidden, asked.expert_hidden) == (64, 14336)
    assert (asked.experts, asked.topk, asked.dtype) == (8, 2, "bfloat16")
    with pytest.raises(UserError, match="did you mean mixtral-8x7b"):
        bench.make_request("mixtral-8x7", Request())


@pytest.mark.parametrize(
    "given, rows",
    [
        (dict(capacity_factor="demand"), 32),  # 18 and 4 in blocks of 8: 24 and 8
        (dict(capacity_factor="none"), 2 * 16 * 2 + 2 * 7 - 6),
        (dict(capacity_factor="1.25"), 40),
        (dict(capacity_factor="1e300"), 2 * 16 * 2 + 2 * 7 - 6),
        (dict(capacity=33), 32),
    ],
)
def test_capacity(given, rows):
    ids = np.full((1, 2, 16, 2), -1, np.int32)
    ids[0, 0, :, 0] = 0
    ids[0, 1, :2, 0], ids[0, 1, 2:6, 0] = 0, 1
    found = replay.Replay("", ids, 4)
    asked = Request(alignment=8, **given)
    assert request._capacity(asked, found) == rows


def test_devices_are_made_before_jax_starts():
    code = (
        "from jax_ep.tools.benchmark.request import find_devices;"
        "print(len(find_devices(3, 'cpu')))"
    )
    env = dict(PATH="/usr/bin:/bin", JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True
    )
    assert done.stdout == "3\n", done.stderr


# --- replay ---------------------------------------------------------------------------


@pytest.fixture
def recording(tmp_path):
    """Two steps of two layers, over two ranks of two tokens; experts 0 to 3."""
    path = tmp_path / "run.routing"
    with record.Recorder(path, num_experts=4, shares={"expert": 2}) as recorder:
        for step in range(2):
            ids = [[0, 1], [step, -1], [2, 3], [3, 2]]
            other = np.zeros((4, 2), int).tolist()
            recorder.add(step, {"a": jnp.array(ids), "b": jnp.array(other)})
    return path


def test_recorded_routing(recording):
    found = replay.recorded(recording, layer=None, ranks=None, steps=None)
    assert found.name == "run.routing, layer a" and found.experts == 4
    assert found.ids.shape == (2, 2, 2, 2)
    assert found.demand().tolist() == [[2, 1, 2, 2], [1, 2, 2, 2]]
    one = replay.recorded(recording, layer="b", ranks=4, steps=1)
    assert one.ids.shape == (1, 4, 1, 2) and one.demand().tolist() == [[8, 0, 0, 0]]


def test_each_group_of_ranks_is_a_batch(tmp_path):
    # Over (data 2, expert 2): tokens 0, 1 and 2, 3 are exchanged apart.
    with record.Recorder(
        tmp_path / "r", num_experts=4, shares={"data": 2, "expert": 2}
    ) as recorder:
        recorder.add(0, {"a": jnp.array([[0], [0], [2], [3]])})
    case = request.resolve(Request(routing=str(tmp_path / "r"), platform="cpu"))
    assert case.replay.ids.tolist() == [[[[0]], [[0]]], [[[2]], [[3]]]]
    assert case.layer.tokens == 1
    # Over 4 ranks of the user's, they are one exchange.
    case = request.resolve(
        Request(routing=str(tmp_path / "r"), platform="cpu", ranks=4)
    )
    assert case.replay.ids.tolist() == [[[[0]], [[0]], [[2]], [[3]]]]


def test_a_recording_that_goes_on_says_so(tmp_path):
    with record.Recorder(tmp_path / "r", num_experts=4) as recorder:
        recorder.add(0, {"a": jnp.array([[0], [1]])})
    whole = (tmp_path / "r").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-3])
    found = replay.recorded(tmp_path / "cut", layer=None, ranks=None, steps=None)
    assert found.name == "cut, layer a, not closed"


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(layer="c"), "layer (=c) must be one of ['a', 'b']"),
        (dict(tokens=3), "tokens (=3) must be 2, as in"),
        (dict(experts=8), "experts (=8) must be 4, as in"),
        (dict(ranks=3), "cannot be split over 3 ranks evenly"),
    ],
)
def test_a_recording_that_does_not_fit(recording, change, words):
    with pytest.raises(UserError, match=re.escape(words)):
        request.resolve(Request(routing=str(recording), platform="cpu", **change))


def test_a_recording_decides_tokens_ranks_and_experts(recording):
    case = request.resolve(Request(routing=str(recording), hidden=64, platform="cpu"))
    layer = case.layer
    assert (layer.tokens, layer.topk, layer.experts) == (2, 2, 4)
    assert layer.hidden == 64 and len(case.devices) == 2
    assert layer.capacity == 4


def test_what_is_no_recording(tmp_path):
    with pytest.raises(FileNotFoundError):
        request.resolve(Request(routing=str(tmp_path / "none.routing")))
    (tmp_path / "other").write_text("text")
    with pytest.raises(UserError, match="not a recording of jax_ep"):
        request.resolve(Request(routing=str(tmp_path / "other")))


def test_times_are_taken_of_the_median_step():
    # Busiest ranks: 4, 2, 3.
    ids = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]).reshape(3, 2, 1, 2)
    assert replay.Replay("", ids, 2).typical() == 2


# --- bytes ----------------------------------------------------------------------------


def test_traffic_by_hand():
    # Ranks own experts 0, 1 and 2, 3. Rank 0: a token to both ranks, one to its own
    # twice; rank 1: one to rank 0, and one that is masked.
    ids = np.array([[[0, 2], [0, 1]], [[1, -1], [-1, -1]]])
    found = routings.traffic(ids, 4)
    assert found.demand.tolist() == [4, 1]
    assert found.egress.tolist() == [1, 1]
    assert found.ingress.tolist() == [1, 1]
    assert found.local.tolist() == [2, 0]
    # Rank 0 gets two rows of its own and one of rank 1.
    assert routings.logical_bytes(found, 10) == 30
    assert routings.copied_bytes("dispatch", found, 2, 6, 10) == 2 * (2 + 6) * 10
    assert routings.copied_bytes("combine", found, 2, 6, 10) == (5 + 4) * 10


def test_the_slowest_of_link_and_memory_is_the_floor():
    needed = routings.Bytes(100, 50, 400)
    assert needed.floor(measurement.Ceilings(10.0, 1.0, 100.0)) == 50
    assert needed.floor(measurement.Ceilings(10.0, 10.0, 10.0)) == 40
    assert needed.floor(measurement.Ceilings(None, None, 100.0)) == 4


def test_copies_are_counted_twice(monkeypatch):
    # Each thread's copies take 2 s by a clock that ticks once a call.
    monkeypatch.setattr(memory_rate, "num_cores", lambda: 1)
    ticks = iter(range(1000))
    monkeypatch.setattr(memory_rate.time, "perf_counter", lambda: 2 * next(ticks))
    assert memory_rate.copy_rate(800) == 2 * 800 / 2


# --- phases ---------------------------------------------------------------------------

GPU = ("began", "last_send", "last_arrival", "last_row")


def of_gpu(*blocks, rank=0, stage="dispatch"):
    return Stamps(stage, rank, rank, GPU, np.array(blocks, np.int64))


def test_phases_follow_one_another():
    found = phases.phases(of_gpu([100, 500, 0, 900], [90, 700, 1000, 1200]))
    assert found == {"issue": 610e-9, "drain": 300e-9, "epilogue": 200e-9}
    # All rows had arrived before the last was sent.
    found = phases.phases(of_gpu([100, 800, 500, 900]))
    assert found == {"issue": 700e-9, "drain": 0, "epilogue": 100e-9}
    # One rank: nothing is sent.
    found = phases.phases(of_gpu([100, 0, 0, 300]))
    assert found == {"issue": 0, "drain": 0, "epilogue": 200e-9}


def test_phases_of_cpu_devices():
    names = ("arrived", "began", "ended")
    stamps = Stamps("combine", 1, 1, names, np.array([[1000, 4000, 9000]]))
    assert phases.phases(stamps) == {"wait": 3e-6, "copy": 5e-6}


def test_phases_are_medians_of_calls_by_rank():
    calls = [
        [
            of_gpu([100, 100 + n, 200 + n, 300 + n], rank=0, stage="combine"),
            of_gpu([100, 101 + n, 200 + n, 300 + n], rank=1, stage="combine"),
            of_gpu([100, 900, 900, 900], rank=1, stage="layout"),
        ]
        for n in (10, 20, 90)
    ]
    found = phases.median_phases(calls, "dispatch backward", 2)
    assert [rank["issue"] for rank in found] == [20e-9, 21e-9]
    assert phases.median_phases(calls, "dispatch", 2) is None
    assert phases.median_phases(calls, "combine", 3) is None
