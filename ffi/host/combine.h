// Sums every token's rows, in a fixed order.
#ifndef JAX_EP_FFI_HOST_COMBINE_H_
#define JAX_EP_FFI_HOST_COMBINE_H_

#include <cstdint>
#include <vector>

#include "ffi/cuda/dtypes.h"
#include "ffi/host/parallel.h"
#include "ffi/host/routing.h"
#include "ffi/status.h"

namespace jax_ep::host {

struct CombineLeaf {
  LeafDtype dtype;  // one that is summed
  int64_t width;    // elements per row
};

// The arrays of one rank.
struct CombineBuffers {
  Routing routing;
  const float* weights;           // [C], or null
  const float* row_values;        // [C], or null
  float* values;                  // [T, K], null without row_values
  std::vector<const char*> y;     // per leaf [C, width]
  std::vector<const char*> bias;  // per leaf [T, width], or empty
  std::vector<char*> out;         // per leaf [T, width]
};

// Fills out and values of all ranks:
//
//   out[t]       = sum over k of y_owner[slot[t, k]], plus bias[t]
//   values[t, k] = row_values_owner[slot[t, k]], 0 where slot is -1
//
// Sums are made in float32 and in this order. Per owner, a partial starts at +0 and
// adds the token's rows (times their weights) by ascending k. It is rounded to the type
// that crosses the link, the leaf's or float32 if `wire_f32`. The total starts at +0,
// adds the partials by ascending owner, bias last, and is rounded once to the leaf's
// type,
// or not at all if `out_f32`: then out is float32.
Status Combine(const RoutingShape& shape, const std::vector<CombineLeaf>& leaves,
               bool wire_f32, bool out_f32, const std::vector<CombineBuffers>& ranks,
               const Parallel& parallel);

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_COMBINE_H_
