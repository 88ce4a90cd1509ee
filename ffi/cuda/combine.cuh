// Combine: the expert rank adds a token's rows and sends one row per (token, rank);
// the source adds the ranks' rows while others are still under way.
//
// A block is one channel: a loader warp brings rows of y to shared memory, a team of
// warps adds them in registers, two sender warps send the sums; a second loader brings
// the sums that arrive, a second team adds those and writes the result. Sums for tokens
// of this rank take the same way, through this rank's own range of the ring. A leaf's
// row travels in pieces; a sum is a piece of a token's partial or final sum.

#ifndef JAX_EP_FFI_CUDA_COMBINE_CUH_
#define JAX_EP_FFI_CUDA_COMBINE_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "numeric.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "routing.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// `Config` has kRanks, kTopk, kHasWeights, kHasRowValues, kHasBias, kWireF32,
// kNumLeaves, Dtype(leaf) and Width(leaf).
template <class Config>
class Combine {
 public:
  static constexpr int kRanks = Config::kRanks;
  static constexpr int kTopk = Config::kTopk;
  static constexpr int kNumLeaves = Config::kNumLeaves;

  static constexpr CombineShape MakeWireShape() {
    int32_t dtypes[kNumLeaves] = {};
    int64_t widths[kNumLeaves] = {};
    for (int i = 0; i < kNumLeaves; ++i) {
      dtypes[i] = Config::Dtype(i);
      widths[i] = Config::Width(i);
    }
    return MakeCombineShape(dtypes, widths, kNumLeaves, kTopk, Config::kWireF32,
                            Config::kHasRowValues);
  }
  static constexpr CombineLayout kShape = MakeCombineLayout(MakeWireShape());
  static constexpr int kSlotBytes = kShape.wire.slot_bytes;
  static constexpr int kThreads = 32 * kCombineWarps;
  static constexpr int kTeamThreads = 32 * kTeamWarps;

  __device__ static void Run(const CombineParams& params, uint8_t* shared) {
    __shared__ CallState state_storage;
    CallState* state = ptx::HoldShared(&state_storage);
    shared = ptx::HoldShared(shared);
    const CommonParams& common = params.common;
    const uint64_t signature = reinterpret_cast<uint64_t>(params.out[0]) * 4 + 3;
    const RingShape ring = MakeRing(kRanks, kSlotBytes, gridDim.x);
    const int channel = blockIdx.x;
    const Parts parts(shared);
    const int senders =
        static_cast<int>(gridDim.x) <= kMaxBlocksWithTwoSenders ? kSenderWarps : 1;
    InitStages<kShape.send_stages>(parts.send_full, parts.send_empty, 1, kTeamWarps);
    InitStages<kShape.out_stages>(parts.out_full, parts.out_empty, kTeamWarps, senders);
    InitStages<kShape.recv_stages>(parts.recv_full, parts.recv_empty, 1, kTeamWarps);
    InitCall(state);
    ptx::BarrierInitFence();
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp == 0) BeginCall(common, signature, /*ring_call=*/true, state);
    if (channel >= ring.channels || (warp >= senders && warp < kSenderWarps)) {
      // Nothing to do.
    } else if (warp < kSenderWarps) {
      SendSums(params, state, channel, ring, parts, warp, senders);
    } else if (warp == kSenderWarps) {
      LoadRows(params, channel, ring, parts);
    } else if (warp == kSenderWarps + 1) {
      LoadSums(params, state, channel, ring, parts);
    } else if (warp < kSenderWarps + 2 + kTeamWarps) {
      AddRows(params, parts, threadIdx.x - 32 * (kSenderWarps + 2));
    } else {
      WriteSums(params, parts, threadIdx.x - 32 * (kSenderWarps + 2 + kTeamWarps));
    }
    EndCall(
        common, state, [&](int part, int count) { Poison(params, part, count); },
        [&] { FinishRingCall(common, state); });
  }

 private:
  // What a loader tells its team about the input in a stage; the lane that arrives at
  // its barrier writes it.
  struct Input {
    int32_t inputs;  // of this sum, the first one's stage says; -1 ends the work
    int32_t leaf;
    int32_t piece;
    int32_t rank;  // where the sum goes to, or came from; -1: bias, or no input
    int32_t row;   // of y, or the token
    float weight;  // of the row
    float value;
    // Bit k: entry k of the token is this row, or has its row on this rank.
    uint32_t entries;
  };

  // What the team tells the sender about a sum.
  struct Output {
    int32_t rank;  // to send to; -1 ends the work
    uint32_t bytes;
  };

  struct Parts {
    uint8_t* send_stages;
    uint8_t* recv_stages;
    uint8_t* out_stages;
    int32_t* send_batches;
    int32_t* recv_batches;
    Input* send_inputs;
    Input* recv_inputs;
    Output* outputs;
    uint64_t *send_full, *send_empty, *recv_full, *recv_empty, *out_full, *out_empty;

    __device__ __forceinline__ explicit Parts(uint8_t* shared) {
      send_stages = shared;
      recv_stages = send_stages + kShape.send_stages * kInBytes;
      out_stages = recv_stages + kShape.recv_stages * kSlotBytes;
      uint8_t* meta = out_stages + kShape.out_stages * kSlotBytes;
      send_batches = reinterpret_cast<int32_t*>(meta);
      recv_batches = send_batches + 3 * 3 * kBatchEntries;
      meta += kCombineMetaBytes;
      send_full = reinterpret_cast<uint64_t*>(meta);
      send_empty = send_full + kShape.send_stages;
      recv_full = send_empty + kShape.send_stages;
      recv_empty = recv_full + kShape.recv_stages;
      out_full = recv_empty + kShape.recv_stages;
      out_empty = out_full + kShape.out_stages;
      send_inputs = reinterpret_cast<Input*>(out_empty + kShape.out_stages);
      recv_inputs = send_inputs + kShape.send_stages;
      outputs = reinterpret_cast<Output*>(recv_inputs + kShape.recv_stages);
    }
  };
  static constexpr int64_t kInBytes = AlignUp(kShape.wire.in_bytes, 128);
  static_assert(sizeof(Input) + 16 <= kStageMetaBytes, "launch_shape.h");

  // Compile-time facts of a leaf.
  template <int kLeaf>
  struct Leaf {
    static constexpr int kDtype = Config::Dtype(kLeaf);
    using Traits = Numeric<kDtype>;
    static constexpr int64_t kWidth = Config::Width(kLeaf);
    static constexpr int kItem = Traits::kItem;
    static constexpr int kWireItem = Config::kWireF32 ? 4 : kItem;
    static constexpr CombineLeaf kShape = MakeCombineLeaf(kWidth, kWireItem);
    static constexpr int kSize = Traits::kVector;
    // Vectors of a piece per thread of a team.
    static constexpr int kVectors =
        (kShape.piece_elems / kSize + kTeamThreads - 1) / kTeamThreads;
    // Whether every thread has exactly so many.
    static constexpr bool kExact =
        kShape.num_pieces == 1 &&
        (kWidth + kSize - 1) / kSize == kVectors * kTeamThreads;
    // Whether bulk copies can move rows of y, bias and the result.
    static constexpr bool kBulk = kWidth * kItem % 16 == 0;

    __device__ static __forceinline__ int64_t First(int piece) {
      return kShape.num_pieces == 1 ? 0
                                    : static_cast<int64_t>(piece) * kShape.piece_elems;
    }
    __device__ static __forceinline__ int Elements(int piece) {
      return static_cast<int>(Min(kShape.piece_elems, kWidth - First(piece)));
    }
    __device__ static __forceinline__ int NumVectors(int piece) {
      return (Elements(piece) + kSize - 1) / kSize;
    }
    __device__ static __forceinline__ uint32_t WireBytes(int piece) {
      return NumVectors(piece) * kSize * kWireItem;
    }
    __device__ static __forceinline__ int64_t ByteOffset(int64_t row, int piece) {
      return (row * kWidth + First(piece)) * kItem;
    }
  };

  // Calls visitor(Leaf) for the leaf with this number.
  template <int kLeaf = 0, class Visitor>
  __device__ static __forceinline__ void VisitLeaf(int leaf, Visitor visitor) {
    if (kLeaf + 1 == kNumLeaves || leaf == kLeaf) {
      visitor(Leaf<kLeaf>{});
    } else if constexpr (kLeaf + 1 < kNumLeaves) {
      VisitLeaf<kLeaf + 1>(leaf, visitor);
    }
  }
  // Calls visitor(Leaf, leaf, piece) for every piece of every leaf in order.
  template <int kLeaf = 0, class Visitor>
  __device__ static __forceinline__ void ForEachPiece(Visitor visitor) {
    for (int piece = 0; piece < Leaf<kLeaf>::kShape.num_pieces; ++piece) {
      visitor(Leaf<kLeaf>{}, kLeaf, piece);
    }
    if constexpr (kLeaf + 1 < kNumLeaves) ForEachPiece<kLeaf + 1>(visitor);
  }

  template <int kStages>
  __device__ static __forceinline__ void InitStages(uint64_t* full, uint64_t* empty,
                                                    int writers, int readers) {
    if (threadIdx.x >= kStages) return;
    ptx::BarrierInit(full + threadIdx.x, writers);
    ptx::BarrierInit(empty + threadIdx.x, readers);
  }

  // A stage's barriers: `full` completes with the load, `empty` when the team has read.
  // `use` counts the stages used before.
  template <int kStages>
  __device__ static __forceinline__ void AwaitEmpty(uint64_t* empty, uint32_t use) {
    // Pairs with the readers' arrivals.
    if (use >= kStages) {
      ptx::BarrierWait(empty + use % kStages, (use / kStages - 1) & 1);
    }
  }
  template <int kStages>
  __device__ static __forceinline__ void AwaitFull(uint64_t* full, uint32_t use) {
    // Pairs with the loader's arrival and the copy engine's completion.
    ptx::BarrierWait(full + use % kStages, use / kStages & 1);
  }
  // Arrives for the warp, whose lanes are done with the stage.
  __device__ static __forceinline__ void ArriveWarp(uint64_t* barrier) {
    __syncwarp();
    if (Lane() == 0) ptx::BarrierArrive(barrier);
  }

  // --- expert side ------------------------------------------------------------------

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
                  arrays, gathers, index);

    uint32_t loaded = 0;
    while (batches.Next(index)) {
      bool any = false;
      if (Lane() < batches.kPairs) {
#pragma unroll
        for (int k = 0; k < kTopk; ++k) any |= batches.Entry(0, Lane(), k) >= 0;
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
        const uint32_t rows = __ballot_sync(kAllLanes, row >= 0);
        ForEachPiece([&](auto leaf_type, int leaf, int piece) {
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
                ptx::BulkLoad(parts.send_stages + stage * kInBytes,
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
      VisitLeaf(input->leaf, [&](auto leaf_type) {
        AddRowsOfSum<decltype(leaf_type)>(params, parts, thread, inputs, &used, sums);
      });
      ++sums;
    }
    AwaitEmpty<kShape.out_stages>(parts.out_empty, sums);
    if (thread == 0) parts.outputs[sums % kShape.out_stages].rank = -1;
    ArriveWarp(parts.out_full + sums % kShape.out_stages);
  }

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
      const uint8_t* bytes = parts.send_stages + stage * kInBytes;
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
                static_cast<const uint8_t*>(params.y[LeafIndex<L>()]) +
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
      if (L::kExact || index < vectors) StoreWire<L>(out, index, acc[v]);
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

  template <class L, int kLeaf = 0>
  __device__ static constexpr int LeafIndex() {
    if constexpr (SameType<L, Leaf<kLeaf>>::kValue) {
      return kLeaf;
    } else {
      return LeafIndex<L, kLeaf + 1>();
    }
  }
  template <class A, class B>
  struct SameType {
    static constexpr bool kValue = false;
  };
  template <class A>
  struct SameType<A, A> {
    static constexpr bool kValue = true;
  };

  // Vector `index` of a sum on the wire: in the leaf's type, rounded once, or float32.
  template <class L>
  __device__ static __forceinline__ void StoreWire(uint8_t* out, int index,
                                                   const float (&sum)[L::kSize]) {
    uint4* vectors = reinterpret_cast<uint4*>(out);
    if constexpr (L::kWireItem == L::kItem) {
      vectors[index] = L::Traits::Pack(sum);
    } else {
#pragma unroll
      for (int h = 0; h < L::kSize / 4; ++h) {
        const float part[4] = {sum[4 * h], sum[4 * h + 1], sum[4 * h + 2],
                               sum[4 * h + 3]};
        vectors[index * (L::kSize / 4) + h] = Numeric<kLeafF32>::Pack(part);
      }
    }
  }
  template <class L>
  __device__ static __forceinline__ void LoadWire(const uint8_t* bytes, int index,
                                                  float (&values)[L::kSize]) {
    const uint4* vectors = reinterpret_cast<const uint4*>(bytes);
    if constexpr (L::kWireItem == L::kItem) {
      L::Traits::Unpack(vectors[index], values);
    } else {
#pragma unroll
      for (int h = 0; h < L::kSize / 4; ++h) {
        float part[4];
        Numeric<kLeafF32>::Unpack(vectors[index * (L::kSize / 4) + h], part);
#pragma unroll
        for (int j = 0; j < 4; ++j) values[4 * h + j] = part[j];
      }
    }
  }

  // --- source side ------------------------------------------------------------------

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
    batches.Start(parts.recv_batches, num_tokens, arrays, none, token_of);
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
        if (Lane() < kTopk && batches.Entry(0, pair, Lane()) >= 0) {
          owner = batches.Entry(1, pair, Lane());
        }
        uint64_t ranks = __reduce_or_sync(
            kAllLanes, owner >= 0 && owner < 32 ? 1u << (owner & 31) : 0);
        if (kRanks > 32) {
          ranks |= static_cast<uint64_t>(__reduce_or_sync(
                       kAllLanes, owner >= 32 ? 1u << (owner & 31) : 0))
                   << 32;
        }
        const int inputs = __popcll(ranks) + Config::kHasBias;
        ForEachPiece([&](auto leaf_type, int leaf, int piece) {
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
      VisitLeaf(input->leaf, [&](auto leaf_type) {
        WriteSum<decltype(leaf_type)>(params, parts, thread, inputs, &used);
      });
    }
  }

  template <class L>
  __device__ static __forceinline__ void WriteSum(const CombineParams& params,
                                                  const Parts& parts, int thread,
                                                  int inputs, uint32_t* used) {
    constexpr int kStages = kShape.recv_stages;
    constexpr int kLeaf = LeafIndex<L>();
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
            LoadWire<L>(bytes, index, values);
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
        const uint4 bits = L::Traits::Pack(acc[v]);
        if constexpr (L::kBulk) {
          ptx::StoreStreaming(
              reinterpret_cast<uint4*>(out + L::ByteOffset(token, piece)) + index,
              bits);
        } else {
          Vector<L::kDtype>::StoreTail(out + L::ByteOffset(token, 0),
                                       L::First(piece) + index * L::kSize, L::kWidth,
                                       bits);
        }
      }
    }
    if (extra) params.values[token * kTopk + thread] = value;
  }

  template <int kLeaf = 0>
  __device__ static void Poison(const CombineParams& params, int part, int parts) {
    FillBytes(params.out[kLeaf],
              params.num_tokens * Leaf<kLeaf>::kWidth * Leaf<kLeaf>::kItem, kPoison,
              part, parts);
    if constexpr (kLeaf + 1 < kNumLeaves) {
      Poison<kLeaf + 1>(params, part, parts);
    } else if (Config::kHasRowValues) {
      FillBytes(params.values, params.num_tokens * kTopk * 4, kPoison, part, parts);
    }
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_COMBINE_CUH_
