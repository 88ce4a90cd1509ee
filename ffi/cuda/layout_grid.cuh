// What the steps of a layout share: its grid and the barrier over it, the tiles that
// the ids are cut into, and the counts of ids. Each step is a class on top of the one
// before.

#ifndef JAX_EP_FFI_CUDA_LAYOUT_GRID_CUH_
#define JAX_EP_FFI_CUDA_LAYOUT_GRID_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// What a failed layout leaves.
__device__ inline void PoisonLayout(const LayoutParams& params, int part, int parts) {
  const int64_t ids = params.num_ids * 4;
  const int num_ranks = params.common.num_ranks;
  const int64_t local_bytes = 4 * (params.num_experts / num_ranks);
  FillBytes(params.slot, ids, kPoison, part, parts);
  FillBytes(params.slot_rank, ids, kPoison, part, parts);
  FillBytes(params.recv_slot, ids * num_ranks, kPoison, part, parts);
  FillBytes(params.group_sizes, local_bytes, 0, part, parts);
  FillBytes(params.group_counts, local_bytes, 0, part, parts);
  FillBytes(params.group_offsets, local_bytes, 0, part, parts);
  FillBytes(params.num_recv, 4 * num_ranks, 0, part, parts);
  FillBytes(params.num_dropped, 4 * num_ranks, 0, part, parts);
  FillBytes(params.num_invalid, 4, 0, part, parts);
}

class LayoutGrid {
 public:
  static constexpr int kThreads = 32 * kLayoutWarps;

  __device__ LayoutGrid(const LayoutParams& params, CallState* state, int32_t* shared)
      : params_(params),
        common_(params.common),
        state_(state),
        rank_(params.common.rank),
        num_ranks_(params.common.num_ranks),
        num_experts_(params.num_experts),
        local_experts_(params.num_experts / params.common.num_ranks),
        owner_factor_(local_experts_ == 1 ? 0 : 0xffffffffu / local_experts_ + 1),
        tiles_per_source_(LayoutTilesPerSource(gridDim.x, params.common.num_ranks)),
        tiles_(params.common.num_ranks * tiles_per_source_),
        num_words_((params.num_ids + kIdsPerWord - 1) / kIdsPerWord),
        words_per_tile_((num_words_ + tiles_per_source_ - 1) / tiles_per_source_),
        own_(params.common.peers[params.common.rank]),
        tile_counts_(reinterpret_cast<uint32_t*>(own_ + kTileCountOffset)),
        row_base_(reinterpret_cast<int32_t*>(own_ + kRowBaseOffset)),
        kept_(reinterpret_cast<int32_t*>(own_ + kKeptOffset)),
        holds_(HasOneTile() && words_per_tile_ * kIdsPerWord <= kMaxHeldIds),
        held_(reinterpret_cast<uint16_t*>(shared)),
        counts_(shared + kMaxHeldIds / 2),
        first_(counts_ + kLayoutWarps * params.num_experts),
        second_(first_ + params.num_experts) {}

  // Whether no block has a second tile.
  __device__ bool HasOneTile() const { return tiles_ <= static_cast<int>(gridDim.x); }

  // Waits for all blocks; what they wrote before they arrived is visible after.
  __device__ void GridBarrier() {
    ArriveAtGrid();
    AwaitGrid();
  }

  __device__ void ArriveAtGrid() {
    ++barriers_;
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::AddAcquireReleaseDevice(&ControlOf(common_, rank_)->barrier, 1);
    }
  }

  __device__ void AwaitGrid() {
    if (threadIdx.x == 0) {
      Control* control = ControlOf(common_, rank_);
      const uint32_t expected = barriers_ * gridDim.x;
      Patience patience(kIndirectGraceNs);  // other blocks may wait for ranks
      while (!Failed(state_)) {
        // Pairs with the additions of the other blocks.
        const uint32_t seen = ptx::LoadAcquireDevice(&control->barrier);
        if (seen >= expected) break;
        if (patience.Over(&common_, state_) && patience.Overdue()) {
          GiveUp(&common_, state_, kPhaseLayoutGrid, -1, -1, expected, seen,
                 patience.WaitedNs());
        }
      }
    }
    __syncthreads();
  }

  __device__ void ClearCounts() {
    for (int i = threadIdx.x; i < kLayoutWarps * num_experts_; i += kThreads) {
      counts_[i] = 0;
    }
  }

 protected:
  static constexpr uint32_t kNoHeldId = 0xffff;
  static constexpr int kUnroll = 8;        // loads in flight
  static constexpr int kTilesAtOnce = 16;  // the same, of counts

  __device__ int64_t TileBegin(int tile) const {
    return Min(num_words_, tile % tiles_per_source_ * words_per_tile_);
  }
  // First word of a warp's share of a tile; shares are contiguous.
  __device__ int64_t WarpBegin(int tile, int warp) const {
    const int64_t begin = TileBegin(tile);
    const int64_t end = Min(num_words_, begin + words_per_tile_);
    return begin + (end - begin) * warp / kLayoutWarps;
  }

  // counts_[warp][e]: ids of the warp's share of a tile in recv_slot.
  __device__ void CountTile(int tile) {
    ClearCounts();
    __syncthreads();
    const int warp = threadIdx.x / 32;
    const int32_t* ids = params_.recv_slot + tile / tiles_per_source_ * params_.num_ids;
    const int64_t end = Min(WarpBegin(tile, warp + 1) * kIdsPerWord, params_.num_ids);
#pragma unroll 1
    for (int64_t block = WarpBegin(tile, warp) * kIdsPerWord + Lane(); block < end;
         block += 32 * kUnroll) {
      int32_t batch[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        batch[i] = block + i * 32 < end ? ids[block + i * 32] : -1;
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (batch[i] >= 0) atomicAdd(&counts_[warp * num_experts_ + batch[i]], 1);
      }
    }
  }

  // Makes counts_ those before the warp's share of a tile, and notes the tile's.
  __device__ void SumCounts(int tile) {
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts_; e += kThreads) {
      int32_t total = 0;
      for (int w = 0; w < kLayoutWarps; ++w) {
        const int32_t count = counts_[w * num_experts_ + e];
        counts_[w * num_experts_ + e] = total;
        total += count;
      }
      tile_counts_[static_cast<int64_t>(tile) * num_experts_ + e] = total;
    }
  }

  // id / L, for ids: a division takes long.
  __device__ int OwnerOf(int id) const {
    return owner_factor_ == 0 ? id : static_cast<int>(__umulhi(id, owner_factor_));
  }

  // Ids of an expert in `tiles` tiles from `first` on.
  __device__ int32_t CountOf(int first, int tiles, int expert) const {
    const uint32_t* counts = tile_counts_ + first * num_experts_ + expert;
    uint32_t total = 0;
#pragma unroll 1
    for (int begin = 0; begin < tiles; begin += kTilesAtOnce) {
      uint32_t batch[kTilesAtOnce];
#pragma unroll
      for (int i = 0; i < kTilesAtOnce; ++i) {
        batch[i] = begin + i < tiles ? counts[(begin + i) * num_experts_] : 0;
      }
#pragma unroll
      for (int i = 0; i < kTilesAtOnce; ++i) total += batch[i];
    }
    return static_cast<int32_t>(total);
  }

  const LayoutParams& params_;
  const CommonParams& common_;
  CallState* state_;
  int rank_, num_ranks_, num_experts_, local_experts_;
  uint32_t owner_factor_;  // 2^32 / L, rounded up; 0 where that is 2^32
  int tiles_per_source_, tiles_;
  int64_t num_words_, words_per_tile_;
  uint8_t* own_;
  uint32_t* tile_counts_;
  int32_t* row_base_;
  int32_t* kept_;
  bool holds_;                // whether ids are in held_
  uint16_t* held_;            // shared [kMaxHeldIds], of the block's tile
  int32_t* counts_;           // shared [kLayoutWarps][E]
  int32_t *first_, *second_;  // shared [E] each
  uint32_t barriers_ = 0;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LAYOUT_GRID_CUH_
