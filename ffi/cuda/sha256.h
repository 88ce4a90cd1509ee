// SHA-256 (FIPS 180-4), by which programs name their kernels' code.
#ifndef JAX_EP_FFI_CUDA_SHA256_H_
#define JAX_EP_FFI_CUDA_SHA256_H_

#include <string>
#include <string_view>

namespace jax_ep::cuda {

// The digest of `bytes` in hexadecimal, as Python's hexdigest() writes it.
std::string Sha256(std::string_view bytes);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_SHA256_H_
