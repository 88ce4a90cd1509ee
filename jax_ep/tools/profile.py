"""A JAX profile, read for our stages: how long, how often, and beside what.

A profile is the folder that `jax.profiler.trace` wrote; `profile_events.py` says which
of its events count, and as what.
"""

import bisect
import dataclasses
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax

from jax_ep.tools import op_names
from jax_ep.tools.console import UserError
from jax_ep.tools.measurement import Span
from jax_ep.tools.profile_events import (
    STAGES,
    Event,
    cpu_events,
    gpu_events,
    host_spans,
)

_GAP = 20e-6  # seconds between two kernels that a reader takes for one piece of work


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device did.

    Attributes:
      device: see `Event`.
      seconds, counts: of events, by stage; exchanges alone in theirs.
      communication_seconds, compute_seconds: in which some exchange, or something
        else, was under way.
      overlapped_seconds: in which both were.
    """

    device: str
    seconds: dict[str, float]
    counts: dict[str, int]
    communication_seconds: float
    compute_seconds: float
    overlapped_seconds: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """Of all devices of a profile.

    Attributes:
      path: the folder or file that was read.
      platform: "cpu" or "gpu".
      devices: one for each device.
      events: of all devices, by start.
      host: spans of the annotations `ISSUE` and `WAIT`.
    """

    path: str
    platform: str
    devices: list[Device]
    events: list[Event]
    host: list[Span]

    def spans(self, start: float = 0.0, stop: float = float("inf")) -> list[Span]:
        """The timeline of what lies between two times, its zero the first of them.

        Kernels of one stage that follow one another closely are one span; exchanges
        have one each.
        """
        found = [
            dataclasses.replace(span, start=span.start - start, stop=span.stop - start)
            for span in self.host
            if start <= span.start and span.stop <= stop
        ]
        latest: dict[tuple, int] = {}  # where in `found` the lane's last one is
        for event in self.events:
            if event.start < start or event.stop > stop:
                continue
            name = event.stage if event.stage != "other" else "other compute"
            span = Span(
                f"rank {event.device}",
                event.kind,
                name,
                event.start - start,
                event.stop - start,
            )
            key = (span.lane, span.kind, span.name)
            last = found[latest[key]] if key in latest else None
            if last and not event.is_exchange and span.start - last.stop <= _GAP:
                longer = max(last.stop, span.stop)
                found[latest[key]] = dataclasses.replace(last, stop=longer)
            else:
                latest[key] = len(found)
                found.append(span)
        return found


def read(path: str | Path) -> Profile:
    """The newest profile in a folder.

    Args:
      path: what `jax.profiler.trace` was given, any folder inside it, or an .xplane.pb
        file.

    Raises:
      UserError: no such folder, no profile in it, or none of our calls in the profile.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder.")
    files = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"))
    if not files:
        raise UserError(
            f"{path}: no profile: there is no .xplane.pb file in it, which "
            "jax.profiler.trace writes."
        )
    # A folder holds a folder for each run, named by time, with a file for each host.
    files = [file for file in files if file.parent == files[-1].parent]
    events, host, platform = [], [], "cpu"
    for file in files:
        try:
            programs = op_names.programs(file.read_bytes())
            data = jax.profiler.ProfileData.from_file(str(file))
        except (ValueError, RuntimeError) as error:
            raise UserError(f"{file}: not a profile: {error}.") from None
        prefix = f"{file.name.removesuffix('.xplane.pb')} " if len(files) > 1 else ""
        # jaxlib 0.11's statistics lack a __module__, which Python deprecates.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*__module__")
            planes = list(data.planes)
            if any(plane.name.startswith("/device:GPU:") for plane in planes):
                platform = "gpu"
                events += gpu_events(planes, programs, prefix)
            else:
                events += cpu_events(planes, programs, prefix)
            host += host_spans(planes)
    if not any(event.is_exchange for event in events):
        raise UserError(
            f"{path}: no layout, dispatch or combine of jax_ep ran in this profile."
        )
    events.sort(key=lambda event: (event.start, event.stop))
    return Profile(str(path), platform, devices(events), events, host)


def devices(events: list[Event]) -> list[Device]:
    """Sums of each device's events."""
    found = []
    for device in sorted({event.device for event in events}):
        mine = [event for event in events if event.device == device]
        seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        counts: dict[str, int] = dict.fromkeys(STAGES, 0)
        for event in mine:
            seconds[event.stage] += event.stop - event.start
            counts[event.stage] += 1
        communication = union(e for e in mine if e.is_exchange)
        compute = union(e for e in mine if not e.is_exchange)
        found.append(
            Device(
                device,
                seconds,
                counts,
                sum(stop - start for start, stop in communication),
                sum(stop - start for start, stop in compute),
                shared_seconds(communication, compute),
            )
        )
    return found


def union(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The times in which at least one of the events runs, in order, disjoint."""
    found: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if found and event.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], event.stop))
        else:
            found.append((event.start, event.stop))
    return found


def shared_seconds(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """How long both are under way, of two lists as `union` makes them."""
    stops = [stop for _, stop in b]
    total = 0.0
    for start, stop in a:
        for other in b[bisect.bisect_right(stops, start) :]:
            if other[0] >= stop:
                break
            total += min(stop, other[1]) - max(start, other[0])
    return total
