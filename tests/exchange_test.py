"""What an exchange is told reaches every call that the library starts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from jax.sharding import PartitionSpec as P

import jax_ep

RANKS, TOKENS, TOPK, EXPERTS, WIDTH = 4, 6, 2, 8, 4
EXCHANGE = jax_ep.Exchange(
    num_experts=EXPERTS, capacity=5, num_sms=24, timeout_s=5, stamps=True
)


def over_ranks(body, *args):
    mesh = CPU_FFI.mesh(expert=RANKS)
    spec = P("expert")
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)), args


def ids_of(seed=0, dtype=np.int32):
    ids = np.random.default_rng(seed).integers(0, EXPERTS + 1, (RANKS * TOKENS, TOPK))
    return ids.astype(dtype)


def told(function, args):
    """Of each of our custom calls: its target, SMs, time limit and stamps."""
    text = function.lower(*args).as_text()
    found = re.findall(r"custom_call @(jax_ep_\w+)\(.*?backend_config = \{(.*)\}", text)
    assert found
    return [
        (
            target,
            int(re.search(r"num_sms = (\d+)", config)[1]),
            float(re.search(r"timeout_s = ([\d.e+]+)", config)[1]),
            re.search(r"stamps = (\w+)", config)[1],
        )
        for target, config in found
    ]


def test_calls_rounds_and_backwards_inherit_it():
    def body(x, ids):
        handle = jax_ep.dispatch_layout(ids, exchange=EXCHANGE)
        assert handle.exchange == EXCHANGE

        def layer(params, x, weights, handle, bias):
            del params, weights
            return jax_ep.combine(jax_ep.dispatch(x, handle)[0], handle, bias=bias)

        def loss(x):
            return jax_ep.in_rounds(layer, (), x, ids, None, handle)[0].sum()

        total, gradient = jax.value_and_grad(loss)(x)
        return total[None], gradient

    x = np.ones((RANKS * TOKENS, WIDTH), np.float32)
    calls = told(*over_ranks(body, x, ids_of()))
    assert {tuple(rest) for _, *rest in calls} == {(24, 5.0, "true")}
    # The first round and the loop's, forward and backward.
    assert [target for target, *_ in calls].count("jax_ep_layout") == 3


def test_placed_parameters_inherit_the_layers():
    config = jax_ep.MoEConfig(
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        hidden_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_sms=24,
        timeout_s=5,
    )
    placement = jax_ep.plan_placement(
        np.arange(1.0, EXPERTS + 1), num_ranks=RANKS, num_slots=EXPERTS + RANKS
    )
    params = jax_ep.init_params(jax.random.key(0), config)
    mesh = CPU_FFI.mesh(expert=RANKS)
    x = np.ones((RANKS, TOKENS, WIDTH), np.float32)
    layer = jax.jit(
        lambda x, params: jax_ep.sharded_moe(
            x, params, config, mesh=mesh, placement=placement
        )[0]
    )
    calls = told(layer, (x, params))
    assert len(calls) == 5  # layout and dispatch of parameters, then the layer's three
    assert {tuple(rest) for _, *rest in calls} == {(24, 5.0, "false")}


def test_keywords_take_the_place_of_its_fields():
    def body(ids):
        handle = jax_ep.dispatch_layout(
            ids, exchange=EXCHANGE, num_sms=7, expert_alignment=2, capacity=9
        )
        assert handle.exchange == jax_ep.Exchange(
            num_experts=EXPERTS,
            capacity=8,
            expert_alignment=2,
            num_sms=7,
            timeout_s=5,
            stamps=True,
        )
        assert (handle.capacity, handle.num_sms, handle.stamps) == (8, 7, True)
        return handle.slot

    run, args = over_ranks(body, ids_of())
    jax.eval_shape(run, *args)


@pytest.mark.parametrize("where", ["wire", "grad_wire"])
def test_its_wire_format_is_the_calls_default(where):
    """1 and 2^-9 on one rank, twice 2^-9 on another: bfloat16 loses on the link."""

    def total(**told):
        def body(x):
            ids = jnp.array([[0, 1, 2, 3]])
            weights = jnp.array([[1, 2**-9, 2**-9, 2**-9]], jnp.float32)
            handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS, **told)

            def dispatched(x):
                return jax_ep.dispatch(x, handle, weights)

            if where == "wire":
                _, recv_weights = dispatched(x)
                return jax_ep.combine(recv_weights[:, None].astype(x.dtype), handle)

            def loss(x):
                rows, recv_weights = dispatched(x)
                return (rows[:, 0].astype(jnp.float32) * recv_weights).sum()

            return jax.grad(loss)(x)

        run, args = over_ranks(body, np.ones((RANKS, 1), jnp.bfloat16))
        (value,) = set(np.asarray(run(*args), np.float32)[:, 0])
        return value

    # Rounded on the link 1 + 2^-8, which rounds to 1; exactly 1 + 3 * 2^-9, which does
    # not.
    assert total() == 1
    assert total(**{where: jnp.float32}) == 1 + 2**-7


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
def test_ids_of_any_integer_dtype(dtype):
    def body(ids):
        handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS)
        return handle.slot, handle.slot_rank, handle.num_invalid

    ids = ids_of()
    if np.issubdtype(dtype, np.signedinteger):
        ids[0, 0] = -3
    run, _ = over_ranks(body)
    for found, want in zip(run(ids.astype(dtype)), run(ids), strict=True):
        np.testing.assert_array_equal(found, want)


def test_a_large_unsigned_id_is_no_expert():
    def body(ids):
        return jax_ep.dispatch_layout(ids, num_experts=EXPERTS).num_invalid

    ids = np.full((RANKS, 1), 2**32 - 1, np.uint32)
    run, args = over_ranks(body, ids)
    np.testing.assert_array_equal(run(*args), np.ones(RANKS, np.int32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_router_weights_of_a_narrower_float(dtype):
    def body(x, ids, weights):
        handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS)

        def loss(weights):
            rows, recv = jax_ep.dispatch(x, handle, weights)
            assert recv.dtype == jnp.float32
            return (rows[:, 0] * recv).sum()

        value, gradient = jax.value_and_grad(loss)(weights)
        return value[None], gradient

    random = np.random.default_rng(1)
    x = random.integers(1, 5, (RANKS * TOKENS, WIDTH)).astype(np.float32)
    ids = ids_of()
    weights = random.integers(1, 9, ids.shape).astype(dtype)
    run, args = over_ranks(body, x, ids, weights)
    value, gradient = run(*args)
    kept = np.where(ids < EXPERTS, x[:, :1], 0)
    assert np.sum(value) == (kept * weights.astype(np.float32)).sum()
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient.astype(np.float32), kept)


def test_one_rank_needs_no_shard_map():
    ids = np.array([[2, 0], [1, -1], [3, 2]], np.int32)
    x = np.arange(1.0, 4, dtype=np.float32)[:, None]

    @jax.jit
    def layer(x, ids):
        handle = jax_ep.dispatch_layout(ids, num_experts=4, axis_name=())
        rows, _ = jax_ep.dispatch(x, handle)
        return rows, handle.group_sizes, jax_ep.combine(rows * 10, handle)

    rows, sizes, out = layer(x, ids)
    np.testing.assert_array_equal(rows[:, 0], [1, 2, 1, 3, 3, 0])
    np.testing.assert_array_equal(sizes, [1, 1, 2, 1])
    np.testing.assert_array_equal(out[:, 0], [20, 20, 60])
    gradient = jax.grad(lambda x: layer(x, ids)[2].sum())(x)
    np.testing.assert_array_equal(gradient[:, 0], [20, 10, 20])
