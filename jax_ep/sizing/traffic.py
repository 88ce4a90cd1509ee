"""Bytes that an exchange moves: over links, through NICs, in memory, through SMs."""

import dataclasses

from jax_ep.sizing.memory import Shape, handle_bytes, receive_rows
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


def rows_per_token(
    routing: UniformRouting,
    num_ranks: int,
    *,
    domain_size: int | None = None,
    forward: bool = False,
) -> tuple[float, float]:
    """Rows that leave a rank for each of its tokens, inside its domain and out of it.

    With p the probability that a token goes to a given rank, q to a given domain, and D
    domains of N ranks:

    - direct: `p * (N - 1)` inside and `p * (R - N)` across, a copy for each rank;
    - forwarded: `q * (D - 1)` across, one copy for each domain, to the rank there with
      the sender's place, which sends it on: `p * (N - 1) * D` inside, the rank's own
      rows and those it forwards.

    Args:
      routing: who chooses.
      num_ranks: R.
      domain_size: N, ranks that reach each other over NVLink; None is all R.
      forward: one copy for each domain.

    Returns:
      Expected rows (inside, across), means over ranks. A combine has as many on the
      way back, where a forwarding rank adds rows before it sends one on.

    Raises:
      ValueError: R that N does not divide, or R or R/N that do not fit E.

    Source: DeepEP's direct and hybrid modes; one copy for each node is the
    node-limited routing of DeepSeek-V3 (report, section 3.2.2).
    """
    num_domains = _num_domains(num_ranks, domain_size)
    domain = num_ranks // num_domains
    rank = distinct_ranks(routing, num_ranks) / num_ranks
    if not forward or num_domains == 1:
        return rank * (domain - 1), rank * (num_ranks - domain)
    if routing.num_experts % num_domains and num_domains % routing.num_experts:
        raise ValueError(
            f"jax_ep.sizing.rows_per_token: the {num_domains} domains of "
            f"{domain_size} ranks must divide num_experts (={routing.num_experts}), or "
            "be a multiple of it."
        )
    node = distinct_ranks(routing, num_domains) / num_domains
    return rank * (domain - 1) * num_domains, node * (num_domains - 1)


def _num_domains(num_ranks: int, domain_size: int | None) -> int:
    positive("rows_per_token", num_ranks=num_ranks)
    if domain_size is None:
        return 1
    positive("rows_per_token", domain_size=domain_size)
    if num_ranks <= domain_size:
        return 1
    if num_ranks % domain_size:
        raise ValueError(
            f"jax_ep.sizing.rows_per_token: num_ranks (={num_ranks}) must be a "
            f"multiple of domain_size (={domain_size}), or at most that."
        )
    return num_ranks // domain_size


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


def layout_traffic(
    shape: Shape, *, domain_size: int | None = None, forward: bool = False
) -> Traffic:
    """Bytes of a layout: every rank's ids to every rank, and the handle.

    Args:
      shape: the exchange.
      domain_size: N; None is one domain.
      forward: one copy for each domain, as in `rows_per_token`.

    Returns:
      On the link 16 bytes for every 8 of the T*K ids and each other rank. Its time is
      that of its waits, not of these bytes: 21 to 41 us on 2 and 4 H200s.

    Raises:
      ValueError: as `rows_per_token`.

    Source: ffi/cuda/layout_exchange.cuh; times, examples/benchmarks/results/h200.md.
    """
    num_ids = shape.tokens * shape.routing.num_topk
    block = -(-num_ids // _IDS_PER_LINE) * _LINE
    num_domains = _num_domains(shape.num_ranks, domain_size)
    domain = shape.num_ranks // num_domains
    inside, across = domain - 1, shape.num_ranks - domain
    if forward and num_domains > 1:
        inside, across = (domain - 1) * num_domains, num_domains - 1
    memory = 4 * num_ids + 2 * (inside + across) * block + handle_bytes(shape)
    return Traffic("layout", inside * block, across * block, memory, 0, 0)


def dispatch_traffic(
    shape: Shape,
    *,
    dtype: str = "bfloat16",
    weights: bool = True,
    domain_size: int | None = None,
    forward: bool = False,
) -> Traffic:
    """Bytes of a dispatch, and of the backward of a combine.

    Args:
      shape: the exchange.
      dtype: of the rows, see `row_bytes`.
      weights: whether the router's weights travel, K behind each row.
      domain_size: N; None is one domain.
      forward: one copy for each domain, as in `rows_per_token`.

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
    link, nic = _crossing(shape, wire, domain_size, forward)
    rows = receive_rows(shape) * row
    memory = shape.tokens * row + 2 * (link + nic) + rows
    return Traffic("dispatch", link, nic, memory, link + nic + rows, 0)


def combine_traffic(
    shape: Shape,
    *,
    dtype: str = "bfloat16",
    weight_gradients: bool = False,
    domain_size: int | None = None,
    forward: bool = False,
) -> Traffic:
    """Bytes of a combine, and of the backward of a dispatch.

    Args:
      shape: the exchange.
      dtype: of the rows: "float32", "bfloat16" or "float16".
      weight_gradients: whether K numbers travel behind each row, as in the backward of
        a dispatch with weights.
      domain_size: N; None is one domain.
      forward: one row for each domain.

    Returns:
      On the link and the NIC, sums of rows; in memory the T*K rows that are added, the
      ring, written and read, and the T results; through SMs what they store, and what
      they read to add: experts' rows, and sums of other ranks.

    Raises:
      ValueError: as `rows_per_token` and `row_bytes`; "float8" or "mxfp8", which
        combine does not take.

    Source: as `dispatch_traffic`.
    """
    if dtype in _SCALES:
        raise ValueError(
            f"jax_ep.sizing.combine_traffic: dtype (={dtype!r}) must be float32, "
            "bfloat16 or float16: sums are not sent in 8 bits."
        )
    row = row_bytes(shape.hidden, dtype)
    extra = shape.routing.num_topk * bool(weight_gradients)
    link, nic = _crossing(
        shape, wire_bytes(shape.hidden, dtype, extra), domain_size, forward
    )
    read = shape.tokens * shape.routing.num_topk * row
    results = shape.tokens * row
    memory = read + 2 * (link + nic) + results
    written = link + nic + results
    return Traffic("combine", link, nic, memory, written, read + link + nic)


def _crossing(shape, wire, domain_size, forward):
    inside, across = rows_per_token(
        shape.routing, shape.num_ranks, domain_size=domain_size, forward=forward
    )
    return shape.tokens * inside * wire, shape.tokens * across * wire
