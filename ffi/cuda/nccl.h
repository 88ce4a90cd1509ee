// The part of NCCL that the host side calls: always the copy that XLA has loaded.
#ifndef JAX_EP_FFI_CUDA_NCCL_H_
#define JAX_EP_FFI_CUDA_NCCL_H_

#include <cstddef>
#include <string>

#include "ffi/cuda/driver.h"
#include "ffi/status.h"

struct ncclComm;
struct ncclWindow_vidmem;

namespace jax_ep::cuda {

using ncclResult = int;  // 0 is success
using ncclComm_t = ncclComm*;
using ncclWindow_t = ncclWindow_vidmem*;

inline constexpr ncclResult kNcclInProgress = 7;  // of a non-blocking communicator
inline constexpr int kWindowCollSymmetric = 1;    // NCCL_WIN_COLL_SYMMETRIC

// ncclTeam_t: `num_ranks` ranks of a communicator, `stride` apart, and which is ours.
struct NcclTeam {
  int num_ranks;
  int rank;
  int stride;
};

struct Nccl {
  const char* (*ncclGetErrorString)(ncclResult) = nullptr;
  const char* (*ncclGetLastError)(ncclComm_t) = nullptr;
  ncclResult (*ncclCommGetAsyncError)(ncclComm_t, ncclResult*) = nullptr;
  ncclResult (*ncclCommCount)(ncclComm_t, int*) = nullptr;
  ncclResult (*ncclCommUserRank)(ncclComm_t, int*) = nullptr;
  ncclResult (*ncclMemAlloc)(void**, size_t) = nullptr;
  ncclResult (*ncclCommWindowRegister)(ncclComm_t, void*, size_t, ncclWindow_t*,
                                       int) = nullptr;
  // The ranks that reach each other by load and store (one NVLink domain).
  NcclTeam (*ncclTeamLsa)(ncclComm_t) = nullptr;
  // Address at which this device sees `offset` of a rank's window; null before 2.29.
  ncclResult (*ncclGetLsaDevicePointer)(ncclWindow_t, size_t, int, void**) = nullptr;

  int version = 0;  // e.g. 22809
  Status status;    // why NCCL cannot be used, if it cannot

  static const Nccl& Get();

  // Why `call` failed: "ncclMemAlloc: unhandled cuda error (NCCL's last error: ...)
  // [NCCL 2.28.9]", what `more` says, and a full stop.
  Status Failure(const std::string& call, ncclResult result, ncclComm_t comm,
                 const std::string& more = "") const;
};

// Addresses at which this device sees the windows of all `num_ranks` ranks of one
// NVLink domain, in rank order. `stream` is any stream of the device.
Status PeerAddresses(const Nccl& nccl, const Driver& driver, ncclComm_t comm,
                     ncclWindow_t window, int num_ranks, int rank, CUstream stream,
                     CUdeviceptr* addresses);

// Waits for what a non-blocking communicator left in progress; a blocking one returns
// at once. `result` is what the call returned.
ncclResult AwaitCommunicator(const Nccl& nccl, ncclComm_t comm, ncclResult result);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_NCCL_H_
