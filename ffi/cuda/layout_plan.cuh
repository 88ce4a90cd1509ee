// Step 2 of a layout: capacity, first rows and what each source keeps, of the experts
// of one rank; a block does it alone.

#ifndef JAX_EP_FFI_CUDA_LAYOUT_PLAN_CUH_
#define JAX_EP_FFI_CUDA_LAYOUT_PLAN_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "layout_capacity.cuh"
#include "layout_exchange.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// Sum over the block; all threads call.
__device__ __noinline__ int64_t BlockSum(int64_t value) {
  __shared__ int64_t sums[kLayoutWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  if (Lane() == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  int64_t total = 0;
  for (int w = 0; w < kLayoutWarps; ++w) total += sums[w];
  __syncthreads();
  return total;
}

// Sum over the threads before this one; all threads call.
__device__ __noinline__ int64_t BlockPrefix(int64_t value) {
  __shared__ int64_t sums[kLayoutWarps];
  int64_t inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, inclusive, step);
    if (Lane() >= step) inclusive += other;
  }
  if (Lane() == 31) sums[threadIdx.x / 32] = inclusive;
  __syncthreads();
  int64_t before = inclusive - value;
  for (int w = 0; w < kLayoutWarps; ++w) {
    if (w < static_cast<int>(threadIdx.x) / 32) before += sums[w];
  }
  __syncthreads();
  return before;
}

struct BlockTeam {
  static constexpr int kSize = 32 * kLayoutWarps;
  __device__ static int Index() { return threadIdx.x; }
  __device__ static void Sync() { __syncthreads(); }
  __device__ static int64_t Sum(int64_t value) { return BlockSum(value); }
  __device__ static int64_t Prefix(int64_t value) { return BlockPrefix(value); }
};

class LayoutPlan : public LayoutExchange {
 public:
  using LayoutExchange::LayoutExchange;

  // What the experts of one rank take: first rows and kept ids of each source.
  __device__ void PlanRank(int rank) {
    int32_t* demand = first_;  // [source][local expert]
    for (int i = threadIdx.x; i < num_experts_; i += kThreads) {
      const int source = i / local_experts_;
      const int expert = rank * local_experts_ + i % local_experts_;
      demand[i] = CountOf(source * tiles_per_source_, tiles_per_source_, expert);
    }
    __syncthreads();
    LayoutCapacity<BlockTeam>(params_, demand, local_experts_, second_, row_base_,
                              kept_)
        .PlanRank(rank);
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LAYOUT_PLAN_CUH_
