// Kernels from the cubins that travel in the program's attributes.
#ifndef JAX_EP_FFI_CUDA_LOADER_H_
#define JAX_EP_FFI_CUDA_LOADER_H_

#include <string>
#include <string_view>

#include "ffi/cuda/driver.h"

namespace jax_ep::cuda {

// A cubin. Kept until exit, once per process however many call sites bring it.
struct Image;

// The image known by `sha256`, made from `bytes` if this is its first call site.
// Touches no device.
Image* InternImage(std::string_view sha256, std::string_view bytes);

// Finds `entry` of `image` for the current context's `device` and allows it
// `shared_bytes` of dynamic shared memory. Code is loaded here, once per device: a
// kernel that loads at its first launch may wait for a kernel that waits for us.
// Nothing is unloaded, since captured graphs hold the functions. Returns "" or what
// went wrong.
std::string LoadKernel(const Driver& driver, Image* image, const std::string& entry,
                       CUdevice device, int shared_bytes, CUfunction* function);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LOADER_H_
