// What every kernel does around its work: entering a call, waiting with a limit,
// giving up, leaving.
//
// A wait that lasts longer than the limit records who waited for whom, tells every
// rank, and marks its block failed. A failed block waits for nobody and sends
// nothing any more, so its loops run to their ends by themselves; what they computed
// is overwritten before the kernel returns. The state is final: later calls fail at
// once.

#ifndef JAX_EP_FFI_CUDA_CALL_CUH_
#define JAX_EP_FFI_CUDA_CALL_CUH_

#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

constexpr uint32_t kAllLanes = 0xffffffffu;

// Set in the build that the tools measure with.
#ifndef JAX_EP_STAMPS
#define JAX_EP_STAMPS 0
#endif

__device__ __forceinline__ int Lane() { return threadIdx.x & 31; }

// The block's view of the call, in shared memory.
struct CallState {
  uint64_t begun;    // barrier that completes when BeginCall has written the rest
  uint64_t number;   // of this call, or of the last id round before this call
  uint64_t word;     // the call's (kBegunOffset)
  uint32_t failed;   // 1 once this block stopped waiting
  uint32_t entered;  // 0 if another call was running here
  uint32_t last;     // in the block that leaves last 1, or 2 if one before it failed
  uint32_t aborted;  // whether any rank had given up when this block was done
#if JAX_EP_STAMPS
  unsigned long long stamps[kNumStamps];
  int stage;
#endif
};

__device__ __forceinline__ Control* ControlOf(const CommonParams& common, int rank) {
  return reinterpret_cast<Control*>(common.peers[rank] + kControlOffset);
}

__device__ __forceinline__ bool Failed(const CallState* state) {
  return *static_cast<const volatile uint32_t*>(&state->failed) != 0;
}

// Notes the time of a phase, if this is the block's last to reach it; one lane of a
// warp.
__device__ __forceinline__ void NoteStamp(CallState* state, Stamp stamp) {
#if JAX_EP_STAMPS
  atomicMax(&state->stamps[stamp], ptx::Nanoseconds());
#endif
}

__device__ __forceinline__ uint64_t* Word(uint8_t* workspace, int64_t offset,
                                          int64_t index) {
  return reinterpret_cast<uint64_t*>(workspace + offset) + index;
}

__device__ inline void WriteHostRecord(ErrorRecord* host, const ErrorRecord& record) {
  volatile ErrorRecord* out = host;
  out->phase = record.phase;
  out->rank = record.rank;
  out->peer = record.peer;
  out->channel = record.channel;
  out->behind = record.behind;
  out->expected = record.expected;
  out->seen = record.seen;
  out->call = record.call;
  out->waited_ns = record.waited_ns;
  // Pairs with the host's acquire of `written`.
  ptx::StoreReleaseSystem(&host->written, 1u);
}

// The call that a rank has begun, as this rank was told.
__device__ __forceinline__ uint64_t BegunBy(const CommonParams* common, int rank) {
  return ptx::LoadRelaxedSystem(Word(common->peers[common->rank], kBegunOffset, rank));
}

// The rank that has begun the fewest calls, if any has begun fewer than this one, and
// `peer` rather than another. One that waits inside this call is none.
__device__ inline int FurthestBehind(const CommonParams* common, const CallState* state,
                                     int peer) {
  uint64_t least = CallOf(state->word);
  int behind = -1;
  for (int i = peer < 0 ? 0 : -1; i < common->num_ranks; ++i) {
    const int rank = i < 0 ? peer : i;
    if (rank == common->rank || i == peer) continue;
    const uint64_t call = CallOf(BegunBy(common, rank));
    if (call >= least) continue;
    least = call;
    behind = rank;
  }
  return behind;
}

// Records why this thread gave up, unless another one was faster, and tells all
// ranks. Any thread may call it.
__device__ __noinline__ void GiveUp(const CommonParams* common, CallState* state,
                                    int phase, int peer, int channel, uint64_t expected,
                                    uint64_t seen, uint64_t waited_ns) {
  Control* control = ControlOf(*common, common->rank);
  if (atomicExch(&control->reported, 1u) == 0) {
    ErrorRecord record{};
    record.written = 1;
    record.phase = phase;
    record.rank = common->rank;
    record.peer = peer;
    record.channel = channel;
    // Those without a wait have their reason.
    record.behind = waited_ns > 0 ? FurthestBehind(common, state, peer) : -1;
    record.expected = expected;
    record.seen = seen;
    record.call = state->number;
    record.waited_ns = waited_ns;
    WriteHostRecord(common->error, record);
    for (int rank = 0; rank < common->num_ranks; ++rank) {
      reinterpret_cast<ErrorRecord*>(common->peers[rank] +
                                     kErrorsOffset)[common->rank] = record;
      // Pairs with the acquire of `abort` in CheckAbort and BeginCall.
      ptx::StoreReleaseSystem(&ControlOf(*common, rank)->abort, 1 + common->rank);
    }
  }
  *static_cast<volatile uint32_t*>(&state->failed) = 1;
}

// Fails this block if a rank, this one included, has given up; the first block to
// see that tells the host what the other rank wrote.
__device__ __noinline__ bool CheckAbort(const CommonParams* common, CallState* state) {
  Control* control = ControlOf(*common, common->rank);
  // Pairs with the release of `abort` in GiveUp: the record is complete.
  const uint64_t abort = ptx::LoadAcquireSystem(&control->abort);
  if (abort == 0) return false;
  if (atomicExch(&control->reported, 1u) == 0) {
    const ErrorRecord* records =
        reinterpret_cast<ErrorRecord*>(common->peers[common->rank] + kErrorsOffset);
    WriteHostRecord(common->error, records[abort - 1]);
  }
  *static_cast<volatile uint32_t*>(&state->failed) = 1;
  return true;
}

// Fails this block if a rank has given up or, if `sites`, is in this call at another
// site.
__device__ __noinline__ bool CheckPeers(const CommonParams* common, CallState* state,
                                        bool sites) {
  if (CheckAbort(common, state)) return true;
  for (int rank = 0; sites && rank < common->num_ranks; ++rank) {
    if (rank == common->rank) continue;
    const uint64_t word = BegunBy(common, rank);
    if (CallOf(word) != CallOf(state->word) || word == state->word) continue;
    GiveUp(common, state, kPhaseSite, rank, -1, state->word, word, 0);
    return true;
  }
  return false;
}

// After so long a wait looks whether the peers are in the same call.
constexpr uint64_t kSitesNs = 1'000'000;

// What a wait may last longer when it is for somebody who may wait himself, or when a
// wait for data says more.
constexpr uint64_t kIndirectGraceNs = 500'000'000;
__device__ __forceinline__ bool IsIndirect(Phase phase) {
  return phase == kPhaseDispatchCredit || phase == kPhaseCombineCredit ||
         phase == kPhaseLayoutPeer || phase == kPhaseDispatchPeer ||
         phase == kPhaseCombinePeer;
}

// Counts a wait's rounds and looks at the clock and the abort word in some of them.
class Patience {
 public:
  // `grace_ns` is added to the limit.
  __device__ __forceinline__ explicit Patience(uint64_t grace_ns = 0)
      : grace_(grace_ns) {}

  // Whether to stop waiting: the block has failed, or the limit has passed. In the
  // second case `Overdue` is true and the caller must GiveUp.
  __device__ __forceinline__ bool Over(const CommonParams* common, CallState* state) {
    if ((++rounds_ & 31) != 0) return false;
    return Look(common, state);
  }
  __device__ __forceinline__ bool Overdue() const { return overdue_; }
  __device__ __forceinline__ uint64_t WaitedNs() const { return waited_; }

 private:
  __device__ __forceinline__ bool Look(const CommonParams* common, CallState* state) {
    if (Failed(state)) return true;
    const uint64_t now = ptx::Nanoseconds();
    if (start_ == 0) start_ = now;
    waited_ = now - start_;
    if (CheckPeers(common, state, waited_ > kSitesNs)) return true;
    overdue_ = waited_ > common->timeout_ns + grace_;
    return overdue_;
  }

  const uint64_t grace_;
  uint32_t rounds_ = 0;
  bool overdue_ = false;
  uint64_t start_ = 0;
  uint64_t waited_ = 0;
};

// Waits, all lanes of a warp together, until `*word >= expected` in each lane that
// `needs` it. Words only grow. Returns what the lane saw last; after a failure that
// may be less. `peer` is the lane's own.
__device__ __noinline__ uint64_t AwaitAtLeast(const CommonParams* common,
                                              CallState* state, Phase phase, int peer,
                                              int channel, const uint64_t* word,
                                              uint64_t expected, bool needs) {
  uint64_t seen = 0;
  if (__any_sync(kAllLanes, Failed(state))) return seen;
  Patience patience(IsIndirect(phase) ? kIndirectGraceNs : 0);
  while (true) {
    if (needs) {
      // Pairs with the release that the caller names.
      seen = ptx::LoadAcquireSystem(word);
      needs = seen < expected;
    }
    const uint32_t waiting = __ballot_sync(kAllLanes, needs);
    if (waiting == 0) return seen;
    // One lane looks, so that all stop together.
    bool over = false;
    if (Lane() == __ffs(waiting) - 1) {
      over = patience.Over(common, state);
      if (over && patience.Overdue()) {
        GiveUp(common, state, phase, peer, channel, expected, seen,
               patience.WaitedNs());
      }
    }
    if (__any_sync(kAllLanes, over)) return seen;
  }
}

// Before a __syncthreads that comes before all that follows here.
__device__ __forceinline__ void InitCall(CallState* state) {
  if (threadIdx.x == 0) ptx::BarrierInit(&state->begun, 1);
}

// Which of the workspace's counters numbers a call.
enum class CallKind { kIdRounds, kRing, kFew };

// Enters a call; one warp of the block. `signature` tells calls that could run at the
// same time apart and is not 0. Afterwards the block may have failed already.
__device__ __forceinline__ void BeginCall(const CommonParams& common,
                                          uint64_t signature, CallKind kind,
                                          CallState* state) {
  Control* control = ControlOf(common, common.rank);
  if (common.resident != nullptr && Lane() == 0) atomicAdd(common.resident, 1u);
#if JAX_EP_STAMPS
  if (Lane() == 0) {
    for (int i = 0; i < kNumStamps; ++i) state->stamps[i] = 0;
    state->stamps[kStampBegan] = ptx::Nanoseconds();
    state->stage = static_cast<int>(signature & 3) - 1;
  }
#endif
  // One word per lane, so that their latencies overlap.
  uint64_t word = 0;
  if (Lane() == 0) {
    word = atomicCAS(reinterpret_cast<unsigned long long*>(&control->busy), 0ull,
                     static_cast<unsigned long long>(signature));
  } else if (Lane() == 1) {
    // Only the last block of a call changes these, after all blocks entered.
    word = kind == CallKind::kRing  ? control->ring_calls + 1
           : kind == CallKind::kFew ? control->few_calls + 1
                                    : control->id_rounds;
  } else if (Lane() == 2) {
    word = ptx::LoadRelaxedSystem(&control->abort);
  } else if (Lane() == 4) {
    word = control->calls + 1;
  } else if (Lane() == 3) {
    word = common.rank_operand != nullptr ? common.rank_operand[0] : common.rank;
  }
  const uint64_t other = __shfl_sync(kAllLanes, word, 0);
  const uint64_t number = __shfl_sync(kAllLanes, word, 1);
  const uint64_t abort = __shfl_sync(kAllLanes, word, 2);
  const int rank = static_cast<int>(__shfl_sync(kAllLanes, word, 3));
  const uint64_t call = __shfl_sync(kAllLanes, word, 4);
  if (Lane() == 0) {
    state->failed = 0;
    state->last = 0;
    state->entered = other == 0 || other == signature;
    state->number = number;
    state->word = call << kSiteBits | common.site;
    if (abort != 0) {
      CheckAbort(&common, state);
    } else if (!state->entered) {
      GiveUp(&common, state, kPhaseOverlap, -1, -1, signature, other, 0);
    } else if (rank != common.rank) {
      GiveUp(&common, state, kPhaseRankMismatch, -1, -1, common.rank, rank, 0);
    }
    ptx::BarrierArrive(&state->begun);
  }
  __syncwarp();
}

// Tells all ranks which call this one has begun; the warp that began it, in one block.
// With `ordered`, that our kernel before this one has ended too.
__device__ __forceinline__ void TellPeers(const CommonParams& common, CallState* state,
                                          bool ordered) {
#pragma unroll 1
  for (int rank = Lane(); rank < common.num_ranks; rank += 32) {
    if (rank == common.rank || Failed(state)) continue;
    uint64_t* word = Word(common.peers[rank], kBegunOffset, common.rank);
    if (ordered) {
      // Pairs with the acquire in AwaitPeers.
      ptx::StoreReleaseSystem(word, state->word);
    } else {
      ptx::StoreRelaxedSystem(word, state->word);
    }
  }
}

// Waits until all ranks have begun the call, and compares their sites; a warp of the
// same block, when it has done its share. A rank that is further has seen ours, and
// found it to be its own.
__device__ __forceinline__ void AwaitPeers(const CommonParams& common, CallState* state,
                                           Phase phase) {
  const uint64_t least = CallOf(state->word) << kSiteBits;
#pragma unroll 1
  for (int first = 0; first < common.num_ranks; first += 32) {
    const int rank = first + Lane();
    const bool is_peer = rank < common.num_ranks && rank != common.rank;
    // Pairs with the release in TellPeers, where it is one.
    const uint64_t word = AwaitAtLeast(
        &common, state, phase, rank, -1,
        Word(common.peers[common.rank], kBegunOffset, rank), least, is_peer);
    if (is_peer && CallOf(word) == CallOf(state->word) && word != state->word) {
      GiveUp(&common, state, kPhaseSite, rank, -1, state->word, word, 0);
    }
  }
}

// Waits for what BeginCall wrote to `state`; for any thread that looks at it, having
// started what does not depend on the call.
__device__ __forceinline__ void AwaitBegin(CallState* state) {
  // Pairs with the arrival in BeginCall.
  ptx::BarrierWait(&state->begun, 0);
}

// Added to `blocks_done` by a block that failed, beside its 1.
constexpr uint32_t kFailedBlock = 1u << 16;

// Leaves a call; all threads of the block, their own writes complete. In a failed
// call `poison(part, parts)` overwrites a share of the outputs: every block its own,
// in case others never come, and the last block everything. The last block of a good
// call runs `finish()`, then opens the workspace for the next call.
template <class Poison, class Finish>
__device__ __forceinline__ void EndCall(const CommonParams& common, CallState* state,
                                        Poison poison, Finish finish) {
  Control* control = ControlOf(common, common.rank);
  __syncthreads();
#if JAX_EP_STAMPS
  const auto stamps = [&](int block) {
    return Word(common.peers[common.rank], kStampsOffset,
                (state->stage * kMaxStampedBlocks + block) * kMaxStamps);
  };
  if (threadIdx.x < kNumStamps) {
    stamps(blockIdx.x)[threadIdx.x] =
        threadIdx.x == kStampLastRow ? ptx::Nanoseconds() : state->stamps[threadIdx.x];
  } else if (threadIdx.x == kNumStamps) {
    // Blocks that only an earlier call's grid had.
    for (int block = gridDim.x + blockIdx.x; block < kMaxStampedBlocks;
         block += gridDim.x) {
      stamps(block)[kStampBegan] = 0;
    }
  }
#endif
  if (Failed(state)) {
    poison(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    __syncthreads();
  }
  if (threadIdx.x == 0 && state->entered) {
    // Acquire-release, so that the last block's done words (`finish`) come after all
    // that this device's blocks read and wrote.
    const uint32_t before = ptx::AddAcquireReleaseDevice(
        &control->blocks_done, Failed(state) ? kFailedBlock + 1 : 1);
    // 2: perhaps after the load of `abort` below.
    if (before % kFailedBlock == gridDim.x - 1) {
      state->last = before < kFailedBlock ? 1 : 2;
    }
  } else if (threadIdx.x == 32) {
    // Beside the other warp's atomic: its latency would add to every call's.
    state->aborted = ptx::LoadRelaxedSystem(&control->abort) != 0;
  }
  __syncthreads();
  if (!state->last) return;
  if (state->aborted || state->last == 2) CheckAbort(&common, state);
  __syncthreads();
  if (Failed(state)) {
    poison(0, 1);
  } else {
    finish();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    control->blocks_done = 0;
    control->barrier = 0;
    control->invalid_ids = 0;
    control->zero_chunks = 0;
    control->token_chunks = 0;
    control->calls = CallOf(state->word);
    control->busy = 0;
  }
}

// Tells every rank that this one has read all they sent in ring call `number`, and
// counts the call; threads of the last block.
__device__ __forceinline__ void FinishRingCall(const CommonParams& common,
                                               const CallState* state) {
  if (threadIdx.x < common.num_ranks) {
    // Pairs with the acquire in Sender::Begin of a later call.
    ptx::StoreReleaseSystem(Word(common.peers[threadIdx.x], kDoneOffset, common.rank),
                            state->number);
  }
  if (threadIdx.x == 0) ControlOf(common, common.rank)->ring_calls = state->number;
}

// Sets this part of `bytes` bytes at `out` (16-byte aligned) to `value`; all threads
// of the block.
__device__ __noinline__ void FillBytes(void* out, int64_t bytes, uint8_t value,
                                       int part, int parts) {
  uint8_t* data = static_cast<uint8_t*>(out);
  const uint32_t four = value * 0x01010101u;
  const int64_t vectors = bytes / 16;
  const int64_t step = static_cast<int64_t>(parts) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(part) * blockDim.x + threadIdx.x; i < vectors;
       i += step) {
    reinterpret_cast<uint4*>(data)[i] = make_uint4(four, four, four, four);
  }
  if (part == 0 && threadIdx.x < bytes % 16) data[vectors * 16 + threadIdx.x] = value;
}

// NaN in every float type, -1 in every signed integer type.
constexpr uint8_t kPoison = 0xff;

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_CALL_CUH_
