// Step 1 of a layout: ids to all ranks and from them, counted.

#ifndef JAX_EP_FFI_CUDA_LAYOUT_EXCHANGE_CUH_
#define JAX_EP_FFI_CUDA_LAYOUT_EXCHANGE_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "layout_grid.cuh"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

class LayoutExchange : public LayoutGrid {
 public:
  using LayoutGrid::LayoutGrid;

  // Brings all ids of this block's tiles to `held_`, counted, or to recv_slot, as ids
  // or -1. Returns the number of rounds, which is the same on all ranks.
  //
  // A half is written again two rounds later: its writer has then read the round
  // between, which a rank sends only after it has read this one (a barrier of its
  // grid, or the end of its kernel).
  __device__ int Exchange() {
    const int64_t per_round = IdWordsPerRound(num_ranks_);
    const int rounds =
        num_ranks_ == 1
            ? 1
            : static_cast<int>(Max(1, (num_words_ + per_round - 1) / per_round));
    for (int i = 0; i < rounds; ++i) {
      if (i > 0) GridBarrier();
      const uint64_t round = state_->number + i;
      const int64_t begin = i * per_round;
      const int64_t end =
          num_ranks_ == 1 ? num_words_ : Min(num_words_, begin + per_round);
      if (num_ranks_ > 1 && !Failed(state_)) SendIds(round, begin, end);
      if (Lane() == 0) NoteStamp(state_, kStampLastSend);
      for (int tile = blockIdx.x; tile < tiles_; tile += gridDim.x) {
        TakeIds(tile, round, begin, end);
      }
    }
    return rounds;
  }

  __device__ void CountTiles() {
    for (int tile = blockIdx.x; tile < tiles_; tile += gridDim.x) {
      __syncthreads();
      if (!holds_) CountTile(tile);
      SumCounts(tile);
    }
  }

 protected:
  static constexpr uint32_t kNoId = 0xfff;  // on the wire
  static_assert(kMaxExperts <= kNoId, "ids have 12 bits");

  // A number that no earlier round left in the half, and never 0.
  __device__ static uint32_t RoundStamp(uint64_t round) {
    return static_cast<uint32_t>(round % 0xffffffffu) + 1;
  }

  __device__ static ptx::Word128 PackIds(const uint32_t (&ids)[kIdsPerWord],
                                         uint32_t stamp) {
    ptx::Word128 word;
    word.low = stamp | static_cast<uint64_t>(ids[0]) << 32 |
               static_cast<uint64_t>(ids[1]) << 44 |
               static_cast<uint64_t>(ids[7] & 0xff) << 56;
    word.high = ids[2] | ids[3] << 12 | static_cast<uint64_t>(ids[4]) << 24 |
                static_cast<uint64_t>(ids[5]) << 36 |
                static_cast<uint64_t>(ids[6]) << 48 |
                static_cast<uint64_t>(ids[7] >> 8) << 60;
    return word;
  }

  __device__ static uint32_t UnpackId(const ptx::Word128& word, int i) {
    if (i == 0) return word.low >> 32 & 0xfff;
    if (i == 1) return word.low >> 44 & 0xfff;
    if (i == 7) return (word.low >> 56) | (word.high >> 60) << 8;
    return word.high >> (12 * (i - 2)) & 0xfff;
  }

  // This rank's id `index` as the wire has it.
  __device__ uint32_t OwnId(int64_t index) const {
    if (index >= params_.num_ids) return kNoId;
    const int32_t id = params_.topk_idx[index];
    return id >= 0 && id < num_experts_ ? id : kNoId;
  }

  __device__ ptx::Word128* Words(int rank, int source, uint64_t round) const {
    return reinterpret_cast<ptx::Word128*>(common_.peers[rank] + kIdsOffset +
                                           (round & 1) * kIdsHalfBytes) +
           source * IdWordsPerRound(num_ranks_);
  }

  __device__ void SendIds(uint64_t round, int64_t begin, int64_t end) const {
    const uint32_t stamp = RoundStamp(round);
#pragma unroll 1
    for (int64_t w = begin + blockIdx.x * kThreads + threadIdx.x; w < end;
         w += static_cast<int64_t>(gridDim.x) * kThreads) {
      uint32_t ids[kIdsPerWord];
#pragma unroll
      for (int i = 0; i < kIdsPerWord; ++i) ids[i] = OwnId(w * kIdsPerWord + i);
      const ptx::Word128 word = PackIds(ids, stamp);
#pragma unroll 1
      for (int hop = 1; hop < num_ranks_; ++hop) {
        const int rank =
            rank_ + hop < num_ranks_ ? rank_ + hop : rank_ + hop - num_ranks_;
        // Pairs with the load in TakeIds by the stamp inside the word.
        ptx::StoreRelaxedSystem(Words(rank, rank_, round) + (w - begin), word);
      }
    }
  }

  __device__ void TakeIds(int tile, uint64_t round, int64_t begin, int64_t end) {
    const int source = tile / tiles_per_source_;
    const int warp = threadIdx.x / 32;
    const int64_t first = Max(begin, WarpBegin(tile, warp));
    const int64_t last = Min(end, WarpBegin(tile, warp + 1));
    int32_t* ids = params_.recv_slot + source * params_.num_ids;
    int32_t* counts = counts_ + warp * num_experts_;
    uint16_t* held = held_ - TileBegin(tile) * kIdsPerWord;
    uint32_t invalid = 0;
    if (source == rank_) {
      const int64_t end = Min(last * kIdsPerWord, params_.num_ids);
#pragma unroll 1
      for (int64_t block = first * kIdsPerWord + Lane(); block < end;
           block += 32 * kUnroll) {
        int32_t batch[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          batch[i] = block + i * 32 < end ? params_.topk_idx[block + i * 32] : -1;
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          invalid += batch[i] >= num_experts_;
          if (block + i * 32 >= end) continue;
          const bool valid = batch[i] >= 0 && batch[i] < num_experts_;
          if (!holds_) {
            ids[block + i * 32] = valid ? batch[i] : -1;
            continue;
          }
          held[block + i * 32] = static_cast<uint16_t>(valid ? batch[i] : kNoHeldId);
          if (valid) atomicAdd(counts + batch[i], 1);
        }
      }
      invalid = __reduce_add_sync(kAllLanes, invalid);
      if (Lane() == 0 && invalid > 0) {
        atomicAdd(&ControlOf(common_, rank_)->invalid_ids, invalid);
      }
      return;
    }
    const ptx::Word128* words = Words(rank_, source, round) - begin;
    const uint32_t stamp = RoundStamp(round);
    // A row of recv_slot starts 16-byte aligned for every source, or for the first.
    const bool aligned = params_.num_ids % 4 == 0;
#pragma unroll 1
    for (int64_t w = first; w < last; w += 32) {
      const int64_t mine = w + Lane();
      const ptx::Word128 word = AwaitWord(words + mine, stamp, mine < last, source);
      if (mine >= last) continue;
      const int64_t index = mine * kIdsPerWord;
      const int listed = static_cast<int>(Min(kIdsPerWord, params_.num_ids - index));
      int32_t values[kIdsPerWord];
#pragma unroll
      for (int i = 0; i < kIdsPerWord; ++i) {
        // A peer in another layout sends ids that index none of our counts.
        const uint32_t id = UnpackId(word, i);
        const bool valid = id < static_cast<uint32_t>(num_experts_) && i < listed;
        values[i] = valid ? static_cast<int32_t>(id) : -1;
      }
      if (holds_) {
        uint32_t pairs[kIdsPerWord / 2];
#pragma unroll
        for (int i = 0; i < kIdsPerWord; ++i) {
          if (values[i] >= 0) atomicAdd(counts + values[i], 1);
          const uint32_t half = values[i] & 0xffff;
          pairs[i / 2] = i % 2 == 0 ? half : pairs[i / 2] | half << 16;
        }
        *reinterpret_cast<uint4*>(held + index) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        continue;
      }
      if (aligned && index + kIdsPerWord <= params_.num_ids) {
        int4* out = reinterpret_cast<int4*>(ids + index);
        out[0] = make_int4(values[0], values[1], values[2], values[3]);
        out[1] = make_int4(values[4], values[5], values[6], values[7]);
      } else {
#pragma unroll
        for (int i = 0; i < kIdsPerWord; ++i) {
          if (index + i < params_.num_ids) ids[index + i] = values[i];
        }
      }
    }
  }

  // Waits for a word of this round in every lane that `needs` one.
  __device__ ptx::Word128 AwaitWord(const ptx::Word128* address, uint32_t stamp,
                                    bool needs, int source) {
    // No ids at all in words that never came.
    ptx::Word128 word = {~0ull, ~0ull};
    if (__any_sync(kAllLanes, Failed(state_))) return word;
    Patience patience;
    while (true) {
      if (needs) {
        // Pairs with the store in SendIds by the stamp.
        const ptx::Word128 seen = ptx::LoadRelaxedSystem(address);
        if (static_cast<uint32_t>(seen.low) == stamp) {
          word = seen;
          needs = false;
        }
      }
      const uint32_t waiting = __ballot_sync(kAllLanes, needs);
      if (waiting == 0) return word;
      bool over = false;
      if (Lane() == __ffs(waiting) - 1) {
        over = patience.Over(&common_, state_);
        if (over && patience.Overdue()) {
          GiveUp(&common_, state_, kPhaseLayoutIds, source, -1, stamp,
                 static_cast<uint32_t>(ptx::LoadRelaxedSystem(address).low),
                 patience.WaitedNs());
        }
      }
      if (__any_sync(kAllLanes, over)) return word;
    }
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LAYOUT_EXCHANGE_CUH_
