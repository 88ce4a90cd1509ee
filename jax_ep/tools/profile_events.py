"""The events of a profile that tell of our stages, by device.

On GPUs an event is a kernel of a stream, and ours bear their names. On CPU devices it
is an instruction of a program; there an exchange is over, for a device, when one begins
that uses its result: its handler returns before, and its end is noted after all that
its completion set off. Everything else is told apart by the scope that the profiled
program notes for each instruction ("jax_ep.experts"); in CUDA graphs kernels of
libraries have none, and are "other".
"""

import dataclasses
import re
from collections.abc import Iterable

from jax_ep.tools import op_names
from jax_ep.tools.measurement import Span

EXCHANGES = ("layout", "dispatch", "combine")
STAGES = ("router", *EXCHANGES, "experts", "shared experts", "other")

# Around a call and around the wait for its results, for whoever wants a timeline.
ISSUE, WAIT = "jax_ep issue", "jax_ep wait"

_OURS = re.compile(r"jax_ep_(layout|dispatch|combine)")
# What is computed in the scope of an exchange, around it, is "other".
_SCOPE = re.compile(r"jax_ep\.(router|experts|shared_experts)\b")
# Instructions whose time is that of others, which have events of their own.
_CONTAINERS = ("while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that ran on a device.

    Attributes:
      device: "0", "1", ...; with the host's name in front where there are several.
      stage: of `STAGES`. An exchange counts as the stage whose kernel runs: the
        backward of dispatch is a combine.
      is_exchange: a layout, dispatch or combine itself; False for what is computed
        around it in its scope.
      name: of the kernel or instruction.
      start, stop: seconds since the profile began.
    """

    device: str
    stage: str
    is_exchange: bool
    name: str
    start: float
    stop: float

    @property
    def kind(self) -> str:
        """What `Span` calls it."""
        return "communication" if self.is_exchange else "compute"


def gpu_events(planes: Iterable, programs: dict, prefix: str = "") -> list[Event]:
    """The kernels of every stream; copies and fills too, as "other"."""
    found = []
    for plane in planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        device = prefix + plane.name.removeprefix("/device:GPU:")
        for line in plane.lines:
            # Other lines repeat the streams' events by module, step or scope.
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                op = _instruction(programs, stats, str(stats.get("hlo_op", "")))
                stage, is_exchange = _stage(event.name, op)
                found.append(_event(device, stage, is_exchange, event))
    return found


def cpu_events(planes: Iterable, programs: dict, prefix: str = "") -> list[Event]:
    """The instructions of every CPU device; an asynchronous one until its end."""
    begun, ends = [], {}
    starts: dict[tuple, list[float]] = {}  # by run, device and instruction
    for plane in planes:
        if plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            if line.name == "python":
                continue
            for event in line.events:
                stats = dict(event.stats)
                if event.name.startswith("end: "):
                    ends[stats.get("_c")] = event.start_ns
                elif "device_ordinal" in stats and "hlo_op" in stats:
                    begun.append((event, stats))
                    starts.setdefault(_key(stats, event.name), []).append(
                        event.start_ns
                    )
    found = []
    for event, stats in begun:
        op = _instruction(programs, stats, event.name)
        opcode = op.opcode if op else event.name.split(".")[0]
        if opcode in _CONTAINERS:
            continue
        stage, is_exchange = _stage(event.name, op)
        stop = event.start_ns + event.duration_ns
        if is_exchange:
            used = [
                start
                for user in (op.users if op else ())
                for start in starts.get(_key(stats, user), ())
                if start > event.start_ns
            ]
            stop = min([ends.get(stats.get("_p"), stop), *used])
        device = f"{prefix}{stats['device_ordinal']}"
        found.append(_event(device, stage, is_exchange, event, stop))
    return found


def host_spans(planes: Iterable) -> list[Span]:
    """The annotations `ISSUE` and `WAIT`, of the thread that made them."""
    names = {ISSUE: "issue", WAIT: "wait"}
    return [
        Span(
            "host",
            names[event.name],
            names[event.name],
            event.start_ns / 1e9,
            (event.start_ns + event.duration_ns) / 1e9,
        )
        for plane in planes
        if plane.name == "/host:CPU"
        for line in plane.lines
        for event in line.events
        if event.name in names
    ]


def _event(device, stage, is_exchange, event, stop_ns=None) -> Event:
    if stop_ns is None:
        stop_ns = event.start_ns + event.duration_ns
    return Event(
        device, stage, is_exchange, event.name, event.start_ns / 1e9, stop_ns / 1e9
    )


def _key(stats: dict, name: str) -> tuple:
    return stats.get("run_id"), stats["device_ordinal"], name


def _instruction(programs, stats: dict, name: str) -> op_names.Instruction | None:
    program = f"{stats.get('hlo_module')}({stats.get('program_id')})"
    return programs.get(program, {}).get(name)


def _stage(name: str, op: op_names.Instruction | None) -> tuple[str, bool]:
    """The stage, and whether it is the exchange itself."""
    ours = _OURS.match(name) or (_OURS.match(op.target) if op else None)
    if ours:
        return ours[1], True
    scopes = _SCOPE.findall(op.op_name) if op else []
    return (scopes[-1].replace("_", " ") if scopes else "other"), False
