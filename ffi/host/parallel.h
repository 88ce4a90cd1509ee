// A loop shared by the calling thread and tasks of a thread pool it does not own.
#ifndef JAX_EP_FFI_HOST_PARALLEL_H_
#define JAX_EP_FFI_HOST_PARALLEL_H_

#include <cstdint>
#include <functional>
#include <mutex>

#include "ffi/status.h"

namespace jax_ep::host {

// Runs a task on some thread, now or later.
using Schedule = std::function<void(std::function<void()>)>;

class Parallel {
 public:
  // The calling thread alone.
  Parallel() = default;
  // Up to `num_helpers` tasks of `schedule` besides the calling thread.
  Parallel(Schedule schedule, int num_helpers)
      : schedule_(std::move(schedule)), num_helpers_(num_helpers) {}

  // Calls body(i) once for every i in [0, num_chunks), in no fixed order, and returns
  // when all calls have returned. Chunks are taken from a shared counter, so a helper
  // that the pool starts late, or never, costs nothing: the caller does its share. It
  // waits only for chunks that a helper is executing. All tasks are scheduled before
  // this returns; one that runs later finds nothing left and touches nothing of ours.
  //
  // Every thread runs `body` with denormals flushed to zero (see float.h). An exception
  // of `body` ends the loop early and is thrown again from here.
  void For(int64_t num_chunks, const std::function<void(int64_t)>& body) const;

 private:
  Schedule schedule_;
  int num_helpers_ = 0;
};

// How many chunks of `chunk` elements cover `size`.
inline int64_t NumChunks(int64_t size, int64_t chunk) {
  return (size + chunk - 1) / chunk;
}

// Collects the errors of a parallel loop. Which chunk fails first depends on timing, so
// it keeps the error with the lowest position: same inputs, same message.
class ErrorSink {
 public:
  void Report(int64_t position, Status status) {
    std::lock_guard<std::mutex> lock(mu_);
    if (!status_.ok() && position_ <= position) return;
    position_ = position;
    status_ = std::move(status);
  }
  Status status() const {
    std::lock_guard<std::mutex> lock(mu_);
    return status_;
  }

 private:
  mutable std::mutex mu_;
  int64_t position_ = 0;
  Status status_;
};

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_PARALLEL_H_
