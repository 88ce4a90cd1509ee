"""Any routing, capacity and dtype: custom calls, reference and literal loop agree.

Shapes are few and fixed, since each is compiled; values are free.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from combine_test import assert_close
from conftest import CPU_FFI, CPU_XLA, Backend
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from stages import all_ranks, assert_bits_equal, assert_layout_equal, stages

import jax_ep


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is compiled."""

    ranks: int
    tokens: int
    topk: int
    experts: int
    hidden: int
    capacity: int | None = None
    alignment: int = 1
    dtype: str = "float32"
    wire_f32: bool = False
    weighted: bool = False

    def __str__(self):
        fields = dataclasses.asdict(self).values()
        return "-".join(str(value) for value in fields)


SHAPES = [
    Shape(4, 6, 3, 8, 5),
    Shape(4, 6, 3, 8, 5, capacity=20),
    Shape(4, 6, 3, 8, 4, capacity=24, alignment=8, dtype="bfloat16"),
    Shape(4, 6, 3, 8, 3, alignment=4, dtype="float16"),
    Shape(4, 5, 2, 4, 1, capacity=7, dtype="bfloat16", wire_f32=True),
    Shape(4, 5, 2, 4, 8, capacity=1, weighted=True),
    Shape(4, 9, 1, 16, 2, weighted=True, dtype="bfloat16"),
    Shape(4, 3, 8, 64, 16, capacity=33, alignment=3),
    Shape(4, 2, 32, 128, 2, capacity=60, dtype="float16", wire_f32=True),
    Shape(1, 12, 4, 6, 7, capacity=30, alignment=5),
    Shape(1, 4, 1, 1, 1),
    Shape(2, 10, 3, 2, 3, capacity=16, dtype="bfloat16"),
    Shape(2, 10, 2, 10, 33, alignment=16, weighted=True),
    Shape(2, 1, 2, 4, 9, capacity=2),
    Shape(3, 7, 2, 9, 6, capacity=12, alignment=2, dtype="float16", weighted=True),
    Shape(8, 3, 2, 8, 4, capacity=5),
    Shape(8, 4, 4, 32, 2, capacity=18, alignment=6, dtype="bfloat16"),
    Shape(8, 1, 1, 8, 1, weighted=True, wire_f32=True, dtype="float16"),
    Shape(8, 5, 3, 16, 3, capacity=10, alignment=10, weighted=True),
    Shape(6, 4, 2, 12, 5, capacity=9, wire_f32=True),
]


@functools.cache
def program(backend: Backend, shape: Shape):
    """Everything at once: the handle, rows, sums and all derivatives."""

    def body(ids, x, topk_weights, y, weights, bias, d_recv, d_recv_weights, d_out):
        wire_dtype = jnp.float32 if shape.wire_f32 else None
        handle = jax_ep.dispatch_layout(
            ids,
            num_experts=shape.experts,
            capacity=shape.capacity,
            expert_alignment=shape.alignment,
            implementation=backend.implementation,
        )
        recv, pull_back = jax.vjp(
            lambda x, w: jax_ep.dispatch(x, handle, w, grad_wire=wire_dtype),
            x,
            topk_weights,
        )
        dx = pull_back((d_recv, d_recv_weights))
        out, pull_back = jax.vjp(
            lambda y, weights, bias: jax_ep.combine(
                y,
                handle,
                weights=weights if shape.weighted else None,
                bias=bias,
                wire=wire_dtype,
            ),
            y,
            weights,
            bias,
        )
        return handle, recv, dx, out, pull_back(d_out)

    run = stages(backend, shape.ranks)
    return jax.jit(
        jax.shard_map(body, mesh=run.mesh, in_specs=P("expert"), out_specs=P("expert"))
    )


@st.composite
def routings(draw, shape: Shape):
    """Ids `[R, T, K]`, from uniform to all in one place, masked and invalid in part."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = (shape.ranks, shape.tokens, shape.topk)
    # The share of experts that are used, and how much the first are preferred.
    used = draw(st.integers(1, shape.experts))
    skew = draw(st.sampled_from([1.0, 3.0, 10.0]))
    ids = (used * random.random(size) ** skew).astype(np.int32)
    if draw(st.booleans()):  # other experts than the first
        ids = random.permutation(shape.experts).astype(np.int32)[ids]
    masked = draw(st.sampled_from([0.0, 0.0, 0.3, 0.9, 1.0]))
    ids[random.random(size) < masked] = -1
    if draw(st.booleans()):
        wrong = np.array([-(2**31), -2, shape.experts, 2**31 - 1], np.int32)
        chosen = random.random(size) < 0.2
        ids[chosen] = random.choice(wrong, chosen.sum())
    for rank in draw(st.sets(st.integers(0, shape.ranks - 1), max_size=shape.ranks)):
        # A rank with fewer tokens masks its tail.
        ids[rank, draw(st.integers(0, shape.tokens)) :] = -1
    return ids


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    # Shrinking draws smaller seeds, which are no simpler, and takes minutes.
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_pipeline(shape, data):
    ids = data.draw(routings(shape))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # float16 must hold a row times its weight.
    spread = data.draw(st.sampled_from([0, 4, 4 if shape.dtype == "float16" else 10]))
    want = literal.layout(ids, shape.experts, shape.capacity, shape.alignment)

    def floats(*size, dtype=shape.dtype):
        exponents = random.integers(-spread, spread + 1, size)
        values = random.standard_normal(size, np.float32) * np.exp2(exponents)
        return values.astype(np.dtype(jnp.dtype(dtype)))

    source = (shape.ranks, shape.tokens)
    experts = (shape.ranks, want.capacity)
    x = floats(*source, shape.hidden)
    topk_weights = floats(*source, shape.topk, dtype="float32")
    y = floats(*experts, shape.hidden)
    weights = floats(*experts, dtype="float32")
    bias = floats(*source, shape.hidden)
    d_recv = floats(*experts, shape.hidden)
    d_recv_weights = floats(*experts, dtype="float32")
    d_out = floats(*source, shape.hidden)
    arrays = ids, x, topk_weights, y, weights, bias, d_recv, d_recv_weights, d_out
    arrays = [all_ranks(array) for array in arrays]
    wire_dtype = np.float32 if shape.wire_f32 else None

    results = {}
    for backend in (CPU_FFI, CPU_XLA):
        run = stages(backend, shape.ranks)
        result = jax.block_until_ready(program(backend, shape)(*arrays))
        results[backend] = result
        (
            handle,
            (recv, recv_weights),
            (dx, d_topk_weights),
            out,
            (dy, d_weights, d_bias),
        ) = result
        assert_layout_equal(run, handle, want)
        assert_bits_equal(run.by_rank(recv), literal.dispatch(x, want))
        assert_bits_equal(
            run.by_rank(recv_weights), literal.dispatch_weights(topk_weights, want)
        )
        assert_bits_equal(
            run.by_rank(dx), literal.combine(d_recv, want, wire_dtype=wire_dtype)
        )
        assert_bits_equal(
            run.by_rank(d_topk_weights),
            literal.undispatch_weights(d_recv_weights, want),
        )
        assert_bits_equal(run.by_rank(d_bias), d_out)
        if shape.weighted:
            expected = literal.combine(y, want, weights, bias, wire_dtype)
            assert_close(run.by_rank(out), expected, shape.dtype, 2 * shape.topk + 1)
            want_y, want_weights = literal.weighted_combine_gradients(
                d_out, y, weights, want
            )
            assert_close(run.by_rank(dy), want_y, shape.dtype, 1)
            assert_close(
                run.by_rank(d_weights), want_weights, "float32", 2 * shape.hidden
            )
        else:
            expected = literal.combine(y, want, None, bias, wire_dtype)
            assert_bits_equal(run.by_rank(out), expected)
            assert_bits_equal(run.by_rank(dy), literal.dispatch(d_out, want))
            assert not np.asarray(d_weights).any()
    if not shape.weighted:
        leaves = [jax.tree.leaves(result) for result in results.values()]
        jax.tree.map(assert_bits_equal, *leaves)


def test_the_shapes_cover_the_dtypes_and_options():
    assert {s.dtype for s in SHAPES} == {"float32", "bfloat16", "float16"}
    assert {s.weighted for s in SHAPES} == {s.wire_f32 for s in SHAPES} == {True, False}
    assert len(SHAPES) == 20
