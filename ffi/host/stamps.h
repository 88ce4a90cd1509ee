// The stamps of host handlers: kept for the tools, read by no handler.
#ifndef JAX_EP_FFI_HOST_STAMPS_H_
#define JAX_EP_FFI_HOST_STAMPS_H_

#include <cstdint>
#include <vector>

#include "ffi/stamps.h"

namespace jax_ep::host {

// Nanoseconds of a clock that all devices of the process share.
int64_t Now();

// Keeps what a rank's call of a stage ("dispatch", ...) took, in place of its last one.
void KeepStamps(const char* stage, int rank, int64_t arrived, int64_t began,
                int64_t ended);

// Hands out what was kept since the last time.
std::vector<StampRecord> TakeStamps();

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_STAMPS_H_
