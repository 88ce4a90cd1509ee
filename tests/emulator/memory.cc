// Memory of the machine: copies and stores that happen later than their instruction,
// and barriers.

#include "machine.h"
#include "workspace.h"

namespace emu {

namespace {

constexpr uint8_t kMagic = 0xa5;

}  // namespace

// --- words -------------------------------------------------------------------

void Machine::Changed(const void* address) {
  idle_ticks_ = 0;
  const auto found = sleepers_.find(address);
  if (found == sleepers_.end()) return;
  const std::vector<Fiber*> fibers = std::move(found->second);
  sleepers_.erase(found);
  for (Fiber* fiber : fibers) Ready(fiber);
}

void Machine::BeforePoll(const void* address, int bytes) {
  MaybeYield();
  Fiber* fiber = current_;
  // A block sees what it stored itself.
  for (size_t i = 0; i < stores_.size(); ++i) {
    if (stores_[i].address == address && stores_[i].block == fiber->warp->block) {
      MoveStore(i);
      break;
    }
  }
  uint64_t value[2] = {};
  std::memcpy(value, address, bytes);
  if (fiber->polled == address && fiber->polled_tick == tick_ && !schedule_.hasty &&
      std::memcmp(value, fiber->polled_value, sizeof(value)) == 0) {
    sleepers_[address].push_back(fiber);
    Suspend(State::kWord, address);
    std::memcpy(value, address, bytes);
  }
  fiber->polled = address;
  fiber->polled_tick = tick_;
  std::memcpy(fiber->polled_value, value, sizeof(value));
}

void Machine::StoreLater(void* address, const void* value, int bytes, bool release) {
  MaybeYield();
  Store store{current_->warp->block, address, {}, bytes};
  std::memcpy(store.value, value, bytes);
  if (release) FlushStores(store.block);
  stores_.push_back(store);
  if (Random(2) == 0) MoveStore(stores_.size() - 1);
}

void Machine::FlushStores(const Block* block) {
  for (size_t i = stores_.size(); i-- > 0;) {
    if (stores_[i].block == block) MoveStore(i);
  }
}

void Machine::MoveStore(size_t index) {
  const Store store = stores_[index];
  stores_[index] = stores_.back();
  stores_.pop_back();
  std::memcpy(store.address, store.value, store.bytes);
  Changed(store.address);
}

void Machine::AcquiredSystem(const void* address) {
  using namespace jax_ep;
  using namespace jax_ep::cuda;
  const Range* range = Find(address, 8);
  if (range == nullptr || range->workspace_of < 0) return;
  const int64_t offset = static_cast<const char*>(address) - range->begin;
  if (offset >= kHeadOffset && offset < kTailOffset) current_->unfenced_head = true;
  if ((offset >= kTailOffset && offset < kTileCountOffset) ||
      (offset >= kDoneOffset && offset < kStampsOffset)) {
    current_->unfenced_tail = true;
  }
}

// --- barriers in shared memory -----------------------------------------------

void Machine::BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  Mbarrier state{};
  state.magic = kMagic;
  state.arrivals = state.pending = arrivals;
  std::memcpy(barrier, &state, sizeof(state));
}

void Machine::Settle(const Mbarrier& barrier, uint64_t* address) {
  Mbarrier state = barrier;
  const bool over = state.pending == 0 && state.bytes == 0;
  if (over) {
    state.phase ^= 1;
    state.pending = state.arrivals;
  }
  std::memcpy(address, &state, sizeof(state));
  if (over) Changed(address);
  idle_ticks_ = 0;
}

void Machine::BarrierArrive(uint64_t* barrier, uint32_t bytes) {
  MaybeYield();
  Mbarrier state;
  std::memcpy(&state, barrier, sizeof(state));
  if (state.magic != kMagic) Violation("arrives at a barrier that is not initialised");
  if (state.pending == 0) Violation("more arrivals than a barrier's phase has");
  state.pending -= 1;
  state.bytes += bytes;
  Settle(state, barrier);
}

bool Machine::BarrierDone(const uint64_t* barrier, uint32_t parity) {
  Mbarrier state;
  std::memcpy(&state, barrier, sizeof(state));
  if (state.magic != kMagic) Violation("waits at a barrier that is not initialised");
  return state.phase != parity;
}

void Machine::BarrierWait(const uint64_t* barrier, uint32_t parity) {
  MaybeYield();
  if (schedule_.independent_lanes) {
    while (!BarrierDone(barrier, parity)) {
      sleepers_[barrier].push_back(current_);
      Suspend(State::kBarrier, barrier);
    }
    return;
  }
  // One instruction of the warp: its lanes see the same phase.
  Warp* warp = current_->warp;
  if (warp->arrived == 0) {
    warp->collective = Collective::kWait;
  } else if (warp->collective != Collective::kWait) {
    Violation("lanes of a warp are in different collectives");
  }
  warp->arrived |= 1u << current_->lane;
  if (warp->arrived != 0xffffffffu) {
    Suspend(State::kCollective, nullptr);
    return;
  }
  warp->arrived = 0;
  const bool done = BarrierDone(barrier, parity);
  for (Fiber* fiber : warp->lanes) {
    if (done && fiber != current_) Ready(fiber);
    if (done) continue;
    fiber->state = State::kBarrier;
    fiber->address = barrier;
    sleepers_[barrier].push_back(fiber);
  }
  if (!done) Suspend(State::kBarrier, barrier);
}

// --- bulk copies -------------------------------------------------------------

const Range* Machine::Find(const void* address, int64_t bytes) const {
  const char* begin = static_cast<const char*>(address);
  for (const Range& range : ranges_) {
    if (begin >= range.begin && begin + bytes <= range.begin + range.bytes) {
      return &range;
    }
  }
  return nullptr;
}

void Machine::CheckBulk(const Block* block, const void* shared, const void* global,
                        uint32_t bytes) {
  const auto in_shared = static_cast<const char*>(shared) - block->shared;
  if (in_shared < 0 || in_shared + bytes > block->launch->shared_bytes) {
    Violation(
        Format("bulk copy of %lld bytes at %lld of shared memory", bytes, in_shared));
  }
  if (Find(global, bytes) == nullptr) Violation("bulk copy outside of every array");
  if (in_shared % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0 ||
      bytes % 16 != 0) {
    Violation("bulk copy not aligned to 16 bytes");
  }
}

void Machine::AddCopy(Copy copy) {
  // Parts of a copy happen on their own.
  const uint32_t first =
      copy.bytes > 16 ? static_cast<uint32_t>(Random(copy.bytes / 16)) * 16 : 0;
  Copy rest = copy;
  rest.to += first;
  rest.from += first;
  rest.bytes -= first;
  copy.bytes = first;
  for (const Copy& part : {copy, rest}) {
    if (part.bytes == 0) continue;
    copies_.push_back(new Copy(part));
    ++part.block->copies;
    if (part.group != nullptr) ++part.group->unread, ++part.group->unwritten;
    if (schedule_.copy_rarity > 0) continue;
    MoveCopy(copies_.size() - 1);
    MoveCopy(copies_.size() - 1);
  }
}

void Machine::BulkLoad(void* shared, const void* global, uint32_t bytes,
                       uint64_t* barrier) {
  MaybeYield();
  Block* block = current_->warp->block;
  CheckBulk(block, shared, global, bytes);
  const Range* range = Find(global, bytes);
  if (range->workspace_of >= 0 && current_->unfenced_head) {
    Violation("loads a piece without FenceGlobalForBulk after the acquire of its head");
  }
  Copy copy{};
  copy.owner = current_;
  copy.block = block;
  copy.launch = block->launch;
  copy.barrier = barrier;
  copy.to = static_cast<char*>(shared);
  copy.from = static_cast<const char*>(global);
  copy.bytes = bytes;
  AddCopy(copy);
}

void Machine::BulkStore(void* global, const void* shared, uint32_t bytes) {
  MaybeYield();
  Block* block = current_->warp->block;
  CheckBulk(block, shared, global, bytes);
  const Range* range = Find(global, bytes);
  if (range->workspace_of >= 0 && current_->unfenced_tail) {
    Violation("sends a piece without FenceGlobalForBulk after the acquire of its slot");
  }
  const char* from = static_cast<const char*>(shared);
  // Bytes that ordinary stores changed since the engine last used them need a fence
  // since then; of any warp of the block, which is less than the hardware asks for.
  const auto offset = from - block->shared;
  for (int64_t i = offset; i < offset + bytes; i += 16) {
    if (std::memcmp(block->shared + i, block->seen_by_engine + i, 16) != 0) {
      if (block->used[i / 16] >= block->fenced) {
        Violation("bulk store of bytes written without FenceSharedForBulk");
      }
      std::memcpy(block->seen_by_engine + i, block->shared + i, 16);
    }
    block->used[i / 16] = ++uses_;
  }
  Copy copy{};
  copy.owner = current_;
  copy.block = block;
  copy.launch = block->launch;
  copy.group = &current_->groups.back();
  copy.to = static_cast<char*>(global);
  copy.from = from;
  copy.bytes = bytes;
  AddCopy(copy);
}

void Machine::MoveCopy(size_t index) {
  Copy* copy = copies_[index];
  idle_ticks_ = 0;
  Fiber* owner = copy->owner;
  if (!copy->read) {
    copy->data.assign(copy->from, copy->from + copy->bytes);
    copy->read = true;
    if (copy->group != nullptr) {
      --copy->group->unread;
      --copy->block->copies;
    }
  } else {
    std::memcpy(copy->to, copy->data.data(), copy->bytes);
    if (copy->group != nullptr) --copy->group->unwritten;
    if (copy->barrier != nullptr) {
      Block* block = copy->block;
      const auto offset = copy->to - block->shared;
      std::memcpy(block->seen_by_engine + offset, copy->to, copy->bytes);
      ++uses_;
      for (int64_t i = offset; i < offset + copy->bytes; i += 16) {
        block->used[i / 16] = uses_;
      }
      --block->copies;
      Mbarrier state;
      std::memcpy(&state, copy->barrier, sizeof(state));
      if (state.magic != kMagic && failure_.empty()) {
        failure_ = "a bulk load completes at a barrier that is not initialised";
      }
      state.bytes -= copy->bytes;
      Settle(state, copy->barrier);
    }
    copies_[index] = copies_.back();
    copies_.pop_back();
    delete copy;
  }
  if (owner != nullptr && owner->state == State::kCopies) Ready(owner);
}

void Machine::BulkCommit() { current_->groups.emplace_back(); }

void Machine::BulkWait(size_t pending, bool written) {
  MaybeYield();
  std::deque<Group>& groups = current_->groups;
  const auto done = [&] {
    for (size_t i = 0; i + pending + 1 < groups.size(); ++i) {
      if ((written ? groups[i].unwritten : groups[i].unread) != 0) return false;
    }
    return true;
  };
  while (!done()) Suspend(State::kCopies, nullptr);
  while (groups.size() > 1 && groups[0].unread == 0 && groups[0].unwritten == 0) {
    groups.pop_front();
  }
}

void Machine::FenceShared() { current_->warp->block->fenced = ++uses_; }

void Machine::FenceGlobal() {
  current_->unfenced_head = current_->unfenced_tail = false;
}

bool Machine::StepMemory() {
  const size_t count = copies_.size() + stores_.size();
  if (count == 0) return false;
  const size_t index = Random(count);
  if (index < copies_.size()) {
    MoveCopy(index);
  } else {
    MoveStore(index - copies_.size());
  }
  return true;
}

// --- copies of words ---------------------------------------------------------

void Machine::CopyWord(void* shared, const void* global) {
  if (Find(global, 4) == nullptr) Violation("cp.async outside of every array");
  current_->words.push_back({shared, global});
}

void Machine::CopyCommit() {
  std::vector<WordCopy> words;
  for (const WordCopy& word : current_->words) {
    if (Random(2) == 0) {
      std::memcpy(word.to, word.from, 4);
    } else {
      words.push_back(word);
    }
  }
  current_->words.clear();
  current_->word_groups.push_back(std::move(words));
}

void Machine::CopyWait(size_t pending) {
  MaybeYield();
  auto& groups = current_->word_groups;
  while (groups.size() > pending) {
    for (const WordCopy& word : groups.front()) std::memcpy(word.to, word.from, 4);
    groups.pop_front();
  }
}

}  // namespace emu
