"""dispatch_layout against the loop over tokens; the filling rule by its examples."""

import dataclasses

import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from conftest import CPU_FFI, CPU_XLA
from jax.sharding import PartitionSpec as P
from stages import all_ranks, assert_layout_equal, stages

import jax_ep


@dataclasses.dataclass(frozen=True)
class Case:
    ranks: int = 4
    tokens: int = 6
    topk: int = 3
    experts: int = 8
    capacity: int | None = None
    alignment: int = 1
    routing: str = "uniform"

    def ids(self, seed: int = 0) -> np.ndarray:
        """`[R, T, K]`, some of them masked or out of range if the routing says so."""
        random = np.random.default_rng(seed)
        shape = (self.ranks, self.tokens, self.topk)
        ids = random.integers(0, self.experts, shape, np.int32)
        if self.routing == "skewed":
            ids = np.minimum(ids, random.integers(0, 3, shape, np.int32))
        elif self.routing == "one expert":
            ids[:] = self.experts // 2
        elif self.routing == "masked":
            ids[random.random(shape) < 0.4] = -1
        elif self.routing == "invalid":
            wrong = [-(2**31), -7, -1, self.experts, self.experts + 1, 2**31 - 1]
            chosen = random.choice(np.array(wrong, np.int32), shape)
            ids = np.where(random.random(shape) < 0.5, chosen, ids)
        elif self.routing == "silent rank":
            ids[1] = -1
        elif self.routing == "nobody":
            ids[:] = -1
        elif self.routing == "ragged":
            for rank in range(self.ranks):
                ids[rank, self.tokens - rank :] = -1
        elif self.routing == "same expert in all slots":
            ids = np.broadcast_to(ids[..., :1], shape).copy()
        else:
            assert self.routing == "uniform"
        return ids


CASES = [
    Case(),
    Case(routing="masked"),
    Case(routing="invalid"),
    Case(routing="silent rank"),
    Case(routing="nobody"),
    Case(routing="ragged"),
    Case(routing="same expert in all slots"),
    Case(routing="one expert"),
    Case(routing="skewed", alignment=4),
    Case(routing="masked", alignment=7, capacity=30),
    Case(routing="skewed", capacity=20),
    Case(routing="skewed", capacity=23, alignment=4),
    Case(routing="one expert", capacity=10),
    Case(routing="invalid", capacity=8, alignment=8),
    Case(routing="uniform", capacity=1),
    Case(routing="uniform", capacity=1000),
    Case(tokens=0),
    Case(tokens=0, alignment=16),
    Case(tokens=1, topk=1),
    Case(tokens=5, topk=32, experts=64, routing="masked"),
    Case(ranks=1, experts=3, routing="masked", capacity=9, alignment=2),
    Case(ranks=2, experts=2, topk=1),
    Case(ranks=8, experts=8, tokens=3, capacity=6, routing="skewed"),
    Case(ranks=3, experts=21, topk=2),
    Case(ranks=4, experts=2048, tokens=8, topk=4, routing="invalid"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_handle(backend, case):
    run = stages(backend, case.ranks)
    ids = case.ids()
    handle = run.layout(
        all_ranks(ids),
        num_experts=case.experts,
        capacity=case.capacity,
        expert_alignment=case.alignment,
    )
    want = literal.layout(ids, case.experts, case.capacity, case.alignment)
    assert_layout_equal(run, handle, want)
    assert (handle.num_experts, handle.axis_name, handle.num_ranks) == (
        case.experts,
        ("expert",),
        case.ranks,
    )
    assert (handle.num_tokens, handle.num_topk) == (case.tokens, case.topk)
    assert handle.expert_alignment == case.alignment


@pytest.mark.parametrize("alignment", [1, 4])
def test_drops_something(backend, alignment):
    """The cases above that should drop rows do, and those that should not do not."""
    run = stages(backend, 4)
    case = Case(routing="skewed", capacity=20, alignment=alignment)
    static = dict(num_experts=case.experts, expert_alignment=alignment)
    ids = all_ranks(case.ids())
    bounded = run.layout(ids, capacity=case.capacity, **static)
    assert run.by_rank(bounded.num_dropped)[0].max() > 0
    dropped = run.by_rank(bounded.slot_rank) >= 0
    dropped &= run.by_rank(bounded.slot) < 0
    assert dropped.sum() == run.by_rank(bounded.num_dropped)[0].sum()
    dropless = run.layout(ids, **static)
    assert run.by_rank(dropless.num_dropped).max() == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_invariants(case):
    """What the literal layout itself must fulfil, whatever it was derived from."""
    ids = case.ids()
    layout = literal.layout(ids, case.experts, case.capacity, case.alignment)
    valid = (ids >= 0) & (ids < case.experts)
    demand = np.bincount(ids[valid], minlength=case.experts).reshape(case.ranks, -1)
    assert (layout.num_recv == demand.sum(1)).all()
    kept = layout.group_counts
    assert (layout.num_dropped == (demand - kept).sum(1)).all()
    assert (kept <= demand).all() and (layout.group_sizes >= kept).all()
    assert (layout.group_sizes % case.alignment == 0).all()
    assert (layout.group_offsets % case.alignment == 0).all()
    assert (layout.group_sizes.sum(1) <= layout.capacity).all()
    for rank in range(case.ranks):
        if case.alignment == 1 and demand[rank].sum() > layout.capacity:
            assert layout.num_dropped[0, rank] == demand[rank].sum() - layout.capacity
        # Rows of one rank in their order are its slots by (expert, source, token, k).
        rows = sorted(
            (row, (int(ids[s, t, k]), s, t, k))
            for s, t, k, owner, row in layout.kept_slots()
            if owner == rank
        )
        assert len({row for row, _ in rows}) == len(rows) == kept[rank].sum()
        assert [slot for _, slot in rows] == sorted(slot for _, slot in rows)


def demands(counts: list[list[int]]) -> np.ndarray:
    """Ids `[R, T, 1]` by which source s has counts[s][e] slots at expert e."""
    tokens = max(sum(row) for row in counts)
    ids = np.full((len(counts), tokens, 1), -1, np.int32)
    for source, row in enumerate(counts):
        wanted = np.repeat(np.arange(len(row), dtype=np.int32), row)
        np.random.default_rng(source).shuffle(wanted)
        ids[source, : wanted.size, 0] = wanted
    return ids


def kept_by_source(run, handle, ids):
    """Kept rows `[R (source), E]`."""
    kept = run.by_rank(handle.slot) >= 0
    return np.stack(
        [
            np.bincount(ids[s][kept[s]], minlength=handle.num_experts)
            for s in range(ids.shape[0])
        ]
    )


def test_filling_rule_example(backend):
    """Counts 1000, 900, 300, 20 with C 1500 and A 128 keep 512, 384, 300, 20."""
    run = stages(backend, 2)
    counts = [[600, 300, 150, 10, 0, 0, 0, 0], [400, 600, 150, 10, 0, 0, 0, 0]]
    ids = demands(counts)
    handle = run.layout(
        all_ranks(ids), num_experts=8, capacity=1500, expert_alignment=128
    )
    assert handle.capacity == 1408
    assert run.by_rank(handle.group_counts).tolist() == [[512, 384, 300, 20], [0] * 4]
    assert run.by_rank(handle.group_sizes)[0].tolist() == [512, 384, 384, 128]
    assert run.by_rank(handle.group_offsets)[0].tolist() == [0, 512, 896, 1280]
    assert run.by_rank(handle.num_recv).tolist() == [[2220, 0]] * 2
    assert run.by_rank(handle.num_dropped).tolist() == [[1004, 0]] * 2
    # Inside an expert the sources share alike: 256 each of 512, 192 each of 384.
    assert kept_by_source(run, handle, ids)[:, :4].tolist() == [
        [256, 192, 150, 10],
        [256, 192, 150, 10],
    ]
    assert_layout_equal(run, handle, literal.layout(ids, 8, 1500, 128))


def test_without_alignment_exactly_the_overflow_drops(backend):
    run = stages(backend, 2)
    ids = demands([[30, 20, 3, 1], [10, 25, 4, 2]])  # rank 0 wants 85, rank 1 10
    handle = run.layout(all_ranks(ids), num_experts=4, capacity=50)
    assert run.by_rank(handle.num_recv)[1].tolist() == [85, 10]
    assert run.by_rank(handle.num_dropped)[1].tolist() == [35, 0]
    assert run.by_rank(handle.group_counts).tolist() == [[25, 25], [7, 3]]
    # 25 of expert 0 among 30 and 10: 15 and 10. Of expert 1 among 20 and 25: 13 and 12.
    assert kept_by_source(run, handle, ids).tolist() == [[15, 13, 3, 1], [10, 12, 4, 2]]


def test_every_source_keeps_its_first(backend):
    """One expert, more rows than fit: the sources share, each keeps its first slots."""
    run = stages(backend, 4)
    ids = np.zeros((4, 4, 1), np.int32)
    handle = run.layout(all_ranks(ids), num_experts=4, capacity=10)
    slot = run.by_rank(handle.slot)[..., 0]
    assert slot.tolist() == [
        [0, 1, 2, -1],
        [3, 4, 5, -1],
        [6, 7, -1, -1],
        [8, 9, -1, -1],
    ]
    # A small source keeps all of it.
    ids[1, 1:] = -1
    handle = run.layout(all_ranks(ids), num_experts=4, capacity=10)
    slot = run.by_rank(handle.slot)[..., 0]
    assert slot.tolist() == [
        [0, 1, 2, -1],
        [3, -1, -1, -1],
        [4, 5, 6, -1],
        [7, 8, 9, -1],
    ]


@pytest.mark.parametrize(
    "counts, capacity, alignment, kept",
    [
        ([5, 5, 5, 5], 12, 4, [4, 4, 4, 0]),  # not one block for all: index order
        ([5, 5, 5, 5], 16, 4, [4, 4, 4, 4]),
        ([5, 5, 5, 5], 20, 4, [5, 4, 4, 4]),  # the spare block goes to the first
        ([0, 9, 0, 9], 12, 4, [0, 8, 0, 4]),
        ([1, 1, 1, 1], 4, 4, [1, 0, 0, 0]),
        ([100, 0, 0, 1], 7, 1, [6, 0, 0, 1]),
        ([3, 3, 3, 3], 10, 1, [3, 3, 2, 2]),
        ([3, 2, 1, 0], 6, 1, [3, 2, 1, 0]),
    ],
)
def test_filling_rule(ffi_backend, counts, capacity, alignment, kept):
    run = stages(ffi_backend, 1)
    ids = np.full((1, 101, 1), -1, np.int32)
    some = demands([counts])
    ids[:, : some.shape[1]] = some
    assert literal.fill(counts, capacity, alignment) == kept
    handle = run.layout(
        all_ranks(ids), num_experts=4, capacity=capacity, expert_alignment=alignment
    )
    assert run.by_rank(handle.group_counts)[0].tolist() == kept


@pytest.mark.parametrize(
    "capacity, alignment, rows",
    [(None, 1, 32), (None, 3, 36), (None, 8, 40), (17, 1, 17), (17, 8, 16), (8, 8, 8)],
)
def test_capacity(ffi_backend, capacity, alignment, rows):
    """Dropless is R*T*K + L*(A-1) rounded down: 4*4*2 + 2*(A-1)."""
    run = stages(ffi_backend, 4)
    ids = np.zeros((16, 2), np.int32)
    handle = run.layout(
        ids, num_experts=8, capacity=capacity, expert_alignment=alignment
    )
    assert handle.capacity == rows


def test_int64_ids(backend, x64):
    """2**32 + 3 is out of range, not expert 3, and -2**32 + 3 is masked."""
    run = stages(backend, 4)
    ids = np.array([[[3, 2**32 + 3], [-(2**32) + 3, 2**40], [-1, 7]]] * 4, np.int64)
    handle = run.layout(all_ranks(ids), num_experts=8)
    assert_layout_equal(run, handle, literal.layout(ids, 8))
    assert np.asarray(handle.num_invalid).tolist() == [2] * 4


def test_int64_constant_without_x64(backend):
    """A numpy table is clamped before JAX can cut it to int32."""
    ids = np.array([[3, 2**32 + 3], [-(2**32) + 3, 2**40]], np.int64)
    run = stages(backend, 4)

    @run.shard_map
    def layout(x):
        del x
        return jax_ep.dispatch_layout(
            ids, num_experts=8, implementation=backend.implementation
        )

    handle = layout(np.zeros(4, np.int32))
    assert_layout_equal(run, handle, literal.layout(np.stack([ids] * 4), 8))


def test_same_ids_same_bits(backend):
    """Two batches of one routing have one handle, whatever came in between."""
    run = stages(backend, 4)
    case = Case(routing="skewed", capacity=20)
    ids = all_ranks(case.ids())
    first = run.layout(ids, num_experts=8, capacity=20)
    run.layout(all_ranks(case.ids(seed=1)), num_experts=8, capacity=20)
    second = run.layout(ids, num_experts=8, capacity=20)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("ranks", [33, 64])
def test_many_ranks(ranks):
    """More ranks than 32, in a process of their own since devices are set at start."""
    import subprocess
    import sys

    program = f"""
import sys; sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
import literal, numpy as np, conftest
from stages import *
for implementation in ("ffi", "xla"):
    run = stages(conftest.Backend("cpu", implementation), {ranks})
    ids = np.random.default_rng(0).integers(-1, {ranks}, ({ranks}, 1, 2), np.int32)
    x = np.arange({ranks} * 8, dtype=np.float32).reshape({ranks}, 1, 8)
    handle = run.layout(all_ranks(ids), num_experts={ranks})
    want = literal.layout(ids, {ranks})
    assert_layout_equal(run, handle, want)
    recv, _ = run.dispatch(all_ranks(x), handle)
    assert_bits_equal(run.by_rank(recv), literal.dispatch(x, want))
    out = run.combine(recv, handle)
    rows = literal.dispatch(x, want)
    assert_bits_equal(run.by_rank(out), literal.combine(rows, want))
print("passed")
"""
    import os

    env = dict(os.environ, JAX_PLATFORMS="cpu")
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks}"
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True
    )
    assert result.stdout == "passed\n", result.stderr


def test_handle_is_a_pytree(backend):
    """Nine int32 leaves of ndim >= 1; the rest is static and part of the structure."""
    run = stages(backend, 4)
    handle = run.layout(np.zeros((16, 2), np.int32), num_experts=8, num_sms=7)
    leaves, structure = jax.tree.flatten(handle)
    assert len(leaves) == 9
    assert all(leaf.ndim >= 1 and leaf.dtype == jnp.int32 for leaf in leaves)
    assert jax.tree.unflatten(structure, leaves) == handle
    exchange = dataclasses.replace(handle.exchange, timeout_s=1.0)
    other = dataclasses.replace(handle, exchange=exchange)
    assert jax.tree.structure(other) != structure
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.slot = None
    assert (handle.num_sms, handle.timeout_s) == (7, 100.0)
    assert handle.implementation == backend.implementation


def test_default_implementation_is_the_custom_call():
    """On the CPU devices of one process."""
    run = stages(CPU_FFI, 4)
    ids = np.zeros((16, 2), np.int32)

    def text(**static):
        layout = run.shard_map(jax_ep.dispatch_layout, num_experts=8, **static)
        return layout.lower(ids).compile().as_text()

    assert 'custom_call_target="jax_ep_layout"' in text()
    assert 'custom_call_target="jax_ep_layout"' in text(implementation="ffi")
    assert 'custom_call_target="jax_ep' not in text(implementation="xla")


def test_tuple_axes(backend):
    """Ranks of a tuple of axes are numbered as lax.axis_index numbers them."""
    mesh = backend.mesh(a=2, b=2)
    ids = np.random.default_rng(0).integers(-1, 9, (4, 5, 2), np.int32)
    want = literal.layout(ids, 8)
    for names in (("a", "b"), ("b", "a")):
        layout = jax.jit(
            jax.shard_map(
                lambda ids, names=names: jax_ep.dispatch_layout(
                    ids,
                    num_experts=8,
                    axis_name=names,
                    implementation=backend.implementation,
                ),
                mesh=mesh,
                in_specs=P(names),
                out_specs=P(names),
            )
        )
        handle = layout(all_ranks(ids))
        assert handle.axis_name == names
        assert_layout_equal(stages(backend, 4), handle, want)


def test_ffi_and_xla_agree_on_a_large_batch():
    """T 2304, E 16, K 4, all rows but ten alike: counts equal bincount(ids)."""
    random = np.random.default_rng(0)
    ids = np.broadcast_to(np.array([5, 1, 14, 6], np.int32), (4, 2304, 4)).copy()
    ids[:, :10] = random.integers(0, 16, (4, 10, 4))
    handles = [
        stages(backend, 4).layout(all_ranks(ids), num_experts=16)
        for backend in (CPU_FFI, CPU_XLA)
    ]
    for handle in handles:
        counts = np.asarray(handle.group_counts)
        assert counts.tolist() == np.bincount(ids.ravel(), minlength=16).tolist()
    leaves = [jax.tree.leaves(handle) for handle in handles]
    jax.tree.map(np.testing.assert_array_equal, *leaves)
