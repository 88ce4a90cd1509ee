// The custom call that ends a start's: XLA's stream waits for it.
#ifndef JAX_EP_FFI_CUDA_DONE_H_
#define JAX_EP_FFI_CUDA_DONE_H_

#include "xla/ffi/api/ffi.h"

namespace jax_ep::cuda {

inline constexpr char kDoneTarget[] = "jax_ep_done";

XLA_FFI_Error* DoneHandler(XLA_FFI_CallFrame* frame);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DONE_H_
