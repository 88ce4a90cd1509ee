"""When the phases of an exchange began and ended, for tools that measure.

Calls whose handle has `stamps` set note it: kernels compiled for the purpose in the
symmetric workspace, per block; host handlers in memory of the process. Nothing that a
call returns depends on it.
"""

import dataclasses

import numpy as np

from jax_ep import _ffi
from jax_ep.layout import Handle


@dataclasses.dataclass(frozen=True)
class Stamps:
    """The phases of the latest stamped call of a stage on one rank of this process.

    Attributes:
      stage: "layout", "dispatch" or "combine"; a backward counts as the stage it runs.
      rank: on the expert axis.
      device: ordinal in this process.
      names: on CUDA "began", "last_send" (the last piece was handed to the link),
        "last_arrival" (the last piece of another rank was there), in the layout
        "planned" (first rows known), and "last_row" (results written); on CPU devices
        "arrived" (this rank called), "began" (the last rank had) and "ended".
      times: `[blocks, len(names)]` int64, nanoseconds. CPU devices have one block and
        one clock. A GPU's clock is its own: compare times of one device only. 0 where a
        block did nothing of the kind.
    """

    stage: str
    rank: int
    device: int
    names: tuple[str, ...]
    times: np.ndarray

    def seconds(self, begin: str, end: str) -> float:
        """From the first block's `begin` to the last block's `end`.

        Raises:
          ValueError: no block has such a stamp.
        """
        first, last = (
            self.times[:, [n == name for n in self.names]] for name in (begin, end)
        )
        if not first.any() or not last.any():
            raise ValueError(
                f"jax_ep.stamps: {self.stage} of rank {self.rank} has no stamps "
                f"{begin!r} and {end!r}; its names are {self.names}."
            )
        return float(last.max() - first[first > 0].min()) / 1e9


def with_stamps(handle: Handle) -> Handle:
    """The handle whose later calls are stamped; other kernels are compiled for them."""
    exchange = dataclasses.replace(handle.exchange, stamps=True)
    return dataclasses.replace(handle, exchange=exchange)


def read_stamps() -> list[Stamps]:
    """The stamps of this process's devices since the last time, then forgets them.

    Call it after `jax.block_until_ready` on the results of the stamped calls. Of
    several calls of a stage the latest counts.

    Raises:
      RuntimeError: the device's memory cannot be read.
    """
    return [
        Stamps(
            stage,
            rank,
            device,
            tuple(names),
            np.array(times, np.int64).reshape(-1, len(names)),
        )
        for stage, rank, device, names, times in _ffi.take_stamps()
    ]
