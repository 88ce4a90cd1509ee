// The part of the CUDA driver API that the host side calls, with declarations of our
// own: nothing of CUDA is needed to build, and libcuda.so.1 is opened at first use.
#ifndef JAX_EP_FFI_CUDA_DRIVER_H_
#define JAX_EP_FFI_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/status.h"

// Opaque handles, named as in cuda.h so that its manual can be read beside this.
struct CUctx_st;
struct CUevent_st;
struct CUfunc_st;
struct CUkern_st;
struct CUlib_st;
struct CUstream_st;

namespace jax_ep::cuda {

using CUresult = int;  // 0 is success
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = CUctx_st*;
using CUevent = CUevent_st*;
using CUfunction = CUfunc_st*;
using CUkernel = CUkern_st*;
using CUlibrary = CUlib_st*;
using CUstream = CUstream_st*;

// Values of cuda.h's enumerations; they are part of the driver's stable ABI.
inline constexpr unsigned kStreamNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventDisableTiming = 2;   // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kEventWaitExternal = 1;    // CU_EVENT_WAIT_EXTERNAL
inline constexpr unsigned kStreamWaitValueGeq = 0;   // CU_STREAM_WAIT_VALUE_GEQ
inline constexpr int kCaptureNone = 0;               // CU_STREAM_CAPTURE_STATUS_...
inline constexpr unsigned kHostAllocPortable = 1;    // CU_MEMHOSTALLOC_PORTABLE
inline constexpr unsigned kHostAllocDeviceMap = 2;   // CU_MEMHOSTALLOC_DEVICEMAP
inline constexpr int kAttributeNumSms = 16;          // MULTIPROCESSOR_COUNT
inline constexpr int kAttributeComputeMajor = 75;    // COMPUTE_CAPABILITY_MAJOR
inline constexpr int kAttributeComputeMinor = 76;    // COMPUTE_CAPABILITY_MINOR
inline constexpr int kAttributeMaxSharedBytes = 97;  // ..._PER_BLOCK_OPTIN
inline constexpr int kFunctionMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_...

// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CUstream stream;
  void* attributes;  // CUlaunchAttribute[num_attributes]
  unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig of cuda.h");

struct Driver {
  CUresult (*cuGetErrorName)(CUresult, const char**) = nullptr;
  CUresult (*cuGetErrorString)(CUresult, const char**) = nullptr;
  CUresult (*cuDeviceGetAttribute)(int*, int, CUdevice) = nullptr;
  CUresult (*cuCtxGetCurrent)(CUcontext*) = nullptr;
  CUresult (*cuCtxPushCurrent)(CUcontext) = nullptr;
  CUresult (*cuCtxPopCurrent)(CUcontext*) = nullptr;
  CUresult (*cuCtxGetDevice)(CUdevice*) = nullptr;
  CUresult (*cuStreamGetCtx)(CUstream, CUcontext*) = nullptr;
  CUresult (*cuStreamCreate)(CUstream*, unsigned) = nullptr;
  CUresult (*cuStreamSynchronize)(CUstream) = nullptr;
  CUresult (*cuStreamDestroy)(CUstream) = nullptr;
  CUresult (*cuCtxGetStreamPriorityRange)(int* least, int* greatest) = nullptr;
  CUresult (*cuStreamCreateWithPriority)(CUstream*, unsigned, int) = nullptr;
  CUresult (*cuStreamIsCapturing)(CUstream, int*) = nullptr;
  CUresult (*cuStreamWaitEvent)(CUstream, CUevent, unsigned) = nullptr;
  CUresult (*cuStreamWaitValue32)(CUstream, CUdeviceptr, uint32_t, unsigned) = nullptr;
  CUresult (*cuEventCreate)(CUevent*, unsigned) = nullptr;
  CUresult (*cuEventRecord)(CUevent, CUstream) = nullptr;
  CUresult (*cuMemAlloc)(CUdeviceptr*, size_t) = nullptr;
  CUresult (*cuMemGetAddressRange)(CUdeviceptr*, size_t*, CUdeviceptr) = nullptr;
  CUresult (*cuMemHostAlloc)(void**, size_t, unsigned) = nullptr;
  CUresult (*cuMemHostGetDevicePointer)(CUdeviceptr*, void*, unsigned) = nullptr;
  CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char, size_t, CUstream) = nullptr;
  CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr, const void*, size_t, CUstream) = nullptr;
  CUresult (*cuMemcpyDtoHAsync)(void*, CUdeviceptr, size_t, CUstream) = nullptr;
  CUresult (*cuLibraryLoadData)(CUlibrary*, const void*, void*, void**, unsigned, void*,
                                void**, unsigned) = nullptr;
  CUresult (*cuLibraryGetKernel)(CUkernel*, CUlibrary, const char*) = nullptr;
  CUresult (*cuKernelGetFunction)(CUfunction*, CUkernel) = nullptr;
  CUresult (*cuFuncSetAttribute)(CUfunction, int, int) = nullptr;
  CUresult (*cuLaunchKernelEx)(const LaunchConfig*, CUfunction, void**,
                               void**) = nullptr;
  // Loads a function before its first launch (driver 12.4 and later), else null.
  CUresult (*cuFuncLoad)(CUfunction) = nullptr;

  Status status;  // why the driver cannot be used, if it cannot

  static const Driver& Get();

  // Why `call` failed: "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)", what
  // `more` says, and a full stop.
  Status Failure(const std::string& call, CUresult result,
                 const std::string& more = "") const;
};

// Makes the context of `stream` (or `context`) current for a scope, where it is not.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, CUcontext context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DRIVER_H_
