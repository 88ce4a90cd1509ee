"""Bytes and least times, against the kernels' header, the handle, and measurements."""

import dataclasses
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import block_scaled, sizing
from jax_ep.sizing import MACHINES, Shape, UniformRouting

HEADERS = pathlib.Path(__file__).parent.parent / "ffi" / "cuda"
H200 = MACHINES["h200"]
ROUTING = UniformRouting(256, 8)
WIDTHS = (1, 8, 100, 2880, 7168, 40000)

PROGRAM = """
#include <cstdio>
#include <initializer_list>

#include "workspace.h"
using namespace jax_ep;
using namespace jax_ep::cuda;
constexpr int64_t kWidths[] = {WIDTHS};
int main() {
  std::printf("%d %d\\n", kMaxRanks, kIdsPerWord);
  for (int r = 1; r <= kMaxRanks; ++r)
    std::printf("%lld\\n", (long long)WorkspaceBytes(r));
  for (int64_t h : kWidths)
    for (int k : {0, 1, 8, 32}) {
      const int64_t bf16[] = {2 * h};
      const WireShape one = DispatchWire(bf16, 1, k, k > 0);
      const int64_t fp8[] = {h, (h + 127) / 128 * 4};
      const WireShape two = DispatchWire(fp8, 2, k, k > 0);
      std::printf("%lld %lld\\n", (long long)one.row_bytes + one.extra_bytes,
                  (long long)two.row_bytes + two.extra_bytes);
    }
}
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory) -> list[list[int]]:
    """What the kernels' own header says, line by line."""
    folder = tmp_path_factory.mktemp("header")
    widths = ", ".join(map(str, WIDTHS))
    (folder / "program.cc").write_text(PROGRAM.replace("WIDTHS", widths))
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [compiler, "-std=c++17", f"-I{HEADERS}", "program.cc", "-o", "program"],
        cwd=folder,
        check=True,
    )
    output = subprocess.run(
        [folder / "program"], check=True, capture_output=True, text=True
    ).stdout
    return [[int(word) for word in line.split()] for line in output.splitlines()]


def test_workspace(header):
    (num_ranks, ids_per_word), *sizes = header[: 1 + header[0][0]]
    assert num_ranks == sizing.MAX_RANKS
    assert ids_per_word == 8
    assert [[sizing.workspace_bytes(r)] for r in range(1, num_ranks + 1)] == sizes
    assert sizing.workspace_bytes(4) == 158 * 2**20
    assert sizing.workspace_bytes(8) == 256 * 2**20


def test_wire(header):
    expected = header[1 + sizing.MAX_RANKS :]
    found = [
        [sizing.wire_bytes(h, "bfloat16", k), sizing.wire_bytes(h, "float8", k)]
        for h in WIDTHS
        for k in (0, 1, 8, 32)
    ]
    assert found == expected


def test_rows():
    assert sizing.row_bytes(7168) == 14336
    assert sizing.row_bytes(7168, "float32") == 28672
    assert sizing.row_bytes(7168, "float8") == 7168 + 56 * 4
    assert sizing.row_bytes(100, "float8") == 104
    assert sizing.row_bytes(7168, "mxfp8") == 7168 + 224
    for width in (7168, 2880, 100, 1):  # What dispatch's wire formats really send.
        for name, wire in (("float8", "float8_e4m3fn"), ("mxfp8", "mxfp8")):
            sent = block_scaled.NAMES[wire].row_bytes(width)
            assert sizing.wire_bytes(width, name) == sent
    with pytest.raises(ValueError, match="must be one of float32, bfloat16"):
        sizing.row_bytes(8, "int8")
    with pytest.raises(ValueError, match=r"hidden \(=0\)"):
        sizing.row_bytes(0)


@pytest.mark.jax_version
@pytest.mark.parametrize("capacity_factor", [None, 1.0, 1.25, 100.0])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_buffers_are_those_of_a_layer(capacity_factor, alignment, num_ranks):
    """Against the handle and the rows that the stages themselves would make."""
    shape = Shape(UniformRouting(16, 3), 20, 24, num_ranks, capacity_factor, alignment)
    config = jax_ep.MoEConfig(
        num_experts=16,
        num_experts_per_tok=3,
        hidden_size=24,
        moe_intermediate_size=8,
        capacity_factor=capacity_factor,
        expert_alignment=alignment,
    )

    def stages(ids, x, weights):
        handle = jax_ep.dispatch_layout(
            ids,
            num_experts=16,
            capacity=jax_ep.receive_capacity(config, 20, num_ranks),
            expert_alignment=alignment,
        )
        return handle, jax_ep.dispatch(x, handle, weights)

    mesh = jax.make_mesh(
        (num_ranks,),
        ("expert",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices("cpu")[:num_ranks],
    )
    call = jax.shard_map(stages, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    handle, received = jax.eval_shape(
        call,
        jax.ShapeDtypeStruct((num_ranks * 20, 3), jnp.int32),
        jax.ShapeDtypeStruct((num_ranks * 20, 24), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_ranks * 20, 3), jnp.float32),
    )

    def bytes_of(tree):
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))

    assert sizing.receive_rows(shape) == handle.capacity
    assert sizing.handle_bytes(shape) * num_ranks == bytes_of(handle)
    row = sizing.row_bytes(24)
    assert sizing.receive_bytes(shape, row) * num_ranks == bytes_of(received)
    assert sizing.receive_bytes(shape, row, weights=False) == row * handle.capacity


# examples/benchmarks/results/h200.md, uniform routing, default and all SMs: R, T, C,
# stage, MB out, MB memory, floor us, us. Bytes there are the busiest rank's of a draw.
MEASURED = [
    (4, 8192, 81920, "dispatch", 321, 1932, 911, (987.4, 954.9)),
    (4, 8192, 81920, "combine", 319, 1700, 907, (1009.4, 986.8)),
    (4, 16384, 163840, "dispatch", 640, 3861, 1817, (1932.1,)),
    (4, 16384, 163840, "combine", 637, 3393, 1810, (1970.2,)),
    (4, 8192, 262144, "dispatch", 321, 4516, 1170, (1237.0,)),
    (2, 8192, 81920, "dispatch", 117, 1526, 390, (439.4, 436.5)),
    (2, 8192, 81920, "combine", 117, 1291, 330, (394.9, 393.0)),
    (2, 8192, 131072, "dispatch", 117, 2231, 570, (607.7,)),
]
# Of the runs with 4 and with 2: bytes per second out of a GPU, and to and from memory.
CEILINGS = {4: (352e9, 3860e9), 2: (358.5e9, 3914e9)}


@pytest.mark.parametrize("row", MEASURED)
def test_against_the_measured_table(row):
    num_ranks, tokens, capacity, stage, link, memory, floor, times = row
    dropless = capacity == num_ranks * tokens * 8
    shape = Shape(ROUTING, tokens, 7168, num_ranks, None if dropless else 1.25)
    assert sizing.receive_rows(shape) == capacity
    traffic = getattr(sizing, f"{stage}_traffic")(shape)
    link_rate, memory_rate = CEILINGS[num_ranks]
    machine = dataclasses.replace(H200, link_rate=link_rate, memory_rate=memory_rate)
    bound = sizing.time_bound(traffic, machine)
    assert traffic.link == pytest.approx(link * 1e6, rel=0.01)
    assert traffic.memory == pytest.approx(memory * 1e6, rel=0.01)
    assert bound.seconds * 1e6 == pytest.approx(floor, rel=0.01)
    for time in times:  # No kernel beats its bound, and these come near.
        assert 0.8 * time < bound.seconds * 1e6 < time


@pytest.mark.parametrize("ceilings", CEILINGS.values(), ids=map(str, CEILINGS))
def test_rates_of_the_h200_are_those_of_the_runs(ceilings):
    assert (H200.link_rate, H200.memory_rate) == pytest.approx(ceilings, rel=0.02)


@pytest.mark.parametrize(
    "num_ranks, stage, measured, expected",
    [
        (4, "dispatch", 1127.2, 28),
        (4, "combine", 1212.8, 28),
        (2, "dispatch", 746.6, 55),
        (2, "combine", 670.8, 64),
    ],
)
def test_few_sms(num_ranks, stage, measured, expected):
    """32 SMs, same table: the bound that counts SMs holds, and is the larger at R = 2.

    Combine at R = 2 is where the rate of adding is from.
    """
    shape = Shape(ROUTING, 8192, 7168, num_ranks, 1.25)
    traffic = getattr(sizing, f"{stage}_traffic")(shape)
    bound = sizing.time_bound(traffic, H200, num_sms=32)
    assert bound.seconds * 1e6 <= measured * 1.001
    assert bound.binds == ("link" if num_ranks == 4 else "sms")
    # At R = 4 fewer than 32 would do if SMs never waited.
    assert sizing.sms_to_fill(traffic, H200) == expected


def test_sms_to_fill_is_the_least():
    shape = Shape(ROUTING, 8192, 7168, 8, 1.25)
    for traffic in (sizing.dispatch_traffic(shape), sizing.combine_traffic(shape)):
        fewest = sizing.sms_to_fill(traffic, H200)
        assert fewest is not None
        assert sizing.time_bound(traffic, H200, num_sms=fewest).binds != "sms"
        assert sizing.time_bound(traffic, H200, num_sms=fewest - 1).binds == "sms"
    assert sizing.sms_to_fill(traffic, MACHINES["b200"]) is None


def test_backward_is_the_other_stage():
    """Expected rows are the same there and back; weights travel with those of x."""
    shape = Shape(UniformRouting(64, 6, 8, 3), 512, 256, 8)
    there = sizing.dispatch_traffic(shape)
    back = sizing.combine_traffic(shape, weight_gradients=True)
    assert there.link == back.link
    rows = sizing.remote_ranks(shape.routing, 8) * 512
    assert there.link == pytest.approx(rows * (512 + 32))
    assert sizing.combine_traffic(shape).link == pytest.approx(rows * 512)
    small = sizing.dispatch_traffic(shape, dtype="float8", weights=False)
    assert small.link == pytest.approx(rows * (256 + 16))


def test_one_rank_has_no_link():
    shape = Shape(ROUTING, 16, 64, 1)
    dispatch = sizing.dispatch_traffic(shape)
    assert dispatch.link == dispatch.nic == 0
    row = 128
    assert dispatch.memory == 16 * row + 16 * 8 * row
    assert dispatch.written == 16 * 8 * row
    combine = sizing.combine_traffic(shape)
    assert (combine.memory, combine.written, combine.added) == (
        16 * 8 * row + 16 * row,
        16 * row,
        16 * 8 * row,
    )


def test_layout_sends_every_id_to_every_rank():
    shape = Shape(UniformRouting(16, 3), 21, 8, 4)
    # 63 ids in 8 lines of 16 bytes.
    assert sizing.layout_traffic(shape).link == 3 * 8 * 16
    across = sizing.layout_traffic(dataclasses.replace(shape, domain_size=2))
    assert (across.link, across.nic) == (1 * 128, 2 * 128)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda shape: sizing.combine_traffic(shape, dtype="float8"),
            "sums are not sent in 8 bits",
        ),
        (
            lambda shape: sizing.time_bound(
                sizing.combine_traffic(shape), H200, num_sms=133
            ),
            r"num_sms \(=133\) must be at most the 132 of h200",
        ),
        (
            lambda shape: sizing.Machine("x", -1, 1, 1, 1, 1, None, None, ""),
            r"link_rate \(=-1\) must be positive",
        ),
        (
            lambda shape: sizing.Machine("x", 1, 1, 1, 1, 0, None, None, ""),
            r"domain_size \(=0\) must be at least 1",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(Shape(UniformRouting(8, 2), 4, 64, 2))
