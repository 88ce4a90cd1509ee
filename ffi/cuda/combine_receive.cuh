// The source side of a combine: a warp loads the sums that arrive, a team of warps adds
// those of a token, and its bias, and writes the result.

#ifndef JAX_EP_FFI_CUDA_COMBINE_RECEIVE_CUH_
#define JAX_EP_FFI_CUDA_COMBINE_RECEIVE_CUH_

#include "call.cuh"
#include "combine_leaves.cuh"
#include "combine_stages.cuh"
#include "launch_shape.h"
#include "numeric.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "routing.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

template <class Config>
class CombineReceive {
  using Leaves = CombineLeaves<Config>;
  using Parts = CombineParts<Config>;
  using Input = CombineInput;
  static constexpr int kRanks = Config::kRanks;
  static constexpr int kTopk = Config::kTopk;
  static constexpr CombineLayout kShape = Leaves::kShape;
  static constexpr int kSlotBytes = kShape.wire.slot_bytes;
  static constexpr int kTeamThreads = Leaves::kTeamThreads;

 public:
  __device__ static __forceinline__ void LoadSums(const CombineParams& params,
                                                  CallState* state, int channel,
                                                  RingShape ring, const Parts& parts) {
    constexpr int kStages = kShape.recv_stages;
    const auto token_of = [=](int pair) -> int64_t {
      return channel + static_cast<int64_t>(pair) * ring.channels;
    };
    const int32_t* const arrays[2] = {params.slot, params.slot_rank};
    const float* const none[1] = {nullptr};
    const int num_tokens = TokensOfChannel(params.num_tokens, channel, ring.channels);
    RoutingBatches<kTopk, 2, 0> batches;
    batches.Start(parts.recv_batches, num_tokens, params.capacity, arrays, none,
                  token_of);
    AwaitBegin(state);
    Receiver<kRanks> receiver(params.common, state, channel, ring, kSlotBytes,
                              kPhaseCombineRows);

    uint32_t loaded = 0, credited = 0;
    // Frees the ring slots of the first `count` inputs, whose loads are over.
    const auto credit = [&](uint32_t count) {
      for (; credited < count; ++credited) {
        AwaitFull<kStages>(parts.recv_full, credited);
        const int rank = parts.recv_inputs[credited % kStages].rank;
        if (rank >= 0) receiver.Consume(rank);
      }
    };
    // The next free stage, its description filled in by the lane that will arrive for
    // it; `owner` is of the lane's entry.
    const auto open = [&](int inputs, int leaf, int piece, int rank, int64_t token,
                          int owner) {
      const uint32_t stage = loaded % kStages;
      AwaitEmpty<kStages>(parts.recv_empty, loaded);
      if (loaded >= kStages) credit(loaded - kStages + 1);
      Input* input = parts.recv_inputs + stage;
      const uint32_t entries = __ballot_sync(kAllLanes, owner >= 0 && owner == rank);
      if (Lane() == (rank < 0 ? 0 : rank & 31)) {
        input->inputs = inputs;
        input->leaf = leaf;
        input->piece = piece;
        input->rank = rank;
        input->row = static_cast<int32_t>(token);
        input->entries = entries;
      }
      return stage;
    };

    while (batches.Next(token_of)) {
      const int pairs =
          static_cast<int>(Min(batches.kPairs, num_tokens - batches.FirstPair()));
      for (int pair = 0; pair < pairs; ++pair) {
        const int64_t token = token_of(batches.FirstPair() + pair);
        int owner = -1;
        if (Lane() < kTopk && IsRow(batches.Entry(0, pair, Lane()), params.capacity)) {
          owner = batches.Entry(1, pair, Lane());
          if (!IsRank<kRanks>(owner)) owner = -1;
        }
        uint64_t ranks = __reduce_or_sync(
            kAllLanes, owner >= 0 && owner < 32 ? 1u << (owner & 31) : 0);
        if (kRanks > 32) {
          ranks |= static_cast<uint64_t>(__reduce_or_sync(
                       kAllLanes, owner >= 32 ? 1u << (owner & 31) : 0))
                   << 32;
        }
        const int inputs = __popcll(ranks) + Config::kHasBias;
        Leaves::ForEachPiece([&](auto leaf_type, int leaf, int piece) {
          using L = decltype(leaf_type);
          for (uint64_t left = ranks; left != 0; left &= left - 1) {
            const int rank = __ffsll(left) - 1;
            if (!receiver.Arrived(rank)) {
              credit(loaded);
              receiver.Await(rank);
            }
            const uint32_t stage = open(inputs, leaf, piece, rank, token, owner);
            const uint8_t* slot;
            if (receiver.Take(rank, &slot)) {
              const uint32_t bytes =
                  Config::kHasRowValues && leaf == 0 && piece == 0
                      ? kShape.wire.wire_bytes + kShape.wire.extra_bytes
                      : L::WireBytes(piece);
              ptx::BarrierArriveExpect(parts.recv_full + stage, bytes);
              ptx::BulkLoad(parts.recv_stages + stage * kSlotBytes, slot, bytes,
                            parts.recv_full + stage);
            }
            ++loaded;
          }
          if (Config::kHasBias || inputs == 0) {
            const uint32_t stage = open(inputs, leaf, piece, -1, token, owner);
            if (Lane() == 0) {
              uint64_t* full = parts.recv_full + stage;
              if (Config::kHasBias && L::kBulk) {
                const uint32_t bytes = L::Elements(piece) * L::kItem;
                ptx::BarrierArriveExpect(full, bytes);
                ptx::BulkLoad(parts.recv_stages + stage * kSlotBytes,
                              static_cast<const uint8_t*>(params.bias[leaf]) +
                                  L::ByteOffset(token, piece),
                              bytes, full);
              } else {
                ptx::BarrierArrive(full);
              }
            }
            ++loaded;
          }
        });
      }
    }
    if (Lane() == 0) NoteStamp(state, kStampLastArrival);
    open(-1, 0, 0, -1, 0, -1);
    if (Lane() == 0) ptx::BarrierArrive(parts.recv_full + loaded % kStages);
  }

  __device__ static __forceinline__ void WriteSums(const CombineParams& params,
                                                   const Parts& parts, int thread) {
    constexpr int kStages = kShape.recv_stages;
    uint32_t used = 0;
    while (true) {
      AwaitFull<kStages>(parts.recv_full, used);
      const Input* input = parts.recv_inputs + used % kStages;
      const int inputs = input->inputs;
      if (inputs < 0) break;
      Leaves::VisitLeaf(input->leaf, [&](auto leaf_type) {
        WriteSum<decltype(leaf_type)>(params, parts, thread, inputs, &used);
      });
    }
  }

 private:
  template <class L>
  __device__ static __forceinline__ void WriteSum(const CombineParams& params,
                                                  const Parts& parts, int thread,
                                                  int inputs, uint32_t* used) {
    constexpr int kStages = kShape.recv_stages;
    constexpr int kLeaf = L::kIndex;
    const Input* first = parts.recv_inputs + *used % kStages;
    const int piece = first->piece;
    const int64_t token = first->row;
    const bool extra =
        Config::kHasRowValues && kLeaf == 0 && piece == 0 && thread < kTopk;
    float value = 0;
    const int vectors = L::NumVectors(piece);
    float acc[L::kVectors][L::kSize] = {};
#pragma unroll 1
    for (int i = 0; i < (inputs > 0 ? inputs : 1); ++i) {
      const uint32_t stage = *used % kStages;
      if (i > 0) AwaitFull<kStages>(parts.recv_full, *used);
      const uint8_t* bytes = parts.recv_stages + stage * kSlotBytes;
      const int rank = parts.recv_inputs[stage].rank;
      if (rank >= 0) {
#pragma unroll
        for (int v = 0; v < L::kVectors; ++v) {
          const int index = v * kTeamThreads + thread;
          if (L::kExact || index < vectors) {
            float values[L::kSize];
            L::LoadWire(bytes, index, values);
            Accumulate<false>(acc[v], values, 0);
          }
        }
        if (extra && (parts.recv_inputs[stage].entries >> thread & 1)) {
          value =
              reinterpret_cast<const float*>(bytes + kShape.wire.wire_bytes)[thread];
        }
      } else if (Config::kHasBias) {
#pragma unroll
        for (int v = 0; v < L::kVectors; ++v) {
          const int index = v * kTeamThreads + thread;
          if (L::kExact || index < vectors) {
            uint4 bits;
            if constexpr (L::kBulk) {
              bits = reinterpret_cast<const uint4*>(bytes)[index];
            } else {
              bits = Vector<L::kDtype>::LoadTail(
                  static_cast<const uint8_t*>(params.bias[kLeaf]) +
                      L::ByteOffset(token, 0),
                  L::First(piece) + index * L::kSize, L::kWidth);
            }
            float values[L::kSize];
            L::Traits::Unpack(bits, values);
            Accumulate<false>(acc[v], values, 0);
          }
        }
      }
      ArriveWarp(parts.recv_empty + stage);
      ++*used;
    }
    uint8_t* out = static_cast<uint8_t*>(params.out[kLeaf]);
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
      const int index = v * kTeamThreads + thread;
      if (L::kExact || index < vectors) {
        if constexpr (Config::kOutF32) {
          L::StoreF32(out, token, L::First(piece) + index * L::kSize, acc[v]);
        } else if constexpr (L::kBulk) {
          ptx::StoreStreaming(
              reinterpret_cast<uint4*>(out + L::ByteOffset(token, piece)) + index,
              L::Traits::Pack(acc[v]));
        } else {
          Vector<L::kDtype>::StoreTail(out + L::ByteOffset(token, 0),
                                       L::First(piece) + index * L::kSize, L::kWidth,
                                       L::Traits::Pack(acc[v]));
        }
      }
    }
    if (extra) params.values[token * kTopk + thread] = value;
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_COMBINE_RECEIVE_CUH_
