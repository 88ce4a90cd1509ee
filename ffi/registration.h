// What a platform's handlers export, and what they agree on with Python.
#ifndef JAX_EP_FFI_REGISTRATION_H_
#define JAX_EP_FFI_REGISTRATION_H_

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

// Changed when operands, results or attributes of a custom call change meaning, and
// with kKernelAbi (cuda/workspace.h), since a program carries its kernels. Python puts
// the number of the module it finds into every call, so a program from a cache or an
// export that was made for another version is refused with a message.
inline constexpr int kAbiVersion = 5;

struct Registration {
  const char* target;  // jax_ep_dispatch
  const char* stage;   // instantiate, prepare, initialize or execute
  XLA_FFI_Handler* handler;
};

}  // namespace jax_ep

#endif  // JAX_EP_FFI_REGISTRATION_H_
