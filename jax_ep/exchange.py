"""Everything that an exchange is told, in one frozen description."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from jax_ep import _ffi
from jax_ep.block_scaled import NAMES, BlockScaled

Implementation = Literal["ffi", "xla"]

MAX_EXPERTS = _ffi.limits["experts"]  # A counter each in a block's shared memory.
MAX_INT32 = 2**31 - 1  # Rows are numbered in int32.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the calls of one exchange are told; static, and the same on all ranks.

    Made once, by a layer's config or by `dispatch_layout` from its keywords, and held
    by the handle: every call with the handle, the backward's too, and every exchange
    that the library starts itself (further rounds, placed parameters) inherits it.
    Frozen and hashable.

    Attributes:
      num_experts: E, over all ranks, a multiple of the R ranks, at most 2048.
      axis_name: mesh axis, or tuple of axes, that the experts are split over.
      domain_size: G, ranks of an NVLink domain; rank r is in domain r // G. Where it is
        less than R, rows cross between domains first, see `dispatch_layout`. None is
        one domain.
      network_capacity_factor: room for this many times the tokens that uniform routing
        sends from a rank to a domain; None is room for all.
      capacity: rows C of each rank's receive buffer, rounded down to a multiple of
        `expert_alignment`; None is dropless.
      expert_alignment: A >= 1; each expert's rows start on a multiple of it.
      implementation: None, "ffi" or "xla", see `dispatch_layout`.
      num_sms: most SMs that a CUDA kernel may use; None leaves at least 32 free.
      timeout_s: seconds after which a wait for another rank becomes an error.
      wire: what crosses the link forward. None is the rows' own dtype; float32 sends
        combine's partial sums unrounded; `BlockScaled` sends dispatch's rows as FP8.
        Formats by name too, see `jax_ep.block_scaled.NAMES`.
      grad_wire: the same for the calls of the backward, where dispatch's derivative is
        a sum, and combine's sends rows.
      stamps: whether calls note when their phases began and ended, see `stamps.py`.

    Raises:
      TypeError, ValueError: a field that is no such value.

    >>> Exchange(num_experts=8, timeout_s=5).axis_name
    ('expert',)
    """

    num_experts: int
    axis_name: str | Sequence[str] = "expert"
    domain_size: int | None = None
    network_capacity_factor: float | None = None
    capacity: int | None = None
    expert_alignment: int = 1
    implementation: Implementation | None = None
    num_sms: int | None = None
    timeout_s: float = 100.0
    wire: Any = None
    grad_wire: Any = None
    stamps: bool = False
    operation: dataclasses.InitVar[str] = "Exchange"  # For messages.

    def __post_init__(self, operation: str):
        def put(name, value):
            object.__setattr__(self, name, value)

        names = self.axis_name
        put("axis_name", (names,) if isinstance(names, str) else tuple(names))
        needed = ("num_experts", "expert_alignment")
        for name in (*needed, "num_sms", "domain_size", "capacity"):
            value = getattr(self, name)
            if value is not None or name in needed:
                put(name, positive(operation, name, value))
        factor = self.network_capacity_factor
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(
                f"jax_ep.{operation}: network_capacity_factor (={factor}) must be "
                "positive and finite."
            )
        if self.num_experts > MAX_EXPERTS:
            raise ValueError(
                f"jax_ep.{operation}: num_experts (={self.num_experts}) must be at "
                f"most {MAX_EXPERTS}."
            )
        if self.implementation not in (None, "ffi", "xla"):
            raise ValueError(
                f"jax_ep.{operation}: implementation (={self.implementation!r}) must "
                "be None, 'ffi' or 'xla'."
            )
        self._check_capacity(operation)
        put("timeout_s", _seconds(operation, self.timeout_s))
        put("wire", wire_format(operation, "wire", self.wire))
        put("grad_wire", wire_format(operation, "grad_wire", self.grad_wire))
        put("stamps", bool(self.stamps))

    def _check_capacity(self, operation: str) -> None:
        if self.capacity is None:
            return
        if self.capacity < self.expert_alignment:
            raise ValueError(
                f"jax_ep.{operation}: capacity (={self.capacity}) must be at least "
                f"expert_alignment (={self.expert_alignment})."
            )
        if self.capacity > MAX_INT32:
            raise ValueError(
                f"jax_ep.{operation}: capacity (={self.capacity}) must be below 2**31: "
                "rows are int32."
            )
        rows = self.capacity // self.expert_alignment * self.expert_alignment
        object.__setattr__(self, "capacity", rows)

    def replace(self, operation: str = "Exchange", **fields: Any) -> "Exchange":
        """The same exchange with other fields; None leaves a field as it is."""
        given = {name: value for name, value in fields.items() if value is not None}
        return dataclasses.replace(self, operation=operation, **given)


def wire_format(
    operation: str, name: str, wire: Any, *, sums_only: bool = False
) -> BlockScaled | str | None:
    """A wire format as its user gave it, checked: None, "float32" or `BlockScaled`.

    Raises:
      TypeError: any other; with `sums_only`, `BlockScaled` too.
    """
    if isinstance(wire, str) and wire in NAMES:
        wire = NAMES[wire]
    if wire is None or (isinstance(wire, BlockScaled) and not sums_only):
        return wire
    try:
        dtype = None if isinstance(wire, BlockScaled) else jnp.dtype(wire)
    except TypeError:
        dtype = None
    if dtype == jnp.float32:
        return "float32"
    shown = repr(wire) if dtype is None else dtype
    rule = "None or float32"
    if not sums_only:
        rule = f"None, float32, a jax_ep.BlockScaled or one of {', '.join(NAMES)}"
    why = ": sums are never quantised" if isinstance(wire, BlockScaled) else ""
    raise TypeError(f"jax_ep.{operation}: {name} must be {rule}, and is {shown}{why}.")


def rows_format(
    operation: str, name: str, wire: Any, default: BlockScaled | str | None
) -> BlockScaled | None:
    """How rows cross the link: quantised, or None for as they are."""
    wire = wire_format(operation, name, wire) or default
    return wire if isinstance(wire, BlockScaled) else None


def sums_format(
    operation: str, name: str, wire: Any, default: BlockScaled | str | None
) -> str | None:
    """How partial sums cross the link: "float32", or None for rounded to their dtype.

    Raises:
      TypeError: `BlockScaled` as the call's own; as a default it is of rows alone.
    """
    wire = wire_format(operation, name, wire, sums_only=True)
    return "float32" if (wire or default) == "float32" else None


def positive(operation: str, name: str, value: Any) -> int:
    """An int of at least 1; NumPy's integers are made Python's."""
    if isinstance(value, bool):
        raise TypeError(f"jax_ep.{operation}: {name} must be an int, and is a bool.")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(
            f"jax_ep.{operation}: {name} must be an int, and is a "
            f"{type(value).__name__}."
        ) from None
    if value < 1:
        raise ValueError(f"jax_ep.{operation}: {name} (={value}) must be at least 1.")
    return value


def _seconds(operation: str, value: Any) -> float:
    try:
        seconds = float(value) if not isinstance(value, (str, bytes)) else None
    except TypeError:
        seconds = None
    if seconds is None:
        raise TypeError(
            f"jax_ep.{operation}: timeout_s must be a number, and is a "
            f"{type(value).__name__}."
        )
    if not seconds > 0:
        raise ValueError(f"jax_ep.{operation}: timeout_s (={value}) must be positive.")
    return seconds
