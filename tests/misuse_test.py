"""Every misuse is a Python error at trace time, and says what, where and why."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI, CPU_XLA
from jax.sharding import PartitionSpec as P

import jax_ep

IDS = np.zeros((16, 2), np.int32)
X = np.zeros((16, 8), np.float32)
WEIGHTS = np.zeros((16, 2), np.float32)
SPEC = P("expert")


def raises(error, message, function, *args, mesh=None, spec=SPEC, **static):
    """Traces `function` in a shard_map on 4 ranks, and compares the whole message.

    Tracing alone: nothing is compiled, so nothing can gather or hang.
    """
    mesh = mesh or CPU_FFI.mesh(expert=4)
    call = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, **static)
    with pytest.raises(error) as raised:
        jax.eval_shape(call, *args)
    assert type(raised.value) is error
    assert str(raised.value) == message


def abstract_mesh(num_ranks):
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((num_ranks,), ("expert",), axis_types=automatic)


def layout(ids, **static):
    static.setdefault("num_experts", 8)
    return jax_ep.dispatch_layout(ids, **static)


# dispatch_layout


@pytest.mark.parametrize(
    "static, error, message",
    [
        (
            dict(num_experts=6),
            ValueError,
            "jax_ep.dispatch_layout: num_experts (=6) must be divisible by the 4 ranks "
            'of axis "expert".',
        ),
        (
            dict(num_experts=0),
            ValueError,
            "jax_ep.dispatch_layout: num_experts (=0) must be at least 1.",
        ),
        (
            dict(num_experts=2052),
            ValueError,
            "jax_ep.dispatch_layout: num_experts (=2052) must be at most 2048.",
        ),
        (
            dict(num_experts=8.0),
            TypeError,
            "jax_ep.dispatch_layout: num_experts must be an int, and is a float.",
        ),
        (
            dict(num_experts=True),
            TypeError,
            "jax_ep.dispatch_layout: num_experts must be an int, and is a bool.",
        ),
        (
            dict(expert_alignment=0),
            ValueError,
            "jax_ep.dispatch_layout: expert_alignment (=0) must be at least 1.",
        ),
        (
            dict(expert_alignment=-4),
            ValueError,
            "jax_ep.dispatch_layout: expert_alignment (=-4) must be at least 1.",
        ),
        (
            dict(expert_alignment="8"),
            TypeError,
            "jax_ep.dispatch_layout: expert_alignment must be an int, and is a str.",
        ),
        (
            dict(expert_alignment=2**31),
            ValueError,
            "jax_ep.dispatch_layout: R*T*K + L*(A-1) (=4294967326) must be below "
            "2**31: rows are int32.",
        ),
        (
            dict(capacity=0),
            ValueError,
            "jax_ep.dispatch_layout: capacity (=0) must be at least 1.",
        ),
        (
            dict(capacity=15, expert_alignment=16),
            ValueError,
            "jax_ep.dispatch_layout: capacity (=15) must be at least expert_alignment "
            "(=16).",
        ),
        (
            dict(capacity=2**31),
            ValueError,
            "jax_ep.dispatch_layout: capacity (=2147483648) must be below 2**31: rows "
            "are int32.",
        ),
        (
            dict(capacity=1.25),
            TypeError,
            "jax_ep.dispatch_layout: capacity must be an int, and is a float.",
        ),
        (
            dict(implementation="cuda"),
            ValueError,
            "jax_ep.dispatch_layout: implementation (='cuda') must be None, 'ffi' or "
            "'xla'.",
        ),
        (
            dict(num_sms=0),
            ValueError,
            "jax_ep.dispatch_layout: num_sms (=0) must be at least 1.",
        ),
        (
            dict(timeout_s=0),
            ValueError,
            "jax_ep.dispatch_layout: timeout_s (=0) must be positive.",
        ),
        (
            dict(timeout_s=float("nan")),
            ValueError,
            "jax_ep.dispatch_layout: timeout_s (=nan) must be positive.",
        ),
        (
            dict(timeout_s="10"),
            TypeError,
            "jax_ep.dispatch_layout: timeout_s must be a number, and is a str.",
        ),
        (
            dict(axis_name="model"),
            ValueError,
            'jax_ep.dispatch_layout: axis_name (="model") must name axes of the '
            "enclosing mesh, which has ('expert',).",
        ),
        (
            dict(axis_name=("expert", "expert")),
            ValueError,
            'jax_ep.dispatch_layout: axis_name (="expert,expert") must not repeat an '
            "axis.",
        ),
    ],
    ids=str,
)
def test_static_arguments(static, error, message):
    raises(error, message, lambda ids: layout(ids, **static), IDS)


@pytest.mark.parametrize(
    "ids, error, message",
    [
        (
            IDS.reshape(16, 2, 1),
            ValueError,
            "jax_ep.dispatch_layout: topk_idx must have shape [T, K], and has "
            "(4, 2, 1).",
        ),
        (
            IDS[:, 0],
            ValueError,
            "jax_ep.dispatch_layout: topk_idx must have shape [T, K], and has (4,).",
        ),
        (
            IDS[:, :0],
            ValueError,
            "jax_ep.dispatch_layout: topk_idx has K = 0 columns, and K must be from 1 "
            "to 32.",
        ),
        (
            np.zeros((16, 33), np.int32),
            ValueError,
            "jax_ep.dispatch_layout: topk_idx has K = 33 columns, and K must be from 1 "
            "to 32.",
        ),
        (
            IDS.astype(np.float32),
            TypeError,
            "jax_ep.dispatch_layout: topk_idx must be of an integer dtype, and is "
            "float32.",
        ),
        (
            IDS.astype(np.bool_),
            TypeError,
            "jax_ep.dispatch_layout: topk_idx must be of an integer dtype, and is "
            "bool.",
        ),
    ],
    ids=lambda v: f"{v.dtype}{v.shape}" if isinstance(v, np.ndarray) else "",
)
def test_ids(ids, error, message):
    raises(error, message, layout, ids)


def test_more_rows_than_int32():
    ids = jax.ShapeDtypeStruct((4 * 2**25, 32), jnp.int32)
    raises(
        ValueError,
        "jax_ep.dispatch_layout: R*T*K + L*(A-1) (=4294967296) must be below 2**31: "
        "rows are int32.",
        layout,
        ids,
    )


@pytest.mark.parametrize("given", [[[0, 1]], {"ids": 0}, None])
def test_ids_that_are_no_array(given):
    def body(x):
        del x
        return layout(given)

    raises(
        TypeError,
        "jax_ep.dispatch_layout: topk_idx must be an array, and is a "
        f"{type(given).__name__}.",
        body,
        X,
    )


def test_neither_experts_nor_exchange():
    raises(
        TypeError,
        "jax_ep.dispatch_layout: num_experts or an exchange must be given.",
        lambda ids: jax_ep.dispatch_layout(ids).slot,
        IDS,
    )


def test_an_exchange_of_its_own():
    with pytest.raises(ValueError) as raised:
        jax_ep.Exchange(num_experts=4096)
    assert str(raised.value) == (
        "jax_ep.Exchange: num_experts (=4096) must be at most 2048."
    )
    with pytest.raises(ValueError) as raised:
        jax_ep.Exchange(num_experts=8, capacity=3, expert_alignment=4)
    assert str(raised.value) == (
        "jax_ep.Exchange: capacity (=3) must be at least expert_alignment (=4)."
    )
    exchange = jax_ep.Exchange(num_experts=8, capacity=11, expert_alignment=4)
    assert exchange.capacity == 8 and exchange.axis_name == ("expert",)
    assert hash(exchange) == hash(dataclasses.replace(exchange, timeout_s=100))


@pytest.mark.parametrize("implementation", ["ffi", None])
def test_more_ranks_than_one_domain(implementation):
    """Only the custom calls are bound to 64 ranks, so only lowering can tell."""
    mesh = abstract_mesh(65)

    def body(ids):
        return jax_ep.dispatch_layout(
            ids, num_experts=65, implementation=implementation
        ).slot

    ids = jax.ShapeDtypeStruct((65, 2), jnp.int32)
    traced = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    ).trace(ids)
    if implementation is None:
        assert "all_gather" in traced.lower(lowering_platforms=("cpu",)).as_text()
        return
    with pytest.raises(NotImplementedError) as raised:
        traced.lower(lowering_platforms=("cpu",))
    assert str(raised.value) == (
        "jax_ep: implementation='ffi' needs CPU devices of one process, or CUDA, and "
        "at most 64 ranks; lowering for ('cpu',) over 1 processes with 65 ranks."
    )


# Where a call may stand


@pytest.mark.jax_version
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_bare_call(explicit, jit):
    """Outside shard_map, also on a sharded array and with a current mesh."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices("cpu")[:4],
                         axis_types=(kind,))  # fmt: skip
    ids = jax.device_put(IDS, jax.sharding.NamedSharding(mesh, P("expert")))
    with jax.set_mesh(mesh), pytest.raises(ValueError) as raised:
        (jax.jit(layout) if jit else layout)(ids)
    assert str(raised.value) == (
        'jax_ep.dispatch_layout: axis_name (="expert") must be an axis of an enclosing '
        "jax.shard_map, and no shard_map encloses this call."
    )


def test_bare_call_without_a_mesh():
    with pytest.raises(ValueError) as raised:
        layout(jnp.asarray(IDS))
    assert str(raised.value) == (
        'jax_ep.dispatch_layout: axis_name (="expert") must be an axis of an enclosing '
        "jax.shard_map, and no shard_map encloses this call."
    )


@pytest.mark.parametrize(
    "operation, call",
    [
        ("dispatch", lambda handle: jax_ep.dispatch(X, handle)),
        ("combine", lambda handle: jax_ep.combine(X, handle)),
    ],
)
def test_bare_call_with_a_handle(operation, call):
    layout_of = jax.shard_map(
        layout, mesh=CPU_FFI.mesh(expert=4), in_specs=P("expert"), out_specs=P("expert")
    )
    with pytest.raises(ValueError) as raised:
        jax.eval_shape(lambda ids: call(layout_of(ids)), IDS)
    assert str(raised.value) == (
        f'jax_ep.{operation}: axis_name (="expert") must be an axis of an enclosing '
        "jax.shard_map, and no shard_map encloses this call."
    )


@pytest.mark.jax_version
def test_partly_manual_shard_map():
    message = (
        "jax_ep.dispatch_layout: the enclosing shard_map must be manual over every "
        "mesh axis, but leaves ('data',) automatic: drop its axis_names."
    )
    raises(
        ValueError,
        message,
        layout,
        IDS,
        mesh=CPU_FFI.mesh(data=2, expert=4),
        axis_names={"expert"},
    )


@pytest.mark.jax_version
def test_partly_manual_over_another_axis():
    message = (
        "jax_ep.dispatch_layout: the enclosing shard_map must be manual over every "
        "mesh axis, but leaves ('expert',) automatic: drop its axis_names."
    )
    raises(
        ValueError,
        message,
        layout,
        IDS,
        mesh=CPU_FFI.mesh(data=2, expert=4),
        spec=P("data"),
        axis_names={"data"},
    )


# dispatch and combine


def with_handle(call):
    """A body that makes a handle and passes it on; dispatch before anything else."""

    def body(ids, *arrays):
        call(layout(ids), *arrays)
        return ids

    return body


@pytest.mark.parametrize(
    "x, error, message",
    [
        (
            np.zeros((12, 8), np.float32),
            ValueError,
            "jax_ep.dispatch: x must have shape [4, ...], and has (3, 8).",
        ),
        (
            np.zeros((20, 8), np.float32),
            ValueError,
            "jax_ep.dispatch: x must have shape [4, ...], and has (5, 8).",
        ),
        (
            np.zeros((16, 0), np.float32),
            ValueError,
            "jax_ep.dispatch: x must have rows of at least one element, and has shape "
            "(4, 0).",
        ),
        (
            [],
            ValueError,
            "jax_ep.dispatch: x must have from 1 to 16 arrays, and has 0.",
        ),
        (
            [X] * 17,
            ValueError,
            "jax_ep.dispatch: x must have from 1 to 16 arrays, and has 17.",
        ),
        (
            {"a": X, "b": [X, X[:12]]},
            ValueError,
            "jax_ep.dispatch: x['b'][1] must have shape [4, ...], and has (3, 8).",
        ),
        (
            X.astype(jnp.int4),
            TypeError,
            "jax_ep.dispatch: x must have a dtype of 1, 2, 4 or 8 bytes, and is int4.",
        ),
        (
            {"q": X.astype(jnp.float4_e2m1fn)},
            TypeError,
            "jax_ep.dispatch: x['q'] must have a dtype of 1, 2, 4 or 8 bytes, and is "
            "float4_e2m1fn.",
        ),
    ],
    ids=range(8),
)
def test_dispatch_payload(x, error, message):
    raises(error, message, with_handle(lambda h, x: jax_ep.dispatch(x, h)), IDS, x)


def test_dispatch_of_a_scalar():
    raises(
        ValueError,
        "jax_ep.dispatch: x must have shape [4, ...], and has ().",
        with_handle(lambda h: jax_ep.dispatch(jnp.float32(1), h)),
        IDS,
    )


def test_dispatch_of_complex128(x64):
    raises(
        TypeError,
        "jax_ep.dispatch: x must have a dtype of 1, 2, 4 or 8 bytes, and is "
        "complex128.",
        with_handle(lambda h, x: jax_ep.dispatch(x, h)),
        IDS,
        X.astype(np.complex128),
    )


def test_dispatch_of_keys():
    raises(
        TypeError,
        "jax_ep.dispatch: x must have a dtype of 1, 2, 4 or 8 bytes, and is key<fry>.",
        with_handle(
            lambda h: jax_ep.dispatch(jax.random.split(jax.random.key(0), 4), h)
        ),
        IDS,
    )


@pytest.mark.parametrize(
    "weights, error, message",
    [
        (
            WEIGHTS[:12],
            ValueError,
            "jax_ep.dispatch: topk_weights must have shape [T, K] = (4, 2), and has "
            "(3, 2).",
        ),
        (
            np.zeros((16, 3), np.float32),
            ValueError,
            "jax_ep.dispatch: topk_weights must have shape [T, K] = (4, 2), and has "
            "(4, 3).",
        ),
        (
            WEIGHTS[:, 0],
            ValueError,
            "jax_ep.dispatch: topk_weights must have shape [T, K] = (4, 2), and has "
            "(4,).",
        ),
        (
            WEIGHTS.astype(jnp.float8_e4m3fn),
            TypeError,
            "jax_ep.dispatch: topk_weights must be float32, bfloat16 or float16, and "
            "is float8_e4m3fn.",
        ),
        (
            WEIGHTS.astype(np.int32),
            TypeError,
            "jax_ep.dispatch: topk_weights must be float32, bfloat16 or float16, and "
            "is int32.",
        ),
    ],
    ids=range(5),
)
def test_dispatch_weights(weights, error, message):
    body = with_handle(lambda h, x, w: jax_ep.dispatch(x, h, w))
    raises(error, message, body, IDS, X, weights)


def test_wire_dtypes():
    raises(
        TypeError,
        "jax_ep.dispatch: grad_wire must be None or float32, and is bfloat16.",
        with_handle(lambda h, x: jax_ep.dispatch(x, h, grad_wire=jnp.bfloat16)),
        IDS,
        X,
    )
    raises(
        TypeError,
        "jax_ep.combine: wire must be None or float32, and is float16.",
        with_handle(lambda h, y: jax_ep.combine(y, h, wire=jnp.float16)),
        IDS,
        np.zeros((128, 8), np.float32),
    )


Y = np.zeros((128, 8), np.float32)  # C is 4 * 4 * 2 rows on each of 4 ranks


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            dict(y=Y[:124]),
            ValueError,
            "jax_ep.combine: y must have shape [32, ...], and has (31, 8).",
        ),
        (
            dict(y=Y.astype(np.int32)),
            TypeError,
            "jax_ep.combine: y must be float32, bfloat16 or float16, and is int32.",
        ),
        (
            dict(y={"a": Y, "b": Y.astype(jnp.float8_e4m3fn)}),
            TypeError,
            "jax_ep.combine: y['b'] must be float32, bfloat16 or float16, and is "
            "float8_e4m3fn.",
        ),
        (
            dict(y=[]),
            ValueError,
            "jax_ep.combine: y must have from 1 to 16 arrays, and has 0.",
        ),
        (
            dict(y=Y, weights=WEIGHTS),
            ValueError,
            "jax_ep.combine: weights must have shape [C] = (32,), and has (4, 2).",
        ),
        (
            dict(y=Y, weights=Y[:124, 0]),
            ValueError,
            "jax_ep.combine: weights must have shape [C] = (32,), and has (31,).",
        ),
        (
            dict(y=Y, weights=Y[:, 0].astype(np.int32)),
            TypeError,
            "jax_ep.combine: weights must be float32, bfloat16 or float16, and is "
            "int32.",
        ),
        (
            dict(y=Y, bias=X[:12]),
            ValueError,
            "jax_ep.combine: bias must have shape [4, ...], and has (3, 8).",
        ),
        (
            dict(y=Y, bias=X[:, :7]),
            ValueError,
            "jax_ep.combine: bias must have rows of 8 elements as y has, and has shape "
            "(4, 7).",
        ),
        (
            dict(y=Y, bias=X.astype(jnp.bfloat16)),
            TypeError,
            "jax_ep.combine: bias must have y's dtype float32, and is bfloat16.",
        ),
        (
            dict(y=Y, bias={"a": X}),
            ValueError,
            "jax_ep.combine: bias must be a tree like y, PyTreeDef(*), and is "
            "PyTreeDef({'a': *}).",
        ),
    ],
    ids=range(11),
)
def test_combine_arguments(arguments, error, message):
    body = with_handle(lambda h, a: jax_ep.combine(a.pop("y"), h, **a))
    raises(error, message, body, IDS, dict(arguments))


# Handles


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_no_handle(operation):
    raises(
        TypeError,
        f"jax_ep.{operation}: handle must be a jax_ep.Handle, and is a tuple.",
        lambda x: getattr(jax_ep, operation)(x, (1, 2)),
        X,
    )


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_handle_of_another_mesh(operation):
    small, large = (CPU_FFI.mesh(expert=n) for n in (2, 4))
    make = jax.shard_map(
        layout, mesh=large, in_specs=P("expert"), out_specs=P("expert")
    )
    handle = jax.eval_shape(make, IDS)
    raises(
        ValueError,
        f"jax_ep.{operation}: the handle was made for 4 ranks, and axis "
        '"expert" has 2 here.',
        lambda x, handle: getattr(jax_ep, operation)(x, handle),
        X,
        handle,
        mesh=small,
    )


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_handle_passed_as_replicated(operation):
    mesh = CPU_FFI.mesh(expert=4)
    make = jax.shard_map(layout, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    raises(
        ValueError,
        f"jax_ep.{operation}: the handle's slot and recv_slot must have shapes (4, 2) "
        "and (4, 4, 2) on each rank, and have (16, 2) and (16, 4, 2): pass it with "
        'P("expert").',
        lambda x, handle: getattr(jax_ep, operation)(x, handle),
        X,
        jax.eval_shape(make, IDS),
        spec=(P("expert"), P()),
    )


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_handle_with_an_unknown_axis(operation):
    def body(ids, x):
        handle = layout(ids)
        exchange = handle.exchange.replace(axis_name="other")
        handle = dataclasses.replace(handle, exchange=exchange)
        return getattr(jax_ep, operation)(x, handle)

    raises(
        ValueError,
        f'jax_ep.{operation}: axis_name (="other") must name axes of the enclosing '
        "mesh, which has ('expert',).",
        body,
        IDS,
        X,
    )


# Platforms


@pytest.mark.jax_version
def test_custom_calls_on_another_platform():
    """implementation="ffi" never falls back; None does, to the reference."""

    def lower(implementation):
        function = jax.shard_map(
            lambda ids: layout(ids, implementation=implementation).slot,
            mesh=abstract_mesh(4),
            in_specs=P("expert"),
            out_specs=P("expert"),
        )
        traced = jax.jit(function).trace(jax.ShapeDtypeStruct((16, 2), jnp.int32))
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    with pytest.raises(NotImplementedError) as raised:
        lower("ffi")
    message = (
        "jax_ep: implementation='ffi' needs CPU devices of one process, or CUDA, and "
        "at most 64 ranks; lowering for ('tpu',) over 1 processes with 4 ranks."
    )
    assert str(raised.value) == message
    for implementation in (None, "xla"):
        assert not re.search("custom_call @jax_ep", lower(implementation))


def test_a_token_count_of_its_own_is_refused():
    """A dispatch of more tokens than the layout saw names both numbers."""
    raises(
        ValueError,
        "jax_ep.dispatch: x must have shape [4, ...], and has (5, 8).",
        with_handle(lambda h, x: jax_ep.dispatch(x, h)),
        IDS,
        np.zeros((20, 8), np.float32),
    )


def test_backends_agree_on_what_is_wrong():
    """Checks come before the implementation is looked at."""
    for backend in (CPU_FFI, CPU_XLA):
        raises(
            ValueError,
            "jax_ep.dispatch_layout: num_experts (=6) must be divisible by the 4 ranks "
            'of axis "expert".',
            lambda ids, b=backend: layout(
                ids, num_experts=6, implementation=b.implementation
            ),
            IDS,
        )
