"""The three primitives of the pipeline and the custom calls they lower to.

A stage is one primitive. It lowers to the custom call of its name on CPU devices and on
CUDA, with the same operands, results and attributes, and to `reference.py` elsewhere.
Lowering, not tracing, is where the platform is known: only there are CUDA kernels
compiled, and only there does the device learn its rank (an operand that the traced
program must not see, or every result would vary over every mesh axis).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep import _ffi, reference, registration
from jax_ep.axis import ExpertAxis, axis_label, in_sequence

LAYOUT = "jax_ep_layout"
DISPATCH = "jax_ep_dispatch"
COMBINE = "jax_ep_combine"
TARGETS = (LAYOUT, DISPATCH, COMBINE)

registration.register()


@dataclasses.dataclass(frozen=True)
class Config:
    """What a call's shapes do not tell; static, and the same on all ranks."""

    axis: ExpertAxis
    num_experts: int
    expert_alignment: int
    capacity: int
    implementation: str | None
    num_sms: int | None
    timeout_s: float
    stamps: bool

    @property
    def num_local_experts(self) -> int:
        """L = E / R."""
        return self.num_experts // self.axis.num_ranks

    def attributes(self) -> dict[str, Any]:
        """The attributes that all three custom calls carry."""
        return dict(
            abi_version=np.int64(_ffi.abi_version),
            axis=axis_label(self.axis.names),
            num_ranks=np.int64(self.axis.num_ranks),
            groups=self.axis.groups.reshape(-1),
            num_experts=np.int64(self.num_experts),
            expert_alignment=np.int64(self.expert_alignment),
            capacity=np.int64(self.capacity),
            num_sms=np.int64(self.num_sms or 0),
            timeout_s=np.float64(self.timeout_s),
            stamps=np.bool_(self.stamps),
        )


def layout(config: Config, topk_idx: jax.Array) -> list[jax.Array]:
    """The array fields of a `Handle`, in its order, from int32 ids `[T, K]`."""
    return _bind(_layout_p, _layout_types, topk_idx, config=config)


def dispatch(config: Config, handle, leaves, weights):
    """Rows `[C, W]` per leaf `[T, W]`, and `[C]` weights or None."""
    operands = [
        handle.slot,
        handle.slot_rank,
        handle.recv_slot,
        handle.group_counts,
        handle.group_offsets,
    ]
    has_weights = weights is not None
    if has_weights:
        operands.append(weights)
    results = _bind(
        _dispatch_p,
        _dispatch_types,
        *operands,
        *leaves,
        config=config,
        has_weights=has_weights,
    )
    return tuple(results[has_weights:]), results[0] if has_weights else None


def combine(
    config: Config,
    handle,
    leaves,
    *,
    weights=None,
    row_values=None,
    bias=None,
    wire_f32=False,
):
    """Sums `[T, W]` per leaf `[C, W]`, and `row_values[slot]` as `[T, K]` or None."""
    operands = [handle.slot, handle.slot_rank, handle.recv_slot]
    operands += [value for value in (weights, row_values) if value is not None]
    results = _bind(
        _combine_p,
        _combine_types,
        *operands,
        *leaves,
        *(bias or ()),
        config=config,
        has_weights=weights is not None,
        has_row_values=row_values is not None,
        has_bias=bias is not None,
        wire_f32=wire_f32,
    )
    has_values = row_values is not None
    return tuple(results[has_values:]), results[0] if has_values else None


def _bind(primitive, result_types, slot, *operands, **params):
    if slot.shape[0]:
        return primitive.bind(slot, *operands, **params)
    # T = 0 on all ranks: nothing to exchange, and XLA stumbles over empty operands.
    varying = tuple(sorted(jax.typeof(slot).mat.varying))
    types = result_types(*map(jax.typeof, (slot, *operands)), **params)
    zeros = [jnp.zeros(t.shape, t.dtype) for t in types]
    return lax.pcast(zeros, varying, to="varying") if varying else zeros


def _layout_types(topk_idx, *, config):
    shape = topk_idx.shape
    num_ranks, local = config.axis.num_ranks, config.num_local_experts
    shapes = [shape, shape, (num_ranks, *shape), *[(local,)] * 3, *[(num_ranks,)] * 2]
    return [_like(topk_idx, s, jnp.int32) for s in [*shapes, (1,)]]


def _dispatch_types(slot, *operands, config, has_weights):
    types = [_like(slot, (config.capacity,), jnp.float32)] if has_weights else []
    for leaf in operands[4 + has_weights :]:
        types.append(_like(slot, (config.capacity, leaf.shape[1]), leaf.dtype))
    return types


def _combine_types(
    slot, *operands, config, has_weights, has_row_values, has_bias, wire_f32
):
    del config, wire_f32
    types = [_like(slot, slot.shape, jnp.float32)] if has_row_values else []
    leaves = operands[2 + has_weights + has_row_values :]
    for leaf in leaves[: len(leaves) // (1 + has_bias)]:
        types.append(_like(slot, (slot.shape[0], leaf.shape[1]), leaf.dtype))
    return types


def _like(aval, shape, dtype):
    # All operands vary over the same mesh axes (`vary_alike`), and so do the results.
    return aval.update(shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False)


def _lower_custom_call(ctx, *operands, target, config, params, more_attributes):
    attributes = {**config.attributes(), **params}
    attributes |= more_attributes(target, attributes, ctx.avals_in)
    # Not jax.ffi.ffi_call: XLA names an instruction after the primitive it comes from,
    # and profilers show that name. This one is the target's.
    rank_type = jax.typeof(np.zeros(2, np.int32))
    rank_ctx = ctx.replace(avals_in=[], avals_out=[rank_type])
    rank = mlir.lower_fun(config.axis.rank_and_group, multiple_results=False)(rank_ctx)
    call = jax.ffi.ffi_lowering(target)
    call_ctx = ctx.replace(avals_in=[rank_type, *ctx.avals_in])
    return call(call_ctx, *rank, *operands, **attributes)


def _lower_reference(ctx, *operands, reference_stage, config, **params):
    if config.implementation == "ffi":
        raise NotImplementedError(
            "jax_ep: implementation='ffi' needs CPU devices of one process, or CUDA; "
            f"lowering for {ctx.module_context.platforms} over "
            f"{jax.process_count()} processes."
        )
    stage = functools.partial(reference_stage, config=config, **params)
    return mlir.lower_fun(stage, multiple_results=True)(ctx, *operands)


def _lower_cpu(ctx, *operands, target, reference_stage, config, **params):
    if config.implementation == "xla" or jax.process_count() > 1:
        return _lower_reference(
            ctx, *operands, reference_stage=reference_stage, config=config, **params
        )
    return _lower_custom_call(
        ctx,
        *operands,
        target=target,
        config=config,
        params=params,
        more_attributes=lambda *_: {},
    )


def _lower_cuda(ctx, *operands, target, reference_stage, config, **params):
    if config.implementation == "xla":
        return _lower_reference(
            ctx, *operands, reference_stage=reference_stage, config=config, **params
        )
    if not registration.has_cuda():
        raise NotImplementedError(
            "jax_ep: this installation runs on CPU devices only. CUDA needs Python >= "
            "3.12 and jax >= 0.11.2; implementation='xla' runs without our kernels."
        )
    from jax_ep import kernels  # Needs cuda-python, which CPU users lack.

    return _lower_custom_call(
        ctx,
        *operands,
        target=target,
        config=config,
        params=params,
        more_attributes=kernels.attributes,
    )


def _one_after_another(primitive, operands, dims, **params):
    """vmap: the batch's calls in sequence, since each is an exchange of its own."""
    results = in_sequence(primitive, operands, dims, **params)
    return results, [0] * len(results)


def _primitive(target: str, result_types, reference_stage) -> Primitive:
    primitive = Primitive(target)
    primitive.multiple_results = True
    primitive.def_abstract_eval(result_types)
    batching.primitive_batchers[primitive] = functools.partial(
        _one_after_another, primitive
    )
    for rule, platform in ((_lower_cpu, "cpu"), (_lower_cuda, "cuda")):
        rule = functools.partial(rule, target=target, reference_stage=reference_stage)
        mlir.register_lowering(primitive, rule, platform=platform)
    rule = functools.partial(_lower_reference, reference_stage=reference_stage)
    mlir.register_lowering(primitive, rule)
    return primitive


_layout_p = _primitive(LAYOUT, _layout_types, reference.layout)
_dispatch_p = _primitive(DISPATCH, _dispatch_types, reference.dispatch)
_combine_p = _primitive(COMBINE, _combine_types, reference.combine)
