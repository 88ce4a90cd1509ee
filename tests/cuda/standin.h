// What the stand-in libraries offer to a test beyond the real ones' entry points.
#ifndef JAX_EP_TESTS_CUDA_STANDIN_H_
#define JAX_EP_TESTS_CUDA_STANDIN_H_

#include <cstddef>

#include "ffi/cuda/driver.h"
#include "ffi/cuda/nccl.h"

using StandinLaunchHook = void (*)(const jax_ep::cuda::LaunchConfig* config,
                                   const char* kernel, void* params);

struct StandinCounts {
  int libraries = 0;  // loaded
  int functions = 0;  // loaded, one per kernel and device
  int launches = 0;
};

// A stream's wait: for an event that was last recorded on `of`, or for a word.
struct StandinWait {
  jax_ep::cuda::CUstream stream;
  jax_ep::cuda::CUstream of;  // null for a word
  bool external;
  unsigned value;
};

extern "C" {

// libcuda.so.1
jax_ep::cuda::CUstream standin_stream(int device);
void standin_map(void* pointer, size_t bytes);  // becomes device memory
void standin_unmap(void* pointer);
void standin_fail(const char* call, int result);  // from now on; 0 to stop
void standin_on_launch(StandinLaunchHook hook);
StandinCounts standin_counts();
// Copies at most `most` waits from `first` on and returns how many there are in all.
int standin_waits(int first, int most, StandinWait* waits);
void standin_capture(jax_ep::cuda::CUstream stream);  // from now on; null to stop

// libnccl.so.2. A group's communicators come from a fixed pool, so that a group made
// after another was destroyed lives at the same addresses.
void standin_group(int num_ranks, int pool, jax_ep::cuda::ncclComm_t* communicators);
void standin_destroy(jax_ep::cuda::ncclComm_t communicator);  // of a whole group
// A rank sees 0 and 1 in each other's place in windows of more bytes; its ncclMemAlloc
// of a workspace fails, or takes so long. -1 for none.
void standin_swap_peers(int rank, size_t above);
void standin_fail_alloc(int rank);
void standin_slow_alloc(int rank, int ms);
int standin_registrations();
}

#endif  // JAX_EP_TESTS_CUDA_STANDIN_H_
