// The shared memory of a combine's block, through which its warps hand on rows and
// sums.

#ifndef JAX_EP_FFI_CUDA_COMBINE_STAGES_CUH_
#define JAX_EP_FFI_CUDA_COMBINE_STAGES_CUH_

#include "call.cuh"
#include "combine_leaves.cuh"
#include "launch_shape.h"
#include "ptx.cuh"

namespace jax_ep::cuda {

// What a loader tells its team about the input in a stage; the lane that arrives at
// its barrier writes it.
struct CombineInput {
  int32_t inputs;  // of this sum, the first one's stage says; -1 ends the work
  int32_t leaf;
  int32_t piece;
  int32_t rank;  // where the sum goes to, or came from; -1: bias, or no input
  int32_t row;   // of y, or the token
  float weight;  // of the row
  float value;
  // Bit k: entry k of the token is this row, or has its row on this rank.
  uint32_t entries;
};

// What the team tells the sender about a sum.
struct CombineOutput {
  int32_t rank;  // to send to; -1 ends the work
  uint32_t bytes;
};
static_assert(sizeof(CombineInput) + 16 <= kStageMetaBytes, "launch_shape.h");

template <class Config>
struct CombineParts {
  using Input = CombineInput;
  using Output = CombineOutput;
  static constexpr CombineLayout kShape = CombineLeaves<Config>::kShape;
  static constexpr int kSlotBytes = kShape.wire.slot_bytes;
  static constexpr int64_t kInBytes = AlignUp(kShape.wire.in_bytes, 128);

  uint8_t* send_stages;
  uint8_t* recv_stages;
  uint8_t* out_stages;
  int32_t* send_batches;
  int32_t* recv_batches;
  Input* send_inputs;
  Input* recv_inputs;
  Output* outputs;
  uint64_t *send_full, *send_empty, *recv_full, *recv_empty, *out_full, *out_empty;

  __device__ __forceinline__ explicit CombineParts(uint8_t* shared) {
    send_stages = shared;
    recv_stages = send_stages + kShape.send_stages * kInBytes;
    out_stages = recv_stages + kShape.recv_stages * kSlotBytes;
    uint8_t* meta = out_stages + kShape.out_stages * kSlotBytes;
    send_batches = reinterpret_cast<int32_t*>(meta);
    recv_batches = send_batches + 3 * 3 * kBatchEntries;
    meta += kCombineMetaBytes;
    send_full = reinterpret_cast<uint64_t*>(meta);
    send_empty = send_full + kShape.send_stages;
    recv_full = send_empty + kShape.send_stages;
    recv_empty = recv_full + kShape.recv_stages;
    out_full = recv_empty + kShape.recv_stages;
    out_empty = out_full + kShape.out_stages;
    send_inputs = reinterpret_cast<Input*>(out_empty + kShape.out_stages);
    recv_inputs = send_inputs + kShape.send_stages;
    outputs = reinterpret_cast<Output*>(recv_inputs + kShape.recv_stages);
  }
};

template <int kStages>
__device__ __forceinline__ void InitStages(uint64_t* full, uint64_t* empty, int writers,
                                           int readers) {
  if (threadIdx.x >= kStages) return;
  ptx::BarrierInit(full + threadIdx.x, writers);
  ptx::BarrierInit(empty + threadIdx.x, readers);
}

// A stage's barriers: `full` completes with the load, `empty` when the team has read.
// `use` counts the stages used before.
template <int kStages>
__device__ __forceinline__ void AwaitEmpty(uint64_t* empty, uint32_t use) {
  // Pairs with the readers' arrivals.
  if (use >= kStages) {
    ptx::BarrierWait(empty + use % kStages, (use / kStages - 1) & 1);
  }
}
template <int kStages>
__device__ __forceinline__ void AwaitFull(uint64_t* full, uint32_t use) {
  // Pairs with the loader's arrival and the copy engine's completion.
  ptx::BarrierWait(full + use % kStages, use / kStages & 1);
}
// Arrives for the warp, whose lanes are done with the stage.
__device__ __forceinline__ void ArriveWarp(uint64_t* barrier) {
  __syncwarp();
  if (Lane() == 0) ptx::BarrierArrive(barrier);
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_COMBINE_STAGES_CUH_
