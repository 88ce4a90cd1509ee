// What a platform's handlers export, and what they agree on with Python.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

// Changed when operands, results or attributes of a custom call change meaning. Python
// puts the number of the module it finds into every call, so a program from a cache or
// an export that was made for another version is refused with a message.
inline constexpr int kAbiVersion = 2;

struct Registration {
  const char* target;  // jax_ep_dispatch
  const char* stage;   // instantiate, prepare, initialize or execute
  XLA_FFI_Handler* handler;
};

}  // namespace jax_ep
