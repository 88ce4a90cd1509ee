#include "ffi/cuda/watcher.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/cuda/sites.h"
#include "ffi/cuda/workspace.h"
#include "ffi/status.h"

namespace jax_ep::cuda {
namespace {

// How often the thread looks. The log line is promised within a second of the timeout.
constexpr std::chrono::milliseconds kPollInterval{100};

// Launches whose answer is kept. XLA keeps far fewer in flight per device.
constexpr size_t kRememberedRuns = 256;

struct Watched {
  const ErrorRecord* record;
  std::string axis;
  int rank;
  int num_ranks;
  int device;
  bool printed = false;
};

const char* PhaseText(int32_t phase) {
  switch (phase) {
    case kPhaseLayoutIds:
      return "layout, expert ids of the peer (exchange rounds)";
    case kPhaseLayoutGrid:
      return "layout, blocks of its own grid (blocks arrived)";
    case kPhaseDispatchReuse:
      return "dispatch, the peer to finish an earlier call (calls done)";
    case kPhaseDispatchCredit:
      return "dispatch, the peer to free ring slots (pieces consumed)";
    case kPhaseDispatchRows:
      return "dispatch, rows of the peer (pieces arrived)";
    case kPhaseCombineReuse:
      return "combine, the peer to finish an earlier call (calls done)";
    case kPhaseCombineCredit:
      return "combine, the peer to free ring slots (pieces consumed)";
    case kPhaseCombineRows:
      return "combine, rows of the peer (pieces arrived)";
    case kPhaseOverlap:
      return "overlap of two jax_ep calls on one device (call signatures)";
    case kPhaseRankMismatch:
      return "rank check (axis index of the program against rank of the communicator)";
    case kPhaseLayoutPeer:
      return "layout, the peer to begin this call (calls)";
    case kPhaseDispatchPeer:
      return "dispatch, the peer to begin this call (calls)";
    case kPhaseFewDispatchRows:
      return "dispatch, rows of the peer for few tokens (epochs)";
    case kPhaseCombinePeer:
      return "combine, the peer to begin this call (calls)";
    case kPhaseFewCombineRows:
      return "combine, rows of the peer for few tokens (epochs)";
    default:
      return "unknown phase";
  }
}

// Whether a phase waits for a head or tail word.
bool CountsPieces(int32_t phase) {
  return phase == kPhaseDispatchCredit || phase == kPhaseDispatchRows ||
         phase == kPhaseCombineCredit || phase == kPhaseCombineRows;
}

// Whether a phase waits for a call word.
bool CountsCalls(int32_t phase) {
  return phase == kPhaseLayoutPeer || phase == kPhaseDispatchPeer ||
         phase == kPhaseCombinePeer;
}

constexpr char kFinal[] =
    ". Outputs are NaN from here on; jax_ep cannot be used in this process again.";

std::string DescribeCalls(const Watched& watched) {
  const ErrorRecord& record = *watched.record;
  const auto site = [](uint64_t word) {
    return DescribeSite(word & ((uint64_t{1} << kSiteBits) - 1));
  };
  return Concat("jax_ep: ranks of axis \"", watched.axis,
                "\" are in different calls: rank ", record.rank, " in ",
                site(record.expected), ", rank ", record.peer, " in ",
                site(record.seen),
                "; all ranks must make the same calls in the same order; call: ",
                CallOf(record.expected), "; device: ", watched.device, kFinal);
}

std::string Describe(const Watched& watched) {
  const ErrorRecord& record = *watched.record;
  if (record.phase == kPhaseSite) return DescribeCalls(watched);
  uint64_t expected = record.expected, seen = record.seen;
  if (CountsPieces(record.phase)) {
    expected = CountIn(record.expected, record.call);
    seen = CountIn(record.seen, record.call);
  } else if (CountsCalls(record.phase)) {
    expected = CallOf(record.expected);
    seen = CallOf(record.seen);
  }
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.1f", record.waited_ns * 1e-9);
  std::string line = "jax_ep: rank " + std::to_string(record.rank) + " of the " +
                     std::to_string(watched.num_ranks) + " ranks of axis \"" +
                     watched.axis + "\" gave up";
  if (record.waited_ns > 0) line += " after " + std::string(seconds) + " s";
  if (record.behind >= 0) {
    line +=
        Concat(" waiting for rank ", record.behind, ", which has not begun this call");
  } else if (record.peer >= 0) {
    line += Concat(" waiting for rank ", record.peer);
  }
  line += "; phase: " + std::string(PhaseText(record.phase)) +
          "; expected: " + std::to_string(expected) +
          "; seen: " + std::to_string(seen) + "; call: " + std::to_string(record.call);
  if (record.peer >= 0 && record.behind >= 0 && record.peer != record.behind) {
    line += Concat("; peer: ", record.peer, ", which may wait itself");
  }
  if (record.channel >= 0) line += "; channel: " + std::to_string(record.channel);
  if (record.rank != watched.rank) {
    line += "; reported to rank " + std::to_string(watched.rank);
  }
  return line + "; device: " + std::to_string(watched.device) + kFinal;
}

// Pairs with the system-scope release of `written` that ends a kernel's record.
bool IsWritten(const ErrorRecord* record) {
  return __atomic_load_n(&record->written, __ATOMIC_ACQUIRE) != 0;
}

class Watcher {
 public:
  // Never destroyed: its thread and XLA's threads may outlive static destructors.
  static Watcher& Get() {
    static Watcher& watcher = *new Watcher;
    return watcher;
  }

  void Watch(Watched watched) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back(std::move(watched));
    if (!thread_.joinable()) {
      process_ = getpid();
      thread_ = std::thread([this] { Run(); });
      // Before the driver unmaps the records: exit handlers run in reverse order, and
      // the driver's own was there first.
      std::atexit([] { Watcher::Get().Stop(); });
    }
  }

  std::string Error() {
    std::lock_guard<std::mutex> lock(mutex_);
    Poll();
    return error_;
  }

  std::string ErrorForRun(int64_t run_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
      if (run->first == run_id) return run->second;
    }
    Poll();
    if (run_id != -1) {
      runs_.emplace_back(run_id, error_);
      if (runs_.size() > kRememberedRuns) runs_.pop_front();
    }
    return error_;
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_) {
      Poll();
      wake_.wait_for(lock, kPollInterval);
    }
  }

  void Stop() {
    if (getpid() != process_) return;  // a fork has no thread to stop
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Poll();  // what was written since the last look is still worth a line
      stopped_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  // All below with `mutex_` held.
  void Poll() {
    if (stopped_) return;  // the records may be gone
    for (Watched& watched : watched_) {
      if (watched.printed || !IsWritten(watched.record)) continue;
      watched.printed = true;
      const std::string line = Describe(watched);
      PrintLine(line);
      if (error_.empty()) error_ = line;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
  pid_t process_ = 0;
  bool stopped_ = false;
  std::vector<Watched> watched_;
  std::string error_;
  std::deque<std::pair<int64_t, std::string>> runs_;
};

}  // namespace

void WatchRecord(const ErrorRecord* record, const std::string& axis, int rank,
                 int num_ranks, int device) {
  Watcher::Get().Watch({record, axis, rank, num_ranks, device});
}

std::string RecordedError() { return Watcher::Get().Error(); }

std::string RecordedErrorForRun(int64_t run_id) {
  return Watcher::Get().ErrorForRun(run_id);
}

void PrintLine(const std::string& line) {
  std::fprintf(stderr, "%s\n", line.c_str());
  std::fflush(stderr);
}

}  // namespace jax_ep::cuda
