// What one rank's experts take of what all sources want, and where each source's rows
// begin: the filling rule. A team of threads does it: a block, or a warp.

#ifndef JAX_EP_FFI_CUDA_LAYOUT_CAPACITY_CUH_
#define JAX_EP_FFI_CUDA_LAYOUT_CAPACITY_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "workspace.h"

namespace jax_ep::cuda {

// `Team` has kSize, Index(), Sync(), and Sum(value) and Prefix(value), the sums over
// all threads and over those before this one; all threads call together.
template <class Team>
class LayoutCapacity {
 public:
  // Ids of a source for local expert e: `demand[source * stride + e]`. `taken` is room
  // for a number per local expert. First rows and kept ids of each source go to
  // [source * num_experts + expert] of `row_base` and `kept`, which may be where demand
  // is.
  __device__ LayoutCapacity(const LayoutParams& params, const int32_t* demand,
                            int stride, int32_t* taken, int32_t* row_base,
                            int32_t* kept)
      : params_(params),
        num_ranks_(params.common.num_ranks),
        local_experts_(params.num_experts / params.common.num_ranks),
        demand_(demand),
        stride_(stride),
        taken_(taken),
        row_base_(row_base),
        kept_(kept) {}

  __device__ void PlanRank(int rank) {
    // Experts are dealt to threads in contiguous shares, so that prefix sums over
    // threads are prefix sums over experts.
    const int share = (local_experts_ + Team::kSize - 1) / Team::kSize;
    const int begin = static_cast<int>(Min(local_experts_, Team::Index() * share));
    const int end = static_cast<int>(Min(local_experts_, begin + share));
    int64_t wanted = 0, padded = 0, largest = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      const int64_t total = ExpertDemand(e);
      taken_[e] = static_cast<int32_t>(total);
      wanted += total;
      padded += Padded(total);
      largest = Max(largest, total);
    }
    wanted = Team::Sum(wanted);
    if (Team::Sum(padded) > params_.capacity) {
      LimitExperts(begin, end, largest);
    }

    int64_t kept = 0, rows = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      kept += taken_[e];
      rows += Padded(taken_[e]);
    }
    int64_t offset = Team::Prefix(rows);
    kept = Team::Sum(kept);
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      ShareExpert(e, rank * local_experts_ + e, taken_[e], offset);
      if (rank == params_.common.rank) {
        params_.group_counts[e] = taken_[e];
        params_.group_sizes[e] = static_cast<int32_t>(Padded(taken_[e]));
        params_.group_offsets[e] = static_cast<int32_t>(offset);
      }
      offset += Padded(taken_[e]);
    }
    if (Team::Index() == 0) {
      params_.num_recv[rank] = static_cast<int32_t>(wanted);
      params_.num_dropped[rank] = static_cast<int32_t>(wanted - kept);
    }
    Team::Sync();
  }

 private:
  // Counts of rows fit 31 bits, as slots do.
  __device__ int64_t Padded(int64_t rows) const {
    const uint32_t align = params_.expert_alignment;
    return (static_cast<uint32_t>(rows) + align - 1) / align * align;
  }

  __device__ int64_t ExpertDemand(int expert) const {
    int64_t total = 0;
#pragma unroll 1
    for (int s = 0; s < num_ranks_; ++s) total += demand_[s * stride_ + expert];
    return total;
  }

  // Cuts the experts' ids down to what fits: all to the highest multiple of the
  // alignment that does, then the first ones by one more block.
  __device__ void LimitExperts(int begin, int end, int64_t largest) {
    const int64_t align = params_.expert_alignment;
    // Rows of this thread's experts at a limit.
    const auto rows_at = [&](int64_t limit) {
      int64_t rows = 0;
#pragma unroll 1
      for (int e = begin; e < end; ++e) rows += Padded(Min(taken_[e], limit));
      return rows;
    };
    // fits(low) and not fits(high), in units of the alignment. A sum of the largest
    // counts bounds the largest.
    int64_t low = 0, high = Team::Sum(largest) / align + 1;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (Team::Sum(rows_at(middle * align)) <= params_.capacity) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int64_t limit = low * align;
    const int64_t spare = (params_.capacity - Team::Sum(rows_at(limit))) / align;
    int64_t over = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) over += taken_[e] > limit;
    int64_t turn = Team::Prefix(over);
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      if (taken_[e] <= limit) continue;
      taken_[e] =
          static_cast<int32_t>(Min(taken_[e], turn < spare ? limit + align : limit));
      ++turn;
    }
  }

  // Deals an expert's kept ids to its sources, by the same rule with single rows.
  __device__ void ShareExpert(int local, int expert, int64_t kept, int64_t row) {
    int64_t limit = kept, spare = 0;
    if (ExpertDemand(local) > kept) {
      const auto sum_at = [&](int64_t limit) {
        int64_t sum = 0;
#pragma unroll 1
        for (int s = 0; s < num_ranks_; ++s) {
          sum += Min(demand_[s * stride_ + local], limit);
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
      const int64_t count = demand_[s * stride_ + local];
      int64_t mine = Min(count, limit);
      if (count > limit && spare > 0) {
        ++mine;
        --spare;
      }
      const int64_t index = static_cast<int64_t>(s) * params_.num_experts + expert;
      row_base_[index] = static_cast<int32_t>(row);
      kept_[index] = static_cast<int32_t>(mine);
      row += mine;
    }
  }

  const LayoutParams& params_;
  int num_ranks_, local_experts_;
  const int32_t* demand_;
  int stride_;
  int32_t *taken_, *row_base_, *kept_;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LAYOUT_CAPACITY_CUH_
