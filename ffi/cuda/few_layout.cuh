// Layout of few ids: one block holds all of them in shared memory and needs no barrier
// over a grid. Same ids on the wire, same handle as the layout.
//
// A source's ids are cut into contiguous chunks, a warp's each. Going through its chunk
// in order, a warp notes each id's position among those of its expert; what chunks and
// sources before it have is added when all are counted.

#ifndef JAX_EP_FFI_CUDA_FEW_LAYOUT_CUH_
#define JAX_EP_FFI_CUDA_FEW_LAYOUT_CUH_

#include "call.cuh"
#include "few_shape.h"
#include "layout_capacity.cuh"
#include "layout_exchange.cuh"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

struct WarpTeam {
  static constexpr int kSize = 32;
  __device__ static int Index() { return Lane(); }
  __device__ static void Sync() { __syncwarp(); }
  __device__ static int64_t Sum(int64_t value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      value += __shfl_xor_sync(kAllLanes, value, step);
    }
    return value;
  }
  __device__ static int64_t Prefix(int64_t value) {
    int64_t inclusive = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, inclusive, step);
      if (Lane() >= step) inclusive += other;
    }
    return inclusive - value;
  }
};

class FewLayout : public LayoutExchange {
 public:
  static constexpr int kThreads = 32 * kFewLayoutWarps;

  __device__ FewLayout(const LayoutParams& params, CallState* state, int32_t* shared)
      : LayoutExchange(params, state, shared),
        num_ids_(static_cast<int>(params.num_ids)),
        padded_ids_(static_cast<int>(num_words_) * kIdsPerWord),
        chunks_(FewChunks(num_ranks_)),
        ids_(reinterpret_cast<uint16_t*>(shared)),
        positions_(ids_ + kMaxPaddedFewIds),
        chunk_counts_(reinterpret_cast<int32_t*>(positions_ + kMaxPaddedFewIds)),
        first_rows_(chunk_counts_ + num_ranks_ * chunks_ * num_experts_),
        kept_ids_(first_rows_ + num_ranks_ * num_experts_),
        taken_(kept_ids_ + num_ranks_ * num_experts_) {}

  __device__ static void Run(const LayoutParams& params, int32_t* shared) {
    __shared__ CallState state_storage;
    __shared__ uint32_t invalid_storage;
    CallState* state = ptx::HoldShared(&state_storage);
    uint32_t* invalid = ptx::HoldShared(&invalid_storage);
    shared = ptx::HoldShared(shared);
    const uint64_t signature = reinterpret_cast<uint64_t>(params.slot) * 4 + 1;
    FewLayout layout(params, state, shared);
    InitCall(state);
    if (threadIdx.x == 0) *invalid = 0;
    layout.Clear();
    __syncthreads();
    // The last warp is the first without words to send.
    if (threadIdx.x / 32 == kFewLayoutWarps - 1) {
      BeginCall(params.common, signature, CallKind::kIdRounds, state);
      TellPeers(params.common, state, false);
    }
    layout.SendOwn(invalid);
    if (Lane() == 0) NoteStamp(state, kStampLastSend);
    layout.TakeOthers();
    if (Lane() == 0) NoteStamp(state, kStampLastArrival);
    __syncthreads();
    layout.CountChunks();
    __syncthreads();
    layout.SumChunks();
    __syncthreads();
    layout.Plan();
    __syncthreads();
    if (threadIdx.x == 0) NoteStamp(state, kStampPlanned);
    layout.Place();
    // It began the call, and mostly has the least to place.
    if (threadIdx.x / 32 == kFewLayoutWarps - 1) {
      AwaitPeers(params.common, state, kPhaseLayoutPeer);
    }
    EndCall(
        params.common, state,
        [&](int part, int parts) { PoisonLayout(params, part, parts); },
        [&] {
          if (threadIdx.x != 0) return;
          params.num_invalid[0] = *invalid;
          ControlOf(params.common, params.common.rank)->id_rounds = state->number + 1;
        });
  }

 private:
  static constexpr uint32_t kMasked = 0xffff;

  __device__ void Clear() {
    const int counts = num_ranks_ * chunks_ * num_experts_;
    for (int i = threadIdx.x; i < counts; i += kThreads) chunk_counts_[i] = 0;
  }

  __device__ void HoldWord(int source, int64_t word,
                           const uint32_t (&ids)[kIdsPerWord]) {
    uint32_t pairs[kIdsPerWord / 2];
#pragma unroll
    for (int i = 0; i < kIdsPerWord; ++i) {
      // A peer in another layout sends ids that index none of our counts.
      const bool valid = ids[i] < static_cast<uint32_t>(num_experts_);
      const uint32_t id = valid ? ids[i] : kMasked;
      pairs[i / 2] = i % 2 == 0 ? id : pairs[i / 2] | id << 16;
    }
    *reinterpret_cast<uint4*>(ids_ + source * padded_ids_ + word * kIdsPerWord) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }

  __device__ void SendOwn(uint32_t* invalid) {
#pragma unroll 1
    for (int64_t w = threadIdx.x; w < num_words_; w += kThreads) {
      uint32_t ids[kIdsPerWord];
      uint32_t beyond = 0;
#pragma unroll
      for (int i = 0; i < kIdsPerWord; ++i) {
        const int64_t index = w * kIdsPerWord + i;
        const int32_t id = index < num_ids_ ? params_.topk_idx[index] : -1;
        beyond += id >= num_experts_;
        ids[i] = id >= 0 && id < num_experts_ ? id : kNoId;
      }
      if (beyond > 0) atomicAdd(invalid, beyond);
      HoldWord(rank_, w, ids);
      if (num_ranks_ == 1) continue;
      AwaitBegin(state_);
      if (Failed(state_)) continue;
      const ptx::Word128 word = PackIds(ids, RoundStamp(state_->number));
#pragma unroll 1
      for (int hop = 1; hop < num_ranks_; ++hop) {
        // Pairs with the load in AwaitWord by the stamp inside the word.
        ptx::StoreRelaxedSystem(Words(After(hop), rank_, state_->number) + w, word);
      }
    }
    AwaitBegin(state_);
  }

  __device__ void TakeOthers() {
    const int words = static_cast<int>(num_words_);
    const int all = (num_ranks_ - 1) * words;
    const uint32_t stamp = RoundStamp(state_->number);
#pragma unroll 1
    for (int first = threadIdx.x - Lane(); first < all; first += kThreads) {
      const int mine = first + Lane();
      const bool needs = mine < all;
      const int source = After(1 + (needs ? mine / words : 0));
      const int at = needs ? mine % words : 0;
      const ptx::Word128 word =
          AwaitWord(Words(rank_, source, state_->number) + at, stamp, needs, source);
      if (!needs) continue;
      uint32_t ids[kIdsPerWord];
#pragma unroll
      for (int i = 0; i < kIdsPerWord; ++i) ids[i] = UnpackId(word, i);
      HoldWord(source, at, ids);
    }
  }

  // Calls visitor(source, counts, index, is_there, id) for each id of the warp's
  // chunks, 32 at a time in order; id is -1 where it is masked or past the end.
  template <class Visitor>
  __device__ void ForEachId(Visitor visitor) {
#pragma unroll 1
    for (int unit = threadIdx.x / 32; unit < num_ranks_ * chunks_;
         unit += kFewLayoutWarps) {
      const int source = unit / chunks_, chunk = unit % chunks_;
      const int begin = num_ids_ * chunk / chunks_;
      const int end = num_ids_ * (chunk + 1) / chunks_;
#pragma unroll 1
      for (int block = begin; block < end; block += 32) {
        const int index = block + Lane();
        const uint32_t held =
            index < end ? ids_[source * padded_ids_ + index] : kMasked;
        visitor(source, chunk_counts_ + unit * num_experts_, index, index < end,
                held == kMasked ? -1 : static_cast<int>(held));
      }
    }
  }

  __device__ void CountChunks() {
    ForEachId([&](int source, int32_t* counts, int index, bool, int id) {
      // Lanes without an id match no other lane.
      const uint32_t same = __match_any_sync(kAllLanes, id >= 0 ? id : ~Lane());
      const int before = __popc(same & ((1u << Lane()) - 1));
      const int position = id >= 0 ? counts[id] + before : 0;
      __syncwarp();
      if (id >= 0 && (same >> Lane()) == 1) counts[id] = position + 1;  // the last lane
      __syncwarp();
      if (id >= 0) {
        positions_[source * padded_ids_ + index] = static_cast<uint16_t>(position);
      }
    });
  }

  // Makes counts of chunks those before them, and notes each source's.
  __device__ void SumChunks() {
    for (int i = threadIdx.x; i < num_ranks_ * num_experts_; i += kThreads) {
      const int source = i / num_experts_;
      int32_t* counts =
          chunk_counts_ + source * (chunks_ - 1) * num_experts_ + i;  // of chunk 0
      int32_t total = 0;
#pragma unroll 8
      for (int c = 0; c < chunks_; ++c) {
        const int32_t count = counts[c * num_experts_];
        counts[c * num_experts_] = total;
        total += count;
      }
      kept_ids_[i] = total;
    }
  }

  __device__ void Plan() {
    for (int rank = threadIdx.x / 32; rank < num_ranks_; rank += kFewLayoutWarps) {
      const int first = rank * local_experts_;
      LayoutCapacity<WarpTeam>(params_, kept_ids_ + first, num_experts_, taken_ + first,
                               first_rows_, kept_ids_)
          .PlanRank(rank);
    }
  }

  __device__ void Place() {
    ForEachId([&](int source, const int32_t* counts, int index, bool is_there, int id) {
      int row = -1, owner = -1;
      if (id >= 0) {
        const int at = source * num_experts_ + id;
        const int position = positions_[source * padded_ids_ + index] + counts[id];
        owner = OwnerOf(id);
        if (position < kept_ids_[at]) row = first_rows_[at] + position;
      }
      if (!is_there) return;
      params_.recv_slot[source * num_ids_ + index] = owner == rank_ ? row : -1;
      if (source != rank_) return;
      params_.slot[index] = row;
      params_.slot_rank[index] = owner;
    });
  }

  __device__ int After(int hop) const {
    return rank_ + hop < num_ranks_ ? rank_ + hop : rank_ + hop - num_ranks_;
  }

  int num_ids_, padded_ids_, chunks_;
  uint16_t* ids_;          // shared [R][padded ids]
  uint16_t* positions_;    // the same: within the chunk, among those of the id's expert
  int32_t* chunk_counts_;  // shared [R][chunk][E]
  int32_t* first_rows_;    // shared [R][E]
  int32_t* kept_ids_;      // the same; what sources want until it is planned
  int32_t* taken_;         // shared [E]
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_FEW_LAYOUT_CUH_
