// The expert side of a combine: a warp loads rows of y, a team of warps adds those of a
// token and source, one or two warps send the sums.

#ifndef JAX_EP_FFI_CUDA_COMBINE_SEND_CUH_
#define JAX_EP_FFI_CUDA_COMBINE_SEND_CUH_

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
class CombineSend {
  using Leaves = CombineLeaves<Config>;
  using Parts = CombineParts<Config>;
  using Input = CombineInput;
  using Output = CombineOutput;
  static constexpr int kRanks = Config::kRanks;
  static constexpr int kTopk = Config::kTopk;
  static constexpr CombineLayout kShape = Leaves::kShape;
  static constexpr int kSlotBytes = kShape.wire.slot_bytes;
  static constexpr int kTeamThreads = Leaves::kTeamThreads;

 public:
  __device__ static __forceinline__ void LoadRows(const CombineParams& params,
                                                  int channel, RingShape ring,
                                                  const Parts& parts) {
    constexpr int kStages = kShape.send_stages;
    constexpr int kGathers = Config::kHasWeights + Config::kHasRowValues;
    // Ranks in another order for each channel; see ring.cuh for the exception.
    const int rotation = kShape.wire.num_pieces <= ring.slots
                             ? (params.common.rank + channel) % kRanks
                             : 0;
    const auto source_of = [=](int pair) {
      const int source = pair % kRanks + rotation;
      return source < kRanks ? source : source - kRanks;
    };
    const auto index = [=](int pair) -> int64_t {
      return source_of(pair) * params.num_tokens + channel +
             static_cast<int64_t>(pair / kRanks) * ring.channels;
    };
    const int32_t* const arrays[1] = {params.recv_slot};
    const float* gathers[kGathers + 1] = {};
    if (Config::kHasWeights) gathers[0] = params.weights;
    if (Config::kHasRowValues) gathers[Config::kHasWeights] = params.row_values;
    RoutingBatches<kTopk, 1, kGathers> batches;
    batches.Start(parts.send_batches,
                  TokensOfChannel(params.num_tokens, channel, ring.channels) * kRanks,
                  params.capacity, arrays, gathers, index);

    uint32_t loaded = 0;
    while (batches.Next(index)) {
      bool any = false;
      if (Lane() < batches.kPairs) {
#pragma unroll
        for (int k = 0; k < kTopk; ++k) {
          any |= IsRow(batches.Entry(0, Lane(), k), params.capacity);
        }
      }
      for (uint32_t pairs = __ballot_sync(kAllLanes, any); pairs != 0;
           pairs &= pairs - 1) {
        const int pair = __ffs(pairs) - 1;
        const int source = source_of(batches.FirstPair() + pair);
        int row = -1;
        float weight = 0, value = 0;
        if (Lane() < kTopk) {
          row = batches.Entry(0, pair, Lane());
          if (Config::kHasWeights) weight = batches.Gathered(0, pair, Lane());
          if (Config::kHasRowValues) {
            value = batches.Gathered(Config::kHasWeights, pair, Lane());
          }
        }
        const uint32_t rows = __ballot_sync(kAllLanes, IsRow(row, params.capacity));
        Leaves::ForEachPiece([&](auto leaf_type, int leaf, int piece) {
          using L = decltype(leaf_type);
          for (uint32_t left = rows; left != 0; left &= left - 1) {
            const int entry = __ffs(left) - 1;
            const uint32_t stage = loaded % kStages;
            // Before the shuffles, where lanes meet: else one could come back to this
            // stage before another has seen that it is empty.
            AwaitEmpty<kStages>(parts.send_empty, loaded);
            const int64_t from = __shfl_sync(kAllLanes, row, entry);
            const float scale = __shfl_sync(kAllLanes, weight, entry);
            const float row_value =
                Config::kHasRowValues ? __shfl_sync(kAllLanes, value, entry) : 0;
            Input* input = parts.send_inputs + stage;
            if (Lane() == 0) {
              input->inputs = __popc(rows);
              input->leaf = leaf;
              input->piece = piece;
              input->rank = source;
              input->row = static_cast<int32_t>(from);
              input->weight = scale;
              input->value = row_value;
              input->entries = 1u << entry;
              uint64_t* full = parts.send_full + stage;
              if (L::kBulk) {
                const uint32_t bytes = L::Elements(piece) * L::kItem;
                ptx::BarrierArriveExpect(full, bytes);
                ptx::BulkLoad(parts.send_stages + stage * Parts::kInBytes,
                              static_cast<const uint8_t*>(params.y[leaf]) +
                                  L::ByteOffset(from, piece),
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
    AwaitEmpty<kStages>(parts.send_empty, loaded);
    if (Lane() == 0) {
      parts.send_inputs[loaded % kStages].inputs = -1;
      ptx::BarrierArrive(parts.send_full + loaded % kStages);
    }
  }

  __device__ static __forceinline__ void AddRows(const CombineParams& params,
                                                 const Parts& parts, int thread) {
    constexpr int kStages = kShape.send_stages;
    uint32_t used = 0, sums = 0;
    while (true) {
      AwaitFull<kStages>(parts.send_full, used);
      const Input* input = parts.send_inputs + used % kStages;
      const int inputs = input->inputs;
      if (inputs < 0) break;
      Leaves::VisitLeaf(input->leaf, [&](auto leaf_type) {
        AddRowsOfSum<decltype(leaf_type)>(params, parts, thread, inputs, &used, sums);
      });
      ++sums;
    }
    AwaitEmpty<kShape.out_stages>(parts.out_empty, sums);
    if (thread == 0) parts.outputs[sums % kShape.out_stages].rank = -1;
    ArriveWarp(parts.out_full + sums % kShape.out_stages);
  }

  // Sends the sums whose rank is `sender_warp` modulo `senders`.
  __device__ static __forceinline__ void SendSums(const CombineParams& params,
                                                  CallState* state, int channel,
                                                  RingShape ring, const Parts& parts,
                                                  int sender_warp, int senders) {
    constexpr int kStages = kShape.out_stages;
    AwaitBegin(state);
    Sender<kRanks> sender(params.common, state, channel, ring, kSlotBytes,
                          kPhaseCombineReuse, kPhaseCombineCredit, /*prompt=*/false);
    sender.Begin();
    for (uint32_t sums = 0;; ++sums) {
      const uint32_t stage = sums % kStages;
      // Where sums are many, publishing takes longer than one: only when none comes for
      // a while (0.5 us).
      const uint32_t patience = senders == 1 ? 0 : 1000;
      const uint32_t start = ptx::Cycles();
      bool ready = false, idle = false;
      while (!ready && !idle) {
        ready = __all_sync(kAllLanes, ptx::BarrierTestWait(parts.out_full + stage,
                                                           sums / kStages & 1));
        idle = __any_sync(kAllLanes, ptx::Cycles() - start >= patience);
      }
      if (!ready) sender.Flush();
      AwaitFull<kStages>(parts.out_full, sums);
      const Output output = parts.outputs[stage];
      if (output.rank < 0) break;
      if (output.rank % senders == sender_warp) {
#pragma unroll
        for (int i = 0; i < Sender<kRanks>::kPerLane; ++i) {
          sender.Reserve(i, sender.Rank(i) == output.rank);
        }
#pragma unroll
        for (int i = 0; i < Sender<kRanks>::kPerLane; ++i) {
          if (sender.Rank(i) == output.rank) {
            sender.Send(i, parts.out_stages + stage * kSlotBytes, output.bytes);
          }
        }
        sender.Commit();
        ptx::BulkWaitRead<0>();
      }
      ArriveWarp(parts.out_empty + stage);
    }
    if (Lane() == 0) NoteStamp(state, kStampLastSend);
    sender.Flush();
  }

 private:
  template <class L>
  __device__ static __forceinline__ void AddRowsOfSum(const CombineParams& params,
                                                      const Parts& parts, int thread,
                                                      int inputs, uint32_t* used,
                                                      uint32_t sums) {
    constexpr int kStages = kShape.send_stages;
    const Input* first = parts.send_inputs + *used % kStages;
    const int piece = first->piece;
    const int rank = first->rank;
    const bool extra = Config::kHasRowValues && first->leaf == 0 && piece == 0;
    float value = 0;
    const int vectors = L::NumVectors(piece);
    float acc[L::kVectors][L::kSize] = {};
#pragma unroll 1
    for (int i = 0; i < inputs; ++i) {
      const uint32_t stage = *used % kStages;
      if (i > 0) AwaitFull<kStages>(parts.send_full, *used);
      const float weight = Config::kHasWeights ? parts.send_inputs[stage].weight : 0;
      const uint8_t* bytes = parts.send_stages + stage * Parts::kInBytes;
      const int64_t row = parts.send_inputs[stage].row;
      if (extra && thread < kTopk && (parts.send_inputs[stage].entries >> thread & 1)) {
        value = parts.send_inputs[stage].value;
      }
#pragma unroll
      for (int v = 0; v < L::kVectors; ++v) {
        const int index = v * kTeamThreads + thread;
        if (L::kExact || index < vectors) {
          uint4 bits;
          if constexpr (L::kBulk) {
            bits = reinterpret_cast<const uint4*>(bytes)[index];
          } else {
            bits = Vector<L::kDtype>::LoadTail(
                static_cast<const uint8_t*>(params.y[L::kIndex]) +
                    L::ByteOffset(row, 0),
                L::First(piece) + index * L::kSize, L::kWidth);
          }
          float values[L::kSize];
          L::Traits::Unpack(bits, values);
          Accumulate<Config::kHasWeights>(acc[v], values, weight);
        }
      }
      ArriveWarp(parts.send_empty + stage);
      ++*used;
    }
    const uint32_t stage = sums % kShape.out_stages;
    AwaitEmpty<kShape.out_stages>(parts.out_empty, sums);
    uint8_t* out = parts.out_stages + stage * kSlotBytes;
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
      const int index = v * kTeamThreads + thread;
      if (L::kExact || index < vectors) L::StoreWire(out, index, acc[v]);
    }
    if (extra && thread < kTopk) {
      reinterpret_cast<float*>(out + kShape.wire.wire_bytes)[thread] = value;
    }
    if (thread == 0) {
      parts.outputs[stage].rank = rank;
      parts.outputs[stage].bytes =
          extra ? kShape.wire.wire_bytes + kShape.wire.extra_bytes
                : L::WireBytes(piece);
    }
    ptx::FenceSharedForBulk();
    ArriveWarp(parts.out_full + stage);
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_COMBINE_SEND_CUH_
