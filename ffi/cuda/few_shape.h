// Shapes of the calls for few tokens, computed alike by the host and the kernels: how
// rows are cut into tiles, what a slot holds, and the launches.
//
// A tile is what a warp moves at once: up to 7 vectors of 16 bytes per lane, which
// travel as 8 words of 14 bytes and the call's epoch each, so that no reader takes old
// bytes for new ones. Lane l of a tile has its vectors and its words 32 apart from l
// on.

#ifndef JAX_EP_FFI_CUDA_FEW_SHAPE_H_
#define JAX_EP_FFI_CUDA_FEW_SHAPE_H_

#include "launch_shape.h"
#include "workspace.h"

namespace jax_ep::cuda {

// With more tokens the bytes that the words add to the link, an eighth, and slots that
// nobody uses twice cost more than credits and signals do.
constexpr int kMaxFewTokens = 256;
constexpr int kFewVectors = 7;

struct FewTiles {
  int32_t tiles;
  int32_t per_lane;  // vectors
};

JAX_EP_HD constexpr FewTiles MakeFewTiles(int64_t vectors) {
  const int64_t tiles = (vectors + 32 * kFewVectors - 1) / (32 * kFewVectors);
  return {static_cast<int32_t>(tiles),
          static_cast<int32_t>((vectors + 32 * tiles - 1) / (32 * tiles))};
}

JAX_EP_HD constexpr int64_t FewTileBytes(const FewTiles& tiles) {
  return 32 * 16 * (tiles.per_lane + 1);
}

// A slot: the tiles, then K words with one float each where the call has weights or row
// values.
struct FewSlot {
  int32_t tiles;  // of all leaves
  int64_t extra_offset;
  int64_t bytes;
};

JAX_EP_HD constexpr FewSlot MakeFewSlot(int32_t tiles, int64_t tile_bytes, int num_topk,
                                        bool extra) {
  return {tiles, tile_bytes, AlignUp(tile_bytes + (extra ? 16 * num_topk : 0), 128)};
}

JAX_EP_HD constexpr FewSlot FewDispatchSlot(const int64_t* leaf_bytes, int num_leaves,
                                            int num_topk, bool has_weights) {
  int64_t vectors = 0;
  for (int i = 0; i < num_leaves; ++i) vectors += AlignUp(leaf_bytes[i], 16) / 16;
  const FewTiles tiles = MakeFewTiles(vectors);
  return MakeFewSlot(tiles.tiles, tiles.tiles * FewTileBytes(tiles), num_topk,
                     has_weights);
}

// Each leaf of a combine has its own tiles; a vector is 16 bytes of the wire.
JAX_EP_HD constexpr FewTiles MakeFewLeaf(int64_t width, int wire_item) {
  return MakeFewTiles((width * wire_item + 15) / 16);
}

JAX_EP_HD constexpr FewSlot FewCombineSlot(const int32_t* dtypes, const int64_t* widths,
                                           int num_leaves, int num_topk, bool wire_f32,
                                           bool has_row_values) {
  int32_t count = 0;
  int64_t bytes = 0;
  for (int i = 0; i < num_leaves; ++i) {
    const FewTiles tiles =
        MakeFewLeaf(widths[i], wire_f32 ? 4 : LeafItemBytes(dtypes[i]));
    count += tiles.tiles;
    bytes += tiles.tiles * FewTileBytes(tiles);
  }
  return MakeFewSlot(count, bytes, num_topk, has_row_values);
}

// The most tokens per rank that a call for few tokens takes.
JAX_EP_HD constexpr int64_t MaxFewTokens(const FewSlot& slot, int num_ranks) {
  return Min(kMaxFewTokens, FewRangeBytes(num_ranks) / slot.bytes);
}

// Warps of a block. With 8 a thread of combine may have 255 registers.
constexpr int kFewDispatchWarps = 16;
constexpr int kFewCombineWarps = 8;

// Blocks by default: all SMs of a Hopper but 4, and a power of two, as tokens are. A
// NCCL kernel beside us does no harm as it does to dispatch: nobody waits before he
// sends, so one SM is enough to get on.
constexpr int kFewBlocks = 128;

JAX_EP_HD constexpr LaunchDims FewLaunch(int device_sms, int num_sms, int num_ranks,
                                         const FewSlot& slot, int warps) {
  LaunchDims dims{};
  dims.few_tokens = static_cast<int32_t>(MaxFewTokens(slot, num_ranks));
  dims.blocks = GridBlocks(device_sms, num_sms > 0 ? num_sms : kFewBlocks);
  dims.threads = 32 * warps;
  return dims;
}

// --- layout ------------------------------------------------------------------

// Ids of all ranks together, which one block holds.
constexpr int kMaxFewIds = 16 * 1024;
// Each source's in whole words.
constexpr int kMaxPaddedFewIds = kMaxFewIds + kMaxRanks * kIdsPerWord;
constexpr int kFewLayoutWarps = 32;
constexpr int64_t kMaxFewCountBytes = 64 * kKiB;

// The ids of a source are counted in so many contiguous chunks, a warp's each.
JAX_EP_HD constexpr int FewChunks(int num_ranks) {
  return num_ranks < kFewLayoutWarps ? kFewLayoutWarps / num_ranks : 1;
}

JAX_EP_HD constexpr int64_t FewCountBytes(int num_ranks, int num_experts) {
  return int64_t{4} * num_ranks * FewChunks(num_ranks) * num_experts;
}

// Whether one block computes a layout of so many ids per rank.
JAX_EP_HD constexpr bool IsFewIds(int64_t num_ids, int num_ranks, int num_experts) {
  return num_ids <= kMaxFewIds / num_ranks &&
         FewCountBytes(num_ranks, num_experts) <= kMaxFewCountBytes;
}

JAX_EP_HD constexpr LaunchDims FewLayoutLaunch(int num_ranks, int num_experts) {
  LaunchDims dims{};
  dims.blocks = 1;
  dims.threads = 32 * kFewLayoutWarps;
  // Ids and their positions; counts; first rows and kept rows by source and expert, and
  // what each expert takes.
  dims.shared_bytes = static_cast<int32_t>(2 * 2 * kMaxPaddedFewIds +
                                           FewCountBytes(num_ranks, num_experts) +
                                           (2 * num_ranks + 1) * 4 * num_experts);
  return dims;
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_FEW_SHAPE_H_
