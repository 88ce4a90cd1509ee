// Kernels from the cubins that travel in the program's attributes.
#ifndef JAX_EP_FFI_CUDA_LOADER_H_
#define JAX_EP_FFI_CUDA_LOADER_H_

#include <string>
#include <string_view>

#include "ffi/cuda/driver.h"
#include "ffi/status.h"

namespace jax_ep::cuda {

// A cubin. Kept until exit, once per process however many call sites bring it.
struct Image;

// The image of these bytes, made if this is its first call site. An error if they are
// not those that `sha256` names: a program that was damaged, or was made by hand with
// another kernel's name, must not decide what other programs run. `name` is of the
// attribute. Touches no device.
Status InternImage(std::string_view name, std::string_view sha256,
                   std::string_view bytes, Image** image);

// Finds `entry` of `image` for the current context's `device` and allows it
// `shared_bytes` of dynamic shared memory. Code is loaded here, once per device: a
// kernel that loads at its first launch may wait for a kernel that waits for us.
// Nothing is unloaded, since captured graphs hold the functions.
Status LoadKernel(const Driver& driver, Image* image, const std::string& entry,
                  CUdevice device, int shared_bytes, CUfunction* function);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LOADER_H_
