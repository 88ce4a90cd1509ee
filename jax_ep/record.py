"""Recording the routing of a training run; `recording.py` says what is in the file."""

import dataclasses
import json
import math
import os
import queue
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.exchange import MAX_EXPERTS
from jax_ep.recording import (
    END,
    FORMAT,
    HEADER,
    METADATA,
    Metadata,
    Record,
    Recording,
    checksum_of,
    ids,
    partial_path,
    read,
)

__all__ = ["Metadata", "Record", "Recorder", "Recording", "ids", "read"]

_LEVEL = 1  # Ids of a trained router hardly repeat: more effort saves a few percent.
# Steps that wait for the writer. A program that is further ahead waits for it in `add`.
_MAX_PENDING = 64


class Recorder:
    """Writes the expert ids of a training run into a file, beside the run.

    Use it as a context manager, outside of jit; `add` each step's ids, which come from
    the layer, e.g. `MoEStats.topk_idx`. Copies from the devices are asynchronous, and
    a thread of its own compresses and writes: a step pays for starting the copies. Of
    several processes, one records.

    The file appears when the recorder is closed, also by an exception. Until then, and
    for good if the process is killed, `<name>.partial` holds what was written; `read`
    reads it too.

    Args:
      path: of the file; neither it nor `<name>.partial` may exist.
      num_experts: E. Ids take one byte each up to 254 experts, else two, before
        compression.
      shares: see `Metadata`; None is `{axis_name: 1}`.
      axis_name: the expert axis.
      model: any text, e.g. the model's name.
      every: records the steps that this divides.
      max_bytes: no step is recorded that would make the file larger.

    Raises:
      ValueError: an argument out of range. FileExistsError: see `path`. OSError: the
        file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        num_experts: int,
        shares: Mapping[str, int] | None = None,
        axis_name: str = "expert",
        model: str = "",
        every: int = 1,
        max_bytes: int | None = None,
    ):
        shares = {axis_name: 1} if shares is None else dict(shares)
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise ValueError(
                f"jax_ep.record: num_experts (={num_experts}) must be from 1 to "
                f"{MAX_EXPERTS}."
            )
        if every < 1:
            raise ValueError(f"jax_ep.record: every (={every}) must be at least 1.")
        if axis_name not in shares:
            raise ValueError(
                f'jax_ep.record: axis_name (="{axis_name}") must be one of shares, '
                f"which has {list(shares)}."
            )
        self.metadata = Metadata(num_experts, shares, axis_name, model)
        self.every = every
        self._path = Path(path)
        self._partial = partial_path(path)
        if self._path.exists():
            raise FileExistsError(
                17, "exists, and a recording does not replace it", str(self._path)
            )
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._is_full = False
        self._error: BaseException | None = None
        self._file = open(self._partial, "xb")
        self._file.write(FORMAT)
        text = json.dumps(dataclasses.asdict(self.metadata))
        self._write(METADATA, zlib.compress(text.encode()))
        self._queue: queue.Queue = queue.Queue(_MAX_PENDING)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="jax_ep.record", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def is_full(self) -> bool:
        """Whether a step was left out because of `max_bytes`; all later ones are."""
        return self._is_full

    def add(self, step: int, topk_idx: Mapping[str, jax.Array] | jax.Array) -> None:
        """Starts to copy one step's ids to the host, and returns.

        It does not wait for the devices: the ids may not have been computed yet. (It
        waits for the writer where that is 64 recorded steps behind.)

        Args:
          step: at least 0; a step that `every` does not divide is passed over.
          topk_idx: `[..., K]` for each layer, global, of any integer dtype; or one
            array `[layers, ..., K]`, whose layers are named "0", "1", ... The arrays
            must not be donated to a later call.

        Raises:
          ValueError: a closed recorder, a negative step, an array of another shape or
            dtype, or one of which this process holds a part only. TypeError: what is
            no `jax.Array`. OSError: the file could not be written.
        """
        if self._thread is None:
            raise ValueError("jax_ep.record: the recorder is closed.")
        if step < 0:
            raise ValueError(f"jax_ep.record: step (={step}) must be at least 0.")
        self._raise()
        if step % self.every or self._is_full:
            return
        is_stacked = not isinstance(topk_idx, Mapping)
        arrays = {"all": topk_idx} if is_stacked else dict(topk_idx)
        for name, array in arrays.items():
            what = f'jax_ep.record: topk_idx of layer "{name}"'
            if not isinstance(array, jax.Array):
                raise TypeError(
                    f"{what} must be a jax.Array, got {type(array).__name__}."
                )
            shape = "[layers, ..., K]" if is_stacked else "[..., K]"
            if array.ndim < 1 + is_stacked or not jnp.issubdtype(
                array.dtype, jnp.integer
            ):
                raise ValueError(
                    f"{what} ({array.dtype}{list(array.shape)}) must be {shape} of an "
                    "integer dtype."
                )
            if not (array.is_fully_addressable or array.is_fully_replicated):
                raise ValueError(
                    f"{what} must be held by this process whole: gather it, e.g. by an "
                    "out_sharding of P()."
                )
            array.copy_to_host_async()
        self._queue.put((step, arrays, is_stacked))

    def close(self) -> None:
        """Writes what has been added, and gives the file its name."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join()
        self._thread = None
        with self._file:
            self._raise()
            self._write(END, b"")
        self._partial.replace(self._path)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None and not self._is_full:
                try:
                    self._record(*item)
                except BaseException as error:
                    self._error = error  # for the next `add`, or `close`

    def _record(
        self, step: int, arrays: dict[str, jax.Array], is_stacked: bool
    ) -> None:
        # Waits for the devices.
        found = {name: self._small(np.asarray(a)) for name, a in arrays.items()}
        if is_stacked:
            found = {str(n): layer for n, layer in enumerate(found["all"])}
        head = {name: [a.dtype.name, *a.shape] for name, a in found.items()}
        parts = [json.dumps(head).encode() + b"\n"]
        parts += [a.tobytes() for a in found.values()]
        payload = zlib.compress(b"".join(parts), _LEVEL)
        # The last frame must fit too.
        size = self._file.tell() + len(payload) + 2 * HEADER.size
        if size > self._max_bytes:
            self._is_full = True
        else:
            self._write(step, payload)

    def _small(self, topk_idx: np.ndarray) -> np.ndarray:
        """0 for masked, then the experts, then E + 1 for what is none."""
        num_experts = self.metadata.num_experts
        small = np.uint8 if num_experts + 1 < 2**8 else np.uint16
        return (np.clip(topk_idx, -1, num_experts) + 1).astype(small)

    def _write(self, step: int, payload: bytes) -> None:
        header = HEADER.pack(len(payload), checksum_of(step, payload), step)
        self._file.write(header + payload)
        self._file.flush()
