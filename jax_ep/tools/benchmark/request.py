"""What `bench` is asked for, checked; and the devices it runs on."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax

from jax_ep.axis import MAX_RANKS
from jax_ep.exchange import MAX_EXPERTS, MAX_INT32
from jax_ep.layout import MAX_TOPK
from jax_ep.tools import flags
from jax_ep.tools.benchmark import replay, routings
from jax_ep.tools.benchmark.exchanges import Layer
from jax_ep.tools.benchmark.layer import Widths
from jax_ep.tools.console import UserError

CPU_RANKS = 4
DTYPES = ("bfloat16", "float16", "float32")
_DEVICES_FLAG = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything that a run can be asked for; None is the platform's default.

    Attributes:
      tokens, hidden, expert_hidden, topk, experts: T, H, F, K, E.
      shared_hidden: S of the shared expert; None is F, 0 is none.
      platform: "cpu" or "gpu"; None is GPUs where there are any.
      ranks: R; None is all GPUs, or `CPU_RANKS` CPU devices, or that of a recording.
      capacity_factor: "2" (rows over T*K), "none" (dropless), or "demand": as many rows
        as the busiest rank needs in any step, padding included.
      capacity: C, rows, in place of a factor.
      alignment: A.
      num_sms: of the kernels; None is their default.
      dtype: of the rows.
      routing: a kind of `routings.KINDS`, or a file of `jax_ep.record`.
      layer: of a recording; None is its first.
      steps: batches of the routing; None is all of a recording.
    """

    tokens: int | None = None
    hidden: int | None = None
    expert_hidden: int | None = None
    shared_hidden: int | None = None
    topk: int | None = None
    experts: int | None = None
    platform: str | None = None
    ranks: int | None = None
    capacity_factor: str = "demand"
    capacity: int | None = None
    alignment: int = 1
    num_sms: int | None = None
    dtype: str | None = None
    routing: str = "uniform"
    layer: str | None = None
    steps: int | None = None


@dataclasses.dataclass(frozen=True)
class _Shape:
    tokens: int
    hidden: int
    expert_hidden: int
    topk: int
    experts: int
    dtype: str


_DEFAULTS = {
    "gpu": _Shape(8192, 7168, 2048, 8, 256, "bfloat16"),  # DeepSeek-V3's layer
    "cpu": _Shape(256, 256, 128, 4, 16, "float32"),  # that two cores finish
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A request with nothing left open."""

    devices: list[Any]  # jax.Device
    replay: replay.Replay
    layer: Layer
    widths: Widths

    @property
    def platform(self) -> str:
        """As `Measurement.about` says."""
        return self.devices[0].platform


def resolve(request: Request) -> Case:
    """Starts JAX, fills in defaults, makes or reads the ids.

    Raises:
      UserError: what cannot be run, by value and rule.
    """
    for name in dataclasses.fields(request):
        value = getattr(request, name.name)
        least = 0 if name.name == "shared_hidden" else 1
        if isinstance(value, int) and value < least:
            raise UserError(f"{name.name} (={value}) must be at least {least}.")
    if request.dtype is not None and request.dtype not in DTYPES:
        raise UserError(f"dtype (={request.dtype}) must be {', '.join(DTYPES)}.")
    recorded = _recorded(request) if _is_file(request.routing) else None
    wanted = request.ranks
    if wanted is None and recorded is not None:
        wanted = recorded.ids.shape[1]
    devices = find_devices(wanted, request.platform)
    shape = _filled(request, devices[0].platform)
    ids = recorded
    if ids is None:
        sizes = dict(tokens=shape.tokens, topk=shape.topk, experts=shape.experts)
        check_sizes(ranks=len(devices), topk=shape.topk, experts=shape.experts)
        rows = len(devices) * shape.tokens * shape.topk
        rows += shape.experts // len(devices) * (request.alignment - 1)
        if rows > MAX_INT32:
            raise UserError(
                f"tokens (={shape.tokens}) must leave R*T*K + L*(A-1) (={rows}) below "
                "2**31: rows are int32."
            )
        ids = replay.made(
            request.routing, ranks=len(devices), steps=request.steps, **sizes
        )
    _, ranks, tokens, topk = ids.ids.shape
    check_sizes(ranks=ranks, topk=topk, experts=ids.experts)
    capacity = _capacity(request, ids)
    if capacity > MAX_INT32:
        raise UserError(f"capacity (={capacity}) must be below 2**31: rows are int32.")
    layer = Layer(
        tokens,
        shape.hidden,
        topk,
        ids.experts,
        capacity,
        request.num_sms,
        request.alignment,
        shape.dtype,
    )
    shared = request.shared_hidden
    widths = Widths(
        shape.expert_hidden, shape.expert_hidden if shared is None else shared
    )
    return Case(devices[:ranks], ids, layer, widths)


def find_devices(wanted: int | None, platform: str | None = None) -> list[Any]:
    """The ranks. CPU devices are as many as are wanted, if JAX has not started.

    Args:
      wanted: R; None is all GPUs, or `CPU_RANKS` CPU devices.
      platform: "cpu" or "gpu"; None is GPUs where there are any.

    Raises:
      UserError: too few, or neither CPU devices nor GPUs.
    """
    # The ceilings take memory that JAX would have reserved.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if _DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", wanted or CPU_RANKS)
        except RuntimeError:
            pass  # JAX has started: there are the devices that there are.
    if platform not in (None, *_DEFAULTS):
        raise UserError(f"platform (={platform}) must be cpu or gpu.")
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise UserError(
            f"platform (={platform}) must be one that JAX has here: {line}"
        ) from None
    platform = devices[0].platform
    if platform not in _DEFAULTS:
        raise UserError(f"platform (={platform}) must be cpu or gpu: see --platform.")
    if wanted is None:
        wanted = len(devices) if platform == "gpu" else min(CPU_RANKS, len(devices))
    if len(devices) < wanted:
        kind = "GPUs" if platform == "gpu" else "CPU devices"
        raise UserError(
            f"ranks (={wanted}) must be at most the {len(devices)} {kind} there are."
        )
    return devices[:wanted]


def _filled(request: Request, platform: str) -> _Shape:
    given = {
        field.name: getattr(request, field.name)
        for field in dataclasses.fields(_Shape)
        if getattr(request, field.name) is not None
    }
    return dataclasses.replace(_DEFAULTS[platform], **given)


def check_sizes(*, ranks: int, topk: int, experts: int) -> None:
    """What every exchange asks for.

    Raises:
      UserError: by value and rule.
    """
    if ranks > MAX_RANKS:
        raise UserError(
            f"ranks (={ranks}) must be at most {MAX_RANKS}: one NVLink domain."
        )
    if experts % ranks:
        raise UserError(f"experts (={experts}) must be divisible by the {ranks} ranks.")
    if experts > MAX_EXPERTS:
        raise UserError(f"experts (={experts}) must be at most {MAX_EXPERTS}.")
    if topk > min(experts, MAX_TOPK):
        raise UserError(
            f"topk (={topk}) must be at most {min(experts, MAX_TOPK)} with {experts} "
            "experts."
        )


def _is_file(routing: str) -> bool:
    return routing not in routings.KINDS and (
        Path(routing).suffix != "" or os.sep in routing or Path(routing).exists()
    )


def _recorded(request: Request) -> replay.Replay:
    found = replay.recorded(
        Path(request.routing),
        layer=request.layer,
        ranks=request.ranks,
        steps=request.steps,
    )
    facts = dict(
        tokens=found.ids.shape[2], topk=found.ids.shape[3], experts=found.experts
    )
    for name, value in facts.items():
        asked = getattr(request, name)
        if asked is not None and asked != value:
            raise UserError(
                f"{name} (={asked}) must be {value}, as in {request.routing}, or be "
                "left out."
            )
    return found


def _capacity(request: Request, found: replay.Replay) -> int:
    """C, rows."""
    _, ranks, tokens, topk = found.ids.shape
    alignment, text = request.alignment, request.capacity_factor
    local = found.experts // ranks
    bound = ranks * tokens * min(topk, local) + local * (alignment - 1)
    if request.capacity is not None:
        if text != "demand":
            raise UserError(
                f"capacity (={request.capacity}) must be left out with capacity_factor "
                f"(={text})."
            )
        name, rows = f"capacity (={request.capacity})", request.capacity
    elif text == "demand":
        groups = found.demand().reshape(len(found.ids), ranks, local)
        padded = -(-groups // alignment) * alignment
        return max(int(padded.sum(2).max()), alignment)
    elif (factor := flags.capacity_factor(text)) is None:
        return bound // alignment * alignment
    else:
        name = f"capacity_factor (={text})"
        if not 0 < factor < math.inf:
            raise UserError(f"{name} must be positive.")
        # No router fills more than the bound. Rounded, as 1.1 * 10 is more than 11.
        rows = math.ceil(round(min(factor * tokens * topk, bound), 6))
    if rows < alignment:
        raise UserError(
            f"{name} must be at least the alignment (={alignment}) in rows."
        )
    return rows // alignment * alignment
