// What ranks tell each other while they make their workspaces: each has a page that all
// others read. Registering a window is collective and has no limit in NCCL, so a rank
// that cannot must say so before its peers wait for it there.
#ifndef JAX_EP_FFI_CUDA_AGREEMENT_H_
#define JAX_EP_FFI_CUDA_AGREEMENT_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/cuda/driver.h"
#include "ffi/cuda/nccl.h"
#include "ffi/cuda/workspace.h"
#include "ffi/status.h"

namespace jax_ep::cuda {

class Agreement {
 public:
  Agreement(const Nccl& nccl, const Driver& driver, ncclComm_t comm, int num_ranks,
            int rank, CUstream stream, double timeout_s)
      : nccl_(nccl),
        driver_(driver),
        comm_(comm),
        num_ranks_(num_ranks),
        rank_(rank),
        stream_(stream),
        timeout_(timeout_s) {}

  // Registers the pages; collective, and so without a limit. They are the least that
  // NCCL allocates, and live until exit: a late rank may still read them.
  Status Open();

  // Tells the others how this rank's step `step` (1, then 2) went and waits, no longer
  // than the time limit, until all have told. The first failure ends it for all.
  Status Reach(int step, const Status& mine);

 private:
  Status Tell(int step, int failed_rank, const std::string& why);
  Status Read(int rank, size_t offset, void* out, size_t bytes);

  const Nccl& nccl_;
  const Driver& driver_;
  const ncclComm_t comm_;
  const int num_ranks_, rank_;
  const CUstream stream_;
  const std::chrono::duration<double> timeout_;
  CUdeviceptr mine_ = 0;  // this rank's page
  std::array<CUdeviceptr, kMaxRanks> pages_{};
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_AGREEMENT_H_
