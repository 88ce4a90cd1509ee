// A thread pool for tests, in the place of XLA's.
#ifndef JAX_EP_FFI_TESTING_THREADS_H_
#define JAX_EP_FFI_TESTING_THREADS_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "ffi/host/parallel.h"

namespace jax_ep::host {

class Threads {
 public:
  explicit Threads(int num_threads) {
    for (int i = 0; i < num_threads; ++i) {
      threads_.emplace_back([this] { Run(); });
    }
  }

  // Runs what is left, then ends.
  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Schedule schedule() {
    return [this](std::function<void()> task) {
      {
        std::lock_guard<std::mutex> lock(mu_);
        tasks_.push_back(std::move(task));
      }
      wake_.notify_one();
    };
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mu_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mu_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool stop_ = false;
};

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_TESTING_THREADS_H_
