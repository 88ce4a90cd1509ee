"""The primitives of starts and done, and the custom calls they lower to on CUDA.

Elsewhere a start lowers to the whole call of its stage, and done to nothing.
"""

import functools

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep import _ffi, ffi, reference
from jax_ep.axis import in_sequence

DISPATCH_START = "jax_ep_dispatch_start"
COMBINE_START = "jax_ep_combine_start"
DONE = "jax_ep_done"
TARGETS = (DISPATCH_START, COMBINE_START, DONE)


def start(operands, order: jax.Array, **params):
    """Starts a dispatch or combine: its results under way, and the next `order`.

    Args:
      operands: `DispatchOperands` or `CombineOperands` with T >= 1. They, and the
        results, are nobody else's to write or read until `done`.
      order: `[1]` float32 of no meaning; who takes the one returned comes later.
      **params: `call`, and for a combine `wire_f32` and `out_f32`.
    """
    is_dispatch = isinstance(operands, ffi.DispatchOperands)
    plain, primitive = (
        (ffi.dispatch_p, _dispatch_start_p)
        if is_dispatch
        else (ffi.combine_p, _combine_start_p)
    )
    leaves, structure = jax.tree.flatten(operands)
    avals = jax.tree.map(jax.typeof, operands)
    types = ffi.RESULT_TYPES[plain](avals, **params)
    *results, order = primitive.bind(*leaves, order, structure=structure, **params)
    return jax.tree.unflatten(jax.tree.structure(types), results), order


def done(call: ffi.Call, operands, pending, order: jax.Array):
    """Waits for a call: `pending`, as `start` of `operands` gave it."""
    op = "dispatch" if isinstance(operands, ffi.DispatchOperands) else "combine"
    operands = jax.tree.leaves(operands)
    leaves, structure = jax.tree.flatten(pending)
    results = _done_p.bind(
        *operands, *leaves, order, call=call, op=op, num_pending=len(leaves)
    )
    return jax.tree.unflatten(structure, results)


def _start_primitive(target: str, plain: Primitive, stage_target: str, stage):
    """The start of a stage. Without streams of our own (not CUDA) the whole call."""
    primitive = Primitive(target)
    primitive.multiple_results = True

    def abstract_results(*avals, structure, **params):
        operands = jax.tree.unflatten(structure, avals[:-1])
        return [
            *jax.tree.leaves(ffi.RESULT_TYPES[plain](operands, **params)),
            avals[-1],
        ]

    def run(*operands, **params):
        *operands, order = operands
        return [*ffi.run(plain, *operands, **params), order]

    primitive.def_abstract_eval(abstract_results)
    primitive.def_impl(run)  # The whole call: no program that would hold a done.

    def lower(rule, ctx, *operands, **params):
        *operands, order = operands
        ctx = ctx.replace(avals_in=ctx.avals_in[:-1], avals_out=ctx.avals_out[:-1])
        results = rule(
            ctx, *operands, target=stage_target, reference_stage=stage, **params
        )
        return [*results, order]

    def lower_cuda(ctx, *operands, **params):
        if params["call"].exchange.implementation == "xla":
            return lower(_lower_reference_of, ctx, *operands, **params)
        return ffi.lower_cuda(
            ctx,
            *operands,
            target=target,
            reference_stage=stage,
            **params,
        )

    def batched(operands, dims, **params):
        *operands, order = operands
        *dims, order_dim = dims
        if order_dim is not None:
            order = order.take(0, order_dim)  # Of no meaning: one for all.
        if all(dim is None for dim in dims):
            results = primitive.bind(*operands, order, **params)
            return results, [None] * len(results)
        results = in_sequence(plain, operands, dims, **params)
        return [*results, order], [*[0] * len(results), None]

    batching.primitive_batchers[primitive] = batched
    # Each call has a site of its own, or XLA would merge equal starts, but not dones.
    rules = dict(cpu=functools.partial(lower, ffi.lower_cpu), cuda=lower_cuda)
    otherwise = functools.partial(lower, _lower_reference_of)
    ffi.register_rules(primitive, abstract_results, rules, otherwise)
    return primitive


def _lower_reference_of(ctx, *operands, target, **params):
    del target
    return ffi.lower_reference(ctx, *operands, **params)


def _pending(operands, num_pending):
    """Of done's operands, what is under way: between those of the stage and `order`."""
    return list(operands[-num_pending - 1 : -1])


def _lower_done(ctx, *operands, call, op, num_pending):
    """What is under way is there: the same buffers, on CUDA behind a wait."""
    del ctx, call, op
    return _pending(operands, num_pending)


def _lower_done_cuda(ctx, *operands, call, op, num_pending):
    if call.exchange.implementation == "xla":
        return _pending(operands, num_pending)
    first = len(operands) - 1 - num_pending
    lower = jax.ffi.ffi_lowering(
        DONE, operand_output_aliases={first + i: i for i in range(num_pending)}
    )
    return lower(
        ctx,
        *operands,
        abi_version=np.int64(_ffi.abi_version),
        op=op,
        num_pending=np.int64(num_pending),
    )


def _batched_done(operands, dims, *, num_pending, **params):
    *operands, order = operands
    *dims, order_dim = dims
    if order_dim is not None:
        order = order.take(0, order_dim)  # Of no meaning: one for all.
    pending, pending_dims = operands[-num_pending:], dims[-num_pending:]
    if any(dim is not None for dim in pending_dims):  # Started as a whole.
        return pending, pending_dims
    results = _done_p.bind(*operands, order, num_pending=num_pending, **params)
    return results, [None] * len(results)


def _done_types(*avals, call, op, num_pending):
    del call, op
    return _pending(avals, num_pending)


_dispatch_start_p = _start_primitive(
    DISPATCH_START, ffi.dispatch_p, ffi.DISPATCH, reference.dispatch
)
_combine_start_p = _start_primitive(
    COMBINE_START, ffi.combine_p, ffi.COMBINE, reference.combine
)
_done_p = Primitive(DONE)
_done_p.multiple_results = True
_done_p.def_abstract_eval(_done_types)
_done_p.def_impl(
    lambda *operands, num_pending, **params: _pending(operands, num_pending)
)
batching.primitive_batchers[_done_p] = _batched_done
mlir.register_lowering(_done_p, _lower_done)
mlir.register_lowering(_done_p, _lower_done_cuda, platform="cuda")
