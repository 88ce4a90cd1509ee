// Moves every token's row to each row that its slots name. Bits, no arithmetic.
#ifndef JAX_EP_FFI_HOST_DISPATCH_H_
#define JAX_EP_FFI_HOST_DISPATCH_H_

#include <cstdint>
#include <vector>

#include "ffi/host/parallel.h"
#include "ffi/host/routing.h"
#include "ffi/status.h"

namespace jax_ep::host {

// The arrays of one rank. Leaves are the parts of a payload, each with its own rows.
struct DispatchBuffers {
  Routing routing;
  const float* weights;        // [T, K], or null
  float* recv_weights;         // [C], null without weights
  std::vector<const char*> x;  // per leaf [T, row_bytes]
  std::vector<char*> recv;     // per leaf [C, row_bytes]
};

// Fills recv and recv_weights of all ranks; rows that no slot names become zero. Every
// byte is written exactly once, or an error is returned.
Status Dispatch(const RoutingShape& shape, const std::vector<int64_t>& row_bytes,
                const std::vector<DispatchBuffers>& ranks, const Parallel& parallel);

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_DISPATCH_H_
