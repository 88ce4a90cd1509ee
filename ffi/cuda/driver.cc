#include "ffi/cuda/driver.h"

#include <dlfcn.h>

#include <type_traits>

namespace jax_ep::cuda {
namespace {

// The API version whose entry points are asked for. CUDA 12 is the first with
// cuLibraryLoadData and cuLaunchKernelEx on every driver.
constexpr int kApiVersion = 12000;
constexpr int kFuncLoadVersion = 12040;

using GetProcAddress = CUresult (*)(const char*, void**, int, uint64_t, int*);

template <typename Fn>
bool Resolve(GetProcAddress get, const char* name, int version, Fn& fn) {
  void* symbol = nullptr;
  int status = 0;
  if (get(name, &symbol, version, 0, &status) != 0) symbol = nullptr;
  fn = reinterpret_cast<Fn>(symbol);
  return symbol != nullptr;
}

Driver Open() {
  Driver driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    driver.status =
        FailedPrecondition("the CUDA driver library libcuda.so.1 cannot be opened (",
                           reason ? reason : "no reason given", ").");
    return driver;
  }
  auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  std::string missing;
  if (get == nullptr) {
    missing = "cuGetProcAddress_v2";
  } else {
    auto need = [&](const char* name, auto& fn) {
      if (Resolve(get, name, kApiVersion, fn)) return;
      missing += (missing.empty() ? "" : ", ") + std::string(name);
    };
    need("cuGetErrorName", driver.cuGetErrorName);
    need("cuGetErrorString", driver.cuGetErrorString);
    need("cuDeviceGetAttribute", driver.cuDeviceGetAttribute);
    need("cuCtxGetCurrent", driver.cuCtxGetCurrent);
    need("cuCtxPushCurrent", driver.cuCtxPushCurrent);
    need("cuCtxPopCurrent", driver.cuCtxPopCurrent);
    need("cuCtxGetDevice", driver.cuCtxGetDevice);
    need("cuStreamGetCtx", driver.cuStreamGetCtx);
    need("cuStreamCreate", driver.cuStreamCreate);
    need("cuStreamSynchronize", driver.cuStreamSynchronize);
    need("cuStreamDestroy", driver.cuStreamDestroy);
    need("cuCtxGetStreamPriorityRange", driver.cuCtxGetStreamPriorityRange);
    need("cuStreamCreateWithPriority", driver.cuStreamCreateWithPriority);
    need("cuStreamIsCapturing", driver.cuStreamIsCapturing);
    need("cuStreamWaitEvent", driver.cuStreamWaitEvent);
    need("cuStreamWaitValue32", driver.cuStreamWaitValue32);
    need("cuEventCreate", driver.cuEventCreate);
    need("cuEventRecord", driver.cuEventRecord);
    need("cuMemAlloc", driver.cuMemAlloc);
    need("cuMemGetAddressRange", driver.cuMemGetAddressRange);
    need("cuMemHostAlloc", driver.cuMemHostAlloc);
    need("cuMemHostGetDevicePointer", driver.cuMemHostGetDevicePointer);
    need("cuMemsetD8Async", driver.cuMemsetD8Async);
    need("cuMemcpyHtoDAsync", driver.cuMemcpyHtoDAsync);
    need("cuMemcpyDtoHAsync", driver.cuMemcpyDtoHAsync);
    need("cuLibraryLoadData", driver.cuLibraryLoadData);
    need("cuLibraryGetKernel", driver.cuLibraryGetKernel);
    need("cuKernelGetFunction", driver.cuKernelGetFunction);
    need("cuFuncSetAttribute", driver.cuFuncSetAttribute);
    need("cuLaunchKernelEx", driver.cuLaunchKernelEx);
    Resolve(get, "cuFuncLoad", kFuncLoadVersion, driver.cuFuncLoad);
  }
  if (!missing.empty()) {
    driver.status = FailedPrecondition(
        "the CUDA driver is too old, a driver for CUDA 12 or later is needed "
        "(libcuda.so.1 lacks ",
        missing, ").");
  }
  return driver;
}

}  // namespace

const Driver& Driver::Get() {
  static const Driver& driver = *new Driver(Open());  // lives until exit
  return driver;
}

Status Driver::Failure(const std::string& call, CUresult result,
                       const std::string& more) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != 0) name = nullptr;
  if (cuGetErrorString(result, &text) != 0) text = nullptr;
  return FailedPrecondition(call, ": ",
                            name ? name : "CUDA error " + std::to_string(result),
                            text ? Concat(" (", text, ")") : "", more, ".");
}

ScopedContext::ScopedContext(const Driver& driver, CUcontext context)
    : driver_(driver) {
  CUcontext current = nullptr;
  if (driver.cuCtxGetCurrent(&current) == 0 && current == context) return;
  pushed_ = driver.cuCtxPushCurrent(context) == 0;
}

ScopedContext::~ScopedContext() {
  CUcontext popped = nullptr;
  if (pushed_) driver_.cuCtxPopCurrent(&popped);
}

}  // namespace jax_ep::cuda
