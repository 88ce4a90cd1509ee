// The custom calls of platform "CUDA".
//
// Each has four stages. `instantiate`, once per call site and without a device,
// decodes and checks the attributes. `prepare` asks XLA for the communicator of the
// axis's groups. `initialize` makes the workspace and loads the kernel, once each; XLA
// calls both on every execution, and holds the devices together between `initialize`
// and `execute` because a communicator was asked for. `execute` launches, and does
// nothing else, so it may be captured into a graph.
#ifndef JAX_EP_FFI_CUDA_HANDLERS_H_
#define JAX_EP_FFI_CUDA_HANDLERS_H_

#include <string>
#include <vector>

#include "ffi/registration.h"
#include "ffi/stamps.h"
#include "ffi/status.h"

namespace jax_ep::cuda {

std::vector<Registration> Registrations();

// The type of their state, for JAX to register. Handlers whose registration comes first
// register it themselves.
struct TypeRegistration {
  const char* name;
  XLA_FFI_TypeId* type_id;
  const XLA_FFI_TypeInfo* type_info;
};
TypeRegistration StateType();

// The first error that a kernel recorded since the process started, as one line, or ""
// if nothing went wrong. Reads host memory only.
std::string CheckError();

// Appends the stamps of the devices' latest stamped calls, and forgets them. Waits for
// its own copies only: the caller knows that the calls are over.
Status TakeStamps(std::vector<StampRecord>* records);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_HANDLERS_H_
