// A stand-in for libcuda.so.1: devices are contexts over host memory, kernels are a
// callback. It is stricter than the driver where a mistake would go unseen on one.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cuda/driver.h"
#include "tests/cuda/standin.h"

using namespace jax_ep::cuda;

struct CUctx_st {
  int device;
};
struct CUstream_st {
  CUcontext context;
};
struct CUevent_st {
  CUstream stream = nullptr;  // where it was recorded last
};
struct CUlib_st {
  int unused;
};
struct CUkern_st {
  std::string name;
};
struct CUfunc_st {
  std::string name;
  CUcontext context;
  bool loaded = false;
  int shared_bytes = 48 * 1024;
};

namespace {

constexpr int kNumDevices = 8;
constexpr int kNumSms = 132;
constexpr CUresult kInvalidValue = 1, kInvalidImage = 200, kInvalidContext = 201,
                   kNotFound = 500, kIllegalAddress = 700;

CUctx_st contexts[kNumDevices] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
thread_local std::vector<CUcontext> current;

std::mutex mutex;
std::map<uintptr_t, size_t> ranges;  // mapped device memory
std::map<std::string, int> failures;
std::map<std::pair<CUkernel, CUcontext>, CUfunc_st> functions;
StandinCounts counts;
StandinLaunchHook launch_hook = nullptr;

CUresult Injected(const char* call) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = failures.find(call);
  return it == failures.end() ? 0 : it->second;
}

bool IsMapped(CUdeviceptr pointer, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = ranges.upper_bound(pointer);
  if (it == ranges.begin()) return false;
  --it;
  return pointer + bytes <= it->first + it->second;
}

CUresult GetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR_STANDIN";
  return 0;
}
CUresult GetErrorString(CUresult, const char** text) {
  *text = "stand-in";
  return 0;
}
CUresult DeviceGetAttribute(int* value, int attribute, CUdevice) {
  *value = attribute == kAttributeNumSms           ? kNumSms
           : attribute == kAttributeMaxSharedBytes ? 227 * 1024
           : attribute == kAttributeComputeMajor   ? 9
           : attribute == kAttributeComputeMinor   ? 0
                                                   : -1;
  return *value < 0 ? kInvalidValue : 0;
}
CUresult CtxGetCurrent(CUcontext* context) {
  *context = current.empty() ? nullptr : current.back();
  return 0;
}
CUresult CtxPushCurrent(CUcontext context) {
  current.push_back(context);
  return 0;
}
CUresult CtxPopCurrent(CUcontext* context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return 0;
}
CUresult CtxGetDevice(CUdevice* device) {
  if (current.empty()) return kInvalidContext;
  *device = current.back()->device;
  return 0;
}
CUresult StreamGetCtx(CUstream stream, CUcontext* context) {
  *context = stream->context;
  return 0;
}
CUresult StreamCreate(CUstream* stream, unsigned flags) {
  if (current.empty() || flags != kStreamNonBlocking) return kInvalidValue;
  *stream = new CUstream_st{current.back()};
  return Injected("cuStreamCreate");
}
// What streams were asked to wait for, in order; see standin_waits.
std::vector<StandinWait> waits;
CUstream capturing = nullptr;

void NoteWait(StandinWait wait) {
  std::lock_guard<std::mutex> lock(mutex);
  waits.push_back(wait);
}

CUresult CtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
CUresult StreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  if (priority != -5) return kInvalidValue;
  return StreamCreate(stream, flags);
}
CUresult StreamIsCapturing(CUstream stream, int* status) {
  *status = stream == capturing ? 1 : kCaptureNone;
  return 0;
}
CUresult EventCreate(CUevent* event, unsigned flags) {
  if (flags != kEventDisableTiming) return kInvalidValue;
  *event = new CUevent_st{};
  return Injected("cuEventCreate");
}
CUresult EventRecord(CUevent event, CUstream stream) {
  event->stream = stream;
  return Injected("cuEventRecord");
}
CUresult StreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  // An event of outside a capture is waited for by a node of the graph, or not at all.
  const bool external = flags == kEventWaitExternal;
  if (external != (stream == capturing)) return kInvalidValue;
  NoteWait({stream, event->stream, external, 0});
  return Injected("cuStreamWaitEvent");
}
CUresult StreamWaitValue32(CUstream stream, CUdeviceptr word, uint32_t value,
                           unsigned flags) {
  if (flags != kStreamWaitValueGeq || !IsMapped(word, 4)) return kInvalidValue;
  NoteWait({stream, nullptr, false, value});
  return Injected("cuStreamWaitValue32");
}
CUresult StreamSynchronize(CUstream) { return Injected("cuStreamSynchronize"); }
CUresult StreamDestroy(CUstream stream) {
  delete stream;
  return 0;
}
// These ask for the calling thread's context, as the driver's own do.
CUresult MemAlloc(CUdeviceptr* pointer, size_t bytes) {
  if (current.empty()) return kInvalidContext;
  if (CUresult result = Injected("cuMemAlloc")) return result;
  void* memory = std::malloc(bytes);
  standin_map(memory, bytes);
  *pointer = reinterpret_cast<CUdeviceptr>(memory);
  return 0;
}
CUresult MemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  if (current.empty()) return kInvalidContext;
  if (CUresult result = Injected("cuMemGetAddressRange")) return result;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = ranges.upper_bound(pointer);
  if (it == ranges.begin()) return kInvalidValue;
  --it;
  if (pointer >= it->first + it->second) return kInvalidValue;
  *base = it->first;
  *bytes = it->second;
  return 0;
}
CUresult MemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  if (current.empty()) return kInvalidContext;
  if (flags != (kHostAllocPortable | kHostAllocDeviceMap)) return kInvalidValue;
  *pointer = std::malloc(bytes);
  return Injected("cuMemHostAlloc");
}
CUresult MemHostGetDevicePointer(CUdeviceptr* device, void* host, unsigned) {
  if (current.empty()) return kInvalidContext;
  *device = reinterpret_cast<CUdeviceptr>(host);
  return 0;
}
CUresult MemsetD8Async(CUdeviceptr pointer, unsigned char value, size_t bytes,
                       CUstream) {
  if (!IsMapped(pointer, bytes)) return kIllegalAddress;
  std::memset(reinterpret_cast<void*>(pointer), value, bytes);
  return Injected("cuMemsetD8Async");
}
CUresult MemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  if (!IsMapped(to, bytes)) return kIllegalAddress;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
CUresult MemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  if (!IsMapped(from, bytes)) return kIllegalAddress;
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
CUresult LibraryLoadData(CUlibrary* library, const void* image, void*, void**, unsigned,
                         void*, void**, unsigned) {
  if (std::memcmp(image, "\177ELF", 4) != 0) return kInvalidImage;
  std::lock_guard<std::mutex> lock(mutex);
  ++counts.libraries;
  *library = new CUlib_st{};
  return 0;
}
CUresult LibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) {
  if (std::strncmp(name, "jax_ep_", 7) != 0) return kNotFound;
  static std::map<std::string, CUkern_st> kernels;
  std::lock_guard<std::mutex> lock(mutex);
  *kernel = &kernels.try_emplace(name, CUkern_st{name}).first->second;
  return 0;
}
CUresult KernelGetFunction(CUfunction* function, CUkernel kernel) {
  if (current.empty()) return kInvalidContext;
  std::lock_guard<std::mutex> lock(mutex);
  auto [it, inserted] = functions.try_emplace({kernel, current.back()});
  it->second.name = kernel->name;
  it->second.context = current.back();
  *function = &it->second;
  return 0;
}
CUresult FuncLoad(CUfunction function) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!function->loaded) ++counts.functions;
  function->loaded = true;
  return 0;
}
CUresult FuncSetAttribute(CUfunction function, int attribute, int value) {
  if (attribute != kFunctionMaxDynamicShared) return kInvalidValue;
  function->shared_bytes = value;
  return 0;
}
CUresult LaunchKernelEx(const LaunchConfig* config, CUfunction function, void** args,
                        void**) {
  if (CUresult result = Injected("cuLaunchKernelEx")) return result;
  if (current.empty() || current.back() != config->stream->context ||
      function->context != current.back()) {
    return kInvalidContext;
  }
  // A kernel loaded by its first launch is the mistake that hangs on real devices.
  if (!function->loaded || config->shared_bytes > unsigned(function->shared_bytes)) {
    return kInvalidValue;
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    ++counts.launches;
  }
  if (launch_hook) launch_hook(config, function->name.c_str(), args[0]);
  return 0;
}

const std::pair<const char*, void*> kSymbols[] = {
    {"cuGetErrorName", reinterpret_cast<void*>(GetErrorName)},
    {"cuGetErrorString", reinterpret_cast<void*>(GetErrorString)},
    {"cuDeviceGetAttribute", reinterpret_cast<void*>(DeviceGetAttribute)},
    {"cuCtxGetCurrent", reinterpret_cast<void*>(CtxGetCurrent)},
    {"cuCtxPushCurrent", reinterpret_cast<void*>(CtxPushCurrent)},
    {"cuCtxPopCurrent", reinterpret_cast<void*>(CtxPopCurrent)},
    {"cuCtxGetDevice", reinterpret_cast<void*>(CtxGetDevice)},
    {"cuStreamGetCtx", reinterpret_cast<void*>(StreamGetCtx)},
    {"cuStreamCreate", reinterpret_cast<void*>(StreamCreate)},
    {"cuCtxGetStreamPriorityRange", reinterpret_cast<void*>(CtxGetStreamPriorityRange)},
    {"cuStreamCreateWithPriority", reinterpret_cast<void*>(StreamCreateWithPriority)},
    {"cuStreamIsCapturing", reinterpret_cast<void*>(StreamIsCapturing)},
    {"cuStreamWaitEvent", reinterpret_cast<void*>(StreamWaitEvent)},
    {"cuStreamWaitValue32", reinterpret_cast<void*>(StreamWaitValue32)},
    {"cuEventCreate", reinterpret_cast<void*>(EventCreate)},
    {"cuEventRecord", reinterpret_cast<void*>(EventRecord)},
    {"cuStreamSynchronize", reinterpret_cast<void*>(StreamSynchronize)},
    {"cuStreamDestroy", reinterpret_cast<void*>(StreamDestroy)},
    {"cuMemAlloc", reinterpret_cast<void*>(MemAlloc)},
    {"cuMemGetAddressRange", reinterpret_cast<void*>(MemGetAddressRange)},
    {"cuMemHostAlloc", reinterpret_cast<void*>(MemHostAlloc)},
    {"cuMemHostGetDevicePointer", reinterpret_cast<void*>(MemHostGetDevicePointer)},
    {"cuMemsetD8Async", reinterpret_cast<void*>(MemsetD8Async)},
    {"cuMemcpyHtoDAsync", reinterpret_cast<void*>(MemcpyHtoDAsync)},
    {"cuMemcpyDtoHAsync", reinterpret_cast<void*>(MemcpyDtoHAsync)},
    {"cuLibraryLoadData", reinterpret_cast<void*>(LibraryLoadData)},
    {"cuLibraryGetKernel", reinterpret_cast<void*>(LibraryGetKernel)},
    {"cuKernelGetFunction", reinterpret_cast<void*>(KernelGetFunction)},
    {"cuFuncLoad", reinterpret_cast<void*>(FuncLoad)},
    {"cuFuncSetAttribute", reinterpret_cast<void*>(FuncSetAttribute)},
    {"cuLaunchKernelEx", reinterpret_cast<void*>(LaunchKernelEx)},
};

}  // namespace

extern "C" {

CUresult cuGetProcAddress_v2(const char* name, void** symbol, int, uint64_t, int*) {
  // STANDIN_LACKS names an entry point that this "old driver" does not have.
  const char* lacks = std::getenv("STANDIN_LACKS");
  for (const auto& [known, address] : kSymbols) {
    if (std::strcmp(known, name) != 0) continue;
    if (lacks != nullptr && std::strcmp(lacks, name) == 0) break;
    *symbol = address;
    return 0;
  }
  *symbol = nullptr;
  return kNotFound;
}

CUstream standin_stream(int device) { return new CUstream_st{&contexts[device]}; }

void standin_map(void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  ranges[reinterpret_cast<uintptr_t>(pointer)] = bytes;
}

void standin_unmap(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  ranges.erase(reinterpret_cast<uintptr_t>(pointer));
}

void standin_fail(const char* call, int result) {
  std::lock_guard<std::mutex> lock(mutex);
  failures[call] = result;
}

void standin_on_launch(StandinLaunchHook hook) { launch_hook = hook; }

StandinCounts standin_counts() {
  std::lock_guard<std::mutex> lock(mutex);
  return counts;
}

int standin_waits(int first, int most, StandinWait* found) {
  std::lock_guard<std::mutex> lock(mutex);
  const int all = static_cast<int>(waits.size());
  for (int i = 0; i < most && first + i < all; ++i) found[i] = waits[first + i];
  return all;
}

void standin_capture(CUstream stream) { capturing = stream; }

}  // extern "C"
