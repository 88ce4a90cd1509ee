"""Rows and seconds of every rank, batch by batch of a routing."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.params import MoEParams
from jax_ep.tools.benchmark import timing
from jax_ep.tools.benchmark.exchanges import AXIS, on_ranks
from jax_ep.tools.benchmark.layer import experts_step
from jax_ep.tools.benchmark.replay import Replay
from jax_ep.tools.benchmark.setting import Bench
from jax_ep.tools.measurement import Load

# Of a sample, about, and samples for each rank and step: there are many of those.
_SECONDS, _REPEATS = 0.02, 3


@dataclasses.dataclass(frozen=True)
class Layouts:
    """What the layout says of every batch.

    Attributes:
      handles: one for each step, over all ranks; with its own groups, and the first
        one's slots.
      rank_rows: `[steps, R]`, rows with a token.
      dropped_rows: `[steps, R]`.
    """

    handles: list[jax_ep.Handle]
    rank_rows: np.ndarray
    dropped_rows: np.ndarray


def layouts(bench: Bench, make_handle: Callable, replay: Replay) -> Layouts:
    """The handles of all steps of a routing, by the compiled `make_handle`."""
    ranks = bench.mesh.size
    handles, rows, dropped = [], [], []
    for ids in replay.ids:
        flat = ids.reshape(-1, bench.layer.topk)
        handle = make_handle(jax.device_put(flat, bench.sharding))
        rows.append(np.asarray(handle.group_counts).reshape(ranks, -1).sum(1))
        dropped.append(np.asarray(handle.num_dropped)[:ranks])
        if handles:  # The experts need sizes alone; all steps' slots may be gigabytes.
            names = ("slot", "slot_rank", "recv_slot")
            slots = {name: getattr(handles[0], name) for name in names}
            handle = dataclasses.replace(handle, **slots)
        handles.append(handle)
    return Layouts(handles, np.stack(rows), np.stack(dropped))


def rank_seconds(
    bench: Bench,
    found: Layouts,
    arrays: dict,
    params: MoEParams,
    tell: Callable[[], None],
) -> list[list[float]]:
    """`[steps, R]`: each rank's experts on its own device, while no other works.

    A program on one device, with the rows' number as an operand: what differs between
    two times of a device is the routing, and nothing waits for another rank.
    """
    ranks = []
    for device in bench.mesh.devices.flat:
        mesh = Mesh(np.array([device]), (AXIS,))
        share = functools.partial(_share, device, mesh)
        # A copy: the program gives its carry away, and the other ranks' need theirs.
        carry = share(arrays["y"]).copy()
        rest = share(arrays["row_weights"]), share(params)
        program = on_ranks(
            lambda *args: experts_step(bench.layer, *args), mesh, donate_argnums=0
        )
        compiled = program.lower(carry, share(found.handles[0]), *rest).compile()
        ranks.append((share, carry, rest, compiled))
    seconds = np.zeros(found.rank_rows.shape)
    # Ranks in turn, so that whatever else the machine does meets all of them.
    for step, handle in enumerate(found.handles):
        for rank, (share, carry, rest, compiled) in enumerate(ranks):
            carry, seconds[step, rank], _ = timing.measure(
                compiled,
                carry,
                (share(handle), *rest),
                count=1,
                seconds=_SECONDS,
                warm_ups=1,
                repeats=_REPEATS,
            )
            ranks[rank] = (share, carry, rest, compiled)
            tell()
    return [[float(time) for time in step] for step in seconds]


def _share(device, mesh: Mesh, tree):
    """What a device holds of arrays over all ranks, as arrays of its own mesh."""
    sharding = NamedSharding(mesh, P(AXIS))

    def share(array):
        (part,) = (s.data for s in array.addressable_shards if s.device == device)
        return jax.make_array_from_single_device_arrays(part.shape, sharding, [part])

    return jax.tree.map(share, tree)


def load(replay: Replay, found: Layouts, seconds: list[list[float]] | None) -> Load:
    """The record of the measurement."""
    return Load(
        expert_rows=replay.demand().tolist(),
        rank_rows=found.rank_rows.tolist(),
        rank_seconds=seconds,
        dropped_rows=found.dropped_rows.tolist(),
    )
