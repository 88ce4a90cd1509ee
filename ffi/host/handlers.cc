#include "ffi/host/handlers.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/calls.h"
#include "ffi/host/memory.h"
#include "ffi/host/rendezvous.h"
#include "ffi/host/stages.h"
#include "ffi/host/stamps.h"
#include "ffi/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::host {
namespace {

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

// What a rank brings to the others.
template <typename Call>
struct Brought : Participant {
  int64_t arrived = 0;  // see stamps.h
  Call call;
};

// Runs once per call site when a program is compiled or loaded, without a device.
template <typename Call>
ffi::ErrorOr<std::unique_ptr<HostState>> Instantiate(ffi::Dictionary dictionary) {
  Status status;
  try {
    Config config;
    Attributes attrs(dictionary);
    status = ReadConfig<Call>(attrs, config);
    if (status.ok()) return std::make_unique<HostState>(std::move(config));
  } catch (const std::exception& e) {
    status = Internal(e.what(), ".");
  }
  return ffi::Unexpected(ToFfi(status.Within(OpName(Call::kOp))));
}

// Runs on every device, and joins the ranks of its group there.
template <typename Stage>
void ExecuteOn(HostState* state, int64_t run_id, ffi::ThreadPool& pool,
               const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
               Done done) {
  using Call = typename Stage::Call;
  const Config& config = state->config;
  const host::Call meeting{Call::kOp, config.axis, static_cast<int>(config.num_ranks),
                           config.timeout_s};
  // The pool's context is gone once all ranks are told: never used after this returns.
  const Schedule schedule = [&pool](std::function<void()> task) {
    pool.Schedule(std::move(task));
  };

  auto brought = std::make_unique<Brought<Call>>();
  brought->arrived = config.stamps ? Now() : 0;
  Call& own = brought->call;
  Status decoded = Decode(config, args, rets, own);
  // Not before: of a dtype that XLA's headers did not know yet, nobody knows the size.
  if (decoded.ok()) PrepareResults(rets);
  const int32_t* position = own.rank;
  const bool knows_group =
      position != nullptr && position[1] >= 0 && position[1] < config.num_groups();
  if (!knows_group || position[0] < 0 || position[0] >= config.num_ranks) {
    if (position != nullptr) {
      decoded = InvalidArgument("operand rank (=", position[0], ", ", position[1],
                                ") must hold a rank below ", config.num_ranks,
                                " and a group below ", config.num_groups(), ".");
    }
    // Whoever waits for this rank must know; all groups, if it does not know its own.
    for (int64_t group = 0; group < config.num_groups(); ++group) {
      if (knows_group && group != position[1]) continue;
      Rendezvous::Global().Fail(Key{state->uid, run_id, group}, meeting, decoded,
                                schedule);
    }
    done(decoded.Within(OpName(Call::kOp)));
    return;
  }
  if (decoded.ok()) decoded = Stage::Check(config, own);

  Arrival arrival;
  arrival.rank = position[0];
  arrival.status = std::move(decoded);
  arrival.participant = std::move(brought);
  arrival.done = std::move(done);

  const int self = position[0];
  auto full = Rendezvous::Global().Join(Key{state->uid, run_id, position[1]}, meeting,
                                        std::move(arrival), schedule);
  if (!full) return;

  // The last rank: all the others have returned and wait for us.
  Status status;
  try {
    std::vector<const Call*> ranks;
    for (const Arrival& rank : *full) {
      ranks.push_back(&static_cast<const Brought<Call>&>(*rank.participant).call);
      if (!ranks.back()->HasShapeOf(*ranks[0])) {
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
        const auto& each = static_cast<const Brought<Call>&>(*rank.participant);
        KeepStamps(Call::kStage, rank.rank, each.arrived, began, ended);
      }
    }
  } catch (const std::exception& e) {
    status = Internal(e.what(), ".");
  }
  Rendezvous::Complete(std::move(*full), self, status.Within(OpName(Call::kOp)),
                       schedule);
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
    done(Internal(e.what(), ".").Within(OpName(Stage::Call::kOp)));
  }
  return future;
}

// XLA asks `instantiate` for the id of its state when it registers the handler, and JAX
// registers handlers before types if both wait for the backend to start. So the type is
// registered here, at the first call of any kind. Later ones are no-ops.
template <typename Stage>
XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Instantiate<typename Stage::Call>,
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

template <typename Stage>
void Append(std::vector<Registration>& all) {
  const char* target = Stage::Call::kTarget;
  all.push_back({target, "instantiate", InstantiateHandler<Stage>});
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

}  // namespace jax_ep::host
