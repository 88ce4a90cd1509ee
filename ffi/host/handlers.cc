#include "ffi/host/handlers.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/host/combine.h"
#include "ffi/host/dispatch.h"
#include "ffi/host/layout.h"
#include "ffi/host/memory.h"
#include "ffi/host/rendezvous.h"
#include "ffi/host/routing.h"
#include "ffi/host/stamps.h"
#include "ffi/host/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::host {
namespace {

namespace ffi = xla::ffi;

ffi::Error ToFfi(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      return ffi::Error::InvalidArgument(status.message());
    case Code::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, status.message());
    case Code::kInternal:
      return ffi::Error::Internal(status.message());
  }
  return ffi::Error::Internal(status.message());
}

// One call site of one executable, shared by its devices.
struct HostState {
  static ffi::TypeId id;

  explicit HostState(Config config) : uid(NextUid()), config(std::move(config)) {}
  ~HostState() { Rendezvous::Global().Forget(uid); }

  static int64_t NextUid() {
    static std::atomic<int64_t> next{0};
    return next.fetch_add(1, std::memory_order_relaxed);
  }

  const int64_t uid;
  const Config config;
};

ffi::TypeId HostState::id = {};
constexpr ffi::TypeInfo kHostStateInfo = ffi::MakeTypeInfo<HostState>();

#if JAX_EP_POISON_OUTPUTS
// Values that no handler writes, so that a test sees an element it left out: NaN in
// every float format, and a slot far out of range.
void Poison(ffi::AnyBuffer buffer) {
  const ffi::DataType dtype = buffer.element_type();
  const bool is_float = dtype == ffi::DataType::F32 || dtype == ffi::DataType::BF16 ||
                        dtype == ffi::DataType::F16;
  if (buffer.size_bytes() == 0) return;
  std::memset(buffer.untyped_data(), is_float ? 0xff : 0xa5, buffer.size_bytes());
}
#else
void Poison(ffi::AnyBuffer) {}
#endif

// Before anything is written to the results, all of which will be written in full.
void PrepareResults(const ffi::RemainingRets& rets) {
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) continue;
    ExpectFullWrite((*buffer)->untyped_data(), (*buffer)->size_bytes());
    Poison(**buffer);
  }
}

static_assert(kMaxNumTopk <= kMaxTopk, "Combine holds a token's rows on the stack");

// What all ranks of a call must have in common besides the attributes.
struct Shape {
  int64_t tokens = 0;
  int64_t topk = 0;
  std::vector<ffi::DataType> dtypes;  // of the leaves
  std::vector<int64_t> widths;

  bool operator==(const Shape& other) const {
    return tokens == other.tokens && topk == other.topk && dtypes == other.dtypes &&
           widths == other.widths;
  }
};

// slot, slot_rank, recv_slot, of which the first fixes T and K.
Routing TakeRouting(const Config& config, Buffers& operands, Shape& shape) {
  const Dims dims = operands.Peek("slot", 2);
  shape.tokens = dims[0];
  shape.topk = dims[1];
  Routing routing;
  routing.slot = operands.Take<int32_t>("slot", ffi::DataType::S32, dims);
  routing.slot_rank = operands.Take<int32_t>("slot_rank", ffi::DataType::S32, dims);
  routing.recv_slot = operands.Take<int32_t>("recv_slot", ffi::DataType::S32,
                                             {config.num_ranks, dims[0], dims[1]});
  return routing;
}

RoutingShape ToRoutingShape(const Config& config, const Shape& shape) {
  return RoutingShape{static_cast<int>(config.num_ranks), shape.tokens, shape.topk,
                      config.capacity};
}

// A stage: what is read at compile time, what a rank brings, what is done for all.
struct LayoutStage {
  static constexpr char kOp[] = "dispatch_layout";
  static constexpr char kName[] = "layout";

  struct Brought : Participant {
    int64_t arrived = 0;  // see stamps.h
    Shape shape;
    LayoutBuffers buffers;
  };

  static void ReadFlags(Attributes&, Config&) {}

  static Status Decode(const Config& config, Buffers& operands, Buffers& results,
                       Brought& brought) {
    constexpr auto kS32 = ffi::DataType::S32;
    const int64_t num_ranks = config.num_ranks;
    const int64_t num_local = config.num_experts / num_ranks;
    LayoutBuffers& b = brought.buffers;
    const Dims ids = operands.Peek("topk_idx", 2);
    brought.shape.tokens = ids[0];
    brought.shape.topk = ids[1];
    b.topk_idx = operands.Take<int32_t>("topk_idx", kS32, ids);
    b.slot = results.Take<int32_t>("slot", kS32, ids);
    b.slot_rank = results.Take<int32_t>("slot_rank", kS32, ids);
    b.recv_slot = results.Take<int32_t>("recv_slot", kS32, {num_ranks, ids[0], ids[1]});
    b.group_sizes = results.Take<int32_t>("group_sizes", kS32, {num_local});
    b.group_counts = results.Take<int32_t>("group_counts", kS32, {num_local});
    b.group_offsets = results.Take<int32_t>("group_offsets", kS32, {num_local});
    b.num_recv = results.Take<int32_t>("num_recv", kS32, {num_ranks});
    b.num_dropped = results.Take<int32_t>("num_dropped", kS32, {num_ranks});
    b.num_invalid = results.Take<int32_t>("num_invalid", kS32, {1});
    return CheckTokens(config, brought.shape.tokens, brought.shape.topk);
  }

  static Status Run(const Config& config, const std::vector<Brought*>& ranks,
                    const Parallel& parallel) {
    std::vector<LayoutBuffers> buffers;
    for (const Brought* rank : ranks) buffers.push_back(rank->buffers);
    const Shape& shape = ranks[0]->shape;
    ComputeLayout(LayoutShape{static_cast<int>(config.num_ranks),
                              static_cast<int>(config.num_experts), shape.tokens,
                              shape.topk, config.capacity, config.alignment},
                  buffers, parallel);
    return Status();
  }
};

struct DispatchStage {
  static constexpr char kOp[] = "dispatch";
  static constexpr char kName[] = "dispatch";

  struct Brought : Participant {
    int64_t arrived = 0;  // see stamps.h
    Shape shape;
    DispatchBuffers buffers;
  };

  static void ReadFlags(Attributes& attrs, Config& config) {
    config.has_weights = attrs.Get<bool>("has_weights");
  }

  static Status Decode(const Config& config, Buffers& operands, Buffers& results,
                       Brought& brought) {
    Shape& shape = brought.shape;
    DispatchBuffers& b = brought.buffers;
    b.routing = TakeRouting(config, operands, shape);
    const int64_t num_local = config.num_experts / config.num_ranks;
    const auto* counts =
        operands.Take<int32_t>("group_counts", ffi::DataType::S32, {num_local});
    const auto* offsets =
        operands.Take<int32_t>("group_offsets", ffi::DataType::S32, {num_local});
    b.weights = nullptr;
    b.recv_weights = nullptr;
    if (config.has_weights) {
      b.weights = operands.Take<float>("weights", ffi::DataType::F32,
                                       {shape.tokens, shape.topk});
      b.recv_weights =
          results.Take<float>("recv_weights", ffi::DataType::F32, {config.capacity});
    }
    do {
      const auto x = operands.TakeRows(
          "x",
          {ffi::DataType::F32, ffi::DataType::BF16, ffi::DataType::F16,
           ffi::DataType::U8, ffi::DataType::U16, ffi::DataType::U32},
          shape.tokens);
      if (!x) break;
      const int64_t width = x->dimensions()[1];
      shape.dtypes.push_back(x->element_type());
      shape.widths.push_back(width);
      b.x.push_back(static_cast<const char*>(x->untyped_data()));
      b.recv.push_back(
          results.Take<char>("recv", x->element_type(), {config.capacity, width}));
    } while (operands.num_left() > 0);
    if (Status status = operands.Finish(); !status.ok()) return status;
    for (int64_t e = 0; e < num_local; ++e) {
      if (counts[e] < 0 || offsets[e] < 0 ||
          int64_t{offsets[e]} + counts[e] > config.capacity) {
        return InvalidArgument(
            "group_offsets[", e, "] (=", offsets[e], ") and group_counts[", e,
            "] (=", counts[e],
            ") must name rows below the capacity (=", config.capacity, ").");
      }
    }
    return CheckTokens(config, shape.tokens, shape.topk);
  }

  static Status Run(const Config& config, const std::vector<Brought*>& ranks,
                    const Parallel& parallel) {
    const Shape& shape = ranks[0]->shape;
    std::vector<int64_t> row_bytes;
    for (size_t i = 0; i < shape.widths.size(); ++i) {
      row_bytes.push_back(shape.widths[i] * Bytes(shape.dtypes[i]));
    }
    std::vector<DispatchBuffers> buffers;
    for (Brought* rank : ranks) buffers.push_back(std::move(rank->buffers));
    return Dispatch(ToRoutingShape(config, shape), row_bytes, buffers, parallel);
  }
};

struct CombineStage {
  static constexpr char kOp[] = "combine";
  static constexpr char kName[] = "combine";

  struct Brought : Participant {
    int64_t arrived = 0;  // see stamps.h
    Shape shape;
    CombineBuffers buffers;
  };

  static void ReadFlags(Attributes& attrs, Config& config) {
    config.has_weights = attrs.Get<bool>("has_weights");
    config.has_row_values = attrs.Get<bool>("has_row_values");
    config.has_bias = attrs.Get<bool>("has_bias");
    config.wire_f32 = attrs.Get<bool>("wire_f32");
  }

  static Status Decode(const Config& config, Buffers& operands, Buffers& results,
                       Brought& brought) {
    constexpr auto kF32 = ffi::DataType::F32;
    Shape& shape = brought.shape;
    CombineBuffers& b = brought.buffers;
    b.routing = TakeRouting(config, operands, shape);
    b.weights = nullptr;
    b.row_values = nullptr;
    b.values = nullptr;
    if (config.has_weights) {
      b.weights = operands.Take<float>("weights", kF32, {config.capacity});
    }
    if (config.has_row_values) {
      b.row_values = operands.Take<float>("row_values", kF32, {config.capacity});
      b.values = results.Take<float>("values", kF32, {shape.tokens, shape.topk});
    }
    const size_t num_leaves = operands.num_left() / (config.has_bias ? 2 : 1);
    do {
      const auto y = operands.TakeRows(
          "y", {kF32, ffi::DataType::BF16, ffi::DataType::F16}, config.capacity);
      if (!y) break;
      const int64_t width = y->dimensions()[1];
      shape.dtypes.push_back(y->element_type());
      shape.widths.push_back(width);
      b.y.push_back(static_cast<const char*>(y->untyped_data()));
      b.out.push_back(
          results.Take<char>("out", y->element_type(), {shape.tokens, width}));
    } while (shape.widths.size() < num_leaves);
    if (config.has_bias) {
      for (size_t i = 0; i < shape.widths.size(); ++i) {
        b.bias.push_back(operands.Take<char>("bias", shape.dtypes[i],
                                             {shape.tokens, shape.widths[i]}));
      }
    }
    return CheckTokens(config, shape.tokens, shape.topk);
  }

  static Status Run(const Config& config, const std::vector<Brought*>& ranks,
                    const Parallel& parallel) {
    const Shape& shape = ranks[0]->shape;
    std::vector<CombineLeaf> leaves;
    for (size_t i = 0; i < shape.widths.size(); ++i) {
      const ffi::DataType dtype = shape.dtypes[i];
      leaves.push_back({dtype == ffi::DataType::F32    ? Dtype::kF32
                        : dtype == ffi::DataType::BF16 ? Dtype::kBf16
                                                       : Dtype::kF16,
                        shape.widths[i]});
    }
    std::vector<CombineBuffers> buffers;
    for (Brought* rank : ranks) buffers.push_back(std::move(rank->buffers));
    return Combine(ToRoutingShape(config, shape), leaves, config.wire_f32, buffers,
                   parallel);
  }
};

std::string OpPrefix(const char* op) { return Concat("jax_ep.", op, ": "); }

// Runs once per call site when a program is compiled or loaded, without a device.
template <typename Stage>
ffi::ErrorOr<std::unique_ptr<HostState>> Instantiate(ffi::Dictionary dictionary) {
  Status status;
  try {
    Config config;
    Attributes attrs(dictionary);
    Stage::ReadFlags(attrs, config);
    status = ReadCommon(attrs, config);
    if (status.ok()) return std::make_unique<HostState>(std::move(config));
  } catch (const std::exception& e) {
    status = Internal(e.what());
  }
  return ffi::Unexpected(
      ToFfi(Status(status.code(), OpPrefix(Stage::kOp) + status.message())));
}

// Runs on every device, and joins the ranks of its group there.
template <typename Stage>
void ExecuteOn(HostState* state, int64_t run_id, ffi::ThreadPool& pool,
               const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
               Done done) {
  using Brought = typename Stage::Brought;
  const Config& config = state->config;
  const Call call{Stage::kOp, config.axis, static_cast<int>(config.num_ranks),
                  config.timeout_s};
  // The pool's context is gone once all ranks are told: never used after this returns.
  const Schedule schedule = [&pool](std::function<void()> task) {
    pool.Schedule(std::move(task));
  };

  Buffers operands = OperandsOf(args);
  PrepareResults(rets);
  Buffers results = ResultsOf(rets);
  const auto* position = operands.Take<int32_t>("rank", ffi::DataType::S32, {2});
  const bool knows_group =
      position != nullptr && position[1] >= 0 && position[1] < config.num_groups();
  if (!knows_group || position[0] < 0 || position[0] >= config.num_ranks) {
    Status status =
        position == nullptr
            ? operands.Finish()
            : InvalidArgument("operand rank (=", position[0], ", ", position[1],
                              ") must hold a rank below ", config.num_ranks,
                              " and a group below ", config.num_groups(), ".");
    // Whoever waits for this rank must know; all groups, if it does not know its own.
    for (int64_t group = 0; group < config.num_groups(); ++group) {
      if (knows_group && group != position[1]) continue;
      Rendezvous::Global().Fail(Key{state->uid, run_id, group}, call, status, schedule);
    }
    done(Status(status.code(), OpPrefix(Stage::kOp) + status.message()));
    return;
  }

  auto brought = std::make_unique<Brought>();
  brought->arrived = config.stamps ? Now() : 0;
  Arrival arrival;
  arrival.rank = position[0];
  arrival.status = Stage::Decode(config, operands, results, *brought);
  // A buffer of the wrong shape is the cause of what Decode found, if there is one.
  if (Status status = results.Finish(); !status.ok()) arrival.status = status;
  if (Status status = operands.Finish(); !status.ok()) arrival.status = status;
  arrival.participant = std::move(brought);
  arrival.done = std::move(done);

  const int self = position[0];
  auto full = Rendezvous::Global().Join(Key{state->uid, run_id, position[1]}, call,
                                        std::move(arrival), schedule);
  if (!full) return;

  // The last rank: all the others have returned and wait for us.
  Status status;
  try {
    std::vector<Brought*> ranks;
    for (const Arrival& rank : *full) {
      ranks.push_back(static_cast<Brought*>(rank.participant.get()));
      if (!(ranks.back()->shape == ranks[0]->shape)) {
        status =
            InvalidArgument("operands of rank ", rank.rank,
                            " must have the shapes and dtypes of those of rank 0.");
      }
    }
    const int64_t num_threads = std::min<int64_t>(
        pool.num_threads(), std::max(1u, std::thread::hardware_concurrency()));
    const Parallel parallel(schedule, static_cast<int>(num_threads) - 1);
    const int64_t began = config.stamps ? Now() : 0;
    if (status.ok()) status = Stage::Run(config, ranks, parallel);
    if (config.stamps && status.ok()) {
      const int64_t ended = Now();
      for (const Arrival& rank : *full) {
        const auto* brought = static_cast<const Brought*>(rank.participant.get());
        KeepStamps(Stage::kName, rank.rank, brought->arrived, began, ended);
      }
    }
  } catch (const std::exception& e) {
    status = Internal(e.what());
  }
  if (!status.ok()) {
    status = Status(status.code(), OpPrefix(Stage::kOp) + status.message());
  }
  Rendezvous::Complete(std::move(*full), self, status, schedule);
}

template <typename Stage>
ffi::Future Execute(HostState* state, ffi::RunId run_id, ffi::ThreadPool pool,
                    ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const Done done = [promise](const Status& status) mutable {
    if (status.ok()) {
      promise.SetAvailable();
    } else {
      promise.SetError(ToFfi(status));
    }
  };
  try {
    ExecuteOn<Stage>(state, run_id.run_id, pool, args, rets, done);
  } catch (const std::exception& e) {
    // Only for want of memory, before this rank has joined; its peers then time out.
    done(Internal(OpPrefix(Stage::kOp), e.what()));
  }
  return future;
}

// XLA asks `instantiate` for the id of its state when it registers the handler, and JAX
// registers handlers before types if both wait for the backend to start. So the type is
// registered here, at the first call of any kind. Later ones are no-ops.
template <typename Stage>
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Instantiate<Stage>,
                         ffi::Ffi::BindInstantiate().Attrs());
  XLA_FFI_Error* error = ffi::Ffi::RegisterTypeId(frame->api, "jax_ep_host_state",
                                                  &HostState::id, &kHostStateInfo);
  return error != nullptr ? error : handler(frame);
}

template <typename Stage>
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Execute<Stage>,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::State<HostState>>()
                             .Ctx<ffi::RunId>()
                             .Ctx<ffi::ThreadPool>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs());
  return handler(frame);
}

}  // namespace

std::vector<Registration> Registrations() {
  return {
      {"jax_ep_layout", "instantiate", InstantiateHandler<LayoutStage>},
      {"jax_ep_layout", "execute", ExecuteHandler<LayoutStage>},
      {"jax_ep_dispatch", "instantiate", InstantiateHandler<DispatchStage>},
      {"jax_ep_dispatch", "execute", ExecuteHandler<DispatchStage>},
      {"jax_ep_combine", "instantiate", InstantiateHandler<CombineStage>},
      {"jax_ep_combine", "execute", ExecuteHandler<CombineStage>},
  };
}

}  // namespace jax_ep::host
