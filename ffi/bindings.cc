// The module jax_ep._ffi: hands the handlers to Python, which registers them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/host/handlers.h"
#include "ffi/host/stamps.h"
#include "ffi/registration.h"
#include "ffi/stamps.h"
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
  if (std::string error = cuda::TakeStamps(&records); !error.empty()) {
    throw std::runtime_error(error);
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
  m.attr("abi_version") = kAbiVersion;
  m.attr("has_cuda") = bool(JAX_EP_HAS_CUDA);
  m.attr("poisons_outputs") = bool(JAX_EP_POISON_OUTPUTS);
}

}  // namespace jax_ep
