"""What `bench` measures and `report` reads: one JSON document, checked when read.

Times are seconds, sizes bytes, rates bytes per second. A None was not measured. A rank
is a position on the expert axis.
"""

import dataclasses
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any

FORMAT = "jax_ep measurement 1"


@dataclasses.dataclass(frozen=True)
class Layer:
    """The shapes of one exchange.

    Attributes:
      tokens: T, per rank.
      hidden: H.
      expert_hidden: F.
      topk: K.
      experts: E.
      ranks: R.
      capacity: C, rows of a rank's receive buffer.
      expert_alignment: A.
      dtype: of the rows.
    """

    tokens: int
    hidden: int
    expert_hidden: int
    topk: int
    experts: int
    ranks: int
    capacity: int
    expert_alignment: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this machine gives a kernel that only moves rows, in the same run.

    Attributes:
      egress: out of one rank to all others at once; None where there is no link (CPU
        devices of one process).
      ingress: into one rank from all others at once.
      memory: of one rank's memory, read plus written; of CPU devices, of all of them,
        at as many bytes as an exchange writes.
    """

    egress: float | None
    ingress: float | None
    memory: float


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One stage: how long, how many bytes, and which part of it waits for what.

    Attributes:
      stage: "layout", "dispatch", "combine", "dispatch backward", "combine backward".
      seconds: of one call, device time, of the slowest rank; without stamps.
      spread: largest minus smallest sample, over the median.
      egress_bytes, ingress_bytes: over the busiest rank's link; None for a layout, and
        for CPU devices, which have none.
      memory_bytes: read plus written in the busiest rank's memory; of CPU devices, of
        all of them. None for a layout.
      floor_seconds: of the slowest of these at the ceilings.
      logical_bytes: a row for each (token, rank) pair that the busiest rank receives
        (in combine: sends back), those that stay on the rank too: what DeepEP's
        published "logical bandwidth" divides by the time (tests/elastic/test_ep.py,
        num_scaleup_bytes). None for a layout.
      phases: of the profiling build, per rank: seconds of "issue" (until the last send
        is issued), "drain" (until the last row has arrived) and "epilogue" (until the
        last row is in its place); on CPU devices "wait" (for the last rank), "copy".
      stamped_seconds: of the profiling build; over `seconds`, the cost of stamping.
    """

    stage: str
    seconds: float
    spread: float
    egress_bytes: int | None
    ingress_bytes: int | None
    memory_bytes: int | None
    floor_seconds: float | None
    logical_bytes: int | None
    phases: list[dict[str, float]] | None
    stamped_seconds: float | None


@dataclasses.dataclass(frozen=True)
class Load:
    """Rows and seconds of every rank, for each batch of the routing.

    Attributes:
      expert_rows: `[steps, E]`, rows wanted per expert, over all source ranks.
      rank_rows: `[steps, R]`, rows with a token that each rank got.
      rank_seconds: `[steps, R]`, time of each rank's experts on its own rows, without
        waiting for others.
      dropped_rows: `[steps, R]`.
    """

    expert_rows: list[list[int]]
    rank_rows: list[list[int]]
    rank_seconds: list[list[float]] | None
    dropped_rows: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of the timeline of one step.

    Attributes:
      lane: "host", or "rank 0", "rank 1", ...
      kind: "communication", "compute", "issue" or "wait".
      name: what a reader calls it: "dispatch", "experts", "shared expert", ...
      start, stop: seconds since the step began.
    """

    lane: str
    kind: str
    name: str
    start: float
    stop: float


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Communication beside compute that does not depend on it.

    Attributes:
      communication_seconds: of a program with layout, dispatch and combine alone.
      compute_seconds: of a program with the experts alone.
      independent_seconds: of a program with only the compute that needs no exchange (a
        shared expert).
      serial_seconds: their sum, what a step takes when nothing overlaps.
      ideal_seconds: what it would take if the independent compute hid as much of the
        communication as it can.
      measured_seconds: of the program with all three.
      spans: the timeline of one measured step.
    """

    communication_seconds: float
    compute_seconds: float
    independent_seconds: float
    serial_seconds: float
    ideal_seconds: float
    measured_seconds: float
    spans: list[Span]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One run.

    Attributes:
      about: date, command, device, platform ("cpu" or "gpu"), versions: texts.
      layer: the shapes.
      routing: "uniform", "zipf", "one-hot", or the name of a recorded file.
      ceilings: None where they were not measured.
      exchanges: a record for each stage.
      load: and padding, which follows from it.
      overlap: None where it was not measured.
    """

    about: dict[str, str]
    layer: Layer
    routing: str
    ceilings: Ceilings | None
    exchanges: list[Exchange]
    load: Load
    overlap: Overlap | None

    def write(self, path: str | os.PathLike) -> None:
        """Writes the document whole, or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)
        partial.write_text(text)
        partial.replace(path)


def read(path: str | os.PathLike) -> Measurement:
    """The measurement that `write` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is no measurement; the message names what is missing or has
        another type.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a measurement of jax_ep: {error}.") from None
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f'{path}: not a measurement of jax_ep ("format": "{FORMAT}").')
    measured = _build(Measurement, found, str(path))
    _check(measured, str(path))
    return measured


def _check(found: Measurement, where: str) -> None:
    """What types do not say: something was measured, and in what shapes."""
    layer, load = found.layer, found.load
    least = min(v for v in dataclasses.astuple(layer) if isinstance(v, int))
    if least < 1:
        raise ValueError(f"{where}: layer: expected sizes from 1 on, got {least}.")
    steps = len(load.expert_rows)
    for name, width in (
        ("expert_rows", layer.experts),
        ("rank_rows", layer.ranks),
        ("rank_seconds", layer.ranks),
        ("dropped_rows", layer.ranks),
    ):
        rows = getattr(load, name)
        if rows is None:
            continue
        if not rows or len(rows) != steps or any(len(row) != width for row in rows):
            raise ValueError(
                f"{where}: load: expected {name} [{max(steps, 1)}, {width}]."
            )
    if not found.exchanges:
        raise ValueError(f"{where}: exchanges: expected at least one.")
    for each in found.exchanges:
        if not 0 < each.seconds < math.inf:
            raise ValueError(
                f"{where}: exchanges: expected positive seconds of {each.stage}, got "
                f"{each.seconds}."
            )


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value`, from JSON, as the annotated type `kind`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            got = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{where}: expected {sorted(hints)}, got {got}.")
        fields = {k: _build(hints[k], v, f"{where}: {k}") for k, v in value.items()}
        return typing.cast(type, kind)(**fields)
    if origin is types.UnionType:
        if value is None:
            return None
        (kind,) = (arg for arg in args if arg is not type(None))
        return _build(kind, value, where)
    if origin is list and isinstance(value, list):
        return [_build(args[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {k: _build(args[1], v, f"{where}: {k}") for k, v in value.items()}
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is kind:
        return value
    raise ValueError(f"{where}: expected {kind}, got {value!r}.")
