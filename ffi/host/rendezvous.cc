#include "ffi/host/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <sstream>
#include <utility>

namespace jax_ep::host {
namespace {

// How long a failed slot waits for its late ranks, in timeouts. Their own work before
// this call has a bound of the same order; after it a late rank opens a new slot and
// gets its error from that one's timeout.
constexpr int kFailedSlotTimeouts = 10;

std::chrono::steady_clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

std::string Prefix(const Call& call) { return "jax_ep." + call.op + ": "; }

// rank 3 of 8 on axis "expert" (group 0)
std::string Where(const Call& call, const Key& key) {
  return Concat(" of ", call.num_ranks, " on axis \"", call.axis, "\" (group ",
                key.group, ")");
}

// The error of the first rank that has one, for all.
Status FirstError(const Key& key, const Call& call,
                  const std::vector<std::optional<Arrival>>& arrivals) {
  const Arrival* first = nullptr;
  int num_failed = 0;
  for (const auto& arrival : arrivals) {
    if (!arrival || arrival->status.ok()) continue;
    if (first == nullptr) first = &*arrival;
    ++num_failed;
  }
  if (first == nullptr) return Status();
  std::string others;
  if (num_failed > 1) others = Concat(", as have ", num_failed - 1, " other ranks");
  return Status(first->status.code(),
                Concat(Prefix(call), first->status.message(), " [rank ", first->rank,
                       Where(call, key), others, "]"));
}

Status Timeout(const Key& key, const Call& call,
               const std::vector<std::optional<Arrival>>& arrivals, double waited_s) {
  std::ostringstream ranks;
  int num_missing = 0;
  for (int rank = 0; rank < call.num_ranks; ++rank) {
    if (arrivals[rank]) continue;
    ranks << (num_missing++ ? ", " : "") << rank;
  }
  std::ostringstream waited;
  waited << std::fixed << std::setprecision(1) << waited_s;
  return Status(Code::kDeadlineExceeded,
                Concat(Prefix(call), num_missing == 1 ? "rank " : "ranks ", ranks.str(),
                       Where(call, key), " did not arrive; waited ", waited.str(),
                       " s, timeout_s (=", call.timeout_s, ")."));
}

}  // namespace

Rendezvous& Rendezvous::Global() {
  static Rendezvous* const rendezvous = [] {
    auto* r = new Rendezvous();
    std::atexit([] { Global().Stop(); });
    return r;
  }();
  return *rendezvous;
}

Rendezvous::Slot& Rendezvous::FindOrCreate(const Key& key, const Call& call) {
  auto [it, created] = slots_.try_emplace(key);
  Slot& slot = it->second;
  if (created) {
    slot.call = call;
    slot.arrivals.resize(call.num_ranks);
    slot.start = Clock::now();
    slot.deadline = slot.start + Seconds(call.timeout_s);
  }
  return slot;
}

std::vector<Arrival> Rendezvous::FailSlot(Slot& slot, Status status) {
  slot.failure = std::move(status);
  slot.deadline = Clock::now() + kFailedSlotTimeouts * Seconds(slot.call.timeout_s);
  std::vector<Arrival> told;
  for (auto& arrival : slot.arrivals) {
    if (arrival) told.push_back(std::move(*arrival));
    arrival.reset();
  }
  return told;
}

std::optional<std::vector<Arrival>> Rendezvous::Join(const Key& key, const Call& call,
                                                     Arrival arrival,
                                                     const Schedule& schedule) {
  const int self = arrival.rank;
  std::vector<Arrival> told;
  Status status;
  {
    std::lock_guard<std::mutex> lock(mu_);
    Slot& slot = FindOrCreate(key, call);
    const bool twice = slot.failure.ok() && slot.arrivals[self];
    if (!twice) ++slot.num_arrived;
    const bool full = slot.num_arrived >= slot.call.num_ranks;
    if (!slot.failure.ok()) {
      status = slot.failure;
      told.push_back(std::move(arrival));
    } else if (twice) {
      status = Internal(Prefix(call), "rank ", self, Where(call, key),
                        " arrived twice; the first value of operand rank must be the "
                        "device's own index on the axis.");
      told = FailSlot(slot, status);
      // Both arrivals of this rank are told; the one that is not the caller's own in a
      // task, like every other rank.
      for (Arrival& other : told) {
        if (other.rank == self) other.rank = -1;
      }
      told.push_back(std::move(arrival));
    } else {
      slot.arrivals[self] = std::move(arrival);
      if (full) {
        status = FirstError(key, call, slot.arrivals);
        for (auto& joined : slot.arrivals) told.push_back(std::move(*joined));
      }
    }
    const bool waiting = told.empty();
    if (full && !waiting) {
      slots_.erase(key);
    } else {
      WakeWatchdogBy(slot.deadline);
    }
    if (waiting) return std::nullopt;
    if (full && status.ok()) return told;
  }
  Complete(std::move(told), self, status, schedule);
  return std::nullopt;
}

void Rendezvous::Complete(std::vector<Arrival> arrivals, int self, const Status& status,
                          const Schedule& schedule) {
  Done own;
  for (Arrival& arrival : arrivals) {
    if (arrival.rank == self) {
      own = std::move(arrival.done);
    } else {
      schedule([done = std::move(arrival.done), status] { done(status); });
    }
  }
  if (own) own(status);
}

void Rendezvous::Fail(const Key& key, const Call& call, const Status& status,
                      const Schedule& schedule) {
  const Status error(status.code(), Prefix(call) + status.message());
  std::vector<Arrival> told;
  {
    std::lock_guard<std::mutex> lock(mu_);
    Slot& slot = FindOrCreate(key, call);
    ++slot.num_arrived;
    if (slot.failure.ok()) told = FailSlot(slot, error);
    if (slot.num_arrived >= slot.call.num_ranks) {
      slots_.erase(key);
    } else {
      WakeWatchdogBy(slot.deadline);
    }
  }
  Complete(std::move(told), /*self=*/-1, error, schedule);
}

void Rendezvous::Forget(int64_t site) {
  std::lock_guard<std::mutex> lock(mu_);
  for (auto it = slots_.lower_bound(Key{site, INT64_MIN, INT64_MIN});
       it != slots_.end() && it->first.site == site;) {
    it = it->second.failure.ok() ? std::next(it) : slots_.erase(it);
  }
}

size_t Rendezvous::num_slots() const {
  std::lock_guard<std::mutex> lock(mu_);
  return slots_.size();
}

void Rendezvous::Stop() {
  // In a forked child the thread does not exist, and the lock may be held for ever.
  if (watchdog_pid_ != getpid()) return;
  std::thread* watchdog = nullptr;
  {
    std::lock_guard<std::mutex> lock(mu_);
    watchdog = std::exchange(watchdog_, nullptr);
    stop_ = watchdog != nullptr;
    wake_.notify_all();
  }
  if (watchdog == nullptr) return;
  watchdog->join();
  delete watchdog;
  std::lock_guard<std::mutex> lock(mu_);
  stop_ = false;
  next_wake_ = Clock::time_point::max();
}

void Rendezvous::WakeWatchdogBy(Clock::time_point deadline) {
  if (stop_) return;  // the process exits
  if (watchdog_ == nullptr || watchdog_pid_ != getpid()) {
    next_wake_ = deadline;
    watchdog_pid_ = getpid();
    watchdog_ = new std::thread([this] { Watch(); });
  } else if (deadline < next_wake_) {
    // Most slots are gone long before; only an earlier deadline is worth a wake-up.
    next_wake_ = deadline;
    wake_.notify_all();
  }
}

void Rendezvous::Watch() {
  std::unique_lock<std::mutex> lock(mu_);
  while (!stop_) {
    const Clock::time_point now = Clock::now();
    Clock::time_point next = Clock::time_point::max();
    std::vector<std::pair<Done, Status>> expired;
    for (auto it = slots_.begin(); it != slots_.end();) {
      Slot& slot = it->second;
      if (slot.deadline <= now && !slot.failure.ok()) {
        it = slots_.erase(it);
        continue;
      }
      if (slot.deadline <= now) {
        const double waited = std::chrono::duration<double>(now - slot.start).count();
        Status status = Timeout(it->first, slot.call, slot.arrivals, waited);
        for (Arrival& arrival : FailSlot(slot, status)) {
          expired.emplace_back(std::move(arrival.done), status);
        }
      }
      next = std::min(next, slot.deadline);
      ++it;
    }
    next_wake_ = next;
    if (!expired.empty()) {
      lock.unlock();
      // Each on a thread of its own, since the rank's program goes on in it.
      for (auto& [done, status] : expired) {
        std::thread([done = std::move(done), status = status] {
          done(status);
        }).detach();
      }
      lock.lock();
      continue;
    }
    if (next == Clock::time_point::max()) {
      wake_.wait(lock);
    } else {
      wake_.wait_until(lock, next);
    }
  }
}

}  // namespace jax_ep::host
