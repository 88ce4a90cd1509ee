"""Start and done: dispatch and combine while other work runs.

On CUDA a start launches its kernel on a stream of our own, and done makes XLA's stream
wait for it. The transpose of done is a start and that of start a done, so what ran
beside a call forward has its derivative run beside the call's derivative. On CPU
devices, where exchanges are `jax.lax`'s, with domains, under vmap and outside of jit a
start is the whole call and done gives what it returned.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_ep import ffi, starts, two_hops
from jax_ep.axis import vary_alike
from jax_ep.combine import bias_leaves
from jax_ep.dispatch import weights_of_tokens
from jax_ep.exchange import rows_format, sums_format
from jax_ep.layout import Handle, call_of
from jax_ep.payload import to_wire

_STATIC = dict(static=True)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a call under way is; static."""

    call: ffi.Call
    is_dispatch: bool
    wire_f32: bool  # Of its sums, or of those of its transpose.
    out_f32: bool = False  # A combine whose bias is added when it is done.

    @property
    def transposed(self) -> "_Kind":
        return dataclasses.replace(
            self, is_dispatch=not self.is_dispatch, out_f32=False
        )


class _Rows(NamedTuple):
    """Leaves `[n, W]`, and what travels per slot: `[T, K]` or `[C]`, or None."""

    leaves: tuple[Any, ...]
    values: Any


class _Flight(NamedTuple):
    """The arrays of a call under way. Its own dual: see `_start_bwd`."""

    sent: _Rows  # The operands themselves, so that their buffers live until done.
    pending: _Rows  # The results, for done alone to read.
    totals: tuple[Any, ...] | None  # With out_f32 they are here; `pending` is zeros.
    order: Any  # [1] float32, whose value nobody reads; an int has no cotangent.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InFlight:
    """A dispatch or combine between its start and its done.

    Pass it to `beside`, any number of times, and to done once, in the function that
    made it: it must not cross a scan, cond or jit, whose copies are not where the
    exchange writes (on CUDA that is a named error). What was sent must not be donated
    before done.

    Attributes:
      flight: its arrays. What they hold is of no use before done.
      handle: that of the call.
      kind: what was started; static.
      tree: of the payload; static.
      tails: the shapes of its arrays without their first axis; static.
    """

    flight: _Flight
    handle: Handle
    kind: _Kind = dataclasses.field(metadata=_STATIC)
    tree: Any = dataclasses.field(metadata=_STATIC)
    tails: tuple[tuple[int, ...], ...] = dataclasses.field(metadata=_STATIC)


@jax.named_scope("jax_ep.dispatch")
def dispatch_start(
    x: Any,
    handle: Handle,
    topk_weights: jax.Array | None = None,
    *,
    grad_wire: Any = None,
) -> InFlight:
    """Starts what `dispatch` does; `dispatch_done` gives its results.

    Call it inside the shard_map that made the handle, on every rank, and make all
    layouts that the program needs before its first start: a plain call, as a layout
    is, waits for every earlier start. Starts of a device run one after another, in the
    order of the compiled program.

    Args:
      x: `[T, H]` float32, bfloat16 or float16, or a pytree of such `[T, ...]` arrays.
      handle: from `dispatch_layout`.
      topk_weights: `[T, K]`, or None, as `dispatch` takes them.
      grad_wire: as `dispatch` takes it: of the backward's partial sums.

    Returns:
      The call under way, for `beside` and `dispatch_done`.

    Raises:
      TypeError, ValueError: as `dispatch`; an array of another dtype, or an exchange
        whose `wire` quantises rows: those travel by `dispatch` alone.

    Derivative: that of `dispatch`, as a `combine_start` where done stands and a
    `combine_done` where start does.

    On the wire: as `dispatch`.
    """
    op = "dispatch_start"
    call = call_of(op, handle)
    leaves, _ = to_wire(op, "x", x, handle.num_tokens, floats_only=True)
    weights = weights_of_tokens(op, topk_weights, handle)
    _refuse_quantised(op, handle, handle.exchange.wire, "wire")
    sums = sums_format(op, "grad_wire", grad_wire, handle.exchange.grad_wire)
    kind = _Kind(call, True, sums is not None)
    return _started(kind, x, _Rows(leaves, weights), handle)


@jax.named_scope("jax_ep.dispatch")
def dispatch_done(flight: InFlight) -> tuple[Any, jax.Array | None]:
    """Waits for a dispatch: what `dispatch` returns, with the same bits and names.

    Args:
      flight: from `dispatch_start`, perhaps through `beside`; not used after.

    Returns:
      `recv_x` and `recv_weights`, as `dispatch`.

    Raises:
      TypeError: `flight` is no dispatch under way.

    Derivative: see `dispatch_start`.
    """
    _check_flight("dispatch_done", flight, is_dispatch=True)
    leaves, values = cast(tuple, _done(flight.kind, flight.flight, flight.handle, None))
    return checkpoint_name((_restored(flight, leaves), values), "jax_ep_recv")


@jax.named_scope("jax_ep.combine")
def combine_start(
    y: Any,
    handle: Handle,
    *,
    has_bias: bool = False,
    wire: Any = None,
    grad_wire: Any = None,
) -> InFlight:
    """Starts what `combine` does; `combine_done` gives its results.

    Call it as `dispatch_start`.

    Args:
      y: `[C, H]` float32, bfloat16 or float16, or a pytree of such `[C, ...]` arrays.
      handle: that of the dispatch.
      has_bias: whether `combine_done` will add a bias. The sums under way are then
        float32, so that the result has the bits of the plain call.
      wire: as `combine` takes it.
      grad_wire: None; rows of the backward are not quantised here.

    Returns:
      The call under way, for `beside` and `combine_done`.

    Raises:
      TypeError, ValueError: as `combine`; an exchange whose `grad_wire` quantises rows.

    Derivative: that of `combine`, as a `dispatch_start` where done stands and a
    `dispatch_done` where start does.

    On the wire: as `combine`.
    """
    op = "combine_start"
    call = call_of(op, handle)
    leaves, _ = to_wire(op, "y", y, handle.capacity, floats_only=True)
    wire = sums_format(op, "wire", wire, handle.exchange.wire)
    _refuse_quantised(op, handle, grad_wire or handle.exchange.grad_wire, "grad_wire")
    kind = _Kind(call, False, wire is not None, out_f32=bool(has_bias))
    return _started(kind, y, _Rows(leaves, None), handle)


@jax.named_scope("jax_ep.combine")
def combine_done(flight: InFlight, *, bias: Any = None) -> Any:
    """Waits for a combine: what `combine` returns, with the same bits and name.

    Args:
      flight: from `combine_start`, perhaps through `beside`; not used after.
      bias: like the result, if the start said `has_bias`: a shared expert's output,
        which may have been computed beside the call.

    Returns:
      `[T, H]` in y's dtype, or a pytree of them.

    Raises:
      TypeError: `flight` is no combine under way, or of the bias as in `combine`.
      ValueError: a bias where the start said there is none, or the reverse, or a shape.

    Derivative: see `combine_start`; `d_bias = d_out`.
    """
    op = "combine_done"
    _check_flight(op, flight, is_dispatch=False)
    if flight.kind.out_f32 != (bias is not None):
        said = flight.kind.out_f32
        raise ValueError(
            f"jax_ep.{op}: bias must be {'given' if said else 'None'}, since "
            f"combine_start was told has_bias={said}."
        )
    handle, sent = flight.handle, flight.flight.sent
    leaves = None
    if bias is not None:
        leaves = bias_leaves(op, bias, flight.tree, sent.leaves, handle.num_tokens)
        leaves, _ = vary_alike(handle.axis_name, (leaves, sent))
    sums, _ = cast(tuple, _done(flight.kind, flight.flight, flight.handle, leaves))
    return checkpoint_name(_restored(flight, sums), "jax_ep_out")


def beside(
    work: Callable[..., Any], flight: InFlight | tuple[InFlight, ...], *args: Any
) -> tuple[Any, Any]:
    """Runs `work(*args)` between a start and its done, forward and backward.

    Without it a compiler is free to put done right behind start. The work must not
    read what is under way, and its arrays must be among `args`.

    Args:
      work: of `args`, any pytrees of arrays, to a pytree of arrays.
      flight: a call under way, or a tuple of them.
      *args: what the work reads.

    Returns:
      The flight (or flights), which must be used from here on, and `work(*args)`.

    Derivative: that of the work, beside the transposed call.

    >>> import jax, jax.numpy as jnp
    >>> import jax_ep
    >>> ids, x = jnp.array([[0], [1]]), jnp.ones((2, 4))
    >>> handle = jax_ep.dispatch_layout(ids, num_experts=2, axis_name=())
    >>> flight = jax_ep.dispatch_start(x, handle)
    >>> flight, shared = jax_ep.beside(jnp.sum, flight, x)
    >>> jax_ep.dispatch_done(flight)[0].sum() == shared
    Array(True, dtype=bool)
    """
    flights = (flight,) if isinstance(flight, InFlight) else tuple(flight)
    if not flights or not all(isinstance(each, InFlight) for each in flights):
        raise TypeError(
            "jax_ep.beside: flight must be a jax_ep.InFlight or a tuple of them, and "
            f"is a {type(flight).__name__}."
        )
    orders = [each.flight.order for each in flights]
    orders, args = lax.optimization_barrier((orders, args))
    orders, out = lax.optimization_barrier((orders, work(*args)))
    moved = tuple(
        dataclasses.replace(each, flight=each.flight._replace(order=order))
        for each, order in zip(flights, orders, strict=True)
    )
    return (moved[0] if isinstance(flight, InFlight) else moved), out


def _refuse_quantised(operation: str, handle: Handle, wire: Any, name: str) -> None:
    if rows_format(operation, name, wire, None) is not None:
        raise ValueError(
            f"jax_ep.{operation}: {name} (={wire!r}) quantises rows, which only plain "
            "calls do: use jax_ep.dispatch and jax_ep.combine."
        )


def _check_flight(operation: str, flight: Any, *, is_dispatch: bool) -> None:
    stage = "dispatch" if is_dispatch else "combine"
    if isinstance(flight, InFlight) and flight.kind.is_dispatch == is_dispatch:
        return
    found = f"a {type(flight).__name__}"
    if isinstance(flight, InFlight):
        found = f"a {'combine' if is_dispatch else 'dispatch'} under way"
    raise TypeError(
        f"jax_ep.{operation}: flight must be what {stage}_start returned, and is "
        f"{found}."
    )


def _started(kind: _Kind, tree: Any, rows: _Rows, handle: Handle) -> InFlight:
    names = handle.axis_name
    order = jnp.zeros(1, jnp.float32)
    rows, handle, order = vary_alike(names, (rows, handle, order))
    flight = cast(_Flight, _start(kind, rows, handle, order))
    leaves, structure = jax.tree.flatten(tree)
    tails = tuple(tuple(leaf.shape[1:]) for leaf in leaves)
    return InFlight(flight, handle, kind, structure, tails)


def _restored(flight: InFlight, leaves) -> Any:
    pairs = zip(leaves, flight.tails, strict=True)
    leaves = [leaf.reshape(leaf.shape[0], *tail) for leaf, tail in pairs]
    return jax.tree.unflatten(flight.tree, leaves)


def _runs_beside(handle: Handle) -> bool:
    """Whether there is a custom call to start: one hop, and tokens."""
    return handle.hop is None and handle.num_tokens > 0


def _operands(kind: _Kind, rows: _Rows, handle: Handle):
    if kind.is_dispatch:
        return ffi.dispatch_operands(handle, rows.leaves, rows.values)
    return ffi.combine_operands(handle, rows.leaves, row_values=rows.values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _start(kind: _Kind, rows: _Rows, handle: Handle, order):
    params: dict[str, Any] = dict(call=kind.call)
    if not kind.is_dispatch:
        params |= dict(wire_f32=kind.wire_f32, out_f32=kind.out_f32)
    if _runs_beside(handle):
        found, order = starts.start(_operands(kind, rows, handle), order, **params)
    elif kind.is_dispatch:
        found = two_hops.dispatch(kind.call, handle, rows.leaves, rows.values)
    else:
        del params["call"]
        found = two_hops.combine(
            kind.call, handle, rows.leaves, row_values=rows.values, **params
        )
    values, leaves = found
    if not kind.out_f32:
        return _Flight(rows, _Rows(leaves, values), None, order)
    like = zip(leaves, rows.leaves, strict=True)
    zeros = tuple(lax.full_like(total, 0, row.dtype) for total, row in like)
    return _Flight(rows, _Rows(zeros, values), leaves, order)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _done(kind: _Kind, flight: _Flight, handle: Handle, bias):
    """Leaves and values, as the plain call gives them."""
    pending = flight.pending
    found: Any = (pending.values, flight.totals if kind.out_f32 else pending.leaves)
    if _runs_beside(handle):
        operands = _operands(kind, flight.sent, handle)
        found = starts.done(kind.call, operands, found, flight.order)
    values, leaves = found
    if not kind.out_f32:
        return leaves, values
    sums = zip(leaves, bias, strict=True)
    leaves = tuple(
        (total + more.astype(jnp.float32)).astype(more.dtype) for total, more in sums
    )
    # Else XLA may go on with the sum unrounded (excess precision).
    return lax.optimization_barrier(leaves), values


def _swapped(flight: _Flight) -> _Flight:
    """A flight's cotangent as the flight of the transposed call, or the reverse."""
    return _Flight(flight.pending, flight.sent, None, flight.order)


# The transpose of start is a done, of the start that `_done_bwd` made.
def _start_fwd(kind, rows, handle, order):
    rows, handle, order = jax.tree.map(
        lambda primal: primal.value,
        (rows, handle, order),
        is_leaf=lambda node: hasattr(node, "perturbed"),
    )
    return _start(kind, rows, handle, order), handle


def _start_bwd(kind, handle, d_flight):
    if isinstance(d_flight.sent.leaves[0], SymbolicZero):
        # Done was not differentiated: nothing is under way.
        return None, None, None
    done = _done(kind.transposed, _swapped(d_flight), handle, None)
    leaves, values = cast(tuple, done)
    return _Rows(tuple(leaves), values), None, None


# The transpose of done is a start, whose flight is the cotangent of the flight.
def _done_fwd(kind, flight, handle, bias):
    return _done(kind, flight, handle, bias), handle


def _done_bwd(kind, handle, cotangents):
    d_leaves, d_values = cotangents
    d_leaves = tuple(d_leaves)
    order = vary_alike(handle.axis_name, (d_leaves, jnp.zeros(1, jnp.float32)))[1]
    started = _start(kind.transposed, _Rows(d_leaves, d_values), handle, order)
    return _swapped(cast(_Flight, started)), None, d_leaves if kind.out_f32 else None


_start.defvjp(_start_fwd, _start_bwd, symbolic_zeros=True)
_done.defvjp(_done_fwd, _done_bwd)
