// Call sites by number: what kernels compare between ranks, and what messages say.
#ifndef JAX_EP_FFI_CUDA_SITES_H_
#define JAX_EP_FFI_CUDA_SITES_H_

#include <cstdint>
#include <string>

namespace jax_ep::cuda {

// The number, of kSiteBits, of the site that `text` tells of: a hash, the same in all
// processes. The text is kept for messages.
uint64_t NumberSite(const std::string& text);

// What is known here of the site of a number.
std::string DescribeSite(uint64_t number);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_SITES_H_
