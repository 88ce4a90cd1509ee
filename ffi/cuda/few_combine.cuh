// Combine for few tokens: latency counts, not bytes. Same sums, same bits as combine.
//
// A warp has a tile of a token's row. As expert rank it adds the token's rows and sends
// the sum to its fixed slot (few_words.cuh); as source it adds its own rows, then what
// other ranks sent, by ascending rank, and writes the result. All sums for other ranks
// are sent before anything is waited for.

#ifndef JAX_EP_FFI_CUDA_FEW_COMBINE_CUH_
#define JAX_EP_FFI_CUDA_FEW_COMBINE_CUH_

#include "call.cuh"
#include "combine_leaves.cuh"
#include "few_shape.h"
#include "few_words.cuh"
#include "numeric.cuh"
#include "ptx.cuh"
#include "routing.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// `Config` is that of Combine.
template <class Config>
class FewCombine {
  using Leaves = CombineLeaves<Config>;
  static constexpr int kRanks = Config::kRanks;
  static constexpr int kTopk = Config::kTopk;

  // Compile-time facts of a leaf beside those of CombineLeaves.
  template <int kLeaf>
  struct Few {
    using L = typename Leaves::template Leaf<kLeaf>;
    static constexpr FewTiles kTiles = MakeFewLeaf(L::kWidth, L::kWireItem);
    static constexpr int kPerLane = kTiles.per_lane;
    static constexpr int kSize = 16 / L::kWireItem;  // elements of a vector
    static constexpr int kVectors = static_cast<int>((L::kWidth + kSize - 1) / kSize);
    using Wire = Numeric<L::kWireItem == L::kItem ? L::kDtype : int{kLeafF32}>;
    // The leaf's place among all tiles, and in the slot.
    static constexpr int FirstTile() {
      if constexpr (kLeaf == 0) {
        return 0;
      } else {
        return Few<kLeaf - 1>::FirstTile() + Few<kLeaf - 1>::kTiles.tiles;
      }
    }
    static constexpr int64_t Offset() {
      if constexpr (kLeaf == 0) {
        return 0;
      } else {
        return Few<kLeaf - 1>::Offset() +
               Few<kLeaf - 1>::kTiles.tiles * FewTileBytes(Few<kLeaf - 1>::kTiles);
      }
    }
  };
  using Last = Few<Config::kNumLeaves - 1>;
  static constexpr FewSlot kSlot =
      MakeFewSlot(Last::FirstTile() + Last::kTiles.tiles,
                  Last::Offset() + Last::kTiles.tiles * FewTileBytes(Last::kTiles),
                  kTopk, Config::kHasRowValues);

 public:
  static constexpr int kThreads = 32 * kFewCombineWarps;

  __device__ static void Run(const CombineParams& params) {
    __shared__ CallState state_storage;
    CallState* state = ptx::HoldShared(&state_storage);
    const CommonParams& common = params.common;
    const uint64_t signature = reinterpret_cast<uint64_t>(params.out[0]) * 4 + 3;
    const int warp = threadIdx.x / 32;
    InitCall(state);
    __syncthreads();
    const bool keeps = warp == kFewCombineWarps - 1;
    if (keeps) {
      BeginCall(common, signature, CallKind::kFew, state);
      if (blockIdx.x == 0) TellPeers(common, state, true);
    }
    MoveTiles(params, state, warp);
    if (keeps && blockIdx.x == 0) {
      AwaitPeers(common, state, kPhaseCombinePeer);
    }
    EndCall(
        common, state,
        [&](int part, int parts) { PoisonCombine<Config>(params, part, parts); },
        [&] { FinishFewCall<kRanks>(common, state); });
  }

 private:
  __device__ static __forceinline__ void MoveTiles(const CombineParams& params,
                                                   CallState* state, int warp) {
    const int pairs = FewPairsOfBlock(params.num_tokens, kSlot.tiles);
    int item = warp;
#pragma unroll 1
    for (; item < pairs * (kRanks - 1); item += kFewCombineWarps) {
      const int pair = blockIdx.x + item % pairs * gridDim.x;
      const int to = params.common.rank + 1 + item / pairs;
      VisitTile(pair % kSlot.tiles, [&](auto few, int tile) {
        SendSum<decltype(few)>(params, state, to < kRanks ? to : to - kRanks,
                               pair / kSlot.tiles, tile);
      });
    }
    if (Lane() == 0) NoteStamp(state, kStampLastSend);
#pragma unroll 1
    for (; item < pairs * kRanks; item += kFewCombineWarps) {
      const int pair = blockIdx.x + item % pairs * gridDim.x;
      VisitTile(pair % kSlot.tiles, [&](auto few, int tile) {
        WriteSum<decltype(few)>(params, state, pair / kSlot.tiles, tile);
      });
    }
    if (Lane() == 0) NoteStamp(state, kStampLastArrival);
  }

  // Calls visitor(Few, tile of the leaf) for a tile of the slot.
  template <int kLeaf = 0, class Visitor>
  __device__ static __forceinline__ void VisitTile(int tile, Visitor visitor) {
    if constexpr (kLeaf + 1 < Config::kNumLeaves) {
      if (tile >= Few<kLeaf + 1>::FirstTile()) {
        VisitTile<kLeaf + 1>(tile, visitor);
        return;
      }
    }
    visitor(Few<kLeaf>{}, tile - Few<kLeaf>::FirstTile());
  }

  template <class F>
  __device__ static __forceinline__ int VectorOf(int tile, int i) {
    return (tile * F::kPerLane + i) * 32 + Lane();
  }

  // A row of y in the lane of each entry of a token, -1 where there is none.
  __device__ static __forceinline__ int RowOf(const CombineParams& params,
                                              const int32_t* slots, int64_t token) {
    const int row = Lane() < kTopk ? slots[token * kTopk + Lane()] : -1;
    return IsRow(row, params.capacity) ? row : -1;
  }
  __device__ static __forceinline__ int ReceivedRowOf(const CombineParams& params,
                                                      int source, int64_t token) {
    return RowOf(params, params.recv_slot + source * params.num_tokens * kTopk, token);
  }

  // Vector `index` of a row of y, bias or the result, as bits of its own dtype; where
  // the wire is wider than that, in the first two words.
  template <class F>
  __device__ static __forceinline__ uint4 LoadVector(const void* rows, int64_t row,
                                                     int index) {
    using L = typename F::L;
    const uint8_t* data =
        static_cast<const uint8_t*>(rows) + row * (L::kWidth * L::kItem);
    if constexpr (!L::kBulk) {
      const uint4 bits = Vector<L::kDtype>::LoadTail(
          data, static_cast<int64_t>(index) * F::kSize, L::kWidth);
      return bits;
    } else if constexpr (F::kSize * L::kItem == 16) {
      return reinterpret_cast<const uint4*>(data)[index];
    } else {
      const uint2 half = reinterpret_cast<const uint2*>(data)[index];
      return make_uint4(half.x, half.y, 0, 0);
    }
  }
  template <class F>
  __device__ static __forceinline__ void StoreVector(void* rows, int64_t row, int index,
                                                     const float (&sum)[F::kSize]) {
    using L = typename F::L;
    float values[L::kSize];
#pragma unroll
    for (int i = 0; i < L::kSize; ++i) values[i] = i < F::kSize ? sum[i % F::kSize] : 0;
    const uint4 bits = L::Traits::Pack(values);
    uint8_t* data = static_cast<uint8_t*>(rows) + row * (L::kWidth * L::kItem);
    const int64_t first = static_cast<int64_t>(index) * F::kSize;
    if constexpr (!L::kBulk) {
      Vector<L::kDtype>::StoreTail(data, first, Min(L::kWidth, first + F::kSize), bits);
    } else if constexpr (F::kSize * L::kItem == 16) {
      ptx::StoreStreaming(reinterpret_cast<uint4*>(data) + index, bits);
    } else {
      reinterpret_cast<uint2*>(data)[index] = make_uint2(bits.x, bits.y);
    }
  }
  template <class F, bool kWeighted>
  __device__ static __forceinline__ void AddVector(float (&sum)[F::kSize], uint4 bits,
                                                   float weight) {
    using L = typename F::L;
    float all[L::kSize], values[F::kSize];
    L::Traits::Unpack(bits, all);
#pragma unroll
    for (int i = 0; i < F::kSize; ++i) values[i] = all[i];
    Accumulate<kWeighted>(sum, values, weight);
  }

  template <class F>
  __device__ static __forceinline__ void LoadTile(const CombineParams& params,
                                                  int64_t row, int tile,
                                                  uint4 (&bits)[F::kPerLane]) {
#pragma unroll
    for (int i = 0; i < F::kPerLane; ++i) {
      const int index = VectorOf<F>(tile, i);
      bits[i] = index < F::kVectors ? LoadVector<F>(params.y[F::L::kIndex], row, index)
                                    : make_uint4(0, 0, 0, 0);
    }
  }

  // The sum of a token's rows here as it crosses the wire, rounded once.
  template <class F>
  __device__ static __forceinline__ void AddRows(const CombineParams& params, int row,
                                                 int tile, uint4 (&wire)[F::kPerLane]) {
    float weight = 0;
    if (Config::kHasWeights && row >= 0) weight = params.weights[row];
    float sums[F::kPerLane][F::kSize] = {};
    uint32_t left = __ballot_sync(kAllLanes, row >= 0);
    if (left != 0) {
      uint4 bits[F::kPerLane];
      LoadTile<F>(params, __shfl_sync(kAllLanes, row, __ffs(left) - 1), tile, bits);
#pragma unroll 1
      while (left != 0) {
        const float scale = __shfl_sync(kAllLanes, weight, __ffs(left) - 1);
        left &= left - 1;
        // The next row's vectors are under way while this one's are added.
        const int64_t next = __shfl_sync(kAllLanes, row, (__ffs(left) - 1) & 31);
#pragma unroll
        for (int i = 0; i < F::kPerLane; ++i) {
          AddVector<F, Config::kHasWeights>(sums[i], bits[i], scale);
          const int index = VectorOf<F>(tile, i);
          if (left != 0 && index < F::kVectors) {
            bits[i] = LoadVector<F>(params.y[F::L::kIndex], next, index);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < F::kPerLane; ++i) wire[i] = F::Wire::Pack(sums[i]);
  }

  template <class F>
  __device__ static __forceinline__ void SendSum(const CombineParams& params,
                                                 CallState* state, int to,
                                                 int64_t token, int tile) {
    const int row = ReceivedRowOf(params, to, token);
    if (!__any_sync(kAllLanes, row >= 0)) return;
    const bool has_extra = Config::kHasRowValues && F::L::kIndex == 0 && tile == 0;
    float value = 0;
    if (has_extra && row >= 0) value = params.row_values[row];
    uint4 wire[F::kPerLane];
    AddRows<F>(params, row, tile, wire);
    AwaitBegin(state);
    if (Failed(state)) return;
    const uint32_t epoch = FewEpoch(state->number);
    Word128 words[F::kPerLane + 1];
    PackWords(wire, epoch, words);
    uint8_t* slot = FewSlotAt(params.common, kRanks, to, params.common.rank, token,
                              kSlot.bytes, state->number);
    if (VectorOf<F>(tile, 0) < F::kVectors) {
      SendWords(slot + F::Offset() + tile * FewTileBytes(F::kTiles), words);
    }
    if (has_extra && row >= 0) {
      const Word128 extra[1] = {
          {__float_as_uint(value), static_cast<uint64_t>(epoch) << 48}};
      SendWords(slot + kSlot.extra_offset, extra);
    }
  }

  template <class F>
  __device__ static __forceinline__ void WriteSum(const CombineParams& params,
                                                  CallState* state, int64_t token,
                                                  int tile) {
    const CommonParams& common = params.common;
    const int me = common.rank;
    const int slot_row = RowOf(params, params.slot, token);
    int owner = slot_row >= 0 ? params.slot_rank[token * kTopk + Lane()] : -1;
    if (!IsRank<kRanks>(owner)) owner = -1;
    const uint64_t ranks = RankMask<kRanks>(owner);
    const int row = owner == me ? slot_row : -1;
    const bool has_extra = Config::kHasRowValues && F::L::kIndex == 0 && tile == 0;
    float value = 0;
    if (has_extra && row >= 0) value = params.row_values[row];
    uint4 own[F::kPerLane];
    AddRows<F>(params, row, tile, own);
    AwaitBegin(state);
    const uint32_t epoch = FewEpoch(state->number);
    float sums[F::kPerLane][F::kSize] = {};
    const auto add = [&](const uint4(&wire)[F::kPerLane]) {
#pragma unroll
      for (int i = 0; i < F::kPerLane; ++i) {
        float values[F::kSize];
        F::Wire::Unpack(wire[i], values);
        Accumulate<false>(sums[i], values, 0);
      }
    };
#pragma unroll 1
    for (uint64_t left = ranks; left != 0; left &= left - 1) {
      const int from = __ffsll(left) - 1;
      if (from == me) {
        add(own);
        continue;
      }
      const uint8_t* slot =
          FewSlotAt(common, kRanks, me, from, token, kSlot.bytes, state->number);
      Word128 words[F::kPerLane + 1];
      AwaitWords(common, state, kPhaseFewCombineRows, from,
                 slot + F::Offset() + tile * FewTileBytes(F::kTiles), epoch,
                 VectorOf<F>(tile, 0) < F::kVectors, words);
      uint4 wire[F::kPerLane];
      UnpackWords(words, wire);
      add(wire);
      if (!has_extra) continue;
      Word128 extra[1];
      AwaitWords(common, state, kPhaseFewCombineRows, from, slot + kSlot.extra_offset,
                 epoch, owner == from, extra);
      if (owner == from) {
        value = __uint_as_float(static_cast<uint32_t>(extra[0].low));
      }
    }
#pragma unroll
    for (int i = 0; i < F::kPerLane; ++i) {
      const int index = VectorOf<F>(tile, i);
      if (index >= F::kVectors) continue;
      if constexpr (Config::kHasBias) {
        AddVector<F, false>(sums[i],
                            LoadVector<F>(params.bias[F::L::kIndex], token, index), 0);
      }
      if constexpr (Config::kOutF32) {
        F::L::StoreF32(params.out[F::L::kIndex], token,
                       static_cast<int64_t>(index) * F::kSize, sums[i]);
      } else {
        StoreVector<F>(params.out[F::L::kIndex], token, index, sums[i]);
      }
    }
    if (has_extra && Lane() < kTopk) params.values[token * kTopk + Lane()] = value;
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_FEW_COMBINE_CUH_
