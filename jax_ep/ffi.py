"""The three primitives of the pipeline and the custom calls they lower to.

A stage is one primitive, and so is its start (see `in_flight.py`). A stage lowers to
the custom call of its name on CPU devices and on CUDA, with the same operands, results
and attributes, and to `reference.py` elsewhere.
Lowering, not tracing, is where the platform is known: only there are CUDA kernels
compiled, and only there does the device learn its rank (an operand that the traced
program must not see, or every result would vary over every mesh axis).
"""

import dataclasses
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep import _ffi, reference, registration
from jax_ep.axis import (
    MAX_RANKS,
    ExpertAxis,
    axis_label,
    in_sequence,
    like,
    partly_manual,
)
from jax_ep.exchange import Exchange

LAYOUT = "jax_ep_layout"
DISPATCH = "jax_ep_dispatch"
COMBINE = "jax_ep_combine"
DISPATCH_START = "jax_ep_dispatch_start"  # On CUDA; elsewhere starts run as a whole.
COMBINE_START = "jax_ep_combine_start"
DONE = "jax_ep_done"
TARGETS = (LAYOUT, DISPATCH, COMBINE)
TARGETS_IN_FLIGHT = (DISPATCH_START, COMBINE_START, DONE)

registration.register()


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call's operands do not tell; static, and the same on all ranks."""

    axis: ExpertAxis
    exchange: Exchange
    capacity: int

    @property
    def num_local_experts(self) -> int:
        """L = E / R."""
        return self.exchange.num_experts // self.axis.num_ranks

    def attributes(self) -> dict[str, Any]:
        """The attributes that all three custom calls carry."""
        exchange = self.exchange
        return dict(
            abi_version=np.int64(_ffi.abi_version),
            axis=axis_label(self.axis.names),
            num_ranks=np.int64(self.axis.num_ranks),
            groups=self.axis.groups.reshape(-1),
            num_experts=np.int64(exchange.num_experts),
            expert_alignment=np.int64(exchange.expert_alignment),
            capacity=np.int64(self.capacity),
            num_sms=np.int64(exchange.num_sms or 0),
            timeout_s=np.float64(exchange.timeout_s),
            stamps=np.bool_(exchange.stamps),
        )


# The operands of a stage, in the order in which they cross to the handler; what is None
# is left out. Results are such trees too: extras first, then one per leaf.


class LayoutOperands(NamedTuple):
    """`topk_idx` `[T, K]` int32."""

    topk_idx: Any

    def flags(self) -> dict[str, bool]:
        """The attributes that say which operands there are."""
        return {}


class DispatchOperands(NamedTuple):
    """Fields of the handle, `weights` `[T, K]` or None, leaves `[T, W]`."""

    slot: Any
    slot_rank: Any
    recv_slot: Any
    group_counts: Any
    group_offsets: Any
    weights: Any
    leaves: tuple[Any, ...]

    def flags(self) -> dict[str, bool]:
        """The attributes that say which operands there are."""
        return dict(has_weights=self.weights is not None)


class CombineOperands(NamedTuple):
    """Fields of the handle, `[C]` vectors or None, leaves `[C, W]`, bias `[T, W]`."""

    slot: Any
    slot_rank: Any
    recv_slot: Any
    weights: Any
    row_values: Any
    leaves: tuple[Any, ...]
    bias: tuple[Any, ...] | None

    def flags(self) -> dict[str, bool]:
        """The attributes that say which operands there are."""
        return dict(
            has_weights=self.weights is not None,
            has_row_values=self.row_values is not None,
            has_bias=self.bias is not None,
        )


def layout(call: Call, topk_idx: jax.Array) -> tuple[jax.Array, ...]:
    """The array fields of a `Handle`, in its order, from int32 ids `[T, K]`."""
    return _bind(_layout_p, LayoutOperands(topk_idx), call=call)


def dispatch_operands(handle, leaves, weights) -> DispatchOperands:
    """What a dispatch with this handle takes."""
    return DispatchOperands(
        handle.slot,
        handle.slot_rank,
        handle.recv_slot,
        handle.group_counts,
        handle.group_offsets,
        weights,
        tuple(leaves),
    )


def dispatch(call: Call, handle, leaves, weights):
    """`[C]` weights or None, and rows `[C, W]` per leaf `[T, W]`."""
    return _bind(_dispatch_p, dispatch_operands(handle, leaves, weights), call=call)


def combine_operands(
    handle, leaves, *, weights=None, row_values=None, bias=None
) -> CombineOperands:
    """What a combine with this handle takes."""
    return CombineOperands(
        handle.slot,
        handle.slot_rank,
        handle.recv_slot,
        weights,
        row_values,
        tuple(leaves),
        None if bias is None else tuple(bias),
    )


def combine(
    call: Call, handle, leaves, *, wire_f32: bool = False, out_f32: bool = False, **more
):
    """`row_values[slot]` as `[T, K]` or None, and sums `[T, W]` per leaf `[C, W]`.

    With `out_f32` sums are float32 whatever their rows are: not rounded at the end.
    """
    operands = combine_operands(handle, leaves, **more)
    return _bind(_combine_p, operands, call=call, wire_f32=wire_f32, out_f32=out_f32)


def start(operands, order: jax.Array, **params):
    """Starts a dispatch or combine: its results under way, and the next `order`.

    Args:
      operands: `DispatchOperands` or `CombineOperands` with T >= 1. They, and the
        results, are nobody else's to write or read until `done`.
      order: `[1]` float32 of no meaning; who takes the one returned comes later.
      **params: `call`, and for a combine `wire_f32` and `out_f32`.
    """
    is_dispatch = isinstance(operands, DispatchOperands)
    plain, primitive = (
        (_dispatch_p, _dispatch_start_p)
        if is_dispatch
        else (_combine_p, _combine_start_p)
    )
    leaves, structure = jax.tree.flatten(operands)
    avals = jax.tree.map(jax.typeof, operands)
    types = _RESULT_TYPES[plain](avals, **params)
    *results, order = primitive.bind(*leaves, order, structure=structure, **params)
    return jax.tree.unflatten(jax.tree.structure(types), results), order


def done(call: Call, operands, pending, order: jax.Array):
    """Waits for a call: `pending`, as `start` of `operands` gave it."""
    op = "dispatch" if isinstance(operands, DispatchOperands) else "combine"
    operands = jax.tree.leaves(operands)
    leaves, structure = jax.tree.flatten(pending)
    results = _done_p.bind(
        *operands, *leaves, order, call=call, op=op, num_pending=len(leaves)
    )
    return jax.tree.unflatten(structure, results)


def _bind(primitive, operands, **params):
    leaves, structure = jax.tree.flatten(operands)
    avals = jax.tree.map(jax.typeof, operands)
    types = _RESULT_TYPES[primitive](avals, **params)
    if leaves[0].shape[0]:
        results = primitive.bind(*leaves, structure=structure, **params)
    else:
        # T = 0 on all ranks: nothing to exchange, and XLA stumbles over empty operands.
        varying = tuple(sorted(avals[0].mat.varying))
        results = [jnp.zeros(t.shape, t.dtype) for t in jax.tree.leaves(types)]
        if varying:
            results = lax.pcast(results, varying, to="varying")
    return jax.tree.unflatten(jax.tree.structure(types), results)


def _layout_types(operands: LayoutOperands, *, call: Call):
    shape = operands.topk_idx.shape
    num_ranks, local = call.axis.num_ranks, call.num_local_experts
    shapes = [shape, shape, (num_ranks, *shape), *[(local,)] * 3, *[(num_ranks,)] * 2]
    return tuple(like(operands.topk_idx, s, jnp.int32) for s in [*shapes, (1,)])


def _dispatch_types(operands: DispatchOperands, *, call: Call):
    weights = None
    if operands.weights is not None:
        weights = like(operands.slot, (call.capacity,), jnp.float32)
    leaves = tuple(
        like(operands.slot, (call.capacity, leaf.shape[1]), leaf.dtype)
        for leaf in operands.leaves
    )
    return weights, leaves


def _combine_types(operands: CombineOperands, *, call: Call, wire_f32, out_f32):
    del call, wire_f32
    slot, values = operands.slot, None
    if operands.row_values is not None:
        values = like(slot, slot.shape, jnp.float32)
    leaves = tuple(
        like(slot, (slot.shape[0], leaf.shape[1]), "float32" if out_f32 else leaf.dtype)
        for leaf in operands.leaves
    )
    return values, leaves


def _lower_custom_call(
    ctx, *operands, target, structure, call, more_attributes, **flags
):
    # A start has `order` behind the operands of its stage.
    tree = jax.tree.unflatten(structure, ctx.avals_in[: structure.num_leaves])
    attributes = {**call.attributes(), **tree.flags(), **flags}
    attributes |= more_attributes(target, attributes, tree)
    # Not jax.ffi.ffi_call: XLA names an instruction after the primitive it comes from,
    # and profilers show that name. This one is the target's.
    rank_type = jax.typeof(np.zeros(2, np.int32))
    rank_ctx = ctx.replace(avals_in=[], avals_out=[rank_type])
    try:
        rank = mlir.lower_fun(call.axis.rank_and_group, multiple_results=False)(
            rank_ctx
        )
    except NameError as error:
        missing = [n for n, _ in call.axis.mesh_axes if f"name: {n}." in str(error)]
        raise ValueError(f"jax_ep: {partly_manual(missing)}") from None
    lower = jax.ffi.ffi_lowering(target)
    call_ctx = ctx.replace(avals_in=[rank_type, *ctx.avals_in])
    return lower(call_ctx, *rank, *operands, **attributes)


def _lower_reference(ctx, *operands, reference_stage, structure, call, **params):
    if call.exchange.implementation == "ffi":
        raise NotImplementedError(
            "jax_ep: implementation='ffi' needs CPU devices of one process, or CUDA, "
            f"and at most {MAX_RANKS} ranks; lowering for "
            f"{ctx.module_context.platforms} over {jax.process_count()} processes with "
            f"{call.axis.num_ranks} ranks."
        )

    if call.exchange.timeout_s != Exchange.timeout_s:
        # Once a process, since the place is always this line.
        warnings.warn(
            f"jax_ep: timeout_s (={call.exchange.timeout_s:g}) is not kept where the "
            "exchange is jax.lax's collectives: how long they wait is XLA's to say, by "
            "XLA_FLAGS=--xla_cpu_collective_timeout_seconds and "
            "--xla_cpu_collective_call_terminate_timeout_seconds on CPUs, and "
            "--xla_gpu_nccl_termination_timeout_seconds on GPUs.",
            stacklevel=1,
        )

    def stage(*operands):
        # Barriers, as a custom call is one: else XLA computes across the edge in other
        # bits (without a rounding to bfloat16, or with fused multiply-adds).
        operands = lax.optimization_barrier(operands)
        tree = jax.tree.unflatten(structure, operands)
        results = jax.tree.leaves(reference_stage(tree, call=call, **params))
        return lax.optimization_barrier(results)

    return mlir.lower_fun(stage, multiple_results=True)(ctx, *operands)


def _lower_cpu(ctx, *operands, target, reference_stage, call, **params):
    params["call"] = call
    in_one_process = jax.process_count() == 1 and call.axis.num_ranks <= MAX_RANKS
    if call.exchange.implementation == "xla" or not in_one_process:
        return _lower_reference(
            ctx, *operands, reference_stage=reference_stage, **params
        )
    return _lower_custom_call(
        ctx, *operands, target=target, more_attributes=lambda *_: {}, **params
    )


def _lower_cuda(ctx, *operands, target, reference_stage, call, **params):
    params["call"] = call
    if call.exchange.implementation == "xla":
        return _lower_reference(
            ctx, *operands, reference_stage=reference_stage, **params
        )
    if not registration.has_cuda():
        raise NotImplementedError(
            "jax_ep: this installation runs on CPU devices only. CUDA needs Python >= "
            "3.12 and jax >= 0.11.2; implementation='xla' runs without our kernels."
        )
    if call.axis.num_ranks > MAX_RANKS:
        raise NotImplementedError(
            f'jax_ep: axis "{axis_label(call.axis.names)}" has {call.axis.num_ranks} '
            f"ranks, and our kernels take at most {MAX_RANKS} (one NVLink domain); "
            "implementation='xla' runs with more."
        )
    _refuse_streams(ctx)
    from jax_ep import kernels  # Needs cuda-python, which CPU users lack.

    return _lower_custom_call(
        ctx,
        *operands,
        target=target,
        more_attributes=kernels.attributes,
        call_site=_call_site(ctx),
        **params,
    )


def _refuse_streams(ctx) -> None:
    """Raises where JAX asks XLA to run the call on another stream than its own."""
    context = ctx.jaxpr_eqn_ctx
    if context is None:
        return
    asked = {"compute_on": context.compute_type}
    for name, value in (context.xla_metadata or {}).items():
        if name == "_xla_stream_annotation":
            asked["set_xla_metadata"] = f"{name}={value}"
    for name, value in asked.items():
        if isinstance(value, str) and "stream" in value:
            raise ValueError(
                f"jax_ep: {name} (={value!r}) must not hold calls of jax_ep: XLA's "
                "graphs lose the order between streams, and all ranks must make their "
                "calls in one order."
            )


_num_sites: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _call_site(ctx) -> str:
    """A call's module and its number there, by which ranks know that they are in one.

    Without the module's name, two programs that run in another order would look alike.
    """
    module = ctx.module_context.module
    number = _num_sites[module] = _num_sites.get(module, 0) + 1
    return f"{module.operation.attributes['sym_name'].value} {number}"


def _one_after_another(primitive, operands, dims, **params):
    """vmap: the batch's calls in sequence, since each is an exchange of its own."""
    results = in_sequence(primitive, operands, dims, **params)
    return results, [0] * len(results)


_numbers = itertools.count()


def _without_number(rule, ctx, *operands, number, **params):
    del number  # Tells equal calls apart.
    return rule(ctx, *operands, **params)


_RESULT_TYPES: dict[Primitive, Callable[..., Any]] = {}


def _run(primitive: Primitive, *operands, **params):
    """Outside of jit: one rank, or a shard_map that JAX runs op by op."""
    return _jitted(primitive, tuple(params.items()))(*operands)


@functools.cache
def _jitted(primitive: Primitive, params: tuple[tuple[str, Any], ...]):
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))


def _primitive(target: str, result_types, reference_stage) -> Primitive:
    primitive = Primitive(target)
    primitive.multiple_results = True
    _RESULT_TYPES[primitive] = result_types

    def abstract_results(*avals, structure, **params):
        return jax.tree.leaves(
            result_types(jax.tree.unflatten(structure, avals), **params)
        )

    primitive.def_abstract_eval(abstract_results)
    primitive.def_impl(functools.partial(_run, primitive))
    batching.primitive_batchers[primitive] = functools.partial(
        _one_after_another, primitive
    )
    rules = dict(cpu=_lower_cpu, cuda=_lower_cuda)
    for platform, rule in rules.items():
        rule = functools.partial(rule, target=target, reference_stage=reference_stage)
        rules[platform] = rule
    otherwise = functools.partial(_lower_reference, reference_stage=reference_stage)

    # JAX lowers equal calls once, and they would have one site; and what it may not
    # lower once it lowers for one platform only (0.12.0). So this one is what a call
    # for several is lowered by, each by another of it.
    numbered = Primitive(target)
    numbered.multiple_results = True
    numbered.def_abstract_eval(
        lambda *avals, number, **params: abstract_results(*avals, **params)
    )
    for platform, rule in {**rules, None: otherwise}.items():
        rule = functools.partial(_without_number, rule)
        mlir.register_lowering(numbered, rule, platform=platform)

    def lower(ctx, *operands, **params):
        platforms = ctx.platforms or ctx.module_context.platforms
        if len(platforms) == 1:
            return rules.get(platforms[0], otherwise)(ctx, *operands, **params)
        bind = functools.partial(numbered.bind, number=next(_numbers), **params)
        return mlir.lower_fun(bind, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(primitive, lower, cacheable=False)
    return primitive


def _start_primitive(target: str, plain: Primitive, stage_target: str, stage):
    """The start of a stage. Without streams of our own (not CUDA) the whole call."""
    primitive = Primitive(target)
    primitive.multiple_results = True

    def abstract_results(*avals, structure, **params):
        operands = jax.tree.unflatten(structure, avals[:-1])
        return [*jax.tree.leaves(_RESULT_TYPES[plain](operands, **params)), avals[-1]]

    def run(*operands, **params):
        *operands, order = operands
        return [*_run(plain, *operands, **params), order]

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
        return _lower_cuda(
            ctx,
            *operands,
            target=target,
            reference_stage=stage,
            site=_next_site(ctx),
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
    mlir.register_lowering(
        primitive, functools.partial(lower, _lower_cpu), platform="cpu"
    )
    # Every call has a number of its own in its module: XLA would merge equal starts,
    # but not their dones.
    mlir.register_lowering(primitive, lower_cuda, platform="cuda", cacheable=False)
    mlir.register_lowering(primitive, functools.partial(lower, _lower_reference_of))
    return primitive


def _lower_reference_of(ctx, *operands, target, **params):
    del target
    return _lower_reference(ctx, *operands, **params)


_sites: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _next_site(ctx) -> np.int64:
    module = ctx.module_context.module
    _sites[module] = _sites.get(module, -1) + 1
    return np.int64(_sites[module])


def _lower_done(ctx, *operands, call, op, num_pending):
    """What is under way is there: the same buffers, on CUDA behind a wait."""
    del ctx, call, op
    return operands[-num_pending - 1 : -1]


def _lower_done_cuda(ctx, *operands, call, op, num_pending):
    if call.exchange.implementation == "xla":
        return operands[-num_pending - 1 : -1]
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
    return list(avals[-num_pending - 1 : -1])


_layout_p = _primitive(LAYOUT, _layout_types, reference.layout)
_dispatch_p = _primitive(DISPATCH, _dispatch_types, reference.dispatch)
_combine_p = _primitive(COMBINE, _combine_types, reference.combine)
_dispatch_start_p = _start_primitive(
    DISPATCH_START, _dispatch_p, DISPATCH, reference.dispatch
)
_combine_start_p = _start_primitive(
    COMBINE_START, _combine_p, COMBINE, reference.combine
)
_done_p = Primitive(DONE)
_done_p.multiple_results = True
_done_p.def_abstract_eval(_done_types)
_done_p.def_impl(
    lambda *operands, num_pending, **params: list(operands[-num_pending - 1 : -1])
)
batching.primitive_batchers[_done_p] = _batched_done
mlir.register_lowering(_done_p, _lower_done)
mlir.register_lowering(_done_p, _lower_done_cuda, platform="cuda")
