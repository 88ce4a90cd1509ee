"""Bytes that an exchange moves: over links, through NICs, in memory, through SMs."""

import dataclasses

from jax_ep.sizing.memory import Shape, handle_bytes, num_domains_of, receive_rows
from jax_ep.sizing.targets import UniformRouting, distinct_ranks, positive

# Bytes of one element, without scales.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "mxfp8": 1}
# Elements that share a scale, and its bytes: `wire="float8_e4m3fn"` and `"mxfp8"`.
_SCALES = {"float8": (128, 4), "mxfp8": (32, 1)}

_LINE = 16  # Leaves of a row, and the weights behind it, start at multiples of it.
_IDS_PER_LINE = 8  # Of the layout: kIdsPerWord in ffi/cuda/workspace.h.


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _leaves(hidden: int, dtype: str) -> list[int]:
    """Bytes of each array's share of a row."""
    positive("row_bytes", hidden=hidden)
    if dtype not in ITEM_BYTES:
        raise ValueError(
            f"jax_ep.sizing.row_bytes: dtype (={dtype!r}) must be one of "
            f"{', '.join(ITEM_BYTES)}."
        )
    leaves = [hidden * ITEM_BYTES[dtype]]
    if dtype in _SCALES:
        block, scale_bytes = _SCALES[dtype]
        leaves.append(-(-hidden // block) * scale_bytes)
    return leaves


def sums_dtype(dtype: str) -> str:
    """The dtype of combine's rows and the backward's: bfloat16 where rows are FP8."""
    return "bfloat16" if dtype in _SCALES else dtype


def row_bytes(hidden: int, dtype: str = "bfloat16") -> int:
    """Bytes of a row in memory.

    Args:
      hidden: H.
      dtype: "float32", "bfloat16", "float16", or rows that `dispatch(..., wire=)`
        quantises: "float8", H bytes and a float32 scale for each 128 of them (1x128
        blocks along the row, as DeepSeek-V3 quantises activations), or "mxfp8", with a
        scale of one byte for each 32.

    Returns:
      Bytes.

    Raises:
      ValueError: another dtype, H below 1.

    Source: DeepSeek-V3 report, section 3.3.2, for the blocks.
    """
    return sum(_leaves(hidden, dtype))


def wire_bytes(hidden: int, dtype: str = "bfloat16", num_weights: int = 0) -> int:
    """Bytes of a row on a link.

    Args:
      hidden: H.
      dtype: as in `row_bytes`.
      num_weights: float32 numbers that travel behind the row: K router weights in a
        dispatch, K gradients of them in its backward, 0 otherwise.

    Returns:
      Each array's share and the weights, each rounded up to 16 bytes.

    Raises:
      ValueError: as `row_bytes`.

    Source: `MakeWire` and `DispatchWire` in ffi/cuda/workspace.h.
    """
    return sum(map(_align, _leaves(hidden, dtype))) + _align(4 * num_weights)


def rail_bytes(hidden: int, dtype: str = "bfloat16", num_weights: int = 0) -> int:
    """Bytes of a row between domains: XLA's collective carries arrays as they are.

    Args:
      hidden: H.
      dtype: as in `row_bytes`.
      num_weights: as in `wire_bytes`.

    Returns:
      The row and the weights, nothing rounded up; where rows are FP8, values and
      scales each to 16 bytes.

    Raises:
      ValueError: as `row_bytes`.
    """
    leaves = _leaves(hidden, dtype)
    return sum(map(_align, leaves) if dtype in _SCALES else leaves) + 4 * num_weights


def rows_per_token(
    routing: UniformRouting, num_ranks: int, *, domain_size: int | None = None
) -> tuple[float, float]:
    """Rows that leave a rank for each of its tokens, each straight to its rank.

    Args:
      routing: who chooses.
      num_ranks: R.
      domain_size: G, ranks that reach each other over NVLink; None is all R.

    Returns:
      Expected rows inside the domain and out of it, `p * (G - 1)` and `p * (R - G)`
      with p the probability that a token goes to a given rank. Means over ranks; a
      combine has as many on the way back.

    Raises:
      ValueError: R that G does not divide, or that does not fit E.

    Source: DeepEP's direct mode. What crosses with one copy for each domain is in
    `crossing`.
    """
    domain = num_ranks // num_domains_of(num_ranks, domain_size)
    rank = distinct_ranks(routing, num_ranks) / num_ranks
    return rank * (domain - 1), rank * (num_ranks - domain)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Expected bytes of one stage, of one rank.

    Attributes:
      stage: "layout", "dispatch" or "combine".
      link: out of the rank over NVLink (and as many in).
      nic: out of the rank to other domains (and as many in).
      memory: read plus written in its memory.
      written: stored by its SMs to peers and memory. 0 for a layout, as `added`.
      added: read by its SMs to be added up.
    """

    stage: str
    link: float
    nic: float
    memory: float
    written: float
    added: float


def layout_traffic(shape: Shape) -> Traffic:
    """Bytes of a layout: every rank's ids to every rank, and the handle.

    Args:
      shape: the exchange. Over several domains it is one exchange of all ranks, which
        our kernels do not make: what is saved by `layout_hops`.

    Returns:
      On the link 16 bytes for every 8 of the T*K ids and each other rank. Its time is
      that of its waits, not of these bytes: 21 to 41 us on 2 and 4 H200s.

    Source: ffi/cuda/layout_exchange.cuh; times, examples/benchmarks/results/h200.md.
    """
    num_ids = shape.tokens * shape.routing.num_topk
    block = ids_bytes(num_ids)
    domain = shape.num_ranks // shape.num_domains
    inside, across = domain - 1, shape.num_ranks - domain
    flat = dataclasses.replace(shape, domain_size=None)
    memory = 4 * num_ids + 2 * (inside + across) * block + handle_bytes(flat)
    return Traffic("layout", inside * block, across * block, memory, 0, 0)


def ids_bytes(num_ids: int) -> int:
    """Bytes on the link of a layout's ids to one other rank."""
    return -(-num_ids // _IDS_PER_LINE) * _LINE


def dispatch_traffic(
    shape: Shape, *, dtype: str = "bfloat16", weights: bool = True
) -> Traffic:
    """Bytes of a dispatch, and of the backward of a combine.

    Args:
      shape: the exchange. Over several domains every row goes straight to its rank,
        which our kernels do not do; `dispatch_hops` is what they do.
      dtype: of the rows, see `row_bytes`.
      weights: whether the router's weights travel, K behind each row.

    Returns:
      On the link and the NIC, rows and their weights; in memory the T source rows, the
      ring that rows cross in, written and read, and all C result rows, zeros included;
      through SMs what they store: rows that leave and result rows.

    Raises:
      ValueError: as `rows_per_token` and `row_bytes`.

    Source: the same bytes as the benchmark's floor (examples/benchmarks/README.md).
    """
    row = row_bytes(shape.hidden, dtype)
    wire = wire_bytes(shape.hidden, dtype, shape.routing.num_topk * bool(weights))
    link, nic = _direct(shape, wire)
    rows = receive_rows(shape) * row
    memory = shape.tokens * row + 2 * (link + nic) + rows
    return Traffic("dispatch", link, nic, memory, link + nic + rows, 0)


def combine_traffic(
    shape: Shape, *, dtype: str = "bfloat16", weight_gradients: bool = False
) -> Traffic:
    """Bytes of a combine, and of the backward of a dispatch.

    Args:
      shape: as in `dispatch_traffic`; `combine_hops` is what our kernels do over
        several domains.
      dtype: of the rows: "float32", "bfloat16" or "float16".
      weight_gradients: whether K numbers travel behind each row, as in the backward of
        a dispatch with weights.

    Returns:
      On the link and the NIC, sums of rows; in memory the T*K rows that are added, the
      ring, written and read, and the T results; through SMs what they store, and what
      they read to add: experts' rows, and sums of other ranks.

    Raises:
      ValueError: as `rows_per_token` and `row_bytes`; "float8" or "mxfp8", which
        combine does not take.

    Source: as `dispatch_traffic`.
    """
    sums_only("combine_traffic", dtype)
    row = row_bytes(shape.hidden, dtype)
    extra = shape.routing.num_topk * bool(weight_gradients)
    link, nic = _direct(shape, wire_bytes(shape.hidden, dtype, extra))
    read = shape.tokens * shape.routing.num_topk * row
    results = shape.tokens * row
    memory = read + 2 * (link + nic) + results
    written = link + nic + results
    return Traffic("combine", link, nic, memory, written, read + link + nic)


def sums_only(where: str, dtype: str) -> None:
    """Raises unless combine takes rows of `dtype`."""
    if dtype in _SCALES:
        raise ValueError(
            f"jax_ep.sizing.{where}: dtype (={dtype!r}) must be float32, bfloat16 or "
            "float16: sums are not sent in 8 bits."
        )


def _direct(shape: Shape, wire: int) -> tuple[float, float]:
    inside, across = rows_per_token(
        shape.routing, shape.num_ranks, domain_size=shape.domain_size
    )
    return shape.tokens * inside * wire, shape.tokens * across * wire
