#include "ffi/cuda/in_flight.h"

#include <atomic>
#include <utility>

namespace jax_ep::cuda {
namespace {

std::atomic<bool> expects_starts{false};

struct Sides {
  std::mutex mutex;
  std::map<CUcontext, std::unique_ptr<SideStream>> by_context;
};
Sides& AllSides() {
  static Sides& sides = *new Sides;  // lives until exit
  return sides;
}

}  // namespace

void SideStream::ExpectStarts() { expects_starts.store(true); }
bool SideStream::ExpectsStarts() { return expects_starts.load(); }

SideStream* SideStream::Find(CUcontext context) {
  Sides& sides = AllSides();
  std::lock_guard<std::mutex> lock(sides.mutex);
  const auto found = sides.by_context.find(context);
  return found == sides.by_context.end() ? nullptr : found->second.get();
}

Status SideStream::Obtain(const Driver& driver, CUcontext context, SideStream** side) {
  Sides& sides = AllSides();
  std::lock_guard<std::mutex> lock(sides.mutex);
  std::unique_ptr<SideStream>& entry = sides.by_context[context];
  if (entry == nullptr) {
    std::unique_ptr<SideStream> made(new SideStream);
    if (Status status = made->Open(driver, context); !status.ok()) return status;
    entry = std::move(made);
  }
  *side = entry.get();
  return Status();
}

Status SideStream::Open(const Driver& driver, CUcontext context) {
  context_ = context;
  ScopedContext current(driver, context);
  int least = 0, greatest = 0;
  if (CUresult result = driver.cuCtxGetStreamPriorityRange(&least, &greatest)) {
    return driver.Failure("cuCtxGetStreamPriorityRange", result);
  }
  if (CUresult result =
          driver.cuStreamCreateWithPriority(&stream_, kStreamNonBlocking, greatest)) {
    return driver.Failure("cuStreamCreateWithPriority", result);
  }
  if (Status status = TakeEvent(driver, &forked_); !status.ok()) return status;
  if (Status status = TakeEvent(driver, &landed_); !status.ok()) return status;
  if (CUresult result = driver.cuMemAlloc(&resident_, sizeof(uint32_t))) {
    return driver.Failure("cuMemAlloc", result);
  }
  if (CUresult result =
          driver.cuMemsetD8Async(resident_, 0, sizeof(uint32_t), stream_)) {
    return driver.Failure("cuMemsetD8Async", result);
  }
  return Status();
}

Status SideStream::TakeEvent(const Driver& driver, CUevent* event) {
  if (!events_.empty()) {
    *event = events_.back();
    events_.pop_back();
    return Status();
  }
  const CUresult result = driver.cuEventCreate(event, kEventDisableTiming);
  return result == 0 ? Status() : driver.Failure("cuEventCreate", result);
}

Status SideStream::Fork(const Driver& driver, CUstream from, const Flight& flight) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto earlier = flights_.find(flight.results.front());
  if (earlier != flights_.end()) {
    const std::string op = earlier->second.flight.op;
    events_.push_back(earlier->second.landed);
    flights_.erase(earlier);
    return FailedPrecondition(
        "its results would be where those of an earlier ", op, "_start are, which ", op,
        "_done never took: every InFlight must be done, in the function that started "
        "it (or an earlier execution failed in between).");
  }
  if (CUresult result = driver.cuEventRecord(forked_, from)) {
    return driver.Failure("cuEventRecord", result);
  }
  if (CUresult result = driver.cuStreamWaitEvent(stream_, forked_, 0)) {
    return driver.Failure("cuStreamWaitEvent", result);
  }
  return Status();
}

Status SideStream::Launched(const Driver& driver, CUstream from, unsigned num_blocks,
                            Flight flight) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry entry{std::move(flight), nullptr};
  if (Status status = TakeEvent(driver, &entry.landed); !status.ok()) return status;
  for (CUevent event : {entry.landed, landed_}) {
    if (CUresult result = driver.cuEventRecord(event, stream_)) {
      return driver.Failure("cuEventRecord", result);
    }
  }
  blocks_ += num_blocks;
  // Pairs with the count in BeginCall (call.cuh).
  if (CUresult result =
          driver.cuStreamWaitValue32(from, resident_, blocks_, kStreamWaitValueGeq)) {
    return driver.Failure("cuStreamWaitValue32", result);
  }
  const void* key = entry.flight.results.front();
  flights_.insert_or_assign(key, std::move(entry));
  return Status();
}

Status SideStream::Join(const Driver& driver, CUstream to, const Flight& found) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = flights_.find(found.results.front());
  if (it == flights_.end()) {
    return FailedPrecondition(
        "no start writes where this done reads: the InFlight was copied (it must not "
        "cross a scan, cond or jit), or it is done already.");
  }
  const Entry entry = std::move(it->second);
  flights_.erase(it);
  events_.push_back(entry.landed);
  // Even if something is wrong: what it writes must not be given to others before.
  if (CUresult result = driver.cuStreamWaitEvent(to, entry.landed, 0)) {
    return driver.Failure("cuStreamWaitEvent", result);
  }
  const Flight& noted = entry.flight;
  const auto differ = [](const char* what, const std::vector<const void*>& ours,
                         const std::vector<const void*>& theirs) {
    for (size_t i = 0; i < ours.size() && i < theirs.size(); ++i) {
      if (ours[i] == theirs[i]) continue;
      return FailedPrecondition(
          what, " ", i,
          " is not the buffer that start had, so it was not kept until "
          "done: the InFlight was copied (it must not cross a scan, cond or jit).");
    }
    if (ours.size() == theirs.size()) return Status();
    return InvalidArgument("start had ", ours.size(), " ", what, "s, and done has ",
                           theirs.size(), ".");
  };
  if (noted.op != found.op) {
    return InvalidArgument("what is under way is a ", noted.op, ".");
  }
  if (Status status = differ("operand", noted.operands, found.operands); !status.ok()) {
    return status;
  }
  return differ("result", noted.results, found.results);
}

Status SideStream::AwaitAll(const Driver& driver, CUstream to) {
  std::lock_guard<std::mutex> lock(mutex_);
  int capture = kCaptureNone;
  if (CUresult result = driver.cuStreamIsCapturing(to, &capture)) {
    return driver.Failure("cuStreamIsCapturing", result);
  }
  // A graph outlives the flights of now. Without one, done has made streams wait.
  if (capture == kCaptureNone && flights_.empty()) return Status();
  const unsigned flags = capture == kCaptureNone ? 0 : kEventWaitExternal;
  const CUresult result = driver.cuStreamWaitEvent(to, landed_, flags);
  return result == 0 ? Status() : driver.Failure("cuStreamWaitEvent", result);
}

}  // namespace jax_ep::cuda
