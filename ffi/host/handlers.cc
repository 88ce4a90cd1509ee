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

#include "ffi/host/combine.h"
#include "ffi/host/dispatch.h"
#include "ffi/host/layout.h"
#include "ffi/host/memory.h"
#include "ffi/host/rendezvous.h"
#include "ffi/host/routing.h"
#include "ffi/host/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::host {
namespace {

namespace ffi = xla::ffi;

// What Python checks too. HLO can come here without it.
constexpr int64_t kMaxExperts = 2048;
constexpr int64_t kMaxRanks = 64;
// Beyond this (30 years) a deadline would overflow the clock.
constexpr double kMaxTimeout = 1e9;

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

// The attributes of a call.
struct Config {
  std::string axis;
  int64_t num_ranks = 0;
  int64_t num_groups = 0;
  int64_t num_experts = 0;
  int64_t alignment = 1;
  int64_t capacity = 0;
  double timeout_s = 0;
  bool has_weights = false;
  bool has_row_values = false;
  bool has_bias = false;
  bool wire_f32 = false;
};

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

// Reads attributes by name; the first that is missing or of another type is the error.
class Attributes {
 public:
  explicit Attributes(const ffi::Dictionary& attrs) : attrs_(attrs) {}

  template <typename T>
  T Get(std::string_view name) {
    auto value = attrs_.get<T>(name);
    if (value.has_value()) return *value;
    if (status_.ok()) {
      status_ = InvalidArgument("attribute ", name, ": ", value.error().message(), ".");
    }
    return T();
  }

  const Status& status() const { return status_; }

 private:
  const ffi::Dictionary& attrs_;
  Status status_;
};

Status ReadCommon(Attributes& attrs, Config& config) {
  const int64_t abi_version = attrs.Get<int64_t>("abi_version");
  config.axis = attrs.Get<std::string_view>("axis");
  config.num_ranks = attrs.Get<int64_t>("num_ranks");
  const auto groups = attrs.Get<ffi::Span<const int64_t>>("groups");
  config.num_experts = attrs.Get<int64_t>("num_experts");
  config.alignment = attrs.Get<int64_t>("expert_alignment");
  config.capacity = attrs.Get<int64_t>("capacity");
  config.timeout_s = attrs.Get<double>("timeout_s");
  if (!attrs.status().ok()) return attrs.status();

  if (abi_version != kAbiVersion) {
    return InvalidArgument("abi_version (=", abi_version,
                           ") of the program must be that of the installed jax_ep (=",
                           kAbiVersion, "); compile or export it again.");
  }
  if (config.num_ranks < 1 || config.num_ranks > kMaxRanks) {
    return InvalidArgument("num_ranks (=", config.num_ranks, ") must be in [1, ",
                           kMaxRanks, "].");
  }
  const int64_t num_positions = static_cast<int64_t>(groups.size());
  if (num_positions == 0 || num_positions % config.num_ranks != 0) {
    return InvalidArgument("groups must hold num_ranks (=", config.num_ranks,
                           ") positions per group, got ", num_positions, " in all.");
  }
  config.num_groups = num_positions / config.num_ranks;
  if (config.num_experts < 1 || config.num_experts > kMaxExperts ||
      config.num_experts % config.num_ranks != 0) {
    return InvalidArgument("num_experts (=", config.num_experts,
                           ") must be a multiple of num_ranks (=", config.num_ranks,
                           ") and at most ", kMaxExperts, ".");
  }
  if (config.capacity < 0 || config.capacity > INT32_MAX) {
    return InvalidArgument("capacity (=", config.capacity, ") must be in [0, 2^31).");
  }
  if (config.alignment < 1 || config.capacity % config.alignment != 0) {
    return InvalidArgument(
        "expert_alignment (=", config.alignment,
        ") must be positive and divide the capacity (=", config.capacity, ").");
  }
  if (!(config.timeout_s > 0)) {
    return InvalidArgument("timeout_s (=", config.timeout_s, ") must be positive.");
  }
  config.timeout_s = std::min(config.timeout_s, kMaxTimeout);
  return Status();
}

const char* Name(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::U16:
      return "uint16";
    case ffi::DataType::U32:
      return "uint32";
    default:
      return "another dtype";
  }
}

int64_t Bytes(ffi::DataType dtype) {
  return static_cast<int64_t>(ffi::ByteWidth(dtype));
}

// Matches any size of a dimension.
constexpr int64_t kAny = -1;
using Dims = std::vector<int64_t>;

std::string Describe(const char* dtype, const Dims& dims) {
  std::string text = Concat(dtype, "[");
  for (size_t i = 0; i < dims.size(); ++i) {
    text += i ? ", " : "";
    text += dims[i] == kAny ? "any" : std::to_string(dims[i]);
  }
  return text + "]";
}

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

// The operands or results of a call, taken one after another. The first one that is not
// what it should be is the error; what is taken after it is null.
class Buffers {
 public:
  Buffers(const char* kind, std::vector<ffi::AnyBuffer> buffers)
      : kind_(kind), buffers_(std::move(buffers)) {}

  // The next buffer, of the given dtype and dimensions.
  template <typename T>
  T* Take(const char* name, ffi::DataType dtype, const Dims& dims) {
    const std::optional<ffi::AnyBuffer> buffer = Next(name);
    if (!buffer) return nullptr;
    if (buffer->element_type() != dtype || !Matches(*buffer, dims)) {
      Fail(name, *buffer, Name(dtype), dims);
      return nullptr;
    }
    return static_cast<T*>(buffer->untyped_data());
  }

  // The next buffer, of one of `dtypes`, with two dimensions, of which the second is
  // not zero.
  std::optional<ffi::AnyBuffer> TakeRows(const char* name,
                                         std::initializer_list<ffi::DataType> dtypes,
                                         int64_t num_rows) {
    const std::optional<ffi::AnyBuffer> buffer = Next(name);
    if (!buffer) return std::nullopt;
    const bool known =
        std::find(dtypes.begin(), dtypes.end(), buffer->element_type()) != dtypes.end();
    if (!known || !Matches(*buffer, {num_rows, kAny}) || buffer->dimensions()[1] < 1) {
      std::string names;
      for (ffi::DataType dtype : dtypes) {
        names += Concat(names.empty() ? "" : "|", Name(dtype));
      }
      Fail(name, *buffer, names.c_str(), {num_rows, kAny});
      return std::nullopt;
    }
    return buffer;
  }

  // The dimensions of the next buffer, which is not taken, where it has `ndim` of them.
  Dims Peek(const char* name, size_t ndim) {
    const size_t position = position_;
    const std::optional<ffi::AnyBuffer> buffer = Next(name);
    position_ = position;
    if (!buffer) return Dims(ndim, 0);
    const auto dims = buffer->dimensions();
    if (dims.size() == ndim) return Dims(dims.begin(), dims.end());
    Fail(name, *buffer, "int32", Dims(ndim, kAny));
    return Dims(ndim, 0);
  }

  size_t num_left() const { return buffers_.size() - position_; }

  Status Finish() {
    if (status_.ok() && num_left() > 0) {
      status_ = InvalidArgument("expected ", position_, " ", kind_, "s, got ",
                                buffers_.size(), ".");
    }
    return status_;
  }

 private:
  std::optional<ffi::AnyBuffer> Next(const char* name) {
    if (!status_.ok()) return std::nullopt;
    if (position_ < buffers_.size()) return buffers_[position_++];
    status_ = InvalidArgument(kind_, " ", name, " is missing; got ", buffers_.size(),
                              " ", kind_, "s.");
    return std::nullopt;
  }

  static bool Matches(const ffi::AnyBuffer& buffer, const Dims& dims) {
    const auto actual = buffer.dimensions();
    if (actual.size() != dims.size()) return false;
    for (size_t i = 0; i < dims.size(); ++i) {
      if (dims[i] != kAny && dims[i] != actual[i]) return false;
    }
    return true;
  }

  void Fail(const char* name, const ffi::AnyBuffer& buffer, const char* dtypes,
            const Dims& dims) {
    const auto actual = buffer.dimensions();
    status_ = InvalidArgument(
        kind_, " ", name, " must be ", Describe(dtypes, dims), ", got ",
        Describe(Name(buffer.element_type()), Dims(actual.begin(), actual.end())), ".");
  }

  const char* kind_;
  std::vector<ffi::AnyBuffer> buffers_;
  size_t position_ = 0;
  Status status_;
};

Buffers OperandsOf(const ffi::RemainingArgs& args) {
  std::vector<ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) break;  // not a buffer; then one is missing
    buffers.push_back(*buffer);
  }
  return Buffers("operand", std::move(buffers));
}

Buffers ResultsOf(const ffi::RemainingRets& rets) {
  std::vector<ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) break;
    ExpectFullWrite((**buffer).untyped_data(), (**buffer).size_bytes());
    Poison(**buffer);
    buffers.push_back(**buffer);
  }
  return Buffers("result", std::move(buffers));
}

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

Status CheckShape(const Config& config, const Shape& shape) {
  if (shape.topk > kMaxTopk) {
    return InvalidArgument("top-k (=", shape.topk, ") must be at most ", kMaxTopk, ".");
  }
  // Rows wanted at one rank are counted in int32.
  const int64_t limit = INT32_MAX / config.num_ranks / std::max<int64_t>(1, shape.topk);
  if (shape.tokens > limit) {
    return InvalidArgument("tokens per rank (=", shape.tokens, ") must be at most ",
                           limit, " with top-k ", shape.topk, " and ", config.num_ranks,
                           " ranks.");
  }
  return Status();
}

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

  struct Brought : Participant {
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
    return CheckShape(config, brought.shape);
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

  struct Brought : Participant {
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
    return CheckShape(config, shape);
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

  struct Brought : Participant {
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
    return CheckShape(config, shape);
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
  Buffers results = ResultsOf(rets);
  const auto* position = operands.Take<int32_t>("rank", ffi::DataType::S32, {2});
  const bool knows_group =
      position != nullptr && position[1] >= 0 && position[1] < config.num_groups;
  if (!knows_group || position[0] < 0 || position[0] >= config.num_ranks) {
    Status status =
        position == nullptr
            ? operands.Finish()
            : InvalidArgument("operand rank (=", position[0], ", ", position[1],
                              ") must hold a rank below ", config.num_ranks,
                              " and a group below ", config.num_groups, ".");
    // Whoever waits for this rank must know; all groups, if it does not know its own.
    for (int64_t group = 0; group < config.num_groups; ++group) {
      if (knows_group && group != position[1]) continue;
      Rendezvous::Global().Fail(Key{state->uid, run_id, group}, call, status, schedule);
    }
    done(Status(status.code(), OpPrefix(Stage::kOp) + status.message()));
    return;
  }

  auto brought = std::make_unique<Brought>();
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
    if (status.ok()) status = Stage::Run(config, ranks, parallel);
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
