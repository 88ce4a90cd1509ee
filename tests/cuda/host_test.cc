// The host side of the CUDA handlers from `instantiate` to the launch, on the stand-in
// libraries. `host_test NAME` runs one test in a process of its own, since workspaces,
// kernels and errors last until exit; `host_test` lists the names.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ffi/cuda/handlers.h"
#include "ffi/cuda/launch_shape.h"
#include "ffi/cuda/stages.h"
#include "ffi/cuda/workspace.h"
#include "ffi/testing/check.h"
#include "tests/cuda/fake_xla.h"
#include "tests/cuda/standin.h"

namespace {

using namespace jax_ep;
using namespace jax_ep::cuda;
using fake_xla::Attrs;
using fake_xla::Buffers;
using fake_xla::Collectives;

constexpr int kExperts = 16, kTopk = 4, kTokens = 8, kWidth = 64, kCapacity = 256;
constexpr auto kI32 = XLA_FFI_DataType_S32;
constexpr auto kF32 = XLA_FFI_DataType_F32;
constexpr auto kBf16 = XLA_FFI_DataType_BF16;

// --- the stand-ins, opened as a process with CUDA has them -------------------

void* cuda_library = nullptr;
void* nccl_library = nullptr;

template <typename Fn>
Fn* Standin(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  CHECK(symbol != nullptr);
  return reinterpret_cast<Fn*>(symbol);
}

void OpenCuda() {
  cuda_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  CHECK(cuda_library != nullptr);
}

void Open() {
  OpenCuda();
  nccl_library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  CHECK(nccl_library != nullptr);
}

CUstream Stream(int device) {
  return Standin<CUstream(int)>(cuda_library, "standin_stream")(device);
}

std::vector<ncclComm_t> Group(int num_ranks, int pool = 0) {
  std::vector<ncclComm_t> comms(num_ranks);
  Standin<void(int, int, ncclComm_t*)>(nccl_library, "standin_group")(num_ranks, pool,
                                                                      comms.data());
  return comms;
}

StandinCounts Counts() {
  return Standin<StandinCounts()>(cuda_library, "standin_counts")();
}

int Registrations() { return Standin<int()>(nccl_library, "standin_registrations")(); }

void OnLaunch(StandinLaunchHook hook) {
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

std::mutex launches_mutex;
std::map<CUstream, std::vector<Launch>> launches;  // by stream

void Record(const LaunchConfig* config, const char* kernel, void* params) {
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

Attrs Common(int num_ranks, std::vector<int64_t> groups) {
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
      .String("cubin_archs", "sm_90a,sm_100a")
      .String("cubin_sm_90a", "\177ELF hopper")
      .String("cubin_sm_90a_sha256", "hopper")
      .String("cubin_sm_100a", "\177ELF blackwell")
      .String("cubin_sm_100a_sha256", "blackwell");
  return attrs;
}

std::vector<int64_t> Iota(int n) {
  std::vector<int64_t> values;
  for (int i = 0; i < n; ++i) values.push_back(i);
  return values;
}

Attrs For(const std::string& target, int num_ranks, std::vector<int64_t> groups = {}) {
  Attrs attrs = Common(num_ranks, groups.empty() ? Iota(num_ranks) : groups);
  attrs.Int("num_topk", kTopk).Bool("has_weights", true);
  if (target == "jax_ep_dispatch") attrs.Ints("leaf_bytes", {2 * kWidth});
  if (target == "jax_ep_combine") {
    attrs.Bool("has_row_values", false).Bool("has_bias", true).Bool("wire_f32", false);
    attrs.Ints32("leaf_dtypes", {kLeafBf16}).Ints("leaf_widths", {kWidth});
  }
  return attrs;
}

void AddBuffers(const std::string& target, int num_ranks, Buffers& in, Buffers& out) {
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
  CallSite(const std::string& target, Attrs attrs)
      : target(target), attrs_(std::move(attrs)) {
    for (const Registration& r : cuda::Registrations()) {
      if (target == r.target) handlers_[r.stage] = r.handler;
    }
    CHECK_EQ(handlers_.size(), size_t{4});
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
std::vector<std::string> OnEachRank(int num_ranks,
                                    const std::function<std::string(int)>& body) {
  std::vector<std::string> said(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] { said[rank] = body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return said;
}

void AllFine(const std::vector<std::string>& said) {
  for (const std::string& text : said) CHECK_EQ(text, std::string());
}

void Contains(const std::string& text, const std::string& part) {
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

CommonParams LastCommon(CUstream stream) {
  std::lock_guard<std::mutex> lock(launches_mutex);
  return launches[stream].back().common;
}

// What a store through one rank's table of peers looks like through the peer's own.
void CheckPeersMeet(const Devices& devices) {
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

// --- tests -------------------------------------------------------------------

void Launches() {
  Open();
  OnLaunch(Record);
  constexpr int kRanks = 2;
  Devices devices(Group(kRanks));
  for (const char* target : {"jax_ep_layout", "jax_ep_dispatch", "jax_ep_combine"}) {
    CallSite site(target, For(target, kRanks));
    CHECK_EQ(site.Instantiate(), std::string());
    for (int run = 0; run < 3; ++run) AllFine(devices.Run(site, run));
    CheckPeersMeet(devices);
  }
  // One window per rank, one image per process, one function per kernel and device.
  CHECK_EQ(Registrations(), kRanks);
  CHECK_EQ(Counts().libraries, 1);
  CHECK_EQ(Counts().functions, 3 * kRanks);
  CHECK_EQ(Counts().launches, 3 * 3 * kRanks);

  const int64_t leaf_bytes[] = {2 * kWidth};
  const int64_t leaf_widths[] = {kWidth};
  const int32_t leaf_dtypes[] = {kLeafBf16};
  const LaunchDims want[] = {
      LayoutLaunch(132, 0, kRanks, kExperts),
      DispatchLaunch(132, 0, leaf_bytes, 1, kTopk, true),
      CombineLaunch(132, 0, leaf_dtypes, leaf_widths, 1, kTopk, false, false)};
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<Launch>& seen = launches[devices.stream[rank]];
    for (size_t i = 0; i < seen.size(); ++i) {
      const LaunchDims& dims = want[i / 3];
      CHECK_EQ(seen[i].config.grid[0], unsigned(dims.blocks));
      CHECK_EQ(seen[i].config.block[0], unsigned(dims.threads));
      CHECK_EQ(seen[i].config.shared_bytes, unsigned(dims.shared_bytes));
      CHECK_EQ(seen[i].config.grid[1] * seen[i].config.grid[2], 1u);
      CHECK_EQ(seen[i].common.timeout_ns, uint64_t{2500000000});
      CHECK(seen[i].common.error != nullptr);
      CHECK(seen[i].common.rank_operand != nullptr);
    }
    CHECK_EQ(seen[0].kernel, std::string("jax_ep_layout"));
    CHECK_EQ(seen[0].layout.num_ids, int64_t{kTokens * kTopk});
    CHECK_EQ(seen[0].layout.num_experts, kExperts);
    CHECK_EQ(seen[3].kernel, std::string("jax_ep_dispatch"));
    CHECK_EQ(seen[3].dispatch.num_tokens, int64_t{kTokens});
    CHECK_EQ(seen[3].dispatch.capacity, int64_t{kCapacity});
    CHECK_EQ(seen[3].dispatch.num_local_experts, kExperts / kRanks);
    CHECK(seen[3].dispatch.weights && seen[3].dispatch.recv_weights);
    CHECK(seen[3].dispatch.x[0] && seen[3].dispatch.recv[0]);
    CHECK(!seen[3].dispatch.x[1] && !seen[3].dispatch.recv[1]);
    CHECK_EQ(seen[6].kernel, std::string("jax_ep_combine"));
    CHECK(seen[6].combine.weights && !seen[6].combine.row_values);
    CHECK(!seen[6].combine.values && seen[6].combine.bias[0]);
  }
  CHECK_EQ(CheckError(), std::string());
}

// Rank order is the group's, whatever the order of the devices.
void ReversedDevices() {
  Open();
  OnLaunch(Record);
  Devices devices(Group(4), {3, 1, 2, 0});
  CallSite site("jax_ep_layout", For("jax_ep_layout", 4));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site));
  CheckPeersMeet(devices);
}

void SwappedPeers() {
  Open();
  Standin<void(bool)>(nccl_library, "standin_swap_peers")(true);
  Devices devices(Group(2));
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  for (const std::string& text : devices.Run(site)) {
    Contains(text, "expected the workspace of rank 0");
    Contains(text, "got rank 1");
  }
  // Ranks that have met and failed do not try to meet again.
  Contains(devices.RunOn(site, 0, 2), "got rank 1");
  CHECK_EQ(Registrations(), 2);
}

// Sub-axis groups, and another group over the same devices, at once.
void SeveralGroups() {
  Open();
  OnLaunch(Record);
  Devices low(Group(2, 0), {0, 1}), high(Group(2, 1), {2, 3});
  Devices all(Group(4, 2));
  CallSite pairs("jax_ep_layout", For("jax_ep_layout", 2, {0, 1, 2, 3}));
  CallSite fours("jax_ep_layout", For("jax_ep_layout", 4));
  CHECK_EQ(pairs.Instantiate(), std::string());
  CHECK_EQ(fours.Instantiate(), std::string());
  AllFine(OnEachRank(8, [&](int i) {
    if (i < 4) return all.RunOn(fours, i, 1);
    return i < 6 ? low.RunOn(pairs, i - 4, 2) : high.RunOn(pairs, i - 6, 2);
  }));
  CheckPeersMeet(low);
  CheckPeersMeet(high);
  CheckPeersMeet(all);
  CHECK_EQ(Registrations(), 8);
  std::set<const void*> workspaces;
  for (const Devices* devices : {&low, &high, &all}) {
    for (CUstream stream : devices->stream) {
      const CommonParams common = LastCommon(stream);
      workspaces.insert(common.peers[common.rank]);
    }
  }
  CHECK_EQ(workspaces.size(), size_t{8});
}

// A communicator that lives where a destroyed one did.
void SecondGroup() {
  Open();
  OnLaunch(Record);
  std::vector<ncclComm_t> comms = Group(2);
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  {
    Devices devices(comms);
    AllFine(devices.Run(site, 1));
    CheckPeersMeet(devices);
  }
  Standin<void(ncclComm_t)>(nccl_library, "standin_destroy")(comms[0]);
  const std::vector<ncclComm_t> again = Group(2);
  CHECK(again == comms);
  Devices devices(again);
  AllFine(devices.Run(site, 2));
  CheckPeersMeet(devices);
  CHECK_EQ(Registrations(), 4);
}

// A driver that does not know the range of a window must not make it look lost.
void UnknownRange() {
  Open();
  Standin<void(const char*, int)>(cuda_library, "standin_fail")("cuMemGetAddressRange",
                                                                1);
  Devices devices(Group(2));
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  for (int run = 0; run < 3; ++run) AllFine(devices.Run(site, run));
  CHECK_EQ(Registrations(), 2);
}

void Concurrent() {
  Open();
  OnLaunch(Record);
  constexpr int kSites = 6, kRuns = 20;
  Devices devices(Group(2));
  std::deque<CallSite> sites;
  for (int i = 0; i < kSites; ++i) {
    const char* target = i % 2 ? "jax_ep_dispatch" : "jax_ep_combine";
    sites.emplace_back(target, For(target, 2));
    CHECK_EQ(sites.back().Instantiate(), std::string());
  }
  AllFine(OnEachRank(2 * kSites, [&](int i) {
    for (int run = 0; run < kRuns; ++run) {
      const std::string error = devices.RunOn(sites[i / 2], i % 2, run);
      if (!error.empty()) return error;
    }
    return std::string();
  }));
  CHECK_EQ(Registrations(), 2);
  CHECK_EQ(Counts().functions, 4);
  CHECK_EQ(Counts().launches, 2 * kSites * kRuns);
}

// A group of one needs neither NCCL nor XLA's extension.
void OneRank() {
  OpenCuda();
  OnLaunch(Record);
  CallSite site("jax_ep_layout", For("jax_ep_layout", 1, {0, 1, 2, 3}));
  CHECK_EQ(site.Instantiate(), std::string());
  const CUstream stream = Stream(2);
  for (int run = 0; run < 2; ++run) {
    const XLA_FFI_InvokeContext context = site.On(2, stream, nullptr, run);
    CHECK_EQ(site.Prepare(context), std::string());
    CHECK_EQ(site.Initialize(context), std::string());
    Buffers in, out;
    AddBuffers(site.target, 1, in, out);
    CHECK_EQ(site.Execute(context, in, out), std::string());
  }
  const CommonParams common = LastCommon(stream);
  CHECK_EQ(common.rank, 0);
  CHECK_EQ(common.num_ranks, 1);
  CHECK(common.peers[0] != nullptr);
}

std::string FirstUse(int num_ranks, Collectives* collectives) {
  CallSite site("jax_ep_layout", For("jax_ep_layout", num_ranks));
  CHECK_EQ(site.Instantiate(), std::string());
  const CUstream stream = cuda_library ? Stream(0) : nullptr;
  const XLA_FFI_InvokeContext context = site.On(0, stream, collectives);
  const std::string error = site.Prepare(context);
  return error.empty() ? site.Initialize(context) : error;
}

void NoExtension() {
  Open();
  Contains(FirstUse(2, nullptr), "CUDA needs jaxlib >= 0.11.2");
}

void ExtensionVersions() {
  Open();
  const std::vector<ncclComm_t> comms = Group(2);
  Collectives newer(comms[0], 0, 2), other(comms[0], 1, 0);
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  CHECK_EQ(site.Prepare(site.On(0, nullptr, &newer)), std::string());
  Contains(site.Prepare(site.On(0, nullptr, &other)), "version mismatch");
}

void NoDriver() {
  fake_xla::Collectives collectives(nullptr);
  collectives.comm = reinterpret_cast<ncclComm_t>(&collectives);
  Contains(FirstUse(2, &collectives), "libcuda.so.1 cannot be opened");
}

void OldDriver() {
  Open();
  Collectives collectives(Group(2)[0]);
  const std::string error = FirstUse(2, &collectives);
  Contains(error, "driver is too old");
  Contains(error, "cuLibraryLoadData");
}

void NoNccl() {
  OpenCuda();
  Collectives collectives(nullptr);
  collectives.comm = reinterpret_cast<ncclComm_t>(&collectives);
  Contains(FirstUse(2, &collectives), "has not loaded libnccl.so.2");
}

void OldNccl() {
  Open();
  Collectives collectives(Group(2)[0]);
  Contains(FirstUse(2, &collectives), "expected NCCL >= 2.28, got 2.27.7");
}

void TwoDomains() {
  Open();
  Collectives collectives(Group(2)[0]);
  const std::string error = FirstUse(2, &collectives);
  Contains(error, "expected all 2 ranks in one NVLink domain, got 1");
  Contains(error, "implementation='xla'");
}

void NoSymmetricMemory() {
  Open();
  Devices devices(Group(2));
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  for (const std::string& text : devices.Run(site)) {
    Contains(text, "NCCL has no symmetric memory between these devices");
  }
}

void OutOfMemory() {
  Open();
  Standin<void(int)>(nccl_library, "standin_fail_alloc")(0);
  Collectives collectives(Group(2)[0]);
  const std::string error = FirstUse(2, &collectives);
  Contains(error, "axis \"expert\", rank 0 of 2");
  Contains(error, "ncclMemAlloc");
  Contains(error, "XLA_PYTHON_CLIENT_MEM_FRACTION");
}

void WrongArchitecture() {
  Open();
  Attrs attrs = For("jax_ep_layout", 2);
  attrs.String("cubin_archs", "sm_100a");
  Devices devices(Group(2));
  CallSite site("jax_ep_layout", std::move(attrs));
  CHECK_EQ(site.Instantiate(), std::string());
  for (const std::string& text : devices.Run(site)) {
    Contains(text, "the program has kernels for sm_100a, and the device is sm_90a");
  }
}

void LaunchFails() {
  Open();
  Devices devices(Group(2));
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site));
  Standin<void(const char*, int)>(cuda_library, "standin_fail")("cuLaunchKernelEx",
                                                                700);
  for (const std::string& text : devices.Run(site)) {
    Contains(text, "jax_ep.dispatch_layout: cuLaunchKernelEx: CUDA_ERROR_STANDIN");
  }
}

void BadAttributes() {
  Open();
  const auto instantiate = [](const char* target, Attrs attrs) {
    return CallSite(target, std::move(attrs)).Instantiate();
  };
  Attrs attrs = For("jax_ep_layout", 2);
  Contains(instantiate("jax_ep_layout", attrs.Int("abi_version", 99)),
           "jax_ep.dispatch_layout: abi_version (=99)");
  attrs = For("jax_ep_layout", 2);
  Contains(instantiate("jax_ep_layout", attrs.Int("num_experts", 15)),
           "num_experts (=15) must be a multiple of num_ranks (=2)");
  attrs = For("jax_ep_layout", 2);
  Contains(instantiate("jax_ep_layout", attrs.Ints("groups", {0, 1, 2})), "groups");
  attrs = For("jax_ep_dispatch", 2);
  Contains(instantiate("jax_ep_dispatch", attrs.Ints("leaf_bytes", {})),
           "number of leaves (=0)");
  Contains(instantiate("jax_ep_combine", For("jax_ep_dispatch", 2)),
           "jax_ep.combine: attribute has_row_values");
  attrs = For("jax_ep_layout", 2);
  Contains(instantiate("jax_ep_layout", attrs.String("cubin_archs", "sm_120a")),
           "attribute cubin_sm_120a");
}

void BadOperands() {
  Open();
  Devices devices(Group(2));
  CallSite site("jax_ep_dispatch", For("jax_ep_dispatch", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site));
  const int64_t local = kExperts / 2;
  const auto execute = [&](std::vector<int64_t> slot, std::vector<int64_t> x,
                           XLA_FFI_DataType dtype, size_t shift, bool extra) {
    Buffers in, out;
    in.Add(kI32, {2}).Add(kI32, slot).Add(kI32, {kTokens, kTopk});
    in.Add(kI32, {2, kTokens, kTopk}).Add(kI32, {local}).Add(kI32, {local});
    in.Add(kF32, {kTokens, kTopk}).Add(dtype, x, shift);
    if (extra) in.Add(kBf16, {1});
    out.Add(kF32, {kCapacity}).Add(kBf16, {kCapacity, kWidth});
    return site.Execute(site.On(0, devices.stream[0], nullptr), in, out);
  };
  CHECK_EQ(execute({kTokens, kTopk}, {kTokens, kWidth}, kBf16, 0, false),
           std::string());
  Contains(execute({kTokens}, {kTokens, kWidth}, kBf16, 0, false),
           "jax_ep.dispatch: operand slot must be int32[any, any], got int32[8].");
  Contains(execute({kTokens, 3}, {kTokens, kWidth}, kBf16, 0, false),
           "operand slot_rank must be int32[8, 3], got int32[8, 4].");
  Contains(execute({kTokens, kTopk}, {kTokens, 32}, kBf16, 0, false),
           "result recv must be bfloat16[256, 32], got bfloat16[256, 64].");
  Contains(execute({kTokens, kTopk}, {kTokens, kWidth}, kI32, 0, false),
           "operand x must be");
  Contains(execute({kTokens, kTopk}, {kTokens, kWidth}, kBf16, 8, false),
           "x must start at a multiple of 16 bytes");
  Contains(execute({kTokens, kTopk}, {kTokens, kWidth}, kBf16, 0, true),
           "expected 8 operands, got 9");
  Buffers none, out;
  Contains(site.Execute(site.On(0, devices.stream[0], nullptr), none, out),
           "operand rank is missing");
  Contains(site.Execute(site.On(5, devices.stream[0], nullptr), none, out),
           "executed before it was initialized");
}

ErrorRecord* RecordOf(CUstream stream) { return LastCommon(stream).error; }

// The word that was seen may be of an earlier call.
void WriteRecord(ErrorRecord* record, int rank, uint64_t calls_ago = 0) {
  record->phase = kPhaseCombineRows;
  record->rank = rank;
  record->peer = 1;
  record->channel = 3;
  record->call = 5;
  record->expected = record->call << kCountBits | 17;
  record->seen = (record->call - calls_ago) << kCountBits | 16;
  record->waited_ns = 2600000000;
  __atomic_store_n(&record->written, 1u, __ATOMIC_RELEASE);
}

// What a kernel leaves behind is printed at once, and raised ever after. The line
// itself is read by cuda_host_test.py.
void Timeout() {
  Open();
  OnLaunch(Record);
  Devices devices(Group(2));
  CallSite site("jax_ep_combine", For("jax_ep_combine", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site, 1));
  WriteRecord(RecordOf(devices.stream[0]), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  std::fprintf(stderr, "-- later\n");
  const std::string error = CheckError();
  for (const char* part :
       {"rank 0 of the 2 ranks", "axis \"expert\"", "after 2.6 s", "waiting for rank 1",
        "combine, rows of the peer", "expected: 17", "seen: 16"}) {
    Contains(error, part);
  }
  for (const std::string& text : devices.Run(site, 2)) CHECK_EQ(text, error);
  CallSite other("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(other.Instantiate(), std::string());
  for (const std::string& text : devices.Run(other, 3)) CHECK_EQ(text, error);
}

// CheckError does not wait for the thread to look.
void TimeoutSeenAtOnce() {
  Open();
  OnLaunch(Record);
  Devices devices(Group(2));
  CallSite site("jax_ep_combine", For("jax_ep_combine", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site, 1));
  WriteRecord(RecordOf(devices.stream[1]), 0, /*calls_ago=*/1);
  Contains(CheckError(), "reported to rank 1");
  Contains(CheckError(), "expected: 17; seen: 0");
}

// All devices of one launch get one answer: XLA makes them wait for each other.
void TimeoutBetweenDevices() {
  Open();
  OnLaunch(Record);
  Devices devices(Group(2));
  CallSite site("jax_ep_combine", For("jax_ep_combine", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site, 1));
  CHECK_EQ(devices.RunOn(site, 0, 2), std::string());
  WriteRecord(RecordOf(devices.stream[0]), 0);
  CHECK_EQ(devices.RunOn(site, 1, 2), std::string());
  Contains(devices.RunOn(site, 1, 3), "gave up");
  Contains(devices.RunOn(site, 0, 3), "gave up");
}

// A stamped dispatch of two blocks, as its kernel leaves it behind.
void WriteStamps(const LaunchConfig* config, const char* kernel, void* params) {
  Record(config, kernel, params);
  const CommonParams common = LastCommon(config->stream);
  auto* words = reinterpret_cast<int64_t*>(common.peers[common.rank] + kStampsOffset);
  for (int block : {0, 2}) {
    int64_t* stamps = words + (kMaxStampedBlocks + block) * kMaxStamps;
    stamps[kStampBegan] = 100 + 10 * common.rank + block;
    stamps[kStampLastSend] = 200;
    stamps[kStampLastRow] = 300 + block;
  }
}

// From a thread without a context: every rank's stamps, once.
void Stamps() {
  Open();
  OnLaunch(WriteStamps);
  Devices devices(Group(2));
  CallSite site("jax_ep_dispatch", For("jax_ep_dispatch", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site, 1));
  std::vector<StampRecord> records;
  CHECK_EQ(TakeStamps(&records), std::string());
  CHECK_EQ(records.size(), size_t{2});
  const std::vector<std::string> names = {"began", "last_send", "last_arrival",
                                          "last_row"};
  std::set<int> ranks;
  for (const StampRecord& record : records) {
    ranks.insert(record.rank);
    CHECK_EQ(record.stage, std::string("dispatch"));
    CHECK_EQ(record.device, devices.ordinal[record.rank]);
    CHECK_EQ(record.names == names, true);
    const int64_t began = 100 + 10 * record.rank;
    const std::vector<int64_t> times = {began, 200, 0, 300, began + 2, 200, 0, 302};
    CHECK_EQ(record.times == times, true);
  }
  CHECK_EQ(ranks.size(), size_t{2});
  records.clear();
  CHECK_EQ(TakeStamps(&records), std::string());
  CHECK_EQ(records.size(), size_t{0});
}

// A channel's pieces fit the count of a signal word.
void ManyTokens() {
  const int64_t wide[] = {14336}, widths[] = {20000};
  const int32_t dtypes[] = {kLeafBf16};
  constexpr int64_t kPieces = (1 << 24) - 1;
  CHECK_EQ(MaxTokens(DispatchLaunch(132, 0, wide, 1, 8, true), 2), 100 * kPieces);
  CHECK_EQ(MaxTokens(DispatchLaunch(132, 1, wide, 1, 8, true), 2), kPieces);
  // A ring at 64 ranks has 271 slots of 14464 bytes, 4 at least to a channel.
  CHECK_EQ(MaxTokens(DispatchLaunch(132, 0, wide, 1, 8, true), 64), 67 * kPieces);
  // Rows of three pieces.
  const LaunchDims combine = CombineLaunch(132, 7, dtypes, widths, 1, 8, false, false);
  CHECK_EQ(MaxTokens(combine, 2), 7 * (kPieces / 3));
  const Status status = CheckPieces(combine, 2, 7 * (kPieces / 3) + 1);
  CHECK_EQ(status.message(), std::string("tokens per rank (=39146836) must be at most "
                                         "39146835 on 7 SMs (num_sms)."));
  CHECK_EQ(CheckPieces(combine, 2, 7 * (kPieces / 3)).ok(), true);
}

// Stamps are read while a rank waits inside NCCL for one that is yet to come.
void StampsWhileRanksMeet() {
  Open();
  Devices devices(Group(2));
  CallSite site("jax_ep_dispatch", For("jax_ep_dispatch", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  std::thread first([&] { CHECK_EQ(devices.RunOn(site, 0, 1), std::string()); });
  while (Registrations() < 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::thread reader([&] {
    std::vector<StampRecord> records;
    CHECK_EQ(TakeStamps(&records), std::string());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::thread second([&] { CHECK_EQ(devices.RunOn(site, 1, 1), std::string()); });
  first.join();
  second.join();
  reader.join();
}

const std::pair<const char*, void (*)()> kTests[] = {
    {"launches", Launches},
    {"reversed_devices", ReversedDevices},
    {"swapped_peers", SwappedPeers},
    {"several_groups", SeveralGroups},
    {"second_group", SecondGroup},
    {"unknown_range", UnknownRange},
    {"concurrent", Concurrent},
    {"one_rank", OneRank},
    {"no_extension", NoExtension},
    {"extension_versions", ExtensionVersions},
    {"no_driver", NoDriver},
    {"old_driver", OldDriver},
    {"no_nccl", NoNccl},
    {"old_nccl", OldNccl},
    {"two_domains", TwoDomains},
    {"no_symmetric_memory", NoSymmetricMemory},
    {"out_of_memory", OutOfMemory},
    {"wrong_architecture", WrongArchitecture},
    {"launch_fails", LaunchFails},
    {"bad_attributes", BadAttributes},
    {"bad_operands", BadOperands},
    {"timeout", Timeout},
    {"timeout_seen_at_once", TimeoutSeenAtOnce},
    {"timeout_between_devices", TimeoutBetweenDevices},
    {"stamps", Stamps},
    {"many_tokens", ManyTokens},
    {"stamps_while_ranks_meet", StampsWhileRanksMeet},
};

}  // namespace

int main(int argc, char** argv) {
  for (const auto& [name, test] : kTests) {
    if (argc == 1) {
      std::printf("%s\n", name);
    } else if (std::string(argv[1]) == name) {
      test();
      return 0;
    }
  }
  return argc == 1 ? 0 : 1;
}
