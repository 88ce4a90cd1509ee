// The module jax_ep._ffi: hands the handlers to Python, which registers them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "ffi/host/handlers.h"
#include "ffi/registration.h"
#if JAX_EP_HAS_CUDA
#include "ffi/cuda/handlers.h"
#endif

namespace nb = nanobind;

namespace jax_ep {
namespace {

Registrations AllRegistrations() {
  Registrations all = host::GetRegistrations();
#if JAX_EP_HAS_CUDA
  Registrations cuda = cuda::GetRegistrations();
  all.handlers.insert(all.handlers.end(), cuda.handlers.begin(), cuda.handlers.end());
  all.types.insert(all.types.end(), cuda.types.begin(), cuda.types.end());
#endif
  return all;
}

// parent[key], created empty where missing.
nb::dict Child(nb::dict parent, const char* key) {
  if (!parent.contains(key)) parent[key] = nb::dict();
  return nb::cast<nb::dict>(parent[key]);
}

nb::dict HandlerDict() {
  nb::dict platforms;
  for (const HandlerRegistration& h : AllRegistrations().handlers) {
    Child(Child(platforms, h.platform), h.target)[h.stage] =
        nb::capsule(reinterpret_cast<void*>(h.handler));
  }
  return platforms;
}

nb::dict TypeDict() {
  nb::dict platforms;
  for (const TypeRegistration& t : AllRegistrations().types) {
    nb::dict type = Child(Child(platforms, t.platform), t.name);
    type["type_id"] = nb::capsule(t.type_id);
    type["type_info"] = nb::capsule(t.type_info);
  }
  return platforms;
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.doc() = "Handlers of the jax_ep custom calls.";
  m.def("registrations", &HandlerDict,
        "The handlers, by platform, target and stage, as PyCapsules.");
  m.def("types", &TypeDict,
        "The state types, by platform and name: PyCapsules type_id and type_info.");
  m.def(
      "api_version",
      [] { return std::pair<int, int>(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "The (major, minor) XLA FFI version of the headers this was built with.");
  m.attr("abi_version") = kAbiVersion;
  m.attr("has_cuda") = bool(JAX_EP_HAS_CUDA);
  m.attr("poisons_outputs") = bool(JAX_EP_POISON_OUTPUTS);
}

}  // namespace jax_ep
