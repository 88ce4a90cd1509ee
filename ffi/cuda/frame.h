// What all CUDA handlers do with a call frame of XLA's.
#ifndef JAX_EP_FFI_CUDA_FRAME_H_
#define JAX_EP_FFI_CUDA_FRAME_H_

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_ep::cuda {

namespace ffi = xla::ffi;

inline const void* Address(const ffi::RemainingArgs& args, size_t i) {
  auto buffer = args.get<ffi::AnyBuffer>(i);
  return buffer.has_value() ? buffer->untyped_data() : nullptr;
}
inline const void* Address(const ffi::RemainingRets& rets, size_t i) {
  auto buffer = rets.get<ffi::AnyBuffer>(i);
  return buffer.has_value() ? (*buffer)->untyped_data() : nullptr;
}
// Where buffers [begin, end) are.
template <typename Buffers>
std::vector<const void*> Addresses(const Buffers& buffers, size_t begin, size_t end) {
  std::vector<const void*> found;
  for (size_t i = begin; i < end; ++i) found.push_back(Address(buffers, i));
  return found;
}

// Runs a handler. What it may throw (for want of memory) must not reach XLA.
template <typename Handler>
XLA_FFI_Error* Guarded(XLA_FFI_CallFrame* frame, Handler handler) {
  try {
    return handler(frame);
  } catch (const std::exception& e) {
    return ffi::internal::CreateError(frame->api,
                                      ffi::Error(ffi::ErrorCode::kResourceExhausted,
                                                 std::string("jax_ep: ") + e.what()));
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_FRAME_H_
