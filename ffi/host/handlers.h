// The custom calls of platform "cpu".
#pragma once

#include <vector>

#include "ffi/registration.h"

namespace jax_ep::host {

std::vector<Registration> Registrations();

}  // namespace jax_ep::host
