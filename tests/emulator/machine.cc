#include "machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <tuple>

namespace emu {

Machine* machine = nullptr;

namespace {

constexpr size_t kStackBytes = 64 * 1024;
// Not a power of two, or all stacks' ends would share a few lines of the cache.
constexpr size_t kStackStride = kStackBytes + 17 * 64;
constexpr uint64_t kCanary = 0x5afe5afe5afe5afe;
constexpr int kMinYield = 16;  // a thread lets others run in one of so many accesses

std::vector<Fiber*> free_fibers;  // of this process, used again and again

Fiber* NewFiber() {
  if (free_fibers.empty()) {
    constexpr size_t kMany = 256;
    void* memory = mmap(nullptr, kMany * kStackStride, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    for (size_t i = 0; i < kMany; ++i) {
      auto* fiber = new Fiber;
      fiber->stack = static_cast<char*>(memory) + i * kStackStride;
      std::memcpy(fiber->stack, &kCanary, sizeof(kCanary));
      free_fibers.push_back(fiber);
    }
  }
  Fiber* fiber = free_fibers.back();
  free_fibers.pop_back();
  return fiber;
}

void FreeFiber(Fiber* fiber) {
  if (std::memcmp(fiber->stack, &kCanary, sizeof(kCanary)) != 0) {
    std::fputs("a fiber's stack is too small\n", stderr);
    std::abort();
  }
  free_fibers.push_back(fiber);
}

}  // namespace

// Runs a kernel's thread, and another one when the fiber is used again.
void FiberMain() {
  while (true) {
    Fiber* fiber = machine->current_;
    const Launch* launch = fiber->warp->block->launch;
    launch->kernel->run(launch->params);
    machine->Suspend(State::kDone, nullptr);
  }
}

Machine::Machine(const Schedule& schedule, std::vector<Range> ranges)
    : schedule_(schedule),
      ranges_(std::move(ranges)),
      random_(schedule.seed * 0x9e3779b97f4a7c15 + 0x1234567) {
  machine = this;
}

uint64_t Machine::Random(uint64_t below) {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return (random_ >> 11) % below;
}

// A fiber's first run enters it through ucontext; later switches take the far faster
// setjmp, which makes no system call.
void Machine::Resume(Fiber* fiber) {
  current_ = fiber;
  fiber->warp->ready &= ~(1u << fiber->lane);
  if (_setjmp(scheduler_) == 0) {
    if (fiber->started) _longjmp(fiber->context, 1);
    fiber->started = true;
    static ucontext_t back, context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber->stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, FiberMain, 0);
    swapcontext(&back, &context);
  }
  current_ = nullptr;
}

void Machine::Suspend(State state, const void* address) {
  Fiber* fiber = current_;
  fiber->state = state;
  fiber->address = address;
  if (state == State::kReady) Ready(fiber);
  if (_setjmp(fiber->context) == 0) _longjmp(scheduler_, 1);
}

void Machine::Ready(Fiber* fiber) {
  fiber->state = State::kReady;
  Warp* warp = fiber->warp;
  warp->ready |= 1u << fiber->lane;
  if (warp->position < 0) {
    warp->position = static_cast<int>(ready_.size());
    ready_.push_back(warp);
  }
}

void Machine::MaybeYield() {
  if (Random(kMinYield) == 0) Suspend(State::kReady, nullptr);
}

// --- launches ----------------------------------------------------------------

void Machine::StartBlock(Launch* launch) {
  auto* block = new Block;
  block->launch = launch;
  block->index = launch->started++;
  ++launch->running;
  launch->live.push_back(block);
  const size_t bytes = (launch->shared_bytes + 127) / 128 * 128;
  block->shared = static_cast<char*>(std::aligned_alloc(128, bytes + 128));
  block->seen_by_engine = static_cast<char*>(std::malloc(bytes + 128));
  std::memset(block->shared, kGarbage, bytes);
  std::memset(block->seen_by_engine, kGarbage, bytes);
  block->used.assign(bytes / 16, 0);
  block->warps.resize(launch->threads / 32);
  block->alive = launch->threads;
  for (size_t w = 0; w < block->warps.size(); ++w) {
    Warp& warp = block->warps[w];
    warp.block = block;
    warp.index = static_cast<int>(w);
    const bool slow_block = block->index == schedule_.slow_block;
    const bool slow_warp = warp.index == schedule_.slow_warp;
    warp.slow = launch->rank == schedule_.slow_rank ||
                (schedule_.slow_block < 0  ? slow_warp
                 : schedule_.slow_warp < 0 ? slow_block
                                           : slow_block && slow_warp);
    for (unsigned lane = 0; lane < 32; ++lane) {
      Fiber* fiber = NewFiber();
      fiber->warp = &warp;
      fiber->lane = lane;
      fiber->thread = static_cast<unsigned>(32 * w + lane);
      fiber->polled = nullptr;
      fiber->groups.assign(1, Group());
      fiber->words.clear();
      fiber->word_groups.clear();
      fiber->unfenced_head = fiber->unfenced_tail = false;
      warp.lanes[lane] = fiber;
      Ready(fiber);
    }
  }
}

void Machine::StartBlocks(Launch* launch) {
  while (launch->running < launch->resident && launch->started < launch->blocks) {
    StartBlock(launch);
  }
}

void Machine::EndBlock(Block* block) {
  Launch* launch = block->launch;
  if (block->copies > 0) {
    failure_ = "rank " + std::to_string(launch->rank) + " block " +
               std::to_string(block->index) + " of " + launch->kernel->name +
               " ended while copies still used its shared memory";
    return;
  }
  for (Store& store : stores_) {
    if (store.block == block) store.block = nullptr;
  }
  for (Copy* copy : copies_) {
    if (copy->block == block)
      copy->block = nullptr, copy->owner = nullptr, copy->group = nullptr;
  }
  for (const Warp& warp : block->warps) {
    if (&warp == paused_) paused_ = nullptr;
    for (Fiber* fiber : warp.lanes) FreeFiber(fiber);
    if (warp.position >= 0) {
      ready_[warp.position] = ready_.back();
      ready_[warp.position]->position = warp.position;
      ready_.pop_back();
    }
  }
  for (const Static& data : block->statics) std::free(data.data);
  std::free(block->shared);
  std::free(block->seen_by_engine);
  launch->live.erase(std::find(launch->live.begin(), launch->live.end(), block));
  delete block;
  --launch->running;
  StartBlocks(launch);
}

// Goes on to the next launch of each rank whose launch is over. Whether any is left.
bool Machine::EndLaunches() {
  bool left = false;
  for (size_t rank = 0; rank < streams_.size(); ++rank) {
    while (next_[rank] < streams_[rank].size()) {
      Launch* launch = &streams_[rank][next_[rank]];
      if (launch->running > 0) break;
      if (launch->started == launch->blocks) {
        // What a kernel has written is visible after it.
        for (size_t i = stores_.size(); i-- > 0;) {
          if (stores_[i].block == nullptr) MoveStore(i);
        }
        for (size_t i = copies_.size(); i-- > 0;) {
          if (copies_[i]->launch == launch) MoveCopy(i);
        }
        ++next_[rank];
      } else {
        StartBlocks(launch);
      }
    }
    left |= next_[rank] < streams_[rank].size();
  }
  return left;
}

// --- the scheduler -----------------------------------------------------------

bool Machine::RunWarp() {
  Warp* warp = ready_[Random(ready_.size())];
  ++steps_;
  if (paused_ != nullptr && steps_ > paused_until_) {
    paused_->slow = false;
    paused_ = nullptr;
  } else if (schedule_.pauses && paused_ == nullptr && Random(50) == 0) {
    paused_ = warp;
    paused_until_ = steps_ + Random(4000);
    warp->slow = true;
  }
  // Slow warps run when no other can, and now and then.
  for (int i = 0; warp->slow && i < 64; ++i) warp = ready_[Random(ready_.size())];
  Block* block = warp->block;
  const uint32_t lanes = warp->ready;
  const unsigned first = static_cast<unsigned>(Random(32));
  bool ended = false;
  for (unsigned i = 0; i < 32 && !ended && failure_.empty(); ++i) {
    const unsigned lane = (first + i) % 32;
    if ((lanes >> lane & 1) == 0) continue;
    Fiber* fiber = warp->lanes[lane];
    Resume(fiber);
    if (fiber->state == State::kDone) ended = --block->alive == 0;
    if (Random(64) == 0) break;
  }
  if (warp->ready == 0 && warp->position >= 0) {
    ready_[warp->position] = ready_.back();
    ready_[warp->position]->position = warp->position;
    ready_.pop_back();
    warp->position = -1;
  }
  if (ended) EndBlock(block);
  return ended;
}

bool Machine::Tick() {
  ++tick_;
  now_ns_ += schedule_.tick_ns;
  cycles_ += 4000;
  if (++idle_ticks_ > schedule_.max_ticks) return false;
  std::vector<Fiber*> woken;
  for (auto it = sleepers_.begin(); it != sleepers_.end();) {
    std::vector<Fiber*>& fibers = it->second;
    for (Fiber* fiber : fibers) {
      if (fiber->state == State::kWord) woken.push_back(fiber);
    }
    fibers.erase(std::remove_if(fibers.begin(), fibers.end(),
                                [](Fiber* f) { return f->state == State::kWord; }),
                 fibers.end());
    it = fibers.empty() ? sleepers_.erase(it) : std::next(it);
  }
  // In an order that the seed decides, not the addresses of this process.
  std::sort(woken.begin(), woken.end(), [](const Fiber* a, const Fiber* b) {
    const auto key = [](const Fiber* f) {
      return std::make_tuple(f->warp->block->launch->rank, f->warp->block->index,
                             f->thread);
    };
    return key(a) < key(b);
  });
  for (Fiber* fiber : woken) Ready(fiber);
  return true;
}

std::string Machine::Run(std::vector<std::vector<Launch>> streams) {
  streams_ = std::move(streams);
  next_.assign(streams_.size(), 0);
  while (failure_.empty() && EndLaunches()) {
    bool ended = false;
    while (!ended && failure_.empty()) {
      if (!ready_.empty()) {
        if (Random(std::max(1, schedule_.copy_rarity)) == 0) StepMemory();
        ended = RunWarp();
      } else if (!StepMemory()) {
        if (Tick()) continue;
        failure_ = "nothing can go on:\n" + Describe();
      }
    }
  }
  return failure_;
}

void Machine::Violation(const std::string& message) {
  failure_ = Where(current_) + ": " + message;
  Suspend(State::kCollective, nullptr);
  std::abort();  // the scheduler resumes nobody after a failure
}

}  // namespace emu
