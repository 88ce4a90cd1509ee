"""Reading a recorded routing back: the file, its steps, and ids to replay.

A file is a line that names the format, then frames: a header of three numbers (bytes of
the payload, the CRC-32 of the frame's other parts, the step) and the payload. The first
frame is the metadata, the last one says that the recording was closed. Whatever ends a
run, all frames before the last write are whole.
"""

import dataclasses
import json
import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

FORMAT = b"jax_ep routing 2\n"
HEADER = struct.Struct("<IIq")  # bytes of the payload, checksum, step
METADATA, END = -1, -2  # in place of a step


def checksum_of(step: int, payload: bytes) -> int:
    """Of a frame."""
    return zlib.crc32(payload, zlib.crc32(HEADER.pack(len(payload), 0, step)))


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a recording says of the run.

    Attributes:
      num_experts: E.
      shares: the mesh axes that tokens were split over, in the mesh's order, and their
        sizes: tokens are split evenly, and the last axis varies fastest.
      axis_name: the one of them that is the expert axis.
      model: any text of the user's.
    """

    num_experts: int
    shares: dict[str, int]
    axis_name: str
    model: str


@dataclasses.dataclass(frozen=True)
class Record:
    """The routing of one step.

    Attributes:
      step: as given to `Recorder.add`.
      topk_idx: `[..., K]` int32 for each layer, -1 where masked; an id that was at
        least E is E.
    """

    step: int
    topk_idx: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recording:
    """A file that a `Recorder` wrote; iterating reads its `Record`s in their order.

    Attributes:
      path: of the file.
      metadata: of the run.
      steps: that were recorded.
      is_complete: False where the recorder was not closed: the run was killed, or goes
        on. `steps` are then the whole ones.
      offsets: where each step's frame lies in the file.
    """

    path: Path
    metadata: Metadata
    steps: tuple[int, ...]
    is_complete: bool
    offsets: tuple[int, ...] = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Record]:
        with open(self.path, "rb") as file:
            for offset in self.offsets:
                file.seek(offset)
                step, payload = _frame(self.path, file)
                yield Record(step, _arrays(payload))


def partial_path(path: str | os.PathLike) -> Path:
    """`<name>.partial`: where a recording is until it is closed."""
    return Path(path).with_name(Path(path).name + ".partial")


def read(path: str | os.PathLike) -> Recording:
    """Opens a recording, closed or not. Ids are read when it is iterated over.

    Args:
      path: of a file, or of a `.partial`; an incomplete one gives a warning that says
        how many steps are whole.

    Returns:
      The `Recording`.

    Raises:
      FileNotFoundError: no such file. ValueError: it is no recording, or its metadata
        is damaged. (A damaged step raises when it is read.)
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(FORMAT)) != FORMAT:
            raise ValueError(f"{path}: not a recording of jax_ep.")
        steps, offsets, is_complete = [], [], False
        while not is_complete and (header := file.read(HEADER.size)):
            if len(header) < HEADER.size:
                break
            length, _, step = HEADER.unpack(header)
            start = file.tell() - HEADER.size
            if start + HEADER.size + length > size:
                break
            offsets.append(start)
            steps.append(step)
            is_complete = step == END
            file.seek(length, os.SEEK_CUR)
        if not steps or steps[0] != METADATA:
            raise ValueError(f"{path}: not a recording of jax_ep: it has no metadata.")
        file.seek(offsets[0])
        metadata = Metadata(**json.loads(zlib.decompress(_frame(path, file)[1])))
    last = -1 if is_complete else None
    if not is_complete:
        warnings.warn(
            f"{path}: this recording was not closed; {len(steps) - 1} steps of it are "
            "whole.",
            stacklevel=2,
        )
    return Recording(
        path, metadata, tuple(steps[1:last]), is_complete, tuple(offsets[1:last])
    )


def ids(
    recording: Recording,
    *,
    layer: str | int,
    step: int | None = None,
    num_ranks: int | None = None,
) -> np.ndarray:
    """A layer's ids as `dispatch_layout` takes them, for one exchange after another.

    Args:
      recording: from `read`.
      layer: its name in the recording.
      step: one step; None is all of them.
      num_ranks: R. None is that of the run: then each group of ranks (each share of the
        data axes) is an exchange of its own. Otherwise a step's tokens, in their order,
        are split over R ranks.

    Returns:
      `[exchanges, R, T, K]` int32, -1 where masked.

    Raises:
      ValueError: a layer or step that was not recorded; tokens that R does not divide;
        steps of different shapes.
    """
    wanted = [record for record in recording if step is None or record.step == step]
    if not wanted:
        raise ValueError(
            f"{recording.path}: step (={step}) must be one of the {len(recording)} "
            f"recorded ones, from {min(recording.steps, default=None)} to "
            f"{max(recording.steps, default=None)}."
        )
    exchanges = []
    for record in wanted:
        if str(layer) not in record.topk_idx:
            raise ValueError(
                f"{recording.path}: layer (={layer}) must be one of "
                f"{list(record.topk_idx)}."
            )
        found = record.topk_idx[str(layer)]
        tokens = found.reshape(-1, found.shape[-1])
        shares = recording.metadata.shares
        if num_ranks is not None:
            shares = {recording.metadata.axis_name: num_ranks}
        exchanges.append(_split(recording, tokens, shares))
    shapes = sorted({one.shape[1:] for one in exchanges})
    if len(shapes) > 1:
        raise ValueError(
            f"{recording.path}: layer {layer} has steps of different shapes [R, T, K], "
            f"{shapes}: choose one step."
        )
    return np.concatenate(exchanges)


def _split(recording: Recording, tokens: np.ndarray, shares: dict[str, int]):
    """`[G, R, T, K]` from a step's `[tokens, K]`."""
    num_shares = math.prod(shares.values())
    if len(tokens) % num_shares:
        raise ValueError(
            f"{recording.path}: {len(tokens)} tokens of a step cannot be split over "
            f"{num_shares} ranks evenly."
        )
    axis = list(shares).index(recording.metadata.axis_name)
    split = tokens.reshape(*shares.values(), len(tokens) // num_shares, -1)
    split = np.moveaxis(split, axis, -3)  # [other axes, R, T, K]
    return split.reshape(-1, *split.shape[-3:])


def _frame(path: Path, file: BinaryIO) -> tuple[int, bytes]:
    """Step and payload of the frame that starts here."""
    start = file.tell()
    length, checksum, step = HEADER.unpack(file.read(HEADER.size))
    payload = file.read(length)
    if len(payload) < length or checksum_of(step, payload) != checksum:
        raise ValueError(
            f"{path}: this recording is damaged: the {length} bytes of step {step} "
            f"at byte {start} do not have their checksum."
        )
    return step, payload


def _arrays(payload: bytes) -> dict[str, np.ndarray]:
    head, _, data = zlib.decompress(payload).partition(b"\n")
    arrays, start = {}, 0
    for name, (dtype, *shape) in json.loads(head).items():
        count = math.prod(shape)
        stored = np.frombuffer(data, dtype, count, start).reshape(shape)
        arrays[name] = stored.astype(np.int32) - 1
        start += stored.nbytes
    return arrays
