// What a CUDA handler keeps of a call site: its attributes, its kernel, and what its
// devices are ready with.
#ifndef JAX_EP_FFI_CUDA_STATE_H_
#define JAX_EP_FFI_CUDA_STATE_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/calls.h"
#include "ffi/cuda/communicator.h"
#include "ffi/cuda/driver.h"
#include "ffi/cuda/in_flight.h"
#include "ffi/cuda/launch_shape.h"
#include "ffi/cuda/loader.h"
#include "ffi/cuda/sites.h"
#include "ffi/status.h"
#include "xla/ffi/api/collectives_c_api.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::cuda {

// What a kernel was compiled for, besides ranks and flags. Of dispatch and combine.
struct KernelSizes {
  bool few = false;      // whether the kernel is one for few tokens; the layout's too
  int64_t most_ids = 0;  // per rank, of a layout for few tokens
  int num_topk = 0;
  std::vector<int64_t> leaf_bytes;   // dispatch: bytes of a row of each leaf
  std::vector<int32_t> leaf_dtypes;  // combine: LeafDtype
  std::vector<int64_t> leaf_widths;  // combine: elements of a row
};

// What `execute` needs of a device; filled in by `initialize`.
struct Ready {
  const Workspace* workspace = nullptr;
  CUfunction function = nullptr;
  LaunchDims dims{};
  SideStream* side = nullptr;  // of a start
};

// One call site of one executable, shared by its devices.
struct CudaState {
  static ffi::TypeId id;

  Config config;
  KernelSizes sizes;
  std::string call_site;                 // its module and its number there
  std::map<std::string, Image*> images;  // by architecture
  std::vector<XLA_FFI_ReplicaGroup> groups;

  Ready GetReady(int32_t ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    return ready_[ordinal];
  }
  void SetReady(int32_t ordinal, const Ready& ready) {
    std::lock_guard<std::mutex> lock(mutex_);
    ready_[ordinal] = ready;
  }

  // The number by which kernels compare the site between ranks: whatever else fixes
  // what crosses is part of it.
  uint64_t SiteOf(const char* op, const AnyCall& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (site_tokens_ == call.num_tokens) return site_;
    std::string text =
        Concat(op, " (", call_site, ": ", call.num_tokens, " tokens per rank, top-k ",
               call.num_topk, ", ", config.num_experts, " experts, capacity ",
               config.capacity, ", alignment ", config.alignment);
    for (const Leaf& leaf : call.leaves) {
      text += Concat(", ", kDtypes[leaf.dtype].name, "[", leaf.width, "]");
    }
    for (const auto& [has, what] : {std::pair(config.has_weights, ", weights"),
                                    std::pair(config.has_row_values, ", row values"),
                                    std::pair(config.wire_f32, ", float32 wire")}) {
      if (has) text += what;
    }
    site_ = NumberSite(text + ")");
    site_tokens_ = call.num_tokens;
    return site_;
  }

 private:
  std::mutex mutex_;
  int64_t site_tokens_ = -1;  // for which `site_` is
  uint64_t site_ = 0;
  std::map<int32_t, Ready> ready_;  // by device ordinal
};

inline Status ReadImages(Attributes& attrs, CudaState& state) {
  std::string_view archs = attrs.Get<std::string_view>("cubin_archs");
  if (!attrs.status().ok()) return attrs.status();
  if (archs.empty()) {
    return InvalidArgument("cubin_archs must name an architecture, got none.");
  }
  while (!archs.empty()) {
    const std::string_view arch = archs.substr(0, archs.find(','));
    archs.remove_prefix(std::min(archs.size(), arch.size() + 1));
    constexpr auto kLetters = "0123456789abcdefghijklmnopqrstuvwxyz_";
    if (arch.empty() || arch.find_first_not_of(kLetters) != std::string_view::npos) {
      return InvalidArgument("cubin_archs must be names like sm_90a joined by commas.");
    }
    const std::string name = Concat("cubin_", arch);
    const auto bytes = attrs.Get<std::string_view>(name);
    const auto sha256 = attrs.Get<std::string_view>(name + "_sha256");
    if (!attrs.status().ok()) return attrs.status();
    Image* image = nullptr;
    if (Status status = InternImage(name, sha256, bytes, &image); !status.ok()) {
      return status;
    }
    state.images[std::string(arch)] = image;
  }
  return Status();
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_STATE_H_
