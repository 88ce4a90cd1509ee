"""Profiles: one taken here, and constructed events of GPUs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.tools import op_names, profile, profile_events
from jax_ep.tools.console import UserError
from jax_ep.tools.profile_events import Event

RANKS, TOKENS, TOPK, EXPERTS, HIDDEN = 2, 8, 2, 4, 16
EXCHANGES = ("layout", "dispatch", "combine")


def layer(x, ids, w):
    handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS)
    with jax.named_scope("jax_ep.shared_experts"):
        shared = jnp.tanh(x @ w)
    rows, _ = jax_ep.dispatch(x, handle)
    with jax.named_scope("jax_ep.experts"):
        rows = jnp.tanh(rows @ w)
    return jax_ep.combine(rows, handle, bias=shared)


def loss(x, ids, w):
    return jnp.sum(layer(x, ids, w))


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """Two steps, forward and backward, on two CPU devices."""
    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), ("expert",))
    step = jax.jit(
        jax.shard_map(
            jax.grad(loss),
            mesh=mesh,
            in_specs=(P("expert"), P("expert"), P()),
            out_specs=P("expert"),
            check_vma=False,
        )
    )
    args = (
        jnp.ones((RANKS * TOKENS, HIDDEN)),
        jnp.arange(RANKS * TOKENS * TOPK, dtype=jnp.int32).reshape(-1, TOPK) % EXPERTS,
        jnp.ones((HIDDEN, HIDDEN)),
    )
    jax.block_until_ready(step(*args))
    folder = tmp_path_factory.mktemp("profile")
    with jax.profiler.trace(folder):
        for _ in range(2):
            with jax.profiler.TraceAnnotation(profile_events.ISSUE):
                out = step(*args)
            with jax.profiler.TraceAnnotation(profile_events.WAIT):
                jax.block_until_ready(out)
    return folder


@pytest.mark.jax_version
def test_counts_of_a_profile_taken_here(taken):
    found = profile.read(taken)
    assert found.platform == "cpu"
    assert [device.device for device in found.devices] == ["0", "1"]
    for device in found.devices:
        # Forward, and the backward: a dispatch's is a combine and the other way round.
        # Unused results of the forward are not computed: no combine there.
        counts = {name: device.counts[name] for name in EXCHANGES}
        assert counts == {"layout": 2, "dispatch": 4, "combine": 2}
        assert device.counts["experts"] >= 2
        assert device.counts["shared experts"] >= 2
        assert all(device.seconds[name] > 0 for name in EXCHANGES)
        assert device.communication_seconds <= sum(
            device.seconds[name] for name in EXCHANGES
        ) * (1 + 1e-9)
        least = min(device.communication_seconds, device.compute_seconds)
        assert 0 <= device.overlapped_seconds <= least


def test_host_and_devices_are_on_one_timeline(taken):
    found = profile.read(taken)
    assert [span.kind for span in found.host] == ["issue", "wait"] * 2
    first, last = found.host[0], found.host[-1]
    inside = [e for e in found.events if first.start <= e.start and e.stop <= last.stop]
    assert len(inside) == len(found.events)
    spans = found.spans(found.host[2].start, last.stop)
    assert min(span.start for span in spans) == 0
    lanes = {span.lane for span in spans}
    assert lanes == {"host", "rank 0", "rank 1"}
    # Of the second step alone.
    names = [s.name for s in spans if s.lane == "rank 0" and s.kind == "communication"]
    assert sorted(names) == ["combine", "dispatch", "dispatch", "layout"]


def test_a_dispatch_ends_before_what_uses_it(taken):
    found = profile.read(taken)
    # Handlers return long before the exchange is over, and ends are noted long after:
    # the program's own dependencies tell. Here: a layout before its dispatch.
    for device in ("0", "1"):
        events = [e for e in found.events if e.device == device and e.is_exchange]
        layouts = [e for e in events if e.stage == "layout"]
        dispatches = [e for e in events if e.stage == "dispatch"]
        for first, second in zip(layouts, dispatches[::2], strict=True):
            assert first.stop <= second.start


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda folder: folder / "none", "no such folder"),
        (lambda folder: folder, "there is no .xplane.pb file in it"),
    ],
)
def test_no_profile(tmp_path, make, words):
    with pytest.raises(UserError, match=words):
        profile.read(make(tmp_path))


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "host.xplane.pb").write_bytes(b"\xff" * 40)
    with pytest.raises(UserError, match="not a profile"):
        profile.read(tmp_path)


def test_a_profile_without_our_calls(tmp_path):
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(jnp.ones(3) + 1)
    with pytest.raises(UserError, match="no layout, dispatch or combine"):
        profile.read(tmp_path)


# --- constructed events ---------------------------------------------------------------


def event(name, start_us, stop_us, **stats):
    start, stop = start_us * 1e3, stop_us * 1e3
    return SimpleNamespace(
        name=name, start_ns=start, duration_ns=stop - start, stats=list(stats.items())
    )


def plane(name, **lines):
    made = [
        SimpleNamespace(name=title.replace("_", " "), events=events)
        for title, events in lines.items()
    ]
    return SimpleNamespace(name=name, lines=made)


PROGRAMS = {
    "jit_step(7)": {
        "fusion.1": op_names.Instruction("fusion", "jit(step)/jax_ep.experts/mul", ""),
        "dot.2": op_names.Instruction(
            "dot", "jit(step)/transpose/jax_ep.shared_experts/dot_general", ""
        ),
    }
}


def test_kernels_of_gpus():
    op = dict(hlo_module="jit_step", program_id=7)
    planes = [
        plane(
            "/device:GPU:1",
            Stream_13=[
                event("jax_ep_dispatch", 0, 10),
                event("loop_fusion_1", 12, 20, hlo_op="fusion.1", **op),
                event("nvjet_tst_128x64", 20, 25),  # in a graph: no scope
                event("jax_ep_combine", 30, 40),
            ],
            Stream_14=[
                event("cutlass_gemm", 5, 8, hlo_op="dot.2", **op),
                event("MemcpyD2D", 38, 45),
            ],
            XLA_Modules=[event("jit_step", 0, 45)],
        ),
        plane("/host:CPU", python=[event("jax_ep_dispatch", 0, 1)]),
    ]
    events = profile_events.gpu_events(planes, PROGRAMS)
    (device,) = profile.devices(events)
    assert device.device == "1"
    micro = {name: round(s * 1e6, 6) for name, s in device.seconds.items()}
    assert micro == {
        "router": 0,
        "layout": 0,
        "dispatch": 10,
        "combine": 10,
        "experts": 8,
        "shared experts": 3,
        "other": 5 + 7,
    }
    assert device.counts["other"] == 2
    assert device.communication_seconds == pytest.approx(20e-6)
    assert device.compute_seconds == pytest.approx((3 + 13 + 7) * 1e-6)
    # 5 to 8 beside the dispatch, 38 to 40 beside the combine.
    assert device.overlapped_seconds == pytest.approx(5e-6)


def of_device_0(**more):
    return dict(hlo_op="", device_ordinal=0, run_id=1, **more)


def test_a_call_on_a_cpu_device_lasts_until_its_result_is_used():
    programs = {
        "jit_step(7)": {
            "call.1": op_names.Instruction(
                "custom-call",
                "jit(step)/jax_ep.dispatch",
                "jax_ep_dispatch",
                ("dot.2",),
            ),
            "while.3": op_names.Instruction("while", "jit(step)/while", ""),
            **PROGRAMS["jit_step(7)"],
        }
    }
    op = dict(hlo_module="jit_step", program_id=7)
    planes = [
        plane(
            "/host:CPU",
            worker=[
                event("call.1", 0, 1, _p=5, **of_device_0(), **op),
                event("while.3", 0, 100, **of_device_0(), **op),
                event("dot.2", 30, 50, **of_device_0(), **op),
                event("end: call.1", 60, 61, _c=5),
                # Without a program: its own end.
                event("jax_ep_combine.4", 70, 71, _p=6, **of_device_0()),
                event("end: jax_ep_combine.4", 90, 91, _c=6),
            ],
        )
    ]
    events = profile_events.cpu_events(planes, programs)
    found = {e.stage: (e.start * 1e6, e.stop * 1e6) for e in events}
    assert found == {
        "dispatch": pytest.approx((0, 30)),
        "shared experts": pytest.approx((30, 50)),
        "combine": pytest.approx((70, 90)),
    }


def test_spans_join_what_follows_closely():
    events = [
        Event("0", "experts", False, "a", 0.0, 0.001),
        Event("0", "experts", False, "b", 0.00101, 0.002),
        Event("0", "dispatch", True, "c", 0.002, 0.003),
        Event("0", "experts", False, "d", 0.003, 0.004),
    ]
    found = profile.Profile("", "gpu", [], events, []).spans()
    assert [(s.name, s.kind, s.start, s.stop) for s in found] == [
        ("experts", "compute", 0.0, 0.002),
        ("dispatch", "communication", 0.002, 0.003),
        ("experts", "compute", 0.003, 0.004),
    ]


def test_wire_format_is_checked():
    with pytest.raises(ValueError, match="longer than its message"):
        op_names.programs(b"\x0a\x05ab")
    with pytest.raises(ValueError, match="does not end"):
        op_names.programs(b"\x80")
    with pytest.raises(ValueError, match="no wire type 3"):
        op_names.programs(b"\x0b")
