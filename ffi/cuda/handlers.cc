#include "ffi/cuda/handlers.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/calls.h"
#include "ffi/cuda/communicator.h"
#include "ffi/cuda/done.h"
#include "ffi/cuda/driver.h"
#include "ffi/cuda/frame.h"
#include "ffi/cuda/in_flight.h"
#include "ffi/cuda/loader.h"
#include "ffi/cuda/stages.h"
#include "ffi/cuda/state.h"
#include "ffi/cuda/watcher.h"
#include "xla/ffi/api/collectives_c_api.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::cuda {

ffi::TypeId CudaState::id = {};

namespace {

constexpr ffi::TypeInfo kCudaStateInfo = ffi::MakeTypeInfo<CudaState>();
constexpr char kCudaStateName[] = "jax_ep_cuda_state";

// Our own among the communicators that XLA keeps per group: no collective of XLA's runs
// on it. Any number will do that others are unlikely to choose.
constexpr int64_t kCommunicationId = 25968;  // "ep"

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

ffi::Error TakeError(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  std::string message = ffi::internal::GetErrorMessage(api, error);
  ffi::internal::DestroyError(api, error);
  return ffi::Error::Internal("jax_ep: XLA gives no communicator: " + message);
}

// --- Handlers ----------------------------------------------------------------

// The start of a stage, whose kernel runs beside what XLA's stream does until done.
template <typename Stage>
struct Start : Stage {
  static constexpr bool kIsStart = true;
  static std::string Op() { return Concat(Stage::Call::kOp, "_start"); }
  static std::string Target() { return Concat(Stage::Call::kTarget, "_start"); }
};
template <typename Stage>
struct Plain : Stage {
  static constexpr bool kIsStart = false;
  static std::string Op() { return Stage::Call::kOp; }
  static std::string Target() { return Stage::Call::kTarget; }
};

template <typename Stage>
ffi::ErrorOr<std::unique_ptr<CudaState>> Instantiate(ffi::Dictionary dictionary) {
  if (Stage::kIsStart) SideStream::ExpectStarts();
  auto state = std::make_unique<CudaState>();
  Attributes attrs(dictionary);
  Status status = ReadConfig<typename Stage::Call>(attrs, state->config);
  state->sizes.few = attrs.Get<bool>("few");
  state->call_site = attrs.Get<std::string_view>("call_site");
  if (status.ok()) status = attrs.status();
  if (status.ok()) status = Stage::Read(attrs, *state);
  if (status.ok()) status = ReadImages(attrs, *state);
  if (!status.ok()) {
    return ffi::Unexpected(ToFfi(status.Within(OpName(Stage::Op()))));
  }
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
  return ffi::Unexpected(ToFfi(FailedPrecondition(
      "jax_ep: CUDA needs jaxlib >= 0.11.2, which lends its communicators to custom "
      "calls (",
      collectives.error().message(), ").")));
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

// The kernel for the device of `ready->workspace`, and its launch.
template <typename Stage>
Status Load(const CudaState& state, Ready* ready) {
  const Driver& driver = Driver::Get();
  const Workspace& workspace = *ready->workspace;
  const std::string arch =
      Concat("sm_", workspace.compute_major, workspace.compute_minor, "a");
  const auto image = state.images.find(arch);
  if (image == state.images.end()) {
    std::string archs;
    for (const auto& entry : state.images) archs += " " + entry.first;
    return FailedPrecondition("the program has kernels for", archs,
                              ", and the device is ", arch,
                              "; compile it where such a device is.");
  }
  ready->dims = Stage::Shape(state, workspace.num_sms);
  if (ready->dims.shared_bytes > workspace.max_shared_bytes) {
    return FailedPrecondition("the kernel needs ", ready->dims.shared_bytes,
                              " bytes of shared memory per block, and the device has ",
                              workspace.max_shared_bytes, ".");
  }
  ScopedContext current(driver, workspace.context);
  return LoadKernel(driver, image->second, Stage::Call::kTarget, workspace.device,
                    ready->dims.shared_bytes, &ready->function);
}

template <typename Stage>
ffi::Error Initialize(CUstream stream, int32_t ordinal, ffi::Context context,
                      CudaState* state) {
  if (ffi::Error error = EarlierError(context); error.failure()) return error;
  Ready ready = state->GetReady(ordinal);
  if (ready.workspace != nullptr && IsMapped(Driver::Get(), *ready.workspace)) {
    return ffi::Error::Success();
  }
  ncclComm_t communicator = nullptr;
  if (ffi::Error error = GetCommunicator(context, *state, &communicator);
      error.failure()) {
    return error;
  }
  Status status =
      ObtainWorkspace(communicator, stream, static_cast<int>(state->config.num_ranks),
                      state->config.axis, state->config.timeout_s, &ready.workspace);
  if (status.ok()) status = Load<Stage>(*state, &ready);
  if (status.ok() && Stage::kIsStart) {
    status = SideStream::Obtain(Driver::Get(), ready.workspace->context, &ready.side);
  }
  if (!status.ok()) return ToFfi(status.Within(OpName(Stage::Op())));
  state->SetReady(ordinal, ready);
  return ffi::Error::Success();
}

template <typename Stage>
ffi::Error Execute(CUstream stream, int32_t ordinal, CudaState* state,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Ready ready = state->GetReady(ordinal);
  Status status;
  typename Stage::Call call;
  if (ready.workspace == nullptr) {
    status = Internal("executed before it was initialized.");
  }
  if (status.ok()) {
    status =
        Decode<typename Stage::Call, Stage::kIsStart>(state->config, args, rets, call);
  }
  if (status.ok()) status = Stage::Check(state->sizes, call);
  if (status.ok()) {
    status = CheckPieces(ready.dims, ready.workspace->num_ranks, call.num_tokens);
  }
  if (!status.ok()) return ToFfi(status.Within(OpName(Stage::Op())));

  const Workspace& workspace = *ready.workspace;
  typename Stage::Params params{};
  Stage::Fill(state->config, call, params);
  CommonParams& common = params.common;
  // XLA may give the operand's buffer to others while a start's kernel runs. The layout
  // has compared ranks, as a plain call.
  common.rank_operand = Stage::kIsStart ? nullptr : call.rank;
  for (int r = 0; r < workspace.num_ranks; ++r) {
    common.peers[r] = reinterpret_cast<uint8_t*>(workspace.peers[r]);
  }
  common.error = reinterpret_cast<ErrorRecord*>(workspace.error_record);
  common.site = state->SiteOf(Stage::Call::kOp, call);
  common.timeout_ns = static_cast<uint64_t>(state->config.timeout_s * 1e9);
  common.rank = workspace.rank;
  common.num_ranks = workspace.num_ranks;

  const Driver& driver = Driver::Get();
  ScopedContext current(driver, workspace.context);
  CUstream launch_stream = stream;
  Flight flight;
  if (Stage::kIsStart) {
    // Neither the rank nor the order stays.
    flight = {Stage::Call::kOp, Addresses(args, 1, args.size() - 1),
              Addresses(rets, 0, rets.size() - 1)};
    status = ready.side->Fork(driver, stream, flight);
    launch_stream = ready.side->stream();
    common.resident = reinterpret_cast<uint32_t*>(ready.side->resident());
  } else if (SideStream::ExpectsStarts()) {
    // One exchange at a time.
    SideStream* side = SideStream::Find(workspace.context);
    if (side != nullptr) status = side->AwaitAll(driver, stream);
  }
  if (!status.ok()) return ToFfi(status.Within(OpName(Stage::Op())));
  LaunchConfig launch{};
  launch.grid[0] = ready.dims.blocks;
  launch.block[0] = ready.dims.threads;
  launch.grid[1] = launch.grid[2] = launch.block[1] = launch.block[2] = 1;
  launch.shared_bytes = ready.dims.shared_bytes;
  launch.stream = launch_stream;
  void* kernel_args[] = {&params};
  const CUresult result =
      driver.cuLaunchKernelEx(&launch, ready.function, kernel_args, nullptr);
  if (result != 0) {
    status = driver.Failure("cuLaunchKernelEx", result);
    status = Status(Code::kInternal, status.message());
  } else if (Stage::kIsStart) {
    status = ready.side->Launched(driver, stream, launch.grid[0], std::move(flight));
  }
  return status.ok() ? ffi::Error::Success()
                     : ToFfi(status.Within(OpName(Stage::Op())));
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
  return error != nullptr ? error : Guarded(frame, handler);
}

XLA_FFI_Error* PrepareHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Prepare,
                         ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
                             .Ctx<ffi::Context>()
                             .Ctx<ffi::State<CudaState>>());
  return Guarded(frame, handler);
}

template <typename Stage>
XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Initialize<Stage>,
                         ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                             .Ctx<ffi::PlatformStream<CUstream>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Ctx<ffi::Context>()
                             .Ctx<ffi::State<CudaState>>());
  return Guarded(frame, handler);
}

auto ExecuteBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::State<CudaState>>()
      .RemainingArgs()
      .RemainingRets();
}

// The trait is compiled in: JAX cannot hand it to the CUDA plugin. Starts and done are
// without: a fork whose join is outside cannot be captured.
template <typename Stage>
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  if constexpr (Stage::kIsStart) {
    XLA_FFI_DEFINE_HANDLER(handler, Execute<Stage>, ExecuteBinding());
    return Guarded(frame, handler);
  } else {
    XLA_FFI_DEFINE_HANDLER(handler, Execute<Stage>, ExecuteBinding(),
                           {ffi::Traits::kCmdBufferCompatible});
    return Guarded(frame, handler);
  }
}

template <typename Stage>
void Append(std::vector<Registration>& all) {
  static const std::string& target = *new std::string(Stage::Target());
  all.push_back({target.c_str(), "instantiate", InstantiateHandler<Stage>});
  all.push_back({target.c_str(), "prepare", PrepareHandler});
  all.push_back({target.c_str(), "initialize", InitializeHandler<Stage>});
  all.push_back({target.c_str(), "execute", ExecuteHandler<Stage>});
}

}  // namespace

std::vector<Registration> Registrations() {
  std::vector<Registration> all;
  Append<Plain<LayoutStage>>(all);
  Append<Plain<DispatchStage>>(all);
  Append<Plain<CombineStage>>(all);
  Append<Start<DispatchStage>>(all);
  Append<Start<CombineStage>>(all);
  all.push_back({kDoneTarget, "execute", DoneHandler});
  return all;
}

TypeRegistration StateType() {
  return {kCudaStateName, &CudaState::id, &kCudaStateInfo};
}

std::string CheckError() { return RecordedError(); }

Status TakeStamps(std::vector<StampRecord>* records) { return CopyStamps(records); }

}  // namespace jax_ep::cuda
