// The custom calls of platform "cpu".
#pragma once

#include "ffi/registration.h"

namespace jax_ep::host {

Registrations GetRegistrations();

}  // namespace jax_ep::host
