"""Bytes of each of two hops: from the compiled program, and from a handle's counts.

Domains that are emulated on one machine say nothing of a network's speed. What crosses
each hop is the same there, so it is read and counted instead of timed.
"""

import math
import re

import numpy as np

import jax_ep

_CROSSING = re.compile(r"= (.*?) all-to-all\(")
_ARRAY = re.compile(r"[a-z]+(\d+)\w*\[([\d,]*)\]")  # bf16[1,32,20], f8e4m3fn[4], ...


def between_bytes(compiled_text: str, num_domains: int) -> int:
    """Bytes that leave a rank for other domains: every all_to_all of a program.

    Args:
      compiled_text: of `compiled.as_text()`; a loop's body counts once.
      num_domains: D, of whose shares one stays.

    Raises:
      ValueError: a collective whose bytes are no multiple of D.
    """
    total = 0
    for results in _CROSSING.findall(compiled_text):
        for bits, shape in _ARRAY.findall(results):
            total += int(bits) // 8 * math.prod(map(int, shape.split(",")))
    if total % num_domains:
        raise ValueError(f"{total} bytes of all_to_all are not {num_domains} shares.")
    return total // num_domains * (num_domains - 1)


def inside_rows(handle: jax_ep.Handle) -> np.ndarray:
    """`[R]`: rows that leave each rank in hop 2, and come back in a combine.

    Args:
      handle: of two hops, as it leaves the shard_map: all ranks' shares in one.

    Raises:
      ValueError: of one domain.
    """
    if handle.hop is None:
        raise ValueError("A handle of one domain has no second hop.")
    domain_size = handle.exchange.domain_size
    assert domain_size is not None, "Two hops are of a domain size."
    shape = (handle.num_ranks, -1, handle.num_topk)
    kept = np.asarray(handle.hop.slot).reshape(shape) >= 0
    owner = np.asarray(handle.hop.slot_rank).reshape(shape)
    rows = np.zeros(handle.num_ranks, np.int64)
    own = np.arange(handle.num_ranks)[:, None] % domain_size
    for rank in range(domain_size):
        goes = (kept & (owner == rank)).any(axis=2)
        rows += (goes & (own != rank)).sum(axis=1)
    return rows
