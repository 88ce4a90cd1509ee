"""The three primitives of the pipeline and the custom calls they lower to.

A stage is one primitive. It lowers to the custom call of its name on CPU devices and on
CUDA, with the same operands, results and attributes, and to `reference.py` elsewhere.
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
TARGETS = (LAYOUT, DISPATCH, COMBINE)

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
    return _bind(dispatch_p, dispatch_operands(handle, leaves, weights), call=call)


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
    return _bind(combine_p, operands, call=call, wire_f32=wire_f32, out_f32=out_f32)


def _bind(primitive, operands, **params):
    leaves, structure = jax.tree.flatten(operands)
    avals = jax.tree.map(jax.typeof, operands)
    types = RESULT_TYPES[primitive](avals, **params)
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


def lower_reference(ctx, *operands, reference_stage, structure, call, **params):
    """To `jax.lax`'s collectives; or an error, where "ffi" was asked for."""
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


def lower_cpu(ctx, *operands, target, reference_stage, call, **params):
    """To the custom call of CPU devices, where one process has all ranks."""
    params["call"] = call
    in_one_process = jax.process_count() == 1 and call.axis.num_ranks <= MAX_RANKS
    if call.exchange.implementation == "xla" or not in_one_process:
        return lower_reference(
            ctx, *operands, reference_stage=reference_stage, **params
        )
    return _lower_custom_call(
        ctx, *operands, target=target, more_attributes=lambda *_: {}, **params
    )


def lower_cuda(ctx, *operands, target, reference_stage, call, **params):
    """To the custom call of CUDA, with its kernel."""
    params["call"] = call
    if call.exchange.implementation == "xla":
        return lower_reference(
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


RESULT_TYPES: dict[Primitive, Callable[..., Any]] = {}


def run(primitive: Primitive, *operands, **params):
    """Outside of jit: one rank, or a shard_map that JAX runs op by op."""
    return _jitted(primitive, tuple(params.items()))(*operands)


@functools.cache
def _jitted(primitive: Primitive, params: tuple[tuple[str, Any], ...]):
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))


def _primitive(target: str, result_types, reference_stage) -> Primitive:
    primitive = Primitive(target)
    primitive.multiple_results = True
    RESULT_TYPES[primitive] = result_types

    def abstract_results(*avals, structure, **params):
        return jax.tree.leaves(
            result_types(jax.tree.unflatten(structure, avals), **params)
        )

    primitive.def_abstract_eval(abstract_results)
    primitive.def_impl(functools.partial(run, primitive))
    batching.primitive_batchers[primitive] = functools.partial(
        _one_after_another, primitive
    )
    rules = dict(cpu=lower_cpu, cuda=lower_cuda)
    for platform, rule in rules.items():
        rule = functools.partial(rule, target=target, reference_stage=reference_stage)
        rules[platform] = rule
    otherwise = functools.partial(lower_reference, reference_stage=reference_stage)

    register_rules(primitive, abstract_results, rules, otherwise)
    return primitive


def register_rules(primitive: Primitive, abstract_results, rules, otherwise) -> None:
    """Lowers every call of its own, by the rule of its platform.

    JAX lowers equal calls once, and they would have one site; and what it may not lower
    once it lowers for one platform only (0.12.0). So another primitive is what a call
    for several is lowered by, each by another number of it.
    """
    numbered = Primitive(primitive.name)
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


_layout_p = _primitive(LAYOUT, _layout_types, reference.layout)
dispatch_p = _primitive(DISPATCH, _dispatch_types, reference.dispatch)
combine_p = _primitive(COMBINE, _combine_types, reference.combine)
