// Dispatch for few tokens: latency counts, not bytes. Same rows, same bits as dispatch.
//
// Rows go to fixed slots of their destinations in words that carry the call's number
// (few_words.cuh), so nobody waits before he sends. A warp moves a tile of a token's
// row: first those of this rank, to other ranks and to its own rows, then its share of
// the zeros, then those that arrive.

#ifndef JAX_EP_FFI_CUDA_FEW_DISPATCH_CUH_
#define JAX_EP_FFI_CUDA_FEW_DISPATCH_CUH_

#include "call.cuh"
#include "dispatch_rows.cuh"
#include "few_rows.cuh"
#include "few_shape.h"
#include "few_words.cuh"
#include "ptx.cuh"
#include "routing.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// `Config` is that of Dispatch.
template <class Config>
class FewDispatch {
  using Rows = FewRows<Config>;
  static constexpr int kRanks = Config::kRanks;
  static constexpr int kTopk = Config::kTopk;
  static constexpr FewTiles kTiles = MakeFewTiles(Rows::kVectors);
  static constexpr int kPerLane = kTiles.per_lane;
  static constexpr FewSlot kSlot = MakeFewSlot(
      kTiles.tiles, kTiles.tiles* FewTileBytes(kTiles), kTopk, Config::kHasWeights);

 public:
  static constexpr int kThreads = 32 * kFewDispatchWarps;

  __device__ static void Run(const DispatchParams& params) {
    __shared__ CallState state_storage;
    CallState* state = ptx::HoldShared(&state_storage);
    const CommonParams& common = params.common;
    const uint64_t signature = reinterpret_cast<uint64_t>(params.recv[0]) * 4 + 2;
    const int warp = threadIdx.x / 32;
    InitCall(state);
    __syncthreads();
    const bool keeps = warp == kFewDispatchWarps - 1;
    if (keeps) {
      BeginCall(common, signature, CallKind::kFew, state);
      if (blockIdx.x == 0) TellPeers(common, state, true);
    }
    MoveTiles(params, state, warp);
    if (keeps) {
      ZeroGaps(params);
      if (blockIdx.x == 0) AwaitPeers(common, state, kPhaseDispatchPeer);
    }
    EndCall(
        common, state,
        [&](int part, int parts) { PoisonDispatch<Config>(params, part, parts); },
        [&] { FinishFewCall<kRanks>(common, state); });
  }

 private:
  __device__ static __forceinline__ void MoveTiles(const DispatchParams& params,
                                                   CallState* state, int warp) {
    const int pairs = FewPairsOfBlock(params.num_tokens, kTiles.tiles);
    int item = warp;
#pragma unroll 1
    for (; item < pairs; item += kFewDispatchWarps) {
      const int pair = blockIdx.x + item * gridDim.x;
      SendTile(params, state, pair / kTiles.tiles, pair % kTiles.tiles);
    }
    if (Lane() == 0) NoteStamp(state, kStampLastSend);
    ZeroRest(params, warp);
    AwaitBegin(state);
#pragma unroll 1
    for (; item < pairs * kRanks; item += kFewDispatchWarps) {
      const int pair = blockIdx.x + item % pairs * gridDim.x;
      const int source = params.common.rank + item / pairs;  // each its own first
      ReceiveTile(params, state, source < kRanks ? source : source - kRanks,
                  pair / kTiles.tiles, pair % kTiles.tiles);
    }
    if (Lane() == 0) NoteStamp(state, kStampLastArrival);
  }

  // A row of the receive buffer in the lane of each entry, -1 where there is none.
  __device__ static __forceinline__ int RowOf(const DispatchParams& params,
                                              const int32_t* slots, int64_t token) {
    const int row = Lane() < kTopk ? slots[token * kTopk + Lane()] : -1;
    return IsRow(row, params.capacity) ? row : -1;
  }

  __device__ static __forceinline__ int VectorOf(int tile, int i) {
    return (tile * kPerLane + i) * 32 + Lane();
  }

  __device__ static __forceinline__ void StoreTile(const DispatchParams& params,
                                                   int row, int tile,
                                                   const uint4 (&bits)[kPerLane]) {
    for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left != 0;
         left &= left - 1) {
      const int64_t to = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (VectorOf(tile, i) < Rows::kVectors) {
          Rows::Store(params, to, VectorOf(tile, i), bits[i]);
        }
      }
    }
  }

  __device__ static __forceinline__ void SendTile(const DispatchParams& params,
                                                  CallState* state, int64_t token,
                                                  int tile) {
    const CommonParams& common = params.common;
    const int me = common.rank;
    const int row = RowOf(params, params.slot, token);
    int owner = row >= 0 ? params.slot_rank[token * kTopk + Lane()] : -1;
    if (!IsRank<kRanks>(owner)) owner = -1;
    const bool has_extra = Config::kHasWeights && tile == 0;
    float weight = 0;
    if (has_extra && Lane() < kTopk) weight = params.weights[token * kTopk + Lane()];
    uint4 bits[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      bits[i] = VectorOf(tile, i) < Rows::kVectors
                    ? Rows::Load(params, token, VectorOf(tile, i))
                    : make_uint4(0, 0, 0, 0);
    }
    const uint64_t ranks = RankMask<kRanks>(owner);
    AwaitBegin(state);
    if (kRanks > 1 && !Failed(state)) {
      const uint32_t epoch = FewEpoch(state->number);
      Word128 words[kPerLane + 1];
      PackWords(bits, epoch, words);
#pragma unroll 1
      for (int hop = 1; hop < kRanks; ++hop) {
        const int to = me + hop < kRanks ? me + hop : me + hop - kRanks;
        if ((ranks >> to & 1) == 0) continue;
        uint8_t* slot =
            FewSlotAt(common, kRanks, to, me, token, kSlot.bytes, state->number);
        if (VectorOf(tile, 0) < Rows::kVectors) {
          SendWords(slot + tile * FewTileBytes(kTiles), words);
        }
        if (has_extra && Lane() < kTopk) {
          const Word128 extra[1] = {
              {__float_as_uint(weight), static_cast<uint64_t>(epoch) << 48}};
          SendWords(slot + kSlot.extra_offset, extra);
        }
      }
    }
    const int mine = owner == me ? row : -1;
    StoreTile(params, mine, tile, bits);
    if (has_extra && mine >= 0) params.recv_weights[mine] = weight;
  }

  __device__ static __forceinline__ void ReceiveTile(const DispatchParams& params,
                                                     CallState* state, int source,
                                                     int64_t token, int tile) {
    const CommonParams& common = params.common;
    const int row =
        RowOf(params, params.recv_slot + source * params.num_tokens * kTopk, token);
    if (!__any_sync(kAllLanes, row >= 0)) return;
    const uint32_t epoch = FewEpoch(state->number);
    const uint8_t* slot = FewSlotAt(common, kRanks, common.rank, source, token,
                                    kSlot.bytes, state->number);
    Word128 words[kPerLane + 1];
    AwaitWords(common, state, kPhaseFewDispatchRows, source,
               slot + tile * FewTileBytes(kTiles), epoch,
               VectorOf(tile, 0) < Rows::kVectors, words);
    uint4 bits[kPerLane];
    UnpackWords(words, bits);
    StoreTile(params, row, tile, bits);
    if (!Config::kHasWeights || tile != 0) return;
    Word128 extra[1];
    AwaitWords(common, state, kPhaseFewDispatchRows, source, slot + kSlot.extra_offset,
               epoch, row >= 0, extra);
    if (row >= 0) {
      params.recv_weights[row] = __uint_as_float(static_cast<uint32_t>(extra[0].low));
    }
  }

  // Rows of the last group's end on.
  __device__ static __forceinline__ int64_t Used(const DispatchParams& params) {
    const int last = params.num_local_experts - 1;
    return Clamped(params,
                   int64_t{params.group_offsets[last]} + params.group_counts[last]);
  }
  __device__ static __forceinline__ int64_t Clamped(const DispatchParams& params,
                                                    int64_t row) {
    return Max(0, Min(row, params.capacity));
  }

  __device__ static __forceinline__ void ZeroRest(const DispatchParams& params,
                                                  int warp) {
    Rows::Zero(params, Used(params), params.capacity,
               blockIdx.x + warp * static_cast<int>(gridDim.x),
               gridDim.x * kFewDispatchWarps);
  }

  // Zeroes the rows between groups; one warp of every block.
  __device__ static __forceinline__ void ZeroGaps(const DispatchParams& params) {
    const int groups = params.num_local_experts;
    for (int first = 0; first < groups - 1; first += 32) {
      const int group = first + Lane();
      int64_t begin = 0, end = 0;
      if (group < groups - 1) {
        begin = Clamped(
            params, int64_t{params.group_offsets[group]} + params.group_counts[group]);
        end = Clamped(params, params.group_offsets[group + 1]);
      }
      for (uint32_t left = __ballot_sync(kAllLanes, begin < end); left != 0;
           left &= left - 1) {
        const int lane = __ffs(left) - 1;
        Rows::Zero(params, __shfl_sync(kAllLanes, begin, lane),
                   __shfl_sync(kAllLanes, end, lane),
                   (blockIdx.x + first + lane) % gridDim.x, gridDim.x);
      }
    }
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_FEW_DISPATCH_CUH_
