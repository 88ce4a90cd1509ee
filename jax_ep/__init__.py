"""Expert parallelism for JAX: dispatch and combine as differentiable custom calls."""

from jax_ep.combine import combine
from jax_ep.dispatch import dispatch
from jax_ep.ffi import TARGETS as CUSTOM_CALLS
from jax_ep.layout import Handle, dispatch_layout

__all__ = ["CUSTOM_CALLS", "Handle", "combine", "dispatch", "dispatch_layout"]

__version__ = "0.1.0"
