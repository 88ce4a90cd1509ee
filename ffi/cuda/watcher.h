// Watches the error records that kernels write into host memory.
#ifndef JAX_EP_FFI_CUDA_WATCHER_H_
#define JAX_EP_FFI_CUDA_WATCHER_H_

#include <cstdint>
#include <string>

#include "ffi/cuda/workspace.h"

namespace jax_ep::cuda {

// Starts to watch `record`, pinned host memory that lives until exit, of `rank` of the
// group over `axis`. A thread looks at all records several times a second and prints
// one line for each as soon as it is written.
void WatchRecord(const ErrorRecord* record, const std::string& axis, int rank,
                 int num_ranks, int device);

// The first error recorded so far, as one line; "" if there is none. Reads the
// records itself, so it knows what the thread is about to print.
std::string RecordedError();

// The same, but one answer for all devices of a launch: XLA's devices wait for each
// other between `prepare` and `execute`, so either all of them see the error or none.
// A launch is known by its `run_id`; -1 is no launch and gets today's answer.
std::string RecordedErrorForRun(int64_t run_id);

// Prints one line to stderr at once. For failures that leave other ranks waiting for
// this one, so that whoever looks at a program that hangs finds the reason.
void PrintLine(const std::string& line);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_WATCHER_H_
