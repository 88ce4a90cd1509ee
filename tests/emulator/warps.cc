// What threads of a warp or block do together, and the clocks they read.

#include <cstdlib>

#include "machine.h"

namespace emu {

void Machine::Rendezvous(Collective kind, uint64_t value, uint64_t argument) {
  Warp* warp = current_->warp;
  if (warp->arrived == 0) {
    warp->collective = kind;
  } else if (warp->collective != kind) {
    Violation("lanes of a warp are in different collectives");
  }
  const unsigned lane = current_->lane;
  warp->values[lane] = value;
  warp->arguments[lane] = argument;
  warp->arrived |= 1u << lane;
  if (warp->arrived != 0xffffffffu) {
    Suspend(State::kCollective, nullptr);
    return;
  }
  uint64_t all = 0, sum = 0;
  uint32_t ballot = 0;
  for (unsigned i = 0; i < 32; ++i) {
    all |= warp->values[i];
    sum += warp->values[i];
    ballot |= static_cast<uint32_t>(warp->values[i] != 0) << i;
  }
  for (unsigned i = 0; i < 32; ++i) {
    const uint64_t argument = warp->arguments[i];
    uint64_t result = 0;
    if (kind == Collective::kShfl) result = warp->values[argument & 31];
    if (kind == Collective::kShflUp)
      result = warp->values[i < argument ? i : i - argument];
    if (kind == Collective::kShflXor) result = warp->values[i ^ argument];
    if (kind == Collective::kBallot) result = ballot;
    if (kind == Collective::kAdd) result = sum;
    if (kind == Collective::kOr) result = all;
    if (kind == Collective::kMatch) {
      for (unsigned j = 0; j < 32; ++j) {
        result |= static_cast<uint64_t>(warp->values[j] == warp->values[i]) << j;
      }
    }
    warp->results[i] = result;
  }
  warp->arrived = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (i != lane) Ready(warp->lanes[i]);
  }
}

void Machine::BlockBarrier() {
  Block* block = current_->warp->block;
  if (++block->at_barrier < block->alive) {
    Suspend(State::kBlockBarrier, nullptr);
    return;
  }
  block->at_barrier = 0;
  for (Warp& warp : block->warps) {
    for (Fiber* fiber : warp.lanes) {
      if (fiber->state == State::kBlockBarrier) Ready(fiber);
    }
  }
}

char* Machine::StaticShared(int line, size_t bytes) {
  Block* block = current_->warp->block;
  for (const Static& data : block->statics) {
    if (data.line == line && data.bytes == bytes) return data.data;
  }
  char* data = static_cast<char*>(std::aligned_alloc(128, (bytes + 127) / 128 * 128));
  std::memset(data, kGarbage, bytes);
  block->statics.push_back({line, bytes, data});
  return data;
}

uint32_t Machine::Cycles() {
  if (Random(schedule_.jump_rarity) == 0)
    cycles_ += static_cast<uint32_t>(Random(20000));
  return ++cycles_;
}

uint64_t Machine::Nanoseconds() {
  // Time may pass while others could run: they are late.
  if (schedule_.hasty && Random(4) == 0) now_ns_ += Random(1'000'000'000);
  return now_ns_;
}

}  // namespace emu
