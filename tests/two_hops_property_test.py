"""Any routing over 2x4, 4x2, 8x1 and 1x8 ranks: the two hops are the literal ones.

Bit for bit those of a loop over tokens in the order of the hops; against one domain
integers bit for bit, floats to the dtype's tolerance.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import literal
import numpy as np
import property_test
import pytest
from combine_test import assert_close
from conftest import CPU_FFI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from stages import all_ranks, assert_bits_equal, stages
from two_hops_test import RANKS, Case, two_hop_combine, two_hop_order

import jax_ep
from jax_ep import two_hops

pytestmark = pytest.mark.filterwarnings("ignore:jax_ep.dispatch_layout. every token")

CASES = [
    (4, Case(6, 3, 16, 5)),
    (2, Case(5, 2, 16, 4, capacity=9, alignment=3, dtype="bfloat16", factor=0.7)),
    (1, Case(6, 4, 8, 3, 12, dtype="float16", wire="float32", factor=1.06)),
    (8, Case(4, 2, 8, 6, 5, dtype="bfloat16")),
    (4, Case(4, 3, 8, 40, 10, wire="float8_e4m3fn", factor=0.8)),
]
FP8 = ("float8_e4m3fn", "mxfp8")


def drawn_cases(num: int) -> list[tuple[int, Case]]:
    """Shapes without a plan, for whoever has the time to compile them."""
    random = np.random.default_rng(0)

    def one_of(*values):
        return values[random.integers(len(values))]

    found = []
    for _ in range(num):
        size, alignment = one_of(1, 2, 4), one_of(1, 1, 2, 5)
        case = Case(
            tokens=int(random.integers(1, 9)),
            topk=int(random.integers(1, 6)),
            experts=RANKS * int(random.integers(1, 5)),
            width=int(random.integers(1, 70)),
            capacity=one_of(None, alignment * int(random.integers(1, 9))),
            alignment=alignment,
            dtype=one_of("float32", "bfloat16", "float16"),
            wire=one_of(None, "float32", *FP8),
        )
        if case.capacity is not None and one_of(True, True, False):
            # Dropless, C would follow the room between domains, and not the loop's.
            expected = two_hops.expected_tokens(
                exchange(size, case), RANKS, case.tokens, case.topk
            )
            least = 1.01 / expected  # A token has room, or it is refused.
            factor = max(one_of(0.6, 1.0), least)
            case = dataclasses.replace(case, factor=factor)
        found.append((size, case))
    return found


def exchange(size: int, case: Case) -> jax_ep.Exchange:
    return jax_ep.Exchange(
        num_experts=case.experts,
        domain_size=size,
        network_capacity_factor=case.factor,
    )


@functools.cache
def program(size: int, case: Case):
    """Handle, rows, sums and derivatives, of one compilation."""

    def body(ids, x, weights, numbers, y, bias, d_recv, d_recv_weights, d_out):
        handle = jax_ep.dispatch_layout(
            ids,
            num_experts=case.experts,
            domain_size=size,
            network_capacity_factor=case.factor,
            capacity=case.capacity,
            expert_alignment=case.alignment,
            wire=case.wire,
            grad_wire=case.wire,
        )

        def send(x, weights):
            (rows, numbers_of_rows), recv = jax_ep.dispatch(
                (x, numbers), handle, weights
            )
            return (rows, recv), numbers_of_rows

        (rows, recv), pull_back, found = jax.vjp(send, x, weights, has_aux=True)
        gradients = pull_back((d_recv, d_recv_weights))
        out, pull_back = jax.vjp(
            lambda y, bias: jax_ep.combine(y, handle, bias=bias), y, bias
        )
        return handle, (rows, recv, found), gradients, out, pull_back(d_out)

    mesh, spec = CPU_FFI.mesh(expert=RANKS), P("expert")
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))


def with_room(ids: np.ndarray, size: int, case: Case) -> np.ndarray:
    """The ids without those of tokens that find no place to their domain."""
    places = two_hops.places(exchange(size, case), RANKS, case.tokens, case.topk)
    ids = np.where((ids >= 0) & (ids < case.experts), ids, -1)
    domain = np.where(ids >= 0, ids // (case.experts * size // RANKS), -1)
    for rank, number in np.ndindex(RANKS, RANKS // size):
        wants = (domain[rank] == number).any(axis=1)
        late = np.flatnonzero(wants)[places:]
        ids[rank, late] = np.where(domain[rank, late] == number, -1, ids[rank, late])
    return ids


def rounded(rows: np.ndarray, wire: str | None) -> np.ndarray:
    """Rows as they come out of the wire."""
    if wire not in FP8:
        return rows
    whole = jax_ep.dequantize(jax_ep.quantize(jnp.asarray(all_ranks(rows)), wire))
    return np.asarray(whole).reshape(rows.shape)


def check(size: int, case: Case, data) -> None:
    shape = property_test.Shape(RANKS, case.tokens, case.topk, case.experts, case.width)
    ids = data.draw(property_test.routings(shape))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    integers = data.draw(st.booleans())

    def values(*dims, dtype=case.dtype):
        if integers:
            found = random.integers(-8, 9, dims)
        else:
            found = random.standard_normal(dims) * np.exp2(random.integers(-4, 5, dims))
        return found.astype(np.dtype(jnp.dtype(dtype)))

    kept_ids = ids if size == RANKS else with_room(ids, size, case)
    want = two_hop_order(kept_ids, case, size)
    asked = literal.layout(ids, case.experts, case.capacity, case.alignment)
    source, experts = (RANKS, case.tokens), (RANKS, want.capacity)
    x, bias, d_out = (values(*source, case.width) for _ in range(3))
    weights = values(*source, case.topk, dtype="float32")
    numbers = random.integers(-(2**31), 2**31, source).astype(np.int32)
    y, d_recv = (values(*experts, case.width) for _ in range(2))
    d_recv_weights = values(*experts, dtype="float32")
    arrays = ids, x, weights, numbers, y, bias, d_recv, d_recv_weights, d_out
    result = program(size, case)(*map(all_ranks, arrays))
    run = stages(CPU_FFI, RANKS)
    handle, rows, gradients, out, of_combine = jax.block_until_ready(result)

    wire = "float32" if case.wire == "float32" else None
    wire_dtype = None if wire is None else np.float32

    def combined(y, layout, bias):
        if size == RANKS:
            return literal.combine(y, layout, None, bias, wire_dtype)
        return two_hop_combine(y, layout, bias, size, wire)

    for name in ("slot", "group_sizes", "group_counts", "group_offsets"):
        np.testing.assert_array_equal(
            run.by_rank(getattr(handle, name)), getattr(want, name), err_msg=name
        )
    for name in ("slot_rank", "num_recv", "num_invalid"):
        np.testing.assert_array_equal(
            run.by_rank(getattr(handle, name)), getattr(asked, name), err_msg=name
        )
    kept = want.group_counts.sum(axis=1)
    np.testing.assert_array_equal(
        run.by_rank(handle.num_dropped), asked.num_recv - kept
    )

    for got, expected in zip(
        map(run.by_rank, rows),
        (
            literal.dispatch(rounded(x, case.wire), want),
            literal.dispatch_weights(weights, want),
            literal.dispatch(numbers, want),
        ),
        strict=True,
    ):
        assert_bits_equal(got, expected)
    assert_bits_equal(
        run.by_rank(gradients[0]), combined(d_recv, want, np.zeros_like(bias))
    )
    assert_bits_equal(
        run.by_rank(gradients[1]), literal.undispatch_weights(d_recv_weights, want)
    )
    sums = run.by_rank(out)
    assert_bits_equal(sums, combined(y, want, bias))
    dy, d_bias = map(run.by_rank, of_combine)
    assert_bits_equal(dy, literal.dispatch(rounded(d_out, case.wire), want))
    assert_bits_equal(d_bias, d_out)

    # One domain, whose sums round elsewhere; rows that are dropped would differ.
    flat = literal.layout(kept_ids, case.experts, case.capacity, case.alignment)
    if not (flat.num_dropped.any() or want.num_dropped.any()):
        y_of_flat = np.zeros_like(y)
        for token, k in zip(flat.kept_slots(), want.kept_slots(), strict=True):
            y_of_flat[token[3], token[4]] = y[k[3], k[4]]
        expected = literal.combine(y_of_flat, flat, None, bias, wire_dtype)
        if integers:
            assert_bits_equal(sums, expected)
        else:
            assert_close(sums, expected, case.dtype, 2 * case.topk + 1)


def examples(number: int):
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        # Shrinking draws smaller seeds, which are no simpler.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("size, case", CASES, ids=str)
@examples(8)
@given(data=st.data())
def test_any_routing(size, case, data):
    check(size, case, data)


@pytest.mark.slow
@pytest.mark.parametrize("size, case", [*CASES, *drawn_cases(8)], ids=str)
@examples(30)
@given(data=st.data())
def test_more_routings_and_shapes(size, case, data):
    check(size, case, data)
