"""Which calls on CUDA are for few tokens: what `ffi/cuda/few_shape.h` says, in Python.

Such a call takes a latency, not a bandwidth: its rows go to fixed slots of the
workspace, without credits and signals, and its layout is one block's. The choice is
made while lowering, from shapes alone, so it is the same on all ranks.
"""

from collections.abc import Sequence

MAX_FEW_TOKENS = 256  # kMaxFewTokens
MAX_FEW_IDS = 16 * 1024  # kMaxFewIds, of all ranks together

_MAX_VECTORS = 7  # kFewVectors, of 16 bytes, in a lane's part of a tile
_LAYOUT_WARPS = 32  # kFewLayoutWarps
_MAX_COUNT_BYTES = 64 * 1024  # kMaxFewCountBytes
_RANGE_BYTES = 4 * 2**20 + 256 * 2**10  # FewRangeBytes, up to R = 8
_RANGE_STEP = 64 * 2**10


def is_few_ids(num_ids: int, num_ranks: int, num_experts: int) -> bool:
    """Whether one block computes a layout of `num_ids` = T·K ids per rank."""
    chunks = max(1, _LAYOUT_WARPS // num_ranks)
    return (
        num_ids <= MAX_FEW_IDS // num_ranks
        and 4 * num_ranks * chunks * num_experts <= _MAX_COUNT_BYTES
    )


def range_bytes(num_ranks: int) -> int:
    """Bytes of a source's slots, in each of the two halves."""
    if num_ranks <= 8:
        return _RANGE_BYTES
    return 8 * _RANGE_BYTES // num_ranks // _RANGE_STEP * _RANGE_STEP


def dispatch_slot_bytes(
    leaf_bytes: Sequence[int], num_topk: int, has_weights: bool
) -> int:
    """Bytes of a token's slot in dispatch, of leaves of so many bytes a row."""
    vectors = sum(-(-size // 16) for size in leaf_bytes)
    return _slot_bytes(_tile_bytes(vectors), num_topk if has_weights else 0)


def combine_slot_bytes(
    wire_bytes: Sequence[int], num_topk: int, has_row_values: bool
) -> int:
    """The same in combine, of leaves of so many bytes a row on the wire."""
    tiles = sum(_tile_bytes(-(-size // 16)) for size in wire_bytes)
    return _slot_bytes(tiles, num_topk if has_row_values else 0)


def is_few_tokens(num_tokens: int, slot_bytes: int, num_ranks: int) -> bool:
    """Whether a dispatch or combine of T tokens per rank is one for few tokens."""
    return num_tokens <= min(MAX_FEW_TOKENS, range_bytes(num_ranks) // slot_bytes)


def _tile_bytes(vectors: int) -> int:
    tiles = -(-vectors // (32 * _MAX_VECTORS))
    per_lane = -(-vectors // (32 * tiles))
    return tiles * 32 * 16 * (per_lane + 1)


def _slot_bytes(tile_bytes: int, extra_words: int) -> int:
    return -(-(tile_bytes + 16 * extra_words) // 128) * 128
