"""Rows that travel as FP8: bits, and the derivative of the unquantised call."""

import dataclasses
import functools

import base
import jax
import jax.numpy as jnp
import literal
import numpy as np
import pytest
from base import IDS, SCALES, WEIGHTS, X
from conftest import CPU_FFI, Backend, enough_for_reference
from dispatch_test import setup
from jax.sharding import PartitionSpec as P
from layout_test import Case
from moe_test import PLAIN, make
from stages import all_ranks, assert_bits_equal

import jax_ep
from jax_ep.block_scaled import NAMES

CASE = Case(routing="masked", alignment=4)
ROWS = (CASE.ranks, CASE.tokens)
E5M2 = jax_ep.BlockScaled(jnp.float8_e5m2)


def payload(dtype, seed: int = 0):
    """Rows of widths that no block and no 16 bytes divide, and what is no float."""
    random = np.random.default_rng(seed)

    def floats(*shape):
        rows = random.standard_normal((*ROWS, *shape)) * np.exp2(
            random.uniform(-8, 8, (*ROWS, *[1] * len(shape)))
        )
        return rows.astype(dtype)

    x = {"rows": floats(150), "cube": floats(3, 11), "scalar": floats()}
    x["rows"][0, 0] = 0
    x["rows"][1, 1, 3] = np.nan
    return x | {"id": random.integers(0, 99, ROWS, np.int32)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float8_e4m3fn", jnp.bfloat16),
        ("mxfp8", jnp.bfloat16),
        ("float8_e5m2", jnp.float32),
        ("mxfp8_e5m2", jnp.float16),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_bits_of_quantise_dispatch_dequantise(backend, name, dtype):
    """Rows multiplied back, and as they travelled; zeros on padding."""
    enough_for_reference(backend, dtype == jnp.bfloat16)
    run, handle, layout = setup(backend, CASE)
    x, wire = payload(dtype), NAMES[name]
    static = {"wire": name if dtype == jnp.bfloat16 else wire}
    recv, _ = run.dispatch(jax.tree.map(all_ranks, x), handle, **static)
    assert_bits_equal(run.by_rank(recv["id"]), literal.dispatch(x["id"], layout))
    raw, _ = run.dispatch(jax.tree.map(all_ranks, x), handle, quantized=True, **static)
    for key in ("rows", "cube", "scalar"):
        flat = x[key].reshape(*ROWS, -1)
        rows = jax_ep.quantize(flat, wire)
        want = literal.dispatch(np.asarray(jax_ep.dequantize(rows)), layout)
        got = run.by_rank(recv[key])
        assert got.dtype == dtype
        assert_bits_equal(got.reshape(want.shape), want)
        values, scales = raw[key]
        assert (values.dtype, scales.dtype) == (wire.dtype, wire.scale)
        assert values.shape == recv[key].shape
        want = literal.dispatch(np.asarray(rows.values), layout)
        assert_bits_equal(run.by_rank(values).reshape(want.shape), want)
        want = literal.dispatch(np.asarray(rows.scales), layout)
        assert_bits_equal(run.by_rank(scales), want)
        back = run.by_rank(jax.jit(jax_ep.dequantize)(raw[key]))
        assert_bits_equal(back, run.by_rank(recv[key]))


def test_half_the_bytes_in_one_call(ffi_backend):
    """What the custom call is given: values and scales in rows of 16 bytes."""
    run, handle, _ = setup(ffi_backend, CASE)
    x = np.zeros((24, 7168), jnp.bfloat16)
    wire = jax_ep.BlockScaled(scale=jnp.float8_e8m0fnu)
    text = run._dispatch(wire=wire).lower(x, handle, None).as_text()
    calls = [line for line in text.splitlines() if "@jax_ep_dispatch(" in line]
    assert len(calls) == 1
    assert "tensor<6x7168xui8>" in calls[0] and "tensor<6x64xui8>" in calls[0]
    assert "bf16" not in calls[0]
    assert wire.row_bytes(7168) == 7168 + 64


@pytest.mark.parametrize("quantized", [False, True])
def test_the_derivative_is_the_unquantised_one(backend, quantized):
    """dx = combine(d_recv), unrounded, in x's dtype; the weights' beside it."""
    run, handle, layout = setup(backend, CASE)
    random = np.random.default_rng(0)
    x = {
        "a": random.standard_normal((*ROWS, 40), np.float32),
        "b": random.standard_normal((*ROWS, 3, 3), np.float32).astype(jnp.bfloat16),
    }
    weights = random.standard_normal((*ROWS, CASE.topk), np.float32)

    def call(x, weights):
        recv, recv_weights = run._dispatch(wire="float8_e4m3fn", quantized=quantized)(
            x, handle, weights
        )
        if quantized:
            recv = {key: jax_ep.dequantize(rows) for key, rows in recv.items()}
        return recv, recv_weights

    args = jax.tree.map(all_ranks, (x, weights))
    recv, pull_back = jax.vjp(call, *args)
    d_recv = jax.tree.map(
        lambda rows: jnp.asarray(
            random.standard_normal(rows.shape, np.float32), rows.dtype
        ),
        recv,
    )
    dx, d_weights = pull_back(d_recv)
    for key in x:
        want = literal.combine(run.by_rank(d_recv[0][key]), layout)
        assert_bits_equal(run.by_rank(dx[key]), want)
    _, pull_back = jax.vjp(lambda w: run._dispatch()(args[0], handle, w)[1], args[1])
    assert_bits_equal(d_weights, pull_back(d_recv[1])[0])


def test_the_backward_of_combine_may_send_fp8(backend):
    """dy is d_out quantised, dispatched and multiplied back."""
    run, handle, layout = setup(backend, CASE)
    random = np.random.default_rng(0)
    y = random.standard_normal((CASE.ranks, layout.capacity, 40), np.float32)
    d_out = random.standard_normal((*ROWS, 40), np.float32)
    _, pull_back = jax.vjp(
        lambda y: run._combine(grad_wire=E5M2)(
            y, handle, dict(weights=None, bias=None)
        ),
        all_ranks(y),
    )
    (dy,) = pull_back(all_ranks(d_out))
    rounded = np.asarray(jax_ep.dequantize(jax_ep.quantize(d_out, E5M2)))
    assert (rounded != d_out).any()
    assert_bits_equal(run.by_rank(dy), literal.dispatch(rounded, layout))


# X is of whole numbers up to 11 and cotangents are powers of two: exact in FP8 with
# scales that are powers of two. So the layer has base.py's values.
EXACT = dict(wire="mxfp8", grad_wire="mxfp8_e5m2")
ARRAYS = (X, IDS, WEIGHTS, SCALES)


def layer(backend: Backend = CPU_FFI, check_vma: bool = True, **static):
    static = EXACT | static
    return jax.shard_map(
        functools.partial(base.layer, implementation=backend.implementation, **static),
        mesh=backend.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
        check_vma=check_vma,
    )


def gradients(function):
    return jax.grad(lambda *args: function(*args).sum(), argnums=(0, 2, 3))


def assert_base_gradients(got):
    for g, want in zip(got, base.gradients(), strict=True):
        assert_bits_equal(g, want)


@pytest.mark.jax_version
@pytest.mark.parametrize("check_vma", [True, False])
def test_layer_under_jit(backend, check_vma):
    function = layer(backend, check_vma)
    assert_bits_equal(jax.jit(function)(*ARRAYS), base.outputs())
    assert_base_gradients(jax.jit(gradients(function))(*ARRAYS))


@pytest.mark.jax_version
def test_layer_eagerly():
    assert_bits_equal(layer()(*ARRAYS), base.outputs())


@pytest.mark.parametrize("names", [(), ("jax_ep_handle", "jax_ep_recv")])
def test_layer_under_checkpoint(names):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    function = jax.checkpoint(layer(), policy=policy)
    assert_base_gradients(jax.jit(gradients(function))(*ARRAYS))


def test_layer_in_scan_and_vmap():
    function = layer()

    def scanned(x, ids, weights, scales):
        return jax.lax.scan(
            lambda _, x: (None, function(x, ids, weights, scales)), None, x
        )[1]

    batch = np.stack([X, 12 - X])
    wants = [base.gradients(x=x) for x in batch]
    mapped = jax.vmap(function, (0, None, None, None))
    for many in (scanned, mapped):
        got = jax.jit(gradients(many))(batch, *ARRAYS[1:])
        assert_bits_equal(got[0], np.stack([want[0] for want in wants]))
        np.testing.assert_allclose(got[1], wants[0][1] + wants[1][1], rtol=1e-6)


def test_layer_exported():
    sharding = jax.sharding.NamedSharding(CPU_FFI.mesh(expert=4), P("expert"))
    arrays = jax.device_put(ARRAYS, sharding)
    exported = jax.export.export(
        jax.jit(layer()),
        disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call(name)
            for name in jax_ep.CUSTOM_CALLS
        ],
    )(*arrays)
    assert_bits_equal(exported.call(*arrays), base.outputs())


def test_second_order():
    """Of sum(out**2) by x, contracted with x: out is linear in x."""
    function = layer(grad_wire=None)

    def squares(x):
        return (function(x, *ARRAYS[1:]) ** 2).sum()

    got = jax.jit(jax.grad(lambda x: (jax.grad(squares)(x) * X).sum()))(X)
    scale = base.token_scales(IDS, WEIGHTS)[:, None].astype(np.float64)
    np.testing.assert_allclose(got, 2 * scale**2 * X, rtol=1e-6)


def test_the_exchange_and_the_config_hold_it():
    """By name; a call's own keyword goes before it; float32 sends rows as they are."""
    x = (X / 3).astype(np.float32)

    def run(exchange, **keywords):
        def call(x, ids):
            handle = jax_ep.dispatch_layout(ids, num_experts=8, **exchange)
            recv, _ = jax_ep.dispatch(x, handle, **keywords)
            return recv

        call = jax.shard_map(
            call,
            mesh=CPU_FFI.mesh(expert=4),
            in_specs=P("expert"),
            out_specs=P("expert"),
        )
        return np.asarray(jax.jit(call)(x, IDS))

    plain, quantised = run({}), run({}, wire="float8_e5m2")
    assert (plain != quantised).any()
    assert_bits_equal(run({"wire": E5M2}), quantised)
    assert_bits_equal(run({"wire": "mxfp8"}, wire=E5M2), quantised)
    assert_bits_equal(run({"wire": "float8_e5m2"}, wire=jnp.float32), plain)
    sizes = dict(
        num_experts=8, num_experts_per_tok=2, hidden_size=8, moe_intermediate_size=4
    )
    config = jax_ep.MoEConfig(**sizes, wire="mxfp8", grad_wire="float8_e5m2")
    assert config == jax_ep.MoEConfig(**sizes, wire=NAMES["mxfp8"], grad_wire=E5M2)
    assert config.exchange().wire == NAMES["mxfp8"]
    assert config.exchange().grad_wire == E5M2


@pytest.mark.parametrize("quantized", [False, True])
def test_two_hops(quantized):
    """Between domains and inside one: rows of FP8, equal to those rounded before."""

    def call(x, ids):
        handle = jax_ep.dispatch_layout(ids, num_experts=8, domain_size=2)
        rows, _ = jax_ep.dispatch(x, handle, wire="mxfp8", quantized=quantized)
        rows = jax_ep.dequantize(rows) if quantized else rows
        rounded = jax_ep.dequantize(jax_ep.quantize(x, "mxfp8"))
        return rows, jax_ep.dispatch(rounded, handle)[0]

    call = jax.shard_map(
        call, mesh=CPU_FFI.mesh(expert=4), in_specs=P("expert"), out_specs=P("expert")
    )
    x = (X / 3).astype(jnp.bfloat16)
    got, want = jax.jit(call)(x, IDS)
    assert_bits_equal(got, want)
    assert (np.asarray(got) != 0).any()


def in_shard_map(function):
    return jax.shard_map(
        lambda x, ids: function(
            x, jax_ep.dispatch_layout(ids, num_experts=8, axis_name="expert")
        ),
        mesh=CPU_FFI.mesh(expert=4),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        (dict(wire=jnp.bfloat16), TypeError, "wire must be None, float32, a jax_ep.Bl"),
        (dict(wire="fp8"), TypeError, "wire must be None, float32, .* and is 'fp8'"),
        (
            dict(grad_wire=E5M2),
            TypeError,
            "grad_wire must be None or float32, and is B",
        ),
        (dict(quantized=True), ValueError, "quantized .=True. needs wire="),
    ],
)
def test_misuse(keywords, error, message):
    function = in_shard_map(lambda x, h: jax_ep.dispatch(x, h, **keywords)[0])
    with pytest.raises(error, match=f"jax_ep.dispatch: {message}"):
        function(X, IDS)


def test_a_sum_is_never_fp8():
    function = in_shard_map(
        lambda x, h: jax_ep.combine(jax_ep.dispatch(x, h)[0], h, wire="mxfp8")
    )
    with pytest.raises(TypeError, match="combine: wire must be .* never quantised"):
        function(X, IDS)


def test_scales_count_as_arrays():
    function = in_shard_map(lambda x, h: jax_ep.dispatch([x] * 9, h, wire="mxfp8")[0])
    with pytest.raises(ValueError, match="at most 16 arrays, .* and has 9 and 9"):
        function(X, IDS)


NUMBERS = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float64, jnp.complex64]


@pytest.mark.parametrize(
    ("dtype", "wrap"),
    [(dtype, jax.jit) for dtype in NUMBERS]
    + [(jnp.float8_e4m3fn, wrap) for wrap in (lambda f: f, jax.checkpoint)],
    ids=lambda value: value.__name__,
)
def test_differentiating_by_bits_is_an_error(dtype, wrap, x64):
    """By the dtype's name; without a derivative, or with one cut off, they travel."""

    def call(x, ids):
        return in_shard_map(lambda rows, h: jax_ep.dispatch(rows, h)[0])(
            {"x": x, "q": jax.lax.stop_gradient(x).astype(dtype)}, ids
        )["x"]

    gradient = jax.grad(lambda x: wrap(call)(x, IDS).sum())(X)
    assert_bits_equal(gradient, np.full_like(X, 2))

    def through(x, ids):
        recv = in_shard_map(lambda rows, h: jax_ep.dispatch(rows, h)[0])(
            {"q": x.astype(dtype)}, ids
        )
        return recv["q"].real.astype(jnp.float32)

    name = np.dtype(dtype).name
    with pytest.raises(TypeError, match=rf"jax_ep.dispatch: x\['q'\] is {name}, which"):
        jax.grad(lambda x: wrap(through)(x, IDS).sum())(X)


def test_the_layer_is_the_unquantised_one_up_to_rounding():
    """Output and gradients, where rows go in several rounds.

    Tokens in e4m3 are off by at most 1 part in 16, and what is computed of them by
    about as much; cotangents in e5m2 by at most 1 in 8 besides.
    """
    config, params, x = make(**PLAIN, capacity_factor=1.0, dropless_fallback=True)
    mesh = CPU_FFI.mesh(expert=4)
    random = np.random.default_rng(0)
    d_out = random.standard_normal(x.shape, np.float32)

    def run(**formats):
        layer = dataclasses.replace(config, **formats)

        def call(x, params):
            return jax_ep.sharded_moe(x, params, layer, mesh=mesh)[0]

        def both(x, params):
            out, pull_back = jax.vjp(call, x, params)
            return out, pull_back(d_out)

        return jax.tree.leaves(jax.jit(both)(x, params))

    def errors(got, want):
        pairs = [
            (np.asarray(a, np.float64), np.asarray(b, np.float64))
            for a, b in zip(got, want, strict=True)
        ]
        return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]

    tokens = run(wire="float8_e4m3fn")
    off = errors(tokens, run())
    assert 1e-4 < max(off) < 1 / 16
    off = errors(run(wire="float8_e4m3fn", grad_wire="float8_e5m2"), tokens)
    assert off[0] == 0
    assert 1e-4 < max(off) < 1 / 8
