// Where the ranks of one custom call meet. Free of XLA.
//
// The devices of a process are threads, and a thread that blocks for its peers can
// starve them of the pool they run on. So nobody waits here: a rank leaves what it
// brought and how to tell it the outcome, and returns. The last rank to arrive gets
// everything and does the work for all.
#ifndef JAX_EP_FFI_HOST_RENDEZVOUS_H_
#define JAX_EP_FFI_HOST_RENDEZVOUS_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "ffi/host/parallel.h"
#include "ffi/status.h"

namespace jax_ep::host {

// One execution of one call site by one group of ranks. A loop body executes the same
// key again and again; that is sound, since a slot leaves the map with its last arrival
// and no rank can arrive for the next iteration before it has this one's outcome.
struct Key {
  int64_t site;
  int64_t run_id;
  int64_t group;

  bool operator<(const Key& other) const {
    return std::tie(site, run_id, group) <
           std::tie(other.site, other.run_id, other.group);
  }
};

// What a slot must know to word and time its errors.
struct Call {
  std::string op;    // dispatch
  std::string axis;  // expert
  int num_ranks;
  double timeout_s;
};

// What a rank brings: pointers to its buffers.
struct Participant {
  virtual ~Participant() = default;
};

// Tells a rank the outcome. XLA continues that rank's program inside this call, and the
// program may block, so two outcomes are never told from one thread, one after another.
using Done = std::function<void(const Status&)>;

struct Arrival {
  int rank;
  Status status;  // a rank with an error still joins, or its peers would wait for it
  std::unique_ptr<Participant> participant;
  Done done;
};

class Rendezvous {
 public:
  Rendezvous() = default;
  ~Rendezvous() { Stop(); }
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // The instance of this process. Never destroyed: ranks may still arrive while the
  // process exits. Its watchdog is stopped at exit.
  static Rendezvous& Global();

  // Adds a rank. The last one of an error-free slot gets all arrivals in rank order and
  // must pass them to Complete; every other caller gets nothing and is done. Where the
  // slot is full with an error in it, where a rank arrives twice, or where the slot has
  // failed before, all ranks concerned are told so. `schedule` is used before the
  // return only.
  std::optional<std::vector<Arrival>> Join(const Key& key, const Call& call,
                                           Arrival arrival, const Schedule& schedule);

  // Tells every rank of a slot the outcome: the caller's own (`self`) at once, since
  // nobody can wait for it yet, the others each in a task of its own.
  static void Complete(std::vector<Arrival> arrivals, int self, const Status& status,
                       const Schedule& schedule);

  // Fails a slot, existing or not, for a rank that cannot say which rank it is.
  void Fail(const Key& key, const Call& call, const Status& status,
            const Schedule& schedule);

  // Drops the failed slots of a call site that will not be executed again.
  void Forget(int64_t site);

  // Ends the watchdog; a later arrival starts it anew.
  void Stop();

  size_t num_slots() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Slot {
    Call call;
    std::vector<std::optional<Arrival>> arrivals;  // by rank
    int num_arrived = 0;
    Clock::time_point start;
    Clock::time_point deadline;  // when to fail or, once failed, to forget it
    Status failure;
  };

  Slot& FindOrCreate(const Key& key, const Call& call);
  // Marks the slot failed and moves out the ranks to be told.
  std::vector<Arrival> FailSlot(Slot& slot, Status status);
  void WakeWatchdogBy(Clock::time_point deadline);
  void Watch();

  mutable std::mutex mu_;
  std::map<Key, Slot> slots_;

  // The watchdog. On the heap, so that a forked child, where the thread does not exist,
  // can leave it behind.
  std::thread* watchdog_ = nullptr;
  std::atomic<int64_t> watchdog_pid_{0};
  bool stop_ = false;
  Clock::time_point next_wake_ = Clock::time_point::max();
  std::condition_variable wake_;
};

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_RENDEZVOUS_H_
