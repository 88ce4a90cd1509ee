// What a platform's handlers export, so that bindings.cc need not know them.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

// Changed when operands, results or attributes of a custom call change meaning. Python
// puts its own copy into every call, so a program from a cache or an export that was
// made for another version is refused with a message.
inline constexpr int kAbiVersion = 1;

struct HandlerRegistration {
  const char* platform;  // as jax.ffi.register_ffi_target takes it
  const char* target;
  const char* stage;  // instantiate, prepare, initialize or execute
  XLA_FFI_Handler* handler;
};

// A type of a handler's state. Platforms must not share one: XLA numbers the types of
// each platform on its own and writes the number into the same static id.
struct TypeRegistration {
  const char* platform;
  const char* name;
  XLA_FFI_TypeId* type_id;
  const XLA_FFI_TypeInfo* type_info;
};

struct Registrations {
  std::vector<HandlerRegistration> handlers;
  std::vector<TypeRegistration> types;
};

}  // namespace jax_ep
