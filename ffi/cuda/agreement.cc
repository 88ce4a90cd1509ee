#include "ffi/cuda/agreement.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>

namespace jax_ep::cuda {
namespace {

// The least that ncclMemAlloc takes from the driver.
constexpr size_t kWindowBytes = size_t{2} << 20;

constexpr size_t kWhyBytes = 1024;  // with a final zero

// What the others poll; `why` is written before it.
struct Said {
  int32_t rank;         // whose page it is
  int32_t step;         // the last that the rank reached
  int32_t failed_rank;  // or kNone
  int32_t pad;
};
struct Page {
  Said said;
  char why[kWhyBytes];
};
constexpr int32_t kNone = -1;

}  // namespace

Status Agreement::Open() {
  void* memory = nullptr;
  ncclResult result = nccl_.ncclMemAlloc(&memory, kWindowBytes);
  if (result != 0) {
    return nccl_.Failure(Concat("ncclMemAlloc of ", kWindowBytes, " bytes"), result,
                         comm_);
  }
  mine_ = reinterpret_cast<CUdeviceptr>(memory);
  // Before the closing barrier of the registration, so that none reads what was here.
  if (Status status = Tell(0, kNone, ""); !status.ok()) return status;
  ncclWindow_t window = nullptr;
  result = nccl_.ncclCommWindowRegister(comm_, memory, kWindowBytes, &window,
                                        kWindowCollSymmetric);
  result = AwaitCommunicator(nccl_, comm_, result);
  if (result != 0) return nccl_.Failure("ncclCommWindowRegister", result, comm_);
  if (window == nullptr) {
    return FailedPrecondition(
        "NCCL has no symmetric memory between these devices (NCCL_CUMEM_ENABLE=0, "
        "NCCL_WIN_ENABLE=0, or no peer access).");
  }
  Status status = PeerAddresses(nccl_, driver_, comm_, window, num_ranks_, rank_,
                                stream_, pages_.data());
  for (int r = 0; r < num_ranks_ && status.ok(); ++r) {
    Said said{};
    status = Read(r, 0, &said, sizeof(said));
    if (status.ok() && said.rank != r) {
      status = FailedPrecondition("expected the page of rank ", r,
                                  ", got that of rank ", said.rank, ".");
    }
  }
  if (!status.ok()) (void)Tell(1, rank_, status.message());
  return status;
}

Status Agreement::Reach(int step, const Status& mine) {
  // Where a failure cannot be told the others give up on their own.
  if (!mine.ok()) {
    (void)Tell(step, rank_, mine.message());
    return mine;
  }
  if (Status status = Tell(step, kNone, ""); !status.ok()) return status;
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  for (int r = 0; r < num_ranks_; ++r) {
    while (true) {
      Said said{};
      char why[kWhyBytes] = {};
      Status status = Read(r, 0, &said, sizeof(said));
      const bool failed = said.failed_rank != kNone;
      if (status.ok() && failed) {
        status = Read(r, offsetof(Page, why), why, kWhyBytes - 1);
      }
      if (status.ok() && failed) {
        (void)Tell(step, said.failed_rank, why);
        return FailedPrecondition("rank ", said.failed_rank, " has none: ", why);
      }
      if (status.ok() && said.step >= step) break;
      if (status.ok() && std::chrono::steady_clock::now() > deadline) {
        status = Status(Code::kDeadlineExceeded,
                        Concat("rank ", r, " did not say within ", timeout_.count(),
                               " s whether it has one."));
      }
      if (!status.ok()) {
        (void)Tell(step, rank_, status.message());
        return status;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return Status();
}

Status Agreement::Tell(int step, int failed_rank, const std::string& why) {
  Page page{{rank_, step, failed_rank, 0}, {}};
  std::memcpy(page.why, why.data(), std::min(why.size(), kWhyBytes - 1));
  // In this order on the stream.
  CUresult result = driver_.cuMemcpyHtoDAsync(mine_ + offsetof(Page, why), page.why,
                                              kWhyBytes, stream_);
  if (result == 0) {
    result = driver_.cuMemcpyHtoDAsync(mine_, &page.said, sizeof(page.said), stream_);
  }
  if (result == 0) result = driver_.cuStreamSynchronize(stream_);
  return result == 0 ? Status() : driver_.Failure("writing a page", result);
}

Status Agreement::Read(int rank, size_t offset, void* out, size_t bytes) {
  CUresult result =
      driver_.cuMemcpyDtoHAsync(out, pages_[rank] + offset, bytes, stream_);
  if (result == 0) result = driver_.cuStreamSynchronize(stream_);
  return result == 0
             ? Status()
             : driver_.Failure(Concat("reading the page of rank ", rank), result);
}

}  // namespace jax_ep::cuda
