// What is said of a run that cannot go on: who waits for what.

#include <cstdio>
#include <map>

#include "machine.h"
#include "workspace.h"

namespace emu {

std::string Format(const char* format, int64_t a, int64_t b, int64_t c, int64_t d) {
  char text[256];
  std::snprintf(text, sizeof(text), format, static_cast<long long>(a),
                static_cast<long long>(b), static_cast<long long>(c),
                static_cast<long long>(d));
  return text;
}

std::string Machine::Where(const Fiber* fiber) const {
  const Block* block = fiber->warp->block;
  return std::string(block->launch->kernel->name) +
         Format(", rank %lld block %lld warp %lld lane %lld", block->launch->rank,
                block->index, fiber->warp->index, fiber->lane);
}

std::string Machine::Name(const void* address, const Block* block) const {
  using namespace jax_ep;
  using namespace jax_ep::cuda;
  const char* at = static_cast<const char*>(address);
  if (at >= block->shared && at < block->shared + block->launch->shared_bytes) {
    Mbarrier state;
    std::memcpy(&state, address, sizeof(state));
    return Format(
        "barrier at %lld of shared memory (phase %lld, %lld arrivals and "
        "%lld bytes missing)",
        at - block->shared, state.phase, state.pending, state.bytes);
  }
  const Range* range = Find(address, 8);
  if (range == nullptr) return "a word of static shared memory";
  const int64_t offset = at - range->begin;
  const auto signal = [&](const char* name, int64_t from) {
    uint64_t word;
    std::memcpy(&word, address, sizeof(word));
    const int64_t index = (offset - from) / 8;
    return name + Format(" of channel %lld and rank %lld (call %lld, count %lld)",
                         index / kMaxRanks, index % kMaxRanks, word >> kCountBits,
                         word & ((1 << kCountBits) - 1));
  };
  if (offset < kErrorsOffset) return "control word" + Format(" at %lld", offset);
  if (offset >= kDoneOffset && offset < kStampsOffset) {
    return "done" + Format(" of rank %lld", (offset - kDoneOffset) / 8);
  }
  if (offset >= kTailOffset && offset < kTileCountOffset) {
    return signal("tail", kTailOffset);
  }
  if (offset >= kHeadOffset && offset < kTailOffset) return signal("head", kHeadOffset);
  return "ids" + Format(" at %lld of the halves", offset - kIdsOffset);
}

std::string Machine::Describe() const {
  std::map<std::string, int> lanes;
  for (size_t rank = 0; rank < streams_.size(); ++rank) {
    if (next_[rank] >= streams_[rank].size()) continue;
    for (const Block* block : streams_[rank][next_[rank]].live) {
      for (const Warp& warp : block->warps) {
        for (const Fiber* fiber : warp.lanes) {
          std::string what;
          if (fiber->state == State::kCollective) what = "the other lanes";
          if (fiber->state == State::kBlockBarrier) what = "__syncthreads";
          if (fiber->state == State::kCopies) what = "its bulk copies";
          if (fiber->state == State::kWord || fiber->state == State::kBarrier) {
            what = Name(fiber->address, block);
          }
          if (what.empty()) continue;
          std::string where = Where(fiber);
          ++lanes[where.substr(0, where.rfind(" lane")) + " waits for " + what];
        }
      }
    }
  }
  std::string text;
  for (const auto& [line, count] : lanes) {
    text += "  " + line + Format(" (%lld lanes)\n", count);
  }
  return text;
}

}  // namespace emu
