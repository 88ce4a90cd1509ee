// The symmetric workspace of one communicator on one device: made at its first use,
// never moved, never freed before exit.
#ifndef JAX_EP_FFI_CUDA_COMMUNICATOR_H_
#define JAX_EP_FFI_CUDA_COMMUNICATOR_H_

#include <array>
#include <string>
#include <vector>

#include "ffi/cuda/driver.h"
#include "ffi/cuda/nccl.h"
#include "ffi/cuda/workspace.h"
#include "ffi/stamps.h"
#include "ffi/status.h"

namespace jax_ep::cuda {

struct Workspace {
  CUcontext context = nullptr;
  CUdevice device = 0;
  int compute_major = 0;
  int compute_minor = 0;
  int num_sms = 0;           // the fewest that a rank's device has: equal grids for all
  int max_shared_bytes = 0;  // that a block may have
  int num_ranks = 0;
  int rank = 0;  // NCCL's, which is the position in the group (see communicator.cc)
  std::array<CUdeviceptr, kMaxRanks> peers{};  // every rank's window, in rank order
  CUdeviceptr error_record = 0;                // as the device sees it
  bool is_checkable = false;                   // see IsMapped
};

// The workspace of `comm` (null for a group of one rank, which needs none) on the
// device of `stream`, made if this is the first call. Every rank must call it, since
// registering a window is collective; where one cannot make its own, all fail and say
// which. `timeout_s` limits the waits for that, `axis` is for messages.
Status ObtainWorkspace(ncclComm_t comm, CUstream stream, int num_ranks,
                       const std::string& axis, double timeout_s,
                       const Workspace** workspace);

// Whether the communicator that `workspace` was made for still stands.
bool IsMapped(const Driver& driver, const Workspace& workspace);

// Appends the stamps that the latest stamped calls left in every workspace, and clears
// them.
Status CopyStamps(std::vector<StampRecord>* records);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_COMMUNICATOR_H_
