#include "ffi/host/rendezvous.h"

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/testing/check.h"
#include "ffi/testing/threads.h"

namespace jax_ep::host {
namespace {

struct Value : Participant {
  explicit Value(int value) : value(value) {}
  int value;
};

Call FourRanks(double timeout_s = 60) {
  return Call{"dispatch", "expert", 4, timeout_s};
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// One rank's outcome, as a future.
struct Rank {
  std::shared_ptr<std::promise<Status>> promise =
      std::make_shared<std::promise<Status>>();
  std::future<Status> outcome = promise->get_future();

  Arrival Arrive(int rank, Status status = Status()) {
    return Arrival{rank, std::move(status), std::make_unique<Value>(rank),
                   [promise = promise](const Status& s) { promise->set_value(s); }};
  }
  Status Get() {
    const auto ready = outcome.wait_for(std::chrono::seconds(30));
    CHECK(ready == std::future_status::ready);
    return outcome.get();
  }
  bool IsReady() {
    return outcome.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
};

const Schedule kInline = [](std::function<void()> task) { task(); };

void LastArriverGetsAllInRankOrder() {
  Rendezvous rendezvous;
  std::vector<Rank> ranks(4);
  const Key key{1, 2, 0};
  for (int rank : {2, 0, 3}) {
    CHECK(!rendezvous.Join(key, FourRanks(), ranks[rank].Arrive(rank), kInline));
    CHECK(!ranks[rank].IsReady());
  }
  CHECK_EQ(rendezvous.num_slots(), 1u);
  auto full = rendezvous.Join(key, FourRanks(), ranks[1].Arrive(1), kInline);
  CHECK(full.has_value());
  CHECK_EQ(rendezvous.num_slots(), 0u);
  CHECK_EQ(full->size(), 4u);
  for (int rank = 0; rank < 4; ++rank) {
    CHECK_EQ((*full)[rank].rank, rank);
    CHECK_EQ(static_cast<Value*>((*full)[rank].participant.get())->value, rank);
    CHECK(!ranks[rank].IsReady());
  }
  Rendezvous::Complete(std::move(*full), 1, Status(), kInline);
  for (Rank& rank : ranks) CHECK(rank.Get().ok());
}

// Many threads, many iterations on the same key, and helpers that sum what all brought.
void ManyThreads() {
  constexpr int kRanks = 8;
  constexpr int kIterations = 200;
  Rendezvous rendezvous;
  Threads pool(3);
  std::atomic<int> num_full{0};
  const Call call{"combine", "expert", kRanks, 60};
  std::vector<std::thread> threads;
  for (int group = 0; group < 2; ++group) {
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, group, rank] {
        for (int i = 0; i < kIterations; ++i) {
          Rank self;
          auto full = rendezvous.Join(Key{7, 1, group}, call, self.Arrive(rank),
                                      pool.schedule());
          if (full) {
            std::atomic<int> sum{0};
            Parallel(pool.schedule(), 2).For(kRanks, [&](int64_t r) {
              sum += static_cast<Value*>((*full)[r].participant.get())->value;
            });
            CHECK_EQ(sum.load(), kRanks * (kRanks - 1) / 2);
            ++num_full;
            Rendezvous::Complete(std::move(*full), rank, Status(), pool.schedule());
          }
          CHECK(self.Get().ok());
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(num_full.load(), 2 * kIterations);
  CHECK_EQ(rendezvous.num_slots(), 0u);
}

// Nobody is told before all have joined, then all are told the same.
void ErrorReachesAllRanks() {
  Rendezvous rendezvous;
  std::vector<Rank> ranks(4);
  const Key key{1, 2, 5};
  const Call call = FourRanks();
  CHECK(!rendezvous.Join(key, call, ranks[0].Arrive(0), kInline));
  CHECK(!rendezvous.Join(key, call, ranks[2].Arrive(2, InvalidArgument("bad width")),
                         kInline));
  CHECK(!rendezvous.Join(key, call, ranks[3].Arrive(3), kInline));
  for (int rank : {0, 2, 3}) CHECK(!ranks[rank].IsReady());
  CHECK(!rendezvous.Join(key, call, ranks[1].Arrive(1), kInline));
  for (Rank& rank : ranks) {
    const Status status = rank.Get();
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK_EQ(status.message(),
             "jax_ep.dispatch: bad width [rank 2 of 4 on axis \"expert\" (group 5)]");
  }
  CHECK_EQ(rendezvous.num_slots(), 0u);
}

void DuplicateArrivalFailsAll() {
  Rendezvous rendezvous;
  std::vector<Rank> ranks(5);
  const Key key{1, 2, 0};
  const Call call = FourRanks();
  CHECK(!rendezvous.Join(key, call, ranks[0].Arrive(0), kInline));
  CHECK(!rendezvous.Join(key, call, ranks[1].Arrive(1), kInline));
  CHECK(!rendezvous.Join(key, call, ranks[4].Arrive(1), kInline));
  for (int i : {0, 1, 4}) {
    CHECK(Contains(ranks[i].Get().message(),
                   "jax_ep.dispatch: rank 1 of 4 on axis \"expert\" (group 0) arrived "
                   "twice"));
  }
  CHECK_EQ(rendezvous.num_slots(), 1u);  // for the ranks to come
  for (int rank : {2, 3}) {
    CHECK(!rendezvous.Join(key, call, ranks[rank].Arrive(rank), kInline));
    CHECK(Contains(ranks[rank].Get().message(), "arrived twice"));
  }
  CHECK_EQ(rendezvous.num_slots(), 0u);
}

void TimeoutNamesMissingRanks() {
  Rendezvous rendezvous;
  std::vector<Rank> ranks(4);
  const Key key{1, 2, 3};
  const Call call = FourRanks(/*timeout_s=*/0.2);
  Rank patient;  // a slot with a later deadline is not touched
  CHECK(!rendezvous.Join(Key{9, 9, 9}, FourRanks(), patient.Arrive(0), kInline));
  CHECK(!rendezvous.Join(key, call, ranks[0].Arrive(0), kInline));
  CHECK(!rendezvous.Join(key, call, ranks[2].Arrive(2), kInline));
  for (int rank : {0, 2}) {
    const Status status = ranks[rank].Get();
    CHECK(status.code() == Code::kDeadlineExceeded);
    CHECK(Contains(status.message(),
                   "jax_ep.dispatch: ranks 1, 3 of 4 on axis \"expert\" (group 3) did "
                   "not arrive; waited 0."));
    CHECK(Contains(status.message(), "timeout_s (=0.2)"));
  }
  // A late rank is told at once, and the last one takes the slot along.
  CHECK_EQ(rendezvous.num_slots(), 2u);
  for (int rank : {3, 1}) {
    CHECK(!rendezvous.Join(key, call, ranks[rank].Arrive(rank), kInline));
    CHECK(ranks[rank].IsReady());
    CHECK(ranks[rank].Get().code() == Code::kDeadlineExceeded);
  }
  CHECK_EQ(rendezvous.num_slots(), 1u);
  CHECK(!patient.IsReady());
}

// What a rank's outcome starts may block; its peers are told all the same.
void OutcomeOfTimeoutMayBlock() {
  Rendezvous rendezvous;
  const Call call = FourRanks(/*timeout_s=*/0.05);
  auto release = std::make_shared<std::promise<void>>();
  std::shared_future<void> released = release->get_future().share();
  auto blocked_ended = std::make_shared<std::promise<void>>();
  Arrival blocked{0, Status(), nullptr, [released, blocked_ended](const Status&) {
                    released.wait();
                    blocked_ended->set_value();
                  }};
  Rank peer;
  CHECK(!rendezvous.Join(Key{1, 2, 3}, call, std::move(blocked), kInline));
  CHECK(!rendezvous.Join(Key{1, 2, 3}, call, peer.Arrive(1), kInline));
  CHECK(peer.Get().code() == Code::kDeadlineExceeded);
  release->set_value();
  blocked_ended->get_future().wait();
}

void FailedSlotsLeave() {
  Rendezvous rendezvous;
  const Call call = FourRanks(/*timeout_s=*/0.02);
  Rank aged;
  CHECK(!rendezvous.Join(Key{1, 1, 0}, call, aged.Arrive(0), kInline));
  CHECK(!aged.Get().ok());
  for (int i = 0; i < 500 && rendezvous.num_slots() > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK_EQ(rendezvous.num_slots(), 0u);  // by age

  Rank waiting;
  CHECK(!rendezvous.Join(Key{2, 1, 0}, FourRanks(), waiting.Arrive(0), kInline));
  rendezvous.Fail(Key{1, 2, 0}, FourRanks(), InvalidArgument("no rank"), kInline);
  rendezvous.Fail(Key{1, 3, 1}, FourRanks(), InvalidArgument("no rank"), kInline);
  CHECK_EQ(rendezvous.num_slots(), 3u);
  rendezvous.Forget(1);
  CHECK_EQ(rendezvous.num_slots(), 1u);  // with its call site
  CHECK(!waiting.IsReady());
}

void RankThatDoesNotKnowItselfFailsAll() {
  Rendezvous rendezvous;
  std::vector<Rank> ranks(4);
  const Key key{1, 2, 0};
  CHECK(!rendezvous.Join(key, FourRanks(), ranks[0].Arrive(0), kInline));
  rendezvous.Fail(key, FourRanks(), InvalidArgument("no rank"), kInline);
  CHECK_EQ(ranks[0].Get().message(), "jax_ep.dispatch: no rank");
  for (int rank : {1, 2}) {
    CHECK(!rendezvous.Join(key, FourRanks(), ranks[rank].Arrive(rank), kInline));
    CHECK_EQ(ranks[rank].Get().message(), "jax_ep.dispatch: no rank");
  }
  CHECK_EQ(rendezvous.num_slots(), 0u);
}

void WatchdogRestarts() {
  Rendezvous rendezvous;
  for (int i = 0; i < 3; ++i) {
    Rank rank;
    const Call call = FourRanks(/*timeout_s=*/0.02);
    CHECK(!rendezvous.Join(Key{1, i, 0}, call, rank.Arrive(0), kInline));
    CHECK(!rank.Get().ok());
    rendezvous.Stop();
  }
  rendezvous.Stop();
}

void ParallelLoop() {
  Threads pool(2);
  const Parallel parallel(pool.schedule(), 4);
  for (int64_t n : {0, 1, 2, 1000}) {
    std::vector<int> seen(n, 0);
    parallel.For(n, [&](int64_t i) { ++seen[i]; });
    for (int count : seen) CHECK_EQ(count, 1);
  }
  // Helpers that run after the loop has ended find nothing to do.
  std::vector<std::function<void()>> late;
  int total = 0;
  Parallel([&](std::function<void()> task) { late.push_back(std::move(task)); }, 3)
      .For(10, [&total](int64_t i) { total += static_cast<int>(i); });
  CHECK_EQ(total, 45);
  CHECK_EQ(late.size(), 3u);
  for (auto& task : late) task();
  CHECK_EQ(total, 45);
  // The caller sees an exception of any thread.
  bool caught = false;
  try {
    parallel.For(100, [](int64_t i) {
      if (i == 57) throw std::string("57");
    });
  } catch (const std::string& e) {
    caught = e == "57";
  }
  CHECK(caught);
}

}  // namespace
}  // namespace jax_ep::host

int main() {
  using namespace jax_ep::host;
  return jax_ep::RunTests({
      {"LastArriverGetsAllInRankOrder", LastArriverGetsAllInRankOrder},
      {"ManyThreads", ManyThreads},
      {"ErrorReachesAllRanks", ErrorReachesAllRanks},
      {"DuplicateArrivalFailsAll", DuplicateArrivalFailsAll},
      {"TimeoutNamesMissingRanks", TimeoutNamesMissingRanks},
      {"OutcomeOfTimeoutMayBlock", OutcomeOfTimeoutMayBlock},
      {"FailedSlotsLeave", FailedSlotsLeave},
      {"RankThatDoesNotKnowItselfFailsAll", RankThatDoesNotKnowItselfFailsAll},
      {"WatchdogRestarts", WatchdogRestarts},
      {"ParallelLoop", ParallelLoop},
  });
}
