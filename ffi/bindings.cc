// The module jax_ep._ffi: hands the handlers to Python, which registers them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cuda/dtypes.h"
#include "ffi/cuda/few_shape.h"
#include "ffi/cuda/limits.h"
#include "ffi/cuda/workspace.h"
#include "ffi/host/handlers.h"
#include "ffi/host/stamps.h"
#include "ffi/registration.h"
#include "ffi/stamps.h"
#include "ffi/status.h"
#if JAX_EP_HAS_CUDA
#include "ffi/cuda/handlers.h"
#endif

namespace nb = nanobind;

namespace jax_ep {
namespace {

// target -> stage -> handler
template <typename Registration>
nb::dict HandlerDict(const std::vector<Registration>& registrations) {
  nb::dict targets;
  for (const Registration& r : registrations) {
    if (!targets.contains(r.target)) targets[r.target] = nb::dict();
    nb::cast<nb::dict>(targets[r.target])[r.stage] =
        nb::capsule(reinterpret_cast<void*>(r.handler));
  }
  return targets;
}

nb::dict AllHandlers() {
  nb::dict platforms;
  platforms["cpu"] = HandlerDict(host::Registrations());
#if JAX_EP_HAS_CUDA
  platforms["CUDA"] = HandlerDict(cuda::Registrations());
#endif
  return platforms;
}

nb::dict AllTypes() {
  nb::dict platforms;
#if JAX_EP_HAS_CUDA
  const auto state = cuda::StateType();
  nb::dict type;
  type["type_id"] = nb::capsule(state.type_id);
  type["type_info"] = nb::capsule(state.type_info);
  nb::dict types;
  types[state.name] = type;
  platforms["CUDA"] = types;
#endif
  return platforms;
}

nb::dict Limits() {
  nb::dict limits;
  limits["ranks"] = kMaxRanks;
  limits["topk"] = kMaxTopk;
  limits["experts"] = kMaxExperts;
  limits["leaves"] = kMaxLeaves;
  return limits;
}

nb::dict LeafDtypes() {
  nb::dict numbers;
  for (int i = 0; i < kNumDtypes; ++i) {
    if (kDtypes[i].is_summed) numbers[kDtypes[i].name] = i;
  }
  return numbers;
}

int64_t WorkspaceBytes(int num_ranks) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw std::invalid_argument(Concat("jax_ep: num_ranks (=", num_ranks,
                                       ") must be in [1, ", kMaxRanks, "]."));
  }
  return cuda::WorkspaceBytes(num_ranks);
}

// The most tokens per rank of a dispatch or combine with a kernel for few tokens. What
// a kernel for them cannot be for (a row too wide for its slots) has none.
int64_t FewDispatchTokens(const std::vector<int64_t>& leaf_bytes, int num_topk,
                          bool has_weights, int num_ranks) {
  return cuda::MaxFewTokens(
      cuda::FewDispatchSlot(leaf_bytes.data(), static_cast<int>(leaf_bytes.size()),
                            num_topk, has_weights),
      num_ranks);
}

int64_t FewCombineTokens(const std::vector<int32_t>& leaf_dtypes,
                         const std::vector<int64_t>& leaf_widths, int num_topk,
                         bool wire_f32, bool has_row_values, int num_ranks) {
  return cuda::MaxFewTokens(cuda::FewCombineSlot(leaf_dtypes.data(), leaf_widths.data(),
                                                 static_cast<int>(leaf_widths.size()),
                                                 num_topk, wire_f32, has_row_values),
                            num_ranks);
}

std::string CheckError() {
#if JAX_EP_HAS_CUDA
  return cuda::CheckError();
#else
  return "";
#endif
}

nb::list TakeStamps() {
  std::vector<StampRecord> records = host::TakeStamps();
#if JAX_EP_HAS_CUDA
  if (Status status = cuda::TakeStamps(&records); !status.ok()) {
    throw std::runtime_error("jax_ep.stamps: " + status.message());
  }
#endif
  nb::list list;
  for (const StampRecord& r : records) {
    list.append(nb::make_tuple(r.stage, r.rank, r.device, r.names, r.times));
  }
  return list;
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.doc() = "Handlers of the jax_ep custom calls.";
  m.def("registrations", &AllHandlers,
        "The handlers, by platform, target and stage, as PyCapsules.");
  m.def("types", &AllTypes,
        "State types that need registering, by platform and name: PyCapsules type_id "
        "and type_info.");
  m.def(
      "api_version",
      [] { return std::pair<int, int>(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "The (major, minor) XLA FFI version of the headers this was built with.");
  m.def("check_error", &CheckError,
        "The first failure of a CUDA exchange in this process, or the empty string.");
  m.def("take_stamps", &TakeStamps,
        "Of the stamped calls since the last time: stage, rank, device, names of the "
        "phases, and their times, flat, in ns.");
  m.def("is_few_ids", &cuda::IsFewIds,
        "Whether a layout of so many ids per rank, over ranks and experts, is one for "
        "few tokens.");
  m.def("few_dispatch_tokens", &FewDispatchTokens,
        "The most tokens per rank of a dispatch for few tokens.");
  m.def("few_combine_tokens", &FewCombineTokens,
        "The most tokens per rank of a combine for few tokens.");
  m.def("workspace_bytes", &WorkspaceBytes,
        "Bytes of GPU memory that the exchanges of `num_ranks` ranks keep on each.");
  m.attr("limits") = Limits();
  m.attr("leaf_dtypes") = LeafDtypes();
  m.attr("abi_version") = kAbiVersion;
  m.attr("has_cuda") = bool(JAX_EP_HAS_CUDA);
  m.attr("poisons_outputs") = bool(JAX_EP_POISON_OUTPUTS);
}

}  // namespace jax_ep
