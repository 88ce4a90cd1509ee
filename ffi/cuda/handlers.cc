#include "ffi/cuda/handlers.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/cuda/communicator.h"
#include "ffi/cuda/driver.h"
#include "ffi/cuda/launch_shape.h"
#include "ffi/cuda/loader.h"
#include "ffi/cuda/watcher.h"
#include "ffi/cuda/workspace.h"
#include "xla/ffi/api/collectives_c_api.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::cuda {
namespace {

constexpr auto kS32 = ffi::DataType::S32;
constexpr auto kF32 = ffi::DataType::F32;

// Our own among the communicators that XLA keeps per group: no collective of XLA's runs
// on it. Any number will do that others are unlikely to choose.
constexpr int64_t kCommunicationId = 25968;  // "ep"

// Rows and slots are moved by 16-byte accesses.
constexpr uintptr_t kBufferAlignment = 16;

// --- XLA's communicators -----------------------------------------------------

// The collectives extension, by XLA's C API alone and with a version test of our own:
// what it has in 0.1 (jaxlib 0.11.2) keeps its meaning in later 0.x.
struct Collectives {
  const XLA_FFI_Api* api = nullptr;
  const XLA_FFI_Collectives_Extension* extension = nullptr;
};

struct CollectivesTag {
  using Type = Collectives;
  using CExtension = XLA_FFI_Collectives_Extension;
  static constexpr auto kName = "collectives";
  static constexpr int64_t kExtensionType = XLA_FFI_Extension_Collectives;
  static constexpr int32_t kMajorVersion = 0;
  static constexpr int32_t kMinorVersion = 1;
  static bool Support(int32_t major, int32_t minor) {
    return major == kMajorVersion && minor >= kMinorVersion;
  }
  static Collectives Create(const XLA_FFI_Api* api, const CExtension* extension) {
    return {api, extension};
  }
};

ffi::Error FailedPrecondition(std::string message) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, std::move(message));
}

ffi::Error TakeError(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  std::string message = ffi::internal::GetErrorMessage(api, error);
  ffi::internal::DestroyError(api, error);
  return ffi::Error::Internal("jax_ep: XLA gives no communicator: " + message);
}

// --- State -------------------------------------------------------------------

// What `execute` needs of a device; filled in by `initialize`.
struct Ready {
  const Workspace* workspace = nullptr;
  CUfunction function = nullptr;
  LaunchDims dims{};
};

// One call site of one executable, shared by its devices.
struct CudaState {
  static ffi::TypeId id;

  Config config;
  int num_topk = 0;                      // dispatch and combine: what the kernel is for
  std::vector<int64_t> leaf_bytes;       // dispatch: bytes of a row of each leaf
  std::vector<int32_t> leaf_dtypes;      // combine: LeafDtype
  std::vector<int64_t> leaf_widths;      // combine: elements of a row
  std::map<std::string, Image*> images;  // by architecture
  std::vector<XLA_FFI_ReplicaGroup> groups;

  std::mutex mutex;
  std::map<int32_t, Ready> ready;  // by device ordinal
};

ffi::TypeId CudaState::id = {};
constexpr ffi::TypeInfo kCudaStateInfo = ffi::MakeTypeInfo<CudaState>();
constexpr char kCudaStateName[] = "jax_ep_cuda_state";

ffi::Error ToFfi(const char* op, const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(Concat("jax_ep.", op, ": ", status.message()));
}

template <typename T>
std::vector<T> GetArray(Attributes& attrs, std::string_view name) {
  const auto span = attrs.Get<ffi::Span<const T>>(name);
  return std::vector<T>(span.begin(), span.end());
}

Status CheckLeaves(size_t num_leaves) {
  if (num_leaves >= 1 && num_leaves <= kMaxLeaves) return Status();
  return InvalidArgument("the number of leaves (=", num_leaves, ") must be in [1, ",
                         kMaxLeaves, "].");
}

void ReadImages(Attributes& attrs, CudaState& state) {
  std::string_view archs = attrs.Get<std::string_view>("cubin_archs");
  while (!archs.empty()) {
    const std::string_view arch = archs.substr(0, archs.find(','));
    archs.remove_prefix(std::min(archs.size(), arch.size() + 1));
    const std::string name = Concat("cubin_", arch);
    const auto bytes = attrs.Get<std::string_view>(name);
    const auto sha256 = attrs.Get<std::string_view>(name + "_sha256");
    if (!attrs.status().ok()) return;
    state.images[std::string(arch)] = InternImage(sha256, bytes);
  }
}

// --- Stages ------------------------------------------------------------------

void CheckAligned(const char* name, const void* data, Status* status) {
  if (reinterpret_cast<uintptr_t>(data) % kBufferAlignment == 0 || !status->ok())
    return;
  *status = InvalidArgument(name, " must start at a multiple of ", kBufferAlignment,
                            " bytes.");
}

// The next buffer, which the kernel reads or writes 16 bytes at a time.
void* TakeAligned(Buffers& buffers, const char* name, ffi::DataType dtype,
                  const Dims& dims, Status* status) {
  void* data = buffers.Take<void>(name, dtype, dims);
  CheckAligned(name, data, status);
  return data;
}

struct Routing {
  int64_t num_tokens = 0;
  int64_t num_topk = 0;
  const int32_t* slot = nullptr;
  const int32_t* slot_rank = nullptr;
  const int32_t* recv_slot = nullptr;
};

// slot, slot_rank, recv_slot, of which the first fixes T and K.
Routing TakeRouting(const CudaState& state, Buffers& operands, Status* status) {
  const Dims dims = operands.Peek("slot", 2);
  Routing routing;
  routing.num_tokens = dims[0];
  routing.num_topk = dims[1];
  routing.slot = operands.Take<int32_t>("slot", kS32, dims);
  routing.slot_rank = operands.Take<int32_t>("slot_rank", kS32, dims);
  routing.recv_slot = static_cast<const int32_t*>(TakeAligned(
      operands, "recv_slot", kS32, {state.config.num_ranks, dims[0], dims[1]}, status));
  if (status->ok()) *status = CheckTokens(state.config, dims[0], dims[1]);
  if (status->ok() && routing.slot != nullptr && dims[1] != state.num_topk) {
    *status =
        InvalidArgument("operand slot has top-k ", dims[1],
                        ", and the kernel was compiled for ", state.num_topk, ".");
  }
  return routing;
}

struct LayoutStage {
  static constexpr char kOp[] = "dispatch_layout";
  static constexpr char kEntry[] = "jax_ep_layout";
  using Params = LayoutParams;

  static Status Read(Attributes&, CudaState&) { return Status(); }

  static LaunchDims Shape(const CudaState& state, int device_sms) {
    const Config& config = state.config;
    return LayoutLaunch(device_sms, static_cast<int>(config.num_sms),
                        static_cast<int>(config.num_ranks),
                        static_cast<int>(config.num_experts));
  }

  static Status Decode(const CudaState& state, Buffers& operands, Buffers& results,
                       Params& params) {
    const Config& config = state.config;
    const int64_t num_ranks = config.num_ranks;
    const int64_t num_local = config.num_local_experts();
    const Dims ids = operands.Peek("topk_idx", 2);
    params.topk_idx = operands.Take<int32_t>("topk_idx", kS32, ids);
    params.slot = results.Take<int32_t>("slot", kS32, ids);
    params.slot_rank = results.Take<int32_t>("slot_rank", kS32, ids);
    Status status = CheckTokens(config, ids[0], ids[1]);
    params.recv_slot = static_cast<int32_t*>(
        TakeAligned(results, "recv_slot", kS32, {num_ranks, ids[0], ids[1]}, &status));
    params.group_sizes = results.Take<int32_t>("group_sizes", kS32, {num_local});
    params.group_counts = results.Take<int32_t>("group_counts", kS32, {num_local});
    params.group_offsets = results.Take<int32_t>("group_offsets", kS32, {num_local});
    params.num_recv = results.Take<int32_t>("num_recv", kS32, {num_ranks});
    params.num_dropped = results.Take<int32_t>("num_dropped", kS32, {num_ranks});
    params.num_invalid = results.Take<int32_t>("num_invalid", kS32, {1});
    params.num_ids = ids[0] * ids[1];
    params.capacity = config.capacity;
    params.num_experts = static_cast<int32_t>(config.num_experts);
    params.expert_alignment = static_cast<int32_t>(config.alignment);
    return status;
  }
};

struct DispatchStage {
  static constexpr char kOp[] = "dispatch";
  static constexpr char kEntry[] = "jax_ep_dispatch";
  using Params = DispatchParams;

  static Status Read(Attributes& attrs, CudaState& state) {
    state.config.has_weights = attrs.Get<bool>("has_weights");
    state.num_topk = static_cast<int>(attrs.Get<int64_t>("num_topk"));
    state.leaf_bytes = GetArray<int64_t>(attrs, "leaf_bytes");
    return attrs.status().ok() ? CheckLeaves(state.leaf_bytes.size()) : attrs.status();
  }

  static LaunchDims Shape(const CudaState& state, int device_sms) {
    return DispatchLaunch(device_sms, static_cast<int>(state.config.num_sms),
                          state.leaf_bytes.data(),
                          static_cast<int>(state.leaf_bytes.size()), state.num_topk,
                          state.config.has_weights);
  }

  static Status Decode(const CudaState& state, Buffers& operands, Buffers& results,
                       Params& params) {
    const Config& config = state.config;
    Status status;
    const Routing routing = TakeRouting(state, operands, &status);
    const int64_t num_local = config.num_local_experts();
    params.slot = routing.slot;
    params.slot_rank = routing.slot_rank;
    params.recv_slot = routing.recv_slot;
    params.group_counts = operands.Take<int32_t>("group_counts", kS32, {num_local});
    params.group_offsets = operands.Take<int32_t>("group_offsets", kS32, {num_local});
    if (config.has_weights) {
      params.weights =
          operands.Take<float>("weights", kF32, {routing.num_tokens, routing.num_topk});
      params.recv_weights =
          results.Take<float>("recv_weights", kF32, {config.capacity});
    }
    for (size_t i = 0; i < state.leaf_bytes.size(); ++i) {
      const auto x =
          operands.TakeRows("x",
                            {kF32, ffi::DataType::BF16, ffi::DataType::F16,
                             ffi::DataType::U8, ffi::DataType::U16, ffi::DataType::U32},
                            routing.num_tokens);
      if (!x) break;
      const int64_t width = x->dimensions()[1];
      const auto dtype = x->element_type();
      if (status.ok() && width * Bytes(dtype) != state.leaf_bytes[i]) {
        status = InvalidArgument("operand x has rows of ", width * Bytes(dtype),
                                 " bytes, and the kernel was compiled for ",
                                 state.leaf_bytes[i], ".");
      }
      params.x[i] = x->untyped_data();
      CheckAligned("x", params.x[i], &status);
      params.recv[i] =
          TakeAligned(results, "recv", dtype, {config.capacity, width}, &status);
    }
    params.num_tokens = routing.num_tokens;
    params.capacity = config.capacity;
    params.num_local_experts = static_cast<int32_t>(num_local);
    return status;
  }
};

struct CombineStage {
  static constexpr char kOp[] = "combine";
  static constexpr char kEntry[] = "jax_ep_combine";
  using Params = CombineParams;

  static Status Read(Attributes& attrs, CudaState& state) {
    Config& config = state.config;
    config.has_weights = attrs.Get<bool>("has_weights");
    config.has_row_values = attrs.Get<bool>("has_row_values");
    config.has_bias = attrs.Get<bool>("has_bias");
    config.wire_f32 = attrs.Get<bool>("wire_f32");
    state.num_topk = static_cast<int>(attrs.Get<int64_t>("num_topk"));
    state.leaf_dtypes = GetArray<int32_t>(attrs, "leaf_dtypes");
    state.leaf_widths = GetArray<int64_t>(attrs, "leaf_widths");
    if (!attrs.status().ok()) return attrs.status();
    if (state.leaf_dtypes.size() != state.leaf_widths.size()) {
      return InvalidArgument("leaf_dtypes and leaf_widths must have equal lengths.");
    }
    return CheckLeaves(state.leaf_widths.size());
  }

  static LaunchDims Shape(const CudaState& state, int device_sms) {
    const Config& config = state.config;
    return CombineLaunch(device_sms, static_cast<int>(config.num_sms),
                         state.leaf_dtypes.data(), state.leaf_widths.data(),
                         static_cast<int>(state.leaf_widths.size()), state.num_topk,
                         config.wire_f32, config.has_row_values);
  }

  static ffi::DataType Dtype(int32_t leaf_dtype) {
    return leaf_dtype == kLeafF32    ? kF32
           : leaf_dtype == kLeafBf16 ? ffi::DataType::BF16
                                     : ffi::DataType::F16;
  }

  static Status Decode(const CudaState& state, Buffers& operands, Buffers& results,
                       Params& params) {
    const Config& config = state.config;
    Status status;
    const Routing routing = TakeRouting(state, operands, &status);
    params.slot = routing.slot;
    params.slot_rank = routing.slot_rank;
    params.recv_slot = routing.recv_slot;
    if (config.has_weights) {
      params.weights = operands.Take<float>("weights", kF32, {config.capacity});
    }
    if (config.has_row_values) {
      params.row_values = operands.Take<float>("row_values", kF32, {config.capacity});
      params.values =
          results.Take<float>("values", kF32, {routing.num_tokens, routing.num_topk});
    }
    for (size_t i = 0; i < state.leaf_widths.size(); ++i) {
      const auto dtype = Dtype(state.leaf_dtypes[i]);
      const int64_t width = state.leaf_widths[i];
      params.y[i] =
          TakeAligned(operands, "y", dtype, {config.capacity, width}, &status);
      params.out[i] =
          TakeAligned(results, "out", dtype, {routing.num_tokens, width}, &status);
    }
    for (size_t i = 0; config.has_bias && i < state.leaf_widths.size(); ++i) {
      params.bias[i] = TakeAligned(operands, "bias", Dtype(state.leaf_dtypes[i]),
                                   {routing.num_tokens, state.leaf_widths[i]}, &status);
    }
    params.num_tokens = routing.num_tokens;
    params.capacity = config.capacity;
    return status;
  }
};

// --- Handlers ----------------------------------------------------------------

template <typename Stage>
ffi::ErrorOr<std::unique_ptr<CudaState>> Instantiate(ffi::Dictionary dictionary) {
  auto state = std::make_unique<CudaState>();
  Attributes attrs(dictionary);
  Status status = ReadCommon(attrs, state->config);
  if (status.ok()) status = Stage::Read(attrs, *state);
  if (status.ok()) {
    ReadImages(attrs, *state);
    status = attrs.status();
  }
  if (!status.ok()) return ffi::Unexpected(ToFfi(Stage::kOp, status));
  const Config& config = state->config;
  for (int64_t g = 0; g < config.num_groups(); ++g) {
    state->groups.push_back({config.groups.data() + g * config.num_ranks,
                             static_cast<size_t>(config.num_ranks)});
  }
  return state;
}

// An error that a kernel recorded is final, for every later execution.
ffi::Error EarlierError(const ffi::Context& context) {
  const auto run_id = context.get<ffi::RunId>();
  std::string error = RecordedErrorForRun(run_id.has_value() ? run_id->run_id : -1);
  if (error.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, std::move(error));
}

ffi::ErrorOr<Collectives> GetCollectives(const ffi::Context& context) {
  auto collectives = context.get<ffi::Extension<CollectivesTag>>();
  if (collectives.has_value()) return *collectives;
  return ffi::Unexpected(FailedPrecondition(
      "jax_ep: CUDA needs jaxlib >= 0.11.2, which lends its communicators to custom "
      "calls; " +
      collectives.error().message()));
}

ffi::Error Prepare(ffi::Context context, CudaState* state) {
  if (ffi::Error error = EarlierError(context); error.failure()) return error;
  if (state->config.num_ranks == 1) return ffi::Error::Success();
  const auto collectives = GetCollectives(context);
  if (!collectives.has_value()) return collectives.error();
  XLA_FFI_Communicator_Request_Args args{};
  args.struct_size = XLA_FFI_Communicator_Request_Args_STRUCT_SIZE;
  args.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  args.groups = state->groups.data();
  args.num_groups = state->groups.size();
  args.communication_id = kCommunicationId;
  const auto* extension = collectives->extension;
  XLA_FFI_Error* error = extension->request_communicator(extension, &args);
  return error ? TakeError(collectives->api, error) : ffi::Error::Success();
}

// The communicator of this device's group, null for a group of one.
//
// Its ranks are positions in the group: XLA numbers a communicator's ranks by the order
// in which the group lists its devices, whatever their ids. Nothing breaks silently if
// that changes: every rank checks whose workspace it sees where (communicator.cc), and
// every kernel compares its `rank` operand with the communicator's rank.
ffi::Error GetCommunicator(const ffi::Context& context, const CudaState& state,
                           ncclComm_t* communicator) {
  *communicator = nullptr;
  if (state.config.num_ranks == 1) return ffi::Error::Success();
  const auto collectives = GetCollectives(context);
  if (!collectives.has_value()) return collectives.error();
  XLA_FFI_Communicator_Get_Args args{};
  args.struct_size = XLA_FFI_Communicator_Get_Args_STRUCT_SIZE;
  args.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  args.groups = state.groups.data();
  args.num_groups = state.groups.size();
  args.communication_id = kCommunicationId;
  const auto* extension = collectives->extension;
  if (XLA_FFI_Error* error = extension->get_communicator(extension, &args)) {
    return TakeError(collectives->api, error);
  }
  *communicator = reinterpret_cast<ncclComm_t>(args.communicator);
  return ffi::Error::Success();
}

template <typename Stage>
std::string Load(const CudaState& state, const Workspace& workspace, Ready* ready) {
  const Driver& driver = Driver::Get();
  const std::string arch = "sm_" + std::to_string(workspace.compute_major) +
                           std::to_string(workspace.compute_minor) + "a";
  const auto image = state.images.find(arch);
  if (image == state.images.end()) {
    std::string archs;
    for (const auto& entry : state.images) archs += " " + entry.first;
    return "the program has kernels for" + archs + ", and the device is " + arch +
           "; compile it where such a device is";
  }
  ready->dims = Stage::Shape(state, workspace.num_sms);
  if (ready->dims.shared_bytes > workspace.max_shared_bytes) {
    return "the kernel needs " + std::to_string(ready->dims.shared_bytes) +
           " bytes of shared memory per block, and the device has " +
           std::to_string(workspace.max_shared_bytes);
  }
  ScopedContext current(driver, workspace.context);
  return LoadKernel(driver, image->second, Stage::kEntry, workspace.device,
                    ready->dims.shared_bytes, &ready->function);
}

template <typename Stage>
ffi::Error Initialize(CUstream stream, int32_t ordinal, ffi::Context context,
                      CudaState* state) {
  if (ffi::Error error = EarlierError(context); error.failure()) return error;
  ncclComm_t communicator = nullptr;
  if (ffi::Error error = GetCommunicator(context, *state, &communicator);
      error.failure()) {
    return error;
  }
  const Workspace* workspace = nullptr;
  std::string error =
      ObtainWorkspace(communicator, stream, static_cast<int>(state->config.num_ranks),
                      state->config.axis, &workspace);
  if (!error.empty()) return FailedPrecondition(std::move(error));

  std::lock_guard<std::mutex> lock(state->mutex);
  Ready& ready = state->ready[ordinal];
  if (ready.workspace == workspace) return ffi::Error::Success();
  Ready loaded;
  error = Load<Stage>(*state, *workspace, &loaded);
  if (!error.empty()) {
    return FailedPrecondition(Concat("jax_ep.", Stage::kOp, ": ", error, "."));
  }
  loaded.workspace = workspace;
  ready = loaded;
  return ffi::Error::Success();
}

template <typename Stage>
ffi::Error Execute(CUstream stream, int32_t ordinal, CudaState* state,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Ready ready;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (auto it = state->ready.find(ordinal); it != state->ready.end()) {
      ready = it->second;
    }
  }
  if (ready.workspace == nullptr) {
    return ffi::Error::Internal(
        Concat("jax_ep.", Stage::kOp, ": executed before it was initialized."));
  }
  const Workspace& workspace = *ready.workspace;
  typename Stage::Params params{};
  Buffers operands = OperandsOf(args);
  Buffers results = ResultsOf(rets);
  CommonParams& common = params.common;
  common.rank_operand = operands.Take<int32_t>("rank", kS32, {2});
  Status status = Stage::Decode(*state, operands, results, params);
  // A buffer of the wrong shape is the cause of what Decode found, if there is one.
  if (Status finish = results.Finish(); !finish.ok()) status = finish;
  if (Status finish = operands.Finish(); !finish.ok()) status = finish;
  if (!status.ok()) return ToFfi(Stage::kOp, status);
  for (int r = 0; r < workspace.num_ranks; ++r) {
    common.peers[r] = reinterpret_cast<uint8_t*>(workspace.peers[r]);
  }
  common.error = reinterpret_cast<ErrorRecord*>(workspace.error_record);
  common.timeout_ns = static_cast<uint64_t>(state->config.timeout_s * 1e9);
  common.rank = workspace.rank;
  common.num_ranks = workspace.num_ranks;

  const Driver& driver = Driver::Get();
  LaunchConfig launch{};
  launch.grid[0] = ready.dims.blocks;
  launch.block[0] = ready.dims.threads;
  launch.grid[1] = launch.grid[2] = launch.block[1] = launch.block[2] = 1;
  launch.shared_bytes = ready.dims.shared_bytes;
  launch.stream = stream;
  void* kernel_args[] = {&params};
  ScopedContext current(driver, workspace.context);
  const CUresult result =
      driver.cuLaunchKernelEx(&launch, ready.function, kernel_args, nullptr);
  if (result == 0) return ffi::Error::Success();
  return ffi::Error::Internal(Concat("jax_ep.", Stage::kOp, ": ",
                                     driver.Describe("cuLaunchKernelEx", result), "."));
}

// XLA asks `instantiate` for the id of its state when it registers the handler, and JAX
// may register handlers before types. So the type is registered here, at the first call
// of any kind; later ones change nothing.
template <typename Stage>
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Instantiate<Stage>,
                         ffi::Ffi::BindInstantiate().Attrs());
  XLA_FFI_Error* error = ffi::Ffi::RegisterTypeId(frame->api, kCudaStateName,
                                                  &CudaState::id, &kCudaStateInfo);
  return error != nullptr ? error : handler(frame);
}

XLA_FFI_Error* PrepareHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Prepare,
                         ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
                             .Ctx<ffi::Context>()
                             .Ctx<ffi::State<CudaState>>());
  return handler(frame);
}

template <typename Stage>
XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Initialize<Stage>,
                         ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                             .Ctx<ffi::PlatformStream<CUstream>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Ctx<ffi::Context>()
                             .Ctx<ffi::State<CudaState>>());
  return handler(frame);
}

// The trait is compiled in: JAX cannot hand it to the CUDA plugin.
template <typename Stage>
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Execute<Stage>,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<CUstream>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Ctx<ffi::State<CudaState>>()
                             .RemainingArgs()
                             .RemainingRets(),
                         {ffi::Traits::kCmdBufferCompatible});
  return handler(frame);
}

template <typename Stage>
void Append(std::vector<Registration>& all) {
  const char* target = Stage::kEntry;  // a custom call has the name of its kernel
  all.push_back({target, "instantiate", InstantiateHandler<Stage>});
  all.push_back({target, "prepare", PrepareHandler});
  all.push_back({target, "initialize", InitializeHandler<Stage>});
  all.push_back({target, "execute", ExecuteHandler<Stage>});
}

}  // namespace

std::vector<Registration> Registrations() {
  std::vector<Registration> all;
  Append<LayoutStage>(all);
  Append<DispatchStage>(all);
  Append<CombineStage>(all);
  return all;
}

TypeRegistration StateType() {
  return {kCudaStateName, &CudaState::id, &kCudaStateInfo};
}

std::string CheckError() { return RecordedError(); }

}  // namespace jax_ep::cuda
