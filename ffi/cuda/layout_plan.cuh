// Step 2 of a layout: capacity, first rows and what each source keeps, of the experts
// of one rank; a block does it alone.

#ifndef JAX_EP_FFI_CUDA_LAYOUT_PLAN_CUH_
#define JAX_EP_FFI_CUDA_LAYOUT_PLAN_CUH_

#include "call.cuh"
#include "launch_shape.h"
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

class LayoutPlan : public LayoutExchange {
 public:
  using LayoutExchange::LayoutExchange;

  // What the experts of one rank take: first rows and kept ids of each source.
  __device__ void PlanRank(int rank) {
    const int first_expert = rank * local_experts_;
    int32_t* demand = first_;  // [source][local expert]
    int32_t* taken = second_;  // [local expert], kept ids
    for (int i = threadIdx.x; i < num_experts_; i += kThreads) {
      const int source = i / local_experts_;
      const int expert = first_expert + i % local_experts_;
      demand[i] = CountOf(source * tiles_per_source_, tiles_per_source_, expert);
    }
    __syncthreads();

    // Experts are dealt to threads in contiguous shares, so that prefix sums over
    // threads are prefix sums over experts.
    const int share = (local_experts_ + kThreads - 1) / kThreads;
    const int begin = static_cast<int>(Min(local_experts_, threadIdx.x * share));
    const int end = static_cast<int>(Min(local_experts_, begin + share));
    int64_t wanted = 0, padded = 0, largest = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      const int64_t total = ExpertDemand(demand, e);
      taken[e] = static_cast<int32_t>(total);
      wanted += total;
      padded += Padded(total);
      largest = Max(largest, total);
    }
    wanted = BlockSum(wanted);
    if (BlockSum(padded) > params_.capacity) {
      LimitExperts(taken, begin, end, largest);
    }

    int64_t kept = 0, rows = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      kept += taken[e];
      rows += Padded(taken[e]);
    }
    int64_t offset = BlockPrefix(rows);
    kept = BlockSum(kept);
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      ShareExpert(demand, e, first_expert + e, taken[e], offset);
      if (rank == rank_) {
        params_.group_counts[e] = taken[e];
        params_.group_sizes[e] = static_cast<int32_t>(Padded(taken[e]));
        params_.group_offsets[e] = static_cast<int32_t>(offset);
      }
      offset += Padded(taken[e]);
    }
    if (threadIdx.x == 0) {
      params_.num_recv[rank] = static_cast<int32_t>(wanted);
      params_.num_dropped[rank] = static_cast<int32_t>(wanted - kept);
    }
    __syncthreads();
  }

 private:
  // Counts of rows fit 31 bits, as slots do.
  __device__ int64_t Padded(int64_t rows) const {
    const uint32_t align = params_.expert_alignment;
    return (static_cast<uint32_t>(rows) + align - 1) / align * align;
  }

  __device__ int64_t ExpertDemand(const int32_t* demand, int expert) const {
    int64_t total = 0;
#pragma unroll 1
    for (int s = 0; s < num_ranks_; ++s) total += demand[s * local_experts_ + expert];
    return total;
  }

  // Cuts the experts' ids down to what fits: all to the highest multiple of the
  // alignment that does, then the first ones by one more block.
  __device__ void LimitExperts(int32_t* taken, int begin, int end, int64_t largest) {
    const int64_t align = params_.expert_alignment;
    // Rows of this thread's experts at a limit.
    const auto rows_at = [&](int64_t limit) {
      int64_t rows = 0;
#pragma unroll 1
      for (int e = begin; e < end; ++e) rows += Padded(Min(taken[e], limit));
      return rows;
    };
    // fits(low) and not fits(high), in units of the alignment. A sum of the largest
    // counts bounds the largest.
    int64_t low = 0, high = BlockSum(largest) / align + 1;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (BlockSum(rows_at(middle * align)) <= params_.capacity) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int64_t limit = low * align;
    const int64_t spare = (params_.capacity - BlockSum(rows_at(limit))) / align;
    int64_t over = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) over += taken[e] > limit;
    int64_t turn = BlockPrefix(over);
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      if (taken[e] <= limit) continue;
      taken[e] =
          static_cast<int32_t>(Min(taken[e], turn < spare ? limit + align : limit));
      ++turn;
    }
  }

  // Deals an expert's kept ids to its sources, by the same rule with single rows.
  __device__ void ShareExpert(const int32_t* demand, int local, int expert,
                              int64_t kept, int64_t row) {
    int64_t limit = kept, spare = 0;
    if (ExpertDemand(demand, local) > kept) {
      const auto sum_at = [&](int64_t limit) {
        int64_t sum = 0;
#pragma unroll 1
        for (int s = 0; s < num_ranks_; ++s) {
          sum += Min(demand[s * local_experts_ + local], limit);
        }
        return sum;
      };
      // fits(low) and not fits(high).
      int64_t low = 0, high = kept + 1;
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (sum_at(middle) <= kept) {
          low = middle;
        } else {
          high = middle;
        }
      }
      limit = low;
      spare = kept - sum_at(limit);
    }
#pragma unroll 1
    for (int s = 0; s < num_ranks_; ++s) {
      const int64_t count = demand[s * local_experts_ + local];
      int64_t mine = Min(count, limit);
      if (count > limit && spare > 0) {
        ++mine;
        --spare;
      }
      const int64_t index = static_cast<int64_t>(s) * num_experts_ + expert;
      row_base_[index] = static_cast<int32_t>(row);
      kept_[index] = static_cast<int32_t>(mine);
      row += mine;
    }
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LAYOUT_PLAN_CUH_
