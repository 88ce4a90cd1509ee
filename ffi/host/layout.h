// Routing: which row of which rank every (token, k) gets. Integers only.
//
// Letters: R ranks, T tokens per rank, K top-k, E experts, L = E / R experts per rank,
// C capacity, A expert alignment. Expert e lives on rank e / L.
#ifndef JAX_EP_FFI_HOST_LAYOUT_H_
#define JAX_EP_FFI_HOST_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "ffi/host/parallel.h"

namespace jax_ep::host {

struct LayoutShape {
  int num_ranks;      // R
  int num_experts;    // E, a multiple of R
  int64_t tokens;     // T
  int64_t topk;       // K
  int64_t capacity;   // C, a multiple of A
  int64_t alignment;  // A
};

// The arrays of one rank, all int32.
struct LayoutBuffers {
  const int32_t* topk_idx;  // [T, K]
  int32_t* slot;            // [T, K]
  int32_t* slot_rank;       // [T, K]
  int32_t* recv_slot;       // [R, T, K]
  int32_t* group_sizes;     // [L]
  int32_t* group_counts;    // [L]
  int32_t* group_offsets;   // [L]
  int32_t* num_recv;        // [R]
  int32_t* num_dropped;     // [R]
  int32_t* num_invalid;     // [1]
};

// The smallest multiple of `alignment` that is at least `count`.
inline int64_t AlignUp(int64_t count, int64_t alignment) {
  return (count + alignment - 1) / alignment * alignment;
}

// How many of each claimant's `demands` a buffer of `capacity` rows keeps, when every
// claimant's share occupies whole blocks of `alignment` rows. All have the same limit,
// the highest multiple of `alignment` that fits; then claimants in order take one block
// more while it fits. So a small demand is kept whole and a large one never starves the
// others.
std::vector<int64_t> FillCapacity(const std::vector<int64_t>& demands, int64_t capacity,
                                  int64_t alignment);

// Fills the arrays of all R ranks from their topk_idx. Negative ids are masked; ids of
// E and above as well, and counted. Rows are ordered by local expert, inside one by
// (source rank, token, k).
void ComputeLayout(const LayoutShape& shape, const std::vector<LayoutBuffers>& ranks,
                   const Parallel& parallel);

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_LAYOUT_H_
