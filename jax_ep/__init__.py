"""Expert parallelism for JAX: dispatch and combine as differentiable custom calls."""

from importlib import import_module as _import_module

import jax as _jax  # noqa: F401  Its extensions load before ours: exports.map says why.

try:  # First of ours, since without it all else fails for a reason that says nothing.
    _import_module("jax_ep._ffi")
except ImportError as error:
    raise ImportError(
        f"jax_ep: {__path__[0]} has no compiled module for this Python ({error}). In a "
        "checkout: start Python elsewhere or with -P after pip install ., or pip "
        "install -e .; else install jax_ep again.",
        name="jax_ep",
    ) from None

from jax_ep import ffi as _ffi_calls
from jax_ep import record, sizing, stamps
from jax_ep import starts as _starts
from jax_ep.block_scaled import BlockScaled, Quantized, dequantize, quantize
from jax_ep.capacity import receive_capacity
from jax_ep.check import check
from jax_ep.checkpoint import load_safetensors
from jax_ep.combine import combine
from jax_ep.config import MoEConfig
from jax_ep.dispatch import dispatch
from jax_ep.dropless import Rounds, in_rounds
from jax_ep.exchange import Exchange
from jax_ep.experts import experts, shared_experts
from jax_ep.hf_models import hf_moe_config
from jax_ep.in_flight import (
    InFlight,
    beside,
    combine_done,
    combine_start,
    dispatch_done,
    dispatch_start,
)
from jax_ep.layout import Handle, dispatch_layout
from jax_ep.losses import (
    MoEStats,
    load_balance_loss,
    moe_stats,
    router_z_loss,
    selection_bias_update,
    sequence_load_balance_loss,
)
from jax_ep.moe import moe
from jax_ep.params import MoEParams, init_params, param_specs
from jax_ep.placement import (
    Placement,
    identity_placement,
    place_params,
    place_topk,
    plan_placement,
    rank_loads,
)
from jax_ep.pretrained import export_hf_moe_layer, load_hf_moe_layer
from jax_ep.router import Routing, router, topk_routing
from jax_ep.serialization import register_serialization as _register_serialization
from jax_ep.sharded import sharded_moe

_register_serialization()

# For `jax.export`: what a program of ours may call.
CUSTOM_CALLS = _ffi_calls.TARGETS + _starts.TARGETS

__all__ = [
    "BlockScaled",
    "CUSTOM_CALLS",
    "Exchange",
    "Handle",
    "InFlight",
    "MoEConfig",
    "MoEParams",
    "MoEStats",
    "Placement",
    "Quantized",
    "Rounds",
    "Routing",
    "beside",
    "check",
    "combine",
    "combine_done",
    "combine_start",
    "dequantize",
    "dispatch",
    "dispatch_done",
    "dispatch_layout",
    "dispatch_start",
    "experts",
    "export_hf_moe_layer",
    "hf_moe_config",
    "identity_placement",
    "in_rounds",
    "init_params",
    "load_balance_loss",
    "load_hf_moe_layer",
    "load_safetensors",
    "moe",
    "moe_stats",
    "param_specs",
    "place_params",
    "place_topk",
    "plan_placement",
    "quantize",
    "rank_loads",
    "receive_capacity",
    "record",
    "router",
    "router_z_loss",
    "selection_bias_update",
    "sequence_load_balance_loss",
    "sharded_moe",
    "shared_experts",
    "sizing",
    "stamps",
    "topk_routing",
]

__version__ = "0.1.0"
