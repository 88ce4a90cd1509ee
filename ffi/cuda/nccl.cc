#include "ffi/cuda/nccl.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <type_traits>

namespace jax_ep::cuda {
namespace {

constexpr int kMinVersion = 22800;         // symmetric windows with a device-side view
constexpr int kLsaPointerVersion = 22900;  // ncclGetLsaDevicePointer

// How long a non-blocking communicator may take to finish a call: long enough for the
// slowest rank to reach it, short enough to end before a person gives up.
constexpr std::chrono::seconds kInProgressLimit{120};

// The start of NCCL 2.28's device-side window, in device memory, as its public device
// header (nccl_device/impl/core__types.h) lays it out in 2.28.3, 2.28.7 and 2.28.9.
// Rank r's window starts at lsa_flat_base + r * stride_4g * 4 GiB. Read for 2.28 only:
// later versions have a function.
struct Window228 {
  void* host_window;
  CUdeviceptr lsa_flat_base;
  int32_t lsa_rank;
  int32_t world_rank;
  uint32_t stride_4g;
  uint32_t multicast_offset_4k;
};
static_assert(sizeof(void*) != 8 || sizeof(Window228) == 32, "NCCL 2.28's layout");

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
         "." + std::to_string(version % 100);
}

Nccl Open() {
  Nccl nccl;
  // RTLD_NOLOAD: a second copy would know nothing of XLA's communicators.
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    nccl.status = FailedPrecondition(
        "this process has not loaded libnccl.so.2, so XLA has no NCCL communicator to "
        "share; jax[cuda13] brings it, with nvidia-nccl-cu13.");
    return nccl;
  }
  auto find = [&](const char* name, auto& fn) {
    fn = reinterpret_cast<std::decay_t<decltype(fn)>>(dlsym(library, name));
    return fn != nullptr;
  };
  ncclResult (*get_version)(int*) = nullptr;
  if (!find("ncclGetVersion", get_version) || get_version(&nccl.version) != 0) {
    nccl.status = FailedPrecondition("libnccl.so.2 does not tell its version.");
    return nccl;
  }
  if (nccl.version < kMinVersion) {
    nccl.status =
        FailedPrecondition("expected NCCL >= 2.28, got ", VersionText(nccl.version),
                           "; install nvidia-nccl-cu13>=2.28.9.");
    return nccl;
  }
  std::string missing;
  auto need = [&](const char* name, auto& fn) {
    if (find(name, fn)) return;
    missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  need("ncclGetErrorString", nccl.ncclGetErrorString);
  need("ncclGetLastError", nccl.ncclGetLastError);
  need("ncclCommGetAsyncError", nccl.ncclCommGetAsyncError);
  need("ncclCommCount", nccl.ncclCommCount);
  need("ncclCommUserRank", nccl.ncclCommUserRank);
  need("ncclMemAlloc", nccl.ncclMemAlloc);
  need("ncclCommWindowRegister", nccl.ncclCommWindowRegister);
  need("ncclTeamLsa", nccl.ncclTeamLsa);
  if (nccl.version >= kLsaPointerVersion) {
    need("ncclGetLsaDevicePointer", nccl.ncclGetLsaDevicePointer);
  }
  if (!missing.empty()) {
    nccl.status =
        FailedPrecondition("NCCL ", VersionText(nccl.version), " lacks ", missing, ".");
  }
  return nccl;
}

}  // namespace

const Nccl& Nccl::Get() {
  static const Nccl& nccl = *new Nccl(Open());  // lives until exit
  return nccl;
}

Status Nccl::Failure(const std::string& call, ncclResult result, ncclComm_t comm,
                     const std::string& more) const {
  std::string text = call + ": " + ncclGetErrorString(result);
  const char* last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') {
    text += " (NCCL's last error: " + std::string(last) + ")";
  }
  return FailedPrecondition(text, " [NCCL ", VersionText(version), "]", more, ".");
}

ncclResult AwaitCommunicator(const Nccl& nccl, ncclComm_t comm, ncclResult result) {
  const auto deadline = std::chrono::steady_clock::now() + kInProgressLimit;
  while (result == kNcclInProgress && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ncclResult state = kNcclInProgress;
    const ncclResult asked = nccl.ncclCommGetAsyncError(comm, &state);
    result = asked != 0 ? asked : state;
  }
  return result;
}

Status PeerAddresses(const Nccl& nccl, const Driver& driver, ncclComm_t comm,
                     ncclWindow_t window, int num_ranks, int rank, CUstream stream,
                     CUdeviceptr* addresses) {
  if (nccl.ncclGetLsaDevicePointer != nullptr) {
    for (int r = 0; r < num_ranks; ++r) {
      void* address = nullptr;
      const ncclResult result = nccl.ncclGetLsaDevicePointer(window, 0, r, &address);
      if (result != 0) return nccl.Failure("ncclGetLsaDevicePointer", result, comm);
      addresses[r] = reinterpret_cast<CUdeviceptr>(address);
    }
    return Status();
  }
  Window228 view{};
  CUresult result = driver.cuMemcpyDtoHAsync(
      &view, reinterpret_cast<CUdeviceptr>(window), sizeof(view), stream);
  if (result == 0) result = driver.cuStreamSynchronize(stream);
  if (result != 0) {
    return driver.Failure("reading the NCCL window", result,
                          "; NCCL has no symmetric memory between these devices");
  }
  // A library built differently would show here rather than as a wild store.
  if (view.lsa_rank != rank || view.world_rank != rank || view.stride_4g == 0 ||
      view.lsa_flat_base == 0) {
    return FailedPrecondition(
        "NCCL ", VersionText(nccl.version),
        " has an unknown window layout; install nvidia-nccl-cu13>=2.29.");
  }
  for (int r = 0; r < num_ranks; ++r) {
    addresses[r] =
        view.lsa_flat_base + (static_cast<CUdeviceptr>(view.stride_4g) << 32) * r;
  }
  return Status();
}

}  // namespace jax_ep::cuda
