// The kernels of a build; defined in the source that build.py writes.

#ifndef JAX_EP_TESTS_EMULATOR_KERNELS_H_
#define JAX_EP_TESTS_EMULATOR_KERNELS_H_

#include <string>

#include "launch_shape.h"
#include "machine.h"

// LayoutLaunch or FewLayoutLaunch, as the kernels of this build have it.
jax_ep::cuda::LaunchDims LayoutDims(bool few, int blocks, int num_ranks,
                                    int num_experts);

// Ends the process if there is none of that name.
const emu::Kernel* FindKernel(const std::string& name);

#endif  // JAX_EP_TESTS_EMULATOR_KERNELS_H_
