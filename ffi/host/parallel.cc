#include "ffi/host/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <utility>

#include "ffi/host/float.h"

namespace jax_ep::host {
namespace {

// Shared by the caller and its helpers, and outlives both.
struct Loop {
  explicit Loop(int64_t num_chunks, const std::function<void(int64_t)>& body)
      : num_chunks(num_chunks), body(&body) {}

  // Takes chunks until none is left.
  void Work() {
    FlushDenormals flush;
    for (;;) {
      const int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= num_chunks) return;
      // `body` lives in the caller's frame, which is there while a chunk is not done.
      if (!failed.load(std::memory_order_relaxed)) {
        try {
          (*body)(chunk);
        } catch (...) {
          std::lock_guard<std::mutex> lock(mu);
          if (!error) error = std::current_exception();
          failed.store(true, std::memory_order_relaxed);
        }
      }
      // Release, so that whoever reads the full count sees what the chunks wrote.
      if (num_done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_chunks) {
        std::lock_guard<std::mutex> lock(mu);
        all_done.notify_all();
      }
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mu);
    // Acquires what the last fetch_add of every chunk released.
    all_done.wait(
        lock, [&] { return num_done.load(std::memory_order_acquire) == num_chunks; });
  }

  const int64_t num_chunks;
  const std::function<void(int64_t)>* const body;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> num_done{0};
  std::atomic<bool> failed{false};
  std::mutex mu;
  std::condition_variable all_done;
  std::exception_ptr error;
};

}  // namespace

void Parallel::For(int64_t num_chunks, const std::function<void(int64_t)>& body) const {
  const int64_t num_helpers = std::min<int64_t>(num_helpers_, num_chunks - 1);
  if (num_helpers <= 0) {
    FlushDenormals flush;
    for (int64_t i = 0; i < num_chunks; ++i) body(i);
    return;
  }
  auto loop = std::make_shared<Loop>(num_chunks, body);
  for (int64_t i = 0; i < num_helpers; ++i) schedule_([loop] { loop->Work(); });
  loop->Work();
  loop->Wait();
  // Taken out of the loop, which a helper may be the last to leave: the exception must
  // end with whoever catches it here.
  if (std::exception_ptr error = std::move(loop->error)) std::rethrow_exception(error);
}

}  // namespace jax_ep::host
