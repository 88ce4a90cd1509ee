// The custom calls of platform "cpu".
#ifndef JAX_EP_FFI_HOST_HANDLERS_H_
#define JAX_EP_FFI_HOST_HANDLERS_H_

#include <vector>

#include "ffi/registration.h"

namespace jax_ep::host {

std::vector<Registration> Registrations();

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_HANDLERS_H_
