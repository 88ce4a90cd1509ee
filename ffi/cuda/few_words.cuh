// How calls for few tokens cross a link: fixed slots, and words that carry the number
// of their call.
//
// Source s writes the row of token t for rank d to slot (s, t) of d's workspace as soon
// as it has it: no credits, no signals. Each 16-byte word has 14 bytes of the row and
// the call's epoch, and is stored and loaded whole (a relaxed 128-bit access is one
// access in PTX; a line of 128 bytes, as NCCL has it, is not by any contract), so the
// data is its own flag.
//
// Halves of the slots are used in turn. A half is written again two calls later. Its
// writer has then ended the call between, in which it saw that this rank had begun it
// (AwaitPeers), and this rank says so when its kernel of the call before has ended.
//
// An epoch comes again after 65535 calls. Until then the last block of each call has
// cleared, a piece at a time, every slot that nobody has written since.

#ifndef JAX_EP_FFI_CUDA_FEW_WORDS_CUH_
#define JAX_EP_FFI_CUDA_FEW_WORDS_CUH_

#include "call.cuh"
#include "few_shape.h"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

using ptx::Word128;

// Epochs of 16 bits, of which 0 is no call's.
constexpr uint32_t kFewEpochs = 65535;
// A call clears so much of its half: all of it long before an epoch comes again.
constexpr int64_t kFewClearBytes = 4 * kKiB;
static_assert(kMaxRanks * FewRangeBytes(kMaxRanks) / kFewClearBytes < kFewEpochs / 2 &&
                  8 * FewRangeBytes(8) / kFewClearBytes < kFewEpochs / 2,
              "");

__device__ __forceinline__ uint32_t FewEpoch(uint64_t call) {
  return static_cast<uint32_t>((call >> 1) % kFewEpochs) + 1;
}

// Slot of a source and its token in the workspace of `rank`.
__device__ __forceinline__ uint8_t* FewSlotAt(const CommonParams& common, int num_ranks,
                                              int rank, int source, int64_t token,
                                              int64_t slot_bytes, uint64_t call) {
  const int64_t range = static_cast<int64_t>(call & 1) * num_ranks + source;
  return common.peers[rank] + FewOffset(num_ranks) + range * FewRangeBytes(num_ranks) +
         token * slot_bytes;
}

__device__ __forceinline__ uint32_t EpochOf(const Word128& word) {
  return static_cast<uint32_t>(word.high >> 48);
}

// A lane's vectors as words: each word has the first 14 bytes of a vector, the last
// word what is left of all.
template <int kVectors>
__device__ __forceinline__ void PackWords(const uint4 (&vectors)[kVectors],
                                          uint32_t epoch,
                                          Word128 (&words)[kVectors + 1]) {
  static_assert(kVectors <= kFewVectors, "");
  const uint64_t stamp = static_cast<uint64_t>(epoch) << 48;
  uint64_t low = 0, high = stamp;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint4& v = vectors[i];
    words[i].low = v.x | static_cast<uint64_t>(v.y) << 32;
    words[i].high = v.z | static_cast<uint64_t>(v.w & 0xffff) << 32 | stamp;
    const uint64_t rest = v.w >> 16;
    if (i < 4) {
      low |= rest << (16 * i);
    } else {
      high |= rest << (16 * (i - 4));
    }
  }
  words[kVectors] = {low, high};
}

template <int kVectors>
__device__ __forceinline__ void UnpackWords(const Word128 (&words)[kVectors + 1],
                                            uint4 (&vectors)[kVectors]) {
  const Word128& last = words[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint64_t rest = i < 4 ? last.low >> (16 * i) : last.high >> (16 * (i - 4));
    const uint64_t high = words[i].high;
    vectors[i] = make_uint4(static_cast<uint32_t>(words[i].low),
                            static_cast<uint32_t>(words[i].low >> 32),
                            static_cast<uint32_t>(high),
                            (static_cast<uint32_t>(high >> 32) & 0xffff) |
                                static_cast<uint32_t>(rest) << 16);
  }
}

// Stores the lane's words of a tile, whose first one is at `words`.
template <int kWords>
__device__ __forceinline__ void SendWords(uint8_t* tile,
                                          const Word128 (&words)[kWords]) {
  Word128* to = reinterpret_cast<Word128*>(tile) + Lane();
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    // Pairs with the loads in AwaitWords by the epoch inside the word.
    ptx::StoreRelaxedSystem(to + 32 * i, words[i]);
  }
}

// Waits for the lane's words of a tile of this call in every lane that `needs` them;
// all lanes. After a failure they are anything.
template <int kWords>
__device__ __forceinline__ void AwaitWords(const CommonParams& common, CallState* state,
                                           Phase phase, int peer, const uint8_t* tile,
                                           uint32_t epoch, bool needs,
                                           Word128 (&words)[kWords]) {
  const Word128* at = reinterpret_cast<const Word128*>(tile) + Lane();
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = {0, 0};
  if (__any_sync(kAllLanes, Failed(state))) return;
  Patience patience;
  // All at once if they are there. Else one of them until it comes: warps that wait
  // should leave the memory to others.
  bool all = true;
  int missing = 0;
  while (true) {
    // Pairs with the stores in SendWords by the epoch.
    if (needs && (all || EpochOf(ptx::LoadRelaxedSystem(at + 32 * missing)) == epoch)) {
      all = needs = false;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (EpochOf(words[i]) != epoch) words[i] = ptx::LoadRelaxedSystem(at + 32 * i);
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (EpochOf(words[i]) == epoch) continue;
        missing = i;
        needs = true;
      }
    }
    const uint32_t waiting = __ballot_sync(kAllLanes, needs);
    if (waiting == 0) return;
    bool over = false;
    if (Lane() == __ffs(waiting) - 1) {
      over = patience.Over(&common, state);
      if (over && patience.Overdue()) {
        GiveUp(&common, state, phase, peer, -1, epoch,
               EpochOf(ptx::LoadRelaxedSystem(at + 32 * missing)), patience.WaitedNs());
      }
    }
    if (__any_sync(kAllLanes, over)) return;
  }
}

// Clears a piece of the half that this call used and counts the call; threads of the
// last block. Nobody writes there before he sees that we begin the next call.
template <int kRanks>
__device__ __forceinline__ void FinishFewCall(const CommonParams& common,
                                              const CallState* state) {
  constexpr int64_t kHalf = kRanks * FewRangeBytes(kRanks);
  constexpr int64_t kPieces = kHalf / kFewClearBytes;
  const int64_t piece = static_cast<int64_t>((state->number >> 1) % kPieces);
  uint4* half = reinterpret_cast<uint4*>(
      common.peers[common.rank] + FewOffset(kRanks) +
      static_cast<int64_t>(state->number & 1) * kHalf + piece * kFewClearBytes);
  for (int i = threadIdx.x; i < kFewClearBytes / 16; i += blockDim.x) {
    half[i] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) ControlOf(common, common.rank)->few_calls = state->number;
}

// The tiles that a block has: tile `pair` % tiles of token `pair` / tiles, for the same
// pairs on all ranks. So a block waits only for what blocks of its own number send, and
// those send before they wait.
__device__ __forceinline__ int FewPairsOfBlock(int64_t num_tokens, int tiles) {
  const int pairs = static_cast<int>(num_tokens) * tiles;
  return (pairs - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
         static_cast<int>(gridDim.x);
}

// The ranks that lanes name, -1 for none, as a mask.
template <int kRanks>
__device__ __forceinline__ uint64_t RankMask(int rank) {
  uint64_t ranks =
      __reduce_or_sync(kAllLanes, rank >= 0 && rank < 32 ? 1u << (rank & 31) : 0);
  if (kRanks > 32) {
    ranks |= static_cast<uint64_t>(
                 __reduce_or_sync(kAllLanes, rank >= 32 ? 1u << (rank & 31) : 0))
             << 32;
  }
  return ranks;
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_FEW_WORDS_CUH_
