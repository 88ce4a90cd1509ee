// Walks a channel's part of the routing arrays (slot, slot_rank, recv_slot), fetched
// in batches ahead of their use.
//
// A channel of C takes the tokens c, c + C, c + 2C, ...: equal shares for all
// channels, also when a rank masks its last tokens. A pair is one token of one source
// (or just a token), with K entries in each array.

#ifndef JAX_EP_FFI_CUDA_ROUTING_CUH_
#define JAX_EP_FFI_CUDA_ROUTING_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "ptx.cuh"

namespace jax_ep::cuda {

__device__ __forceinline__ int TokensOfChannel(int64_t num_tokens, int channel,
                                               int channels) {
  return channel < num_tokens
             ? static_cast<int>((num_tokens - channel + channels - 1) / channels)
             : 0;
}

// Slots come from outside and may be anything: whatever is no row of the buffer is
// taken as -1, alike by the sender and the receiver of a row.
__device__ __forceinline__ bool IsRow(int32_t slot, int64_t capacity) {
  return static_cast<uint32_t>(slot) < static_cast<uint32_t>(capacity);
}

// The same for the rank that owns a slot.
template <int kRanks>
__device__ __forceinline__ bool IsRank(int32_t rank) {
  return static_cast<uint32_t>(rank) < static_cast<uint32_t>(kRanks);
}

// A batch holds `kArrays` arrays fetched by pair, then `kGathers` arrays of floats
// fetched by the values of the first one (row numbers), where those are rows of the
// `capacity` that there are. A warp owns it: all lanes call together.
template <int kTopk, int kArrays, int kGathers>
class RoutingBatches {
 public:
  static constexpr int kPairs = BatchPairs(kTopk);
  static constexpr int kEntries = kPairs * kTopk;
  // With gathers the rows come one batch earlier than what they point to.
  static constexpr int kDepth = kGathers > 0 ? 3 : 2;

  // `index(pair)` is the pair's position in units of K entries.
  template <class Index>
  __device__ __forceinline__ void Start(int32_t* shared, int num_pairs,
                                        int64_t capacity,
                                        const int32_t* const (&arrays)[kArrays],
                                        const float* const (&gathers)[kGathers + 1],
                                        Index index) {
    shared_ = shared;
    num_pairs_ = num_pairs;
    capacity_ = capacity;
#pragma unroll
    for (int i = 0; i < kArrays; ++i) arrays_[i] = arrays[i];
#pragma unroll
    for (int i = 0; i < kGathers; ++i) gathers_[i] = gathers[i];
    batch_ = -1;
    Fetch(0, index);
    ptx::CopyAsyncCommit();
    if (kGathers > 0) {
      Fetch(1, index);
      ptx::CopyAsyncCommit();
      ptx::CopyAsyncWait<1>();
      __syncwarp();
      Gather(0);
      ptx::CopyAsyncCommit();
    }
  }

  // Moves to the next batch, which may be empty; false after the last.
  template <class Index>
  __device__ __forceinline__ bool Next(Index index) {
    ++batch_;
    if (batch_ * kPairs >= num_pairs_) return false;
    ptx::CopyAsyncWait<0>();
    __syncwarp();  // this batch is visible to all lanes, and the one before is over
    if (kGathers > 0) Gather(batch_ + 1);
    Fetch(batch_ + kDepth - 1, index);
    ptx::CopyAsyncCommit();
    return true;
  }

  __device__ __forceinline__ int FirstPair() const { return batch_ * kPairs; }

  // Entry k of a pair of this batch. Pairs past the end have -1 in the first array.
  __device__ __forceinline__ int32_t Entry(int array, int pair, int k) const {
    return Batch(array, batch_)[pair * kTopk + k];
  }
  __device__ __forceinline__ float Gathered(int gather, int pair, int k) const {
    return __int_as_float(GatherBatch(gather, batch_)[pair * kTopk + k]);
  }

 private:
  __device__ __forceinline__ int32_t* Batch(int array, int batch) const {
    return shared_ + (array * kDepth + batch % kDepth) * kBatchEntries;
  }
  __device__ __forceinline__ int32_t* GatherBatch(int gather, int batch) const {
    return shared_ + (kArrays * kDepth + gather * 2 + (batch & 1)) * kBatchEntries;
  }

  template <class Index>
  __device__ __forceinline__ void Fetch(int batch, Index index) {
#pragma unroll 1
    for (int i = 0; i < (kEntries + 31) / 32; ++i) {
      const int entry = i * 32 + Lane();
      if (entry >= kEntries) break;
      const int pair = batch * kPairs + entry / kTopk;
      if (pair < num_pairs_) {
        const int64_t from = static_cast<int64_t>(index(pair)) * kTopk + entry % kTopk;
#pragma unroll
        for (int a = 0; a < kArrays; ++a) {
          ptx::CopyAsync4(Batch(a, batch) + entry, arrays_[a] + from);
        }
      } else {
        Batch(0, batch)[entry] = -1;
      }
    }
  }

  __device__ __forceinline__ void Gather(int batch) {
#pragma unroll 1
    for (int i = 0; i < (kEntries + 31) / 32; ++i) {
      const int entry = i * 32 + Lane();
      if (entry >= kEntries) break;
      const int32_t row = Batch(0, batch)[entry];
      if (!IsRow(row, capacity_)) continue;
#pragma unroll
      for (int g = 0; g < kGathers; ++g) {
        ptx::CopyAsync4(GatherBatch(g, batch) + entry, gathers_[g] + row);
      }
    }
  }

  int32_t* shared_;
  int num_pairs_;
  int64_t capacity_;
  int batch_;
  const int32_t* arrays_[kArrays];
  const float* gathers_[kGathers + 1];
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_ROUTING_CUH_
