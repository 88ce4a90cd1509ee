// Step 3 of a layout: the row of every id, from counts before it and first rows.

#ifndef JAX_EP_FFI_CUDA_LAYOUT_PLACE_CUH_
#define JAX_EP_FFI_CUDA_LAYOUT_PLACE_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "layout_plan.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

class LayoutPlace : public LayoutPlan {
 public:
  using LayoutPlan::LayoutPlan;

  // Makes counts_ positions in the whole list of the source.
  __device__ void AddEarlierTiles(int tile) {
    const int source = tile / tiles_per_source_;
    const int first_tile = source * tiles_per_source_;
    const int last = LastNeeded(source);
    for (int e = FirstNeeded(source) + threadIdx.x; e < last; e += kThreads) {
      const int32_t before = CountOf(first_tile, tile - first_tile, e);
      for (int w = 0; w < kLayoutWarps; ++w) counts_[w * num_experts_ + e] += before;
    }
  }

  __device__ void Place() {
    for (int tile = blockIdx.x; tile < tiles_; tile += gridDim.x) {
      if (!HasOneTile()) {
        __syncthreads();
        CountTile(tile);  // counts_ is of the block's last tile
        SumCounts(tile);
        __syncthreads();
        AddEarlierTiles(tile);
      }
      PlaceTile(tile);
    }
  }

 private:
  // Experts whose positions are needed in a source's tiles: a rank's own in those of
  // others, all in its own.
  __device__ int FirstNeeded(int source) const {
    return source == rank_ ? 0 : rank_ * local_experts_;
  }
  __device__ int LastNeeded(int source) const {
    return source == rank_ ? num_experts_ : (rank_ + 1) * local_experts_;
  }

  __device__ void PlaceTile(int tile) {
    const int source = tile / tiles_per_source_;
    const bool own = source == rank_;
    int32_t* row_base = first_;
    int32_t* kept = second_;
    const int first = FirstNeeded(source), last = LastNeeded(source);
    for (int e = first + threadIdx.x; e < last; e += kThreads) {
      const int64_t index = static_cast<int64_t>(source) * num_experts_ + e;
      row_base[e] = row_base_[index];
      kept[e] = kept_[index];
    }
    __syncthreads();

    // The warp's share, from its first id on: 32 bits are enough.
    const int warp = threadIdx.x / 32;
    int32_t* next = counts_ + warp * num_experts_;  // position of the next id
    const int64_t begin = WarpBegin(tile, warp) * kIdsPerWord;
    const int64_t end = Min(WarpBegin(tile, warp + 1) * kIdsPerWord, params_.num_ids);
    const int count = static_cast<int>(end - begin);
    int32_t* recv_slot = params_.recv_slot + source * params_.num_ids + begin;
    int32_t* slot = params_.slot + begin;
    int32_t* slot_rank = params_.slot_rank + begin;
    const uint16_t* held = held_ + (begin - TileBegin(tile) * kIdsPerWord);
#pragma unroll 1
    for (int block = 0; block < count; block += 32 * kUnroll) {
      int32_t ids[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int at = block + i * 32 + Lane();
        ids[i] = at >= count ? -1 : holds_ ? HeldId(held[at]) : recv_slot[at];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int32_t id = ids[i];
        const bool needed = id >= first && id < last;
        // Lanes with an id nobody needs match no other lane.
        const uint32_t same = __match_any_sync(kAllLanes, needed ? id : ~Lane());
        const uint32_t before = same & ((1u << Lane()) - 1);
        const int position = needed ? next[id] + __popc(before) : 0;
        __syncwarp();
        if (needed && (same >> Lane()) == 1) next[id] = position + 1;  // the last lane
        __syncwarp();
        const int row = needed && position < kept[id] ? row_base[id] + position : -1;
        const int at = block + i * 32 + Lane();
        if (at >= count) continue;
        if (own) {
          const int owner = needed ? OwnerOf(id) : -1;
          recv_slot[at] = owner == rank_ ? row : -1;
          slot[at] = row;
          slot_rank[at] = owner;
        } else {
          recv_slot[at] = row;  // not ours where nobody here needs it
        }
      }
    }
  }

  __device__ static int32_t HeldId(uint32_t held) {
    return held == kNoHeldId ? -1 : static_cast<int32_t>(held);
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LAYOUT_PLACE_CUH_
