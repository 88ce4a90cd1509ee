// The limits of host handlers, CUDA handlers and kernels. Python reads them from the
// compiled module. In this folder because kernels are compiled where only it is.

#ifndef JAX_EP_FFI_CUDA_LIMITS_H_
#define JAX_EP_FFI_CUDA_LIMITS_H_

#include "portable.h"

namespace jax_ep {

constexpr int kMaxRanks = 64;      // one NVLink domain; peers are kernel parameters
constexpr int kMaxTopk = 32;       // a lane of a warp for each of a token's slots
constexpr int kMaxExperts = 2048;  // a counter each in a block's shared memory
constexpr int kMaxLeaves = 16;     // of a call on CUDA; pointers are kernel parameters

// Elements or bytes of a leaf's row: sums over all leaves and rows fit an int64.
constexpr int64_t kMaxRow = (int64_t{1} << 31) - 1;

}  // namespace jax_ep

#endif  // JAX_EP_FFI_CUDA_LIMITS_H_
