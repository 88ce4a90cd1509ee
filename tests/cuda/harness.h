// What tests of the CUDA handlers share: the stand-in libraries, call sites, devices,
// and the list of tests. A test runs in a process of its own, since workspaces, kernels
// and errors last until exit.
#ifndef JAX_EP_TESTS_CUDA_HARNESS_H_
#define JAX_EP_TESTS_CUDA_HARNESS_H_

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/cuda/handlers.h"
#include "ffi/cuda/launch_shape.h"
#include "ffi/cuda/sha256.h"
#include "ffi/cuda/workspace.h"
#include "ffi/registration.h"
#include "ffi/testing/check.h"
#include "tests/cuda/fake_xla.h"
#include "tests/cuda/standin.h"

namespace jax_ep::cuda {

// A test of the program, made by TEST(name) { ... }.
struct Test {
  Test(const char* name, void (*run)()) { All().emplace_back(name, run); }
  static std::vector<std::pair<std::string, void (*)()>>& All() {
    static auto& all = *new std::vector<std::pair<std::string, void (*)()>>;
    return all;
  }
};

#define TEST(name)                             \
  void name##_test();                          \
  const Test name##_entry(#name, name##_test); \
  void name##_test()

using fake_xla::Attrs;
using fake_xla::Buffers;
using fake_xla::Collectives;

inline constexpr int kExperts = 16, kTopk = 4, kTokens = 8, kWidth = 64,
                     kCapacity = 256;
inline constexpr char kHopper[] = "\177ELF hopper", kBlackwell[] = "\177ELF blackwell";
inline constexpr auto kI32 = XLA_FFI_DataType_S32;
inline constexpr auto kF32 = XLA_FFI_DataType_F32;
inline constexpr auto kBf16 = XLA_FFI_DataType_BF16;

// --- the stand-ins, opened as a process with CUDA has them -------------------

inline void* cuda_library = nullptr;
inline void* nccl_library = nullptr;

template <typename Fn>
Fn* Standin(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  CHECK(symbol != nullptr);
  return reinterpret_cast<Fn*>(symbol);
}

inline void OpenCuda() {
  cuda_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  CHECK(cuda_library != nullptr);
}

inline void Open() {
  OpenCuda();
  nccl_library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  CHECK(nccl_library != nullptr);
}

inline CUstream Stream(int device) {
  return Standin<CUstream(int)>(cuda_library, "standin_stream")(device);
}

inline std::vector<ncclComm_t> Group(int num_ranks, int pool = 0) {
  std::vector<ncclComm_t> comms(num_ranks);
  Standin<void(int, int, ncclComm_t*)>(nccl_library, "standin_group")(num_ranks, pool,
                                                                      comms.data());
  return comms;
}

inline StandinCounts Counts() {
  return Standin<StandinCounts()>(cuda_library, "standin_counts")();
}

inline int Windows() { return Standin<int()>(nccl_library, "standin_registrations")(); }

inline void OnLaunch(StandinLaunchHook hook) {
  Standin<void(StandinLaunchHook)>(cuda_library, "standin_on_launch")(hook);
}

// --- what launches were seen -------------------------------------------------

struct Launch {
  std::string kernel;
  LaunchConfig config;
  CommonParams common;
  LayoutParams layout;
  DispatchParams dispatch;
  CombineParams combine;
};

inline std::mutex launches_mutex;
inline std::map<CUstream, std::vector<Launch>> launches;  // by stream

inline void Record(const LaunchConfig* config, const char* kernel, void* params) {
  Launch launch{};
  launch.kernel = kernel;
  launch.config = *config;
  std::memcpy(&launch.common, params, sizeof(CommonParams));
  if (launch.kernel == "jax_ep_layout") {
    std::memcpy(&launch.layout, params, sizeof(LayoutParams));
  } else if (launch.kernel == "jax_ep_dispatch") {
    std::memcpy(&launch.dispatch, params, sizeof(DispatchParams));
  } else {
    std::memcpy(&launch.combine, params, sizeof(CombineParams));
  }
  std::lock_guard<std::mutex> lock(launches_mutex);
  launches[config->stream].push_back(launch);
}

// --- a call site and its devices ---------------------------------------------

inline Attrs Common(int num_ranks, std::vector<int64_t> groups) {
  Attrs attrs;
  attrs.Int("abi_version", kAbiVersion)
      .String("axis", "expert")
      .Int("num_ranks", num_ranks)
      .Ints("groups", std::move(groups))
      .Int("num_experts", kExperts)
      .Int("expert_alignment", 1)
      .Int("capacity", kCapacity)
      .Int("num_sms", 0)
      .Float("timeout_s", 2.5)
      .Bool("stamps", false)
      .Bool("few", false)
      .String("call_site", "jit_step 3")
      .String("cubin_archs", "sm_90a,sm_100a")
      .String("cubin_sm_90a", kHopper)
      .String("cubin_sm_90a_sha256", Sha256(kHopper))
      .String("cubin_sm_100a", kBlackwell)
      .String("cubin_sm_100a_sha256", Sha256(kBlackwell));
  return attrs;
}

inline std::vector<int64_t> Iota(int n) {
  std::vector<int64_t> values;
  for (int i = 0; i < n; ++i) values.push_back(i);
  return values;
}

inline Attrs For(const std::string& target, int num_ranks,
                 std::vector<int64_t> groups = {}) {
  Attrs attrs = Common(num_ranks, groups.empty() ? Iota(num_ranks) : groups);
  attrs.Int("num_topk", kTopk).Bool("has_weights", true);
  if (target == "jax_ep_dispatch") attrs.Ints("leaf_bytes", {2 * kWidth});
  if (target == "jax_ep_combine") {
    attrs.Bool("has_row_values", false).Bool("has_bias", true).Bool("wire_f32", false);
    attrs.Bool("out_f32", false);
    attrs.Ints32("leaf_dtypes", {kLeafBf16}).Ints("leaf_widths", {kWidth});
  }
  return attrs;
}

inline void AddBuffers(const std::string& target, int num_ranks, Buffers& in,
                       Buffers& out) {
  const int64_t local = kExperts / num_ranks;
  in.Add(kI32, {2});
  if (target == "jax_ep_layout") {
    in.Add(kI32, {kTokens, kTopk});
    out.Add(kI32, {kTokens, kTopk}).Add(kI32, {kTokens, kTopk});
    out.Add(kI32, {num_ranks, kTokens, kTopk});
    out.Add(kI32, {local}).Add(kI32, {local}).Add(kI32, {local});
    out.Add(kI32, {num_ranks}).Add(kI32, {num_ranks}).Add(kI32, {1});
    return;
  }
  in.Add(kI32, {kTokens, kTopk}).Add(kI32, {kTokens, kTopk});
  in.Add(kI32, {num_ranks, kTokens, kTopk});
  if (target == "jax_ep_dispatch") {
    in.Add(kI32, {local}).Add(kI32, {local}).Add(kF32, {kTokens, kTopk});
    in.Add(kBf16, {kTokens, kWidth});
    out.Add(kF32, {kCapacity}).Add(kBf16, {kCapacity, kWidth});
  } else {
    in.Add(kF32, {kCapacity}).Add(kBf16, {kCapacity, kWidth});
    in.Add(kBf16, {kTokens, kWidth});
    out.Add(kBf16, {kTokens, kWidth});
  }
}

class CallSite {
 public:
  CallSite(const std::string& target, Attrs attrs,
           const std::vector<Registration>& handlers = cuda::Registrations())
      : target(target), attrs_(std::move(attrs)) {
    for (const Registration& r : handlers) {
      if (target == r.target) handlers_[r.stage] = r.handler;
    }
    CHECK(handlers_.count("execute") > 0);
  }

  std::string Instantiate() {
    XLA_FFI_InvokeContext context;
    context.state = &state_;
    return Call(handlers_["instantiate"], XLA_FFI_ExecutionStage_INSTANTIATE, &context,
                attrs_);
  }

  // A device's context for one execution.
  XLA_FFI_InvokeContext On(int device, CUstream stream, Collectives* collectives,
                           int64_t run_id = -1) {
    XLA_FFI_InvokeContext context;
    context.stream = stream;
    context.ordinal = device;
    context.run_id = run_id;
    context.extension = collectives ? &collectives->c.extension_base : nullptr;
    context.state = &state_;
    return context;
  }

  std::string Prepare(XLA_FFI_InvokeContext context) {
    context.stream = nullptr;  // XLA has none at this stage
    return Call(handlers_["prepare"], XLA_FFI_ExecutionStage_PREPARE, &context, attrs_);
  }
  std::string Initialize(XLA_FFI_InvokeContext context) {
    return Call(handlers_["initialize"], XLA_FFI_ExecutionStage_INITIALIZE, &context,
                attrs_);
  }
  std::string Execute(XLA_FFI_InvokeContext context, Buffers& in, Buffers& out) {
    return Call(handlers_["execute"], XLA_FFI_ExecutionStage_EXECUTE, &context, attrs_,
                &in, &out);
  }

  const std::string target;

 private:
  std::string Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                   XLA_FFI_InvokeContext* context, Attrs& attrs, Buffers* in = nullptr,
                   Buffers* out = nullptr) {
    return fake_xla::Call(handler, stage, context, attrs, in, out);
  }

  Attrs attrs_;
  std::map<std::string, XLA_FFI_Handler*> handlers_;
  void* state_ = nullptr;
};

// Runs `body(rank)` on a thread per rank and returns what each said.
inline std::vector<std::string> OnEachRank(
    int num_ranks, const std::function<std::string(int)>& body) {
  std::vector<std::string> said(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] { said[rank] = body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return said;
}

inline void AllFine(const std::vector<std::string>& said) {
  for (const std::string& text : said) CHECK_EQ(text, std::string());
}

inline void Contains(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) {
    CheckFailed(__FILE__, __LINE__, "contains",
                ": <" + text + "> lacks <" + part + ">");
  }
}

// The devices of one group, and whole executions of a call site on them.
struct Devices {
  explicit Devices(std::vector<ncclComm_t> comms, std::vector<int> ordinals = {}) {
    for (size_t r = 0; r < comms.size(); ++r) {
      ordinal.push_back(ordinals.empty() ? static_cast<int>(r) : ordinals[r]);
      stream.push_back(Stream(ordinal.back()));
    }
    this->comms = std::move(comms);
  }

  int num_ranks() const { return static_cast<int>(stream.size()); }

  std::string RunOn(CallSite& site, int rank, int64_t run_id) {
    Collectives collectives(comms[rank]);
    const XLA_FFI_InvokeContext context =
        site.On(ordinal[rank], stream[rank], &collectives, run_id);
    std::string error = site.Prepare(context);
    if (error.empty()) error = site.Initialize(context);
    if (!error.empty()) return error;
    Buffers in, out;
    AddBuffers(site.target, num_ranks(), in, out);
    return site.Execute(context, in, out);
  }

  std::vector<std::string> Run(CallSite& site, int64_t run_id = 1) {
    return OnEachRank(num_ranks(), [&](int rank) { return RunOn(site, rank, run_id); });
  }

  std::vector<int> ordinal;
  std::vector<CUstream> stream;
  std::vector<ncclComm_t> comms;
};

inline CommonParams LastCommon(CUstream stream) {
  std::lock_guard<std::mutex> lock(launches_mutex);
  return launches[stream].back().common;
}

// What a store through one rank's table of peers looks like through the peer's own.
inline void CheckPeersMeet(const Devices& devices) {
  std::vector<CommonParams> common;
  for (CUstream stream : devices.stream) common.push_back(LastCommon(stream));
  const int n = devices.num_ranks();
  for (int r = 0; r < n; ++r) {
    CHECK_EQ(common[r].rank, r);
    CHECK_EQ(common[r].num_ranks, n);
    for (int peer = 0; peer < n; ++peer) {
      auto* word = reinterpret_cast<uint64_t*>(common[r].peers[peer] + kRingOffset) + r;
      CHECK_EQ(*word, uint64_t{0});  // cleared before anyone could write
      *word = 100 * r + peer + 1;
    }
  }
  for (int r = 0; r < n; ++r) {
    for (int source = 0; source < n; ++source) {
      auto* word =
          reinterpret_cast<uint64_t*>(common[r].peers[r] + kRingOffset) + source;
      CHECK_EQ(*word, uint64_t(100 * source + r + 1));
      *word = 0;
    }
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_TESTS_CUDA_HARNESS_H_
