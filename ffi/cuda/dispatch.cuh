// Dispatch: each token crosses the link once per destination rank and is written to
// all its rows there, while others are still under way.
//
// A block has, per channel, a sender warp and a receiver warp, and one warp for the
// gaps. The sender loads a token's row into shared memory once and copies it from
// there to the ring of every destination and to its rows on this rank. The receiver
// copies ring slots to shared memory and from there to each row. Rows travel in
// pieces; `item` is a piece of a token.
//
// Two SMs share a path to memory, and where both have a block they write half as fast
// as one alone. So where memory is what binds, the last tokens' rows on this rank
// belong to no channel: senders take them, a few at a time, when they have sent all of
// theirs. Where the link binds, they are written while it is busy.

#ifndef JAX_EP_FFI_CUDA_DISPATCH_CUH_
#define JAX_EP_FFI_CUDA_DISPATCH_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "ptx.cuh"
#include "ring.cuh"
#include "routing.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// `Config` has kRanks, kTopk, kHasWeights, kNumLeaves and LeafBytes(leaf).
template <class Config>
class Dispatch {
 public:
  static constexpr int kRanks = Config::kRanks;
  static constexpr int kTopk = Config::kTopk;
  static constexpr int kPerLane = (kRanks + 31) / 32;

  static constexpr int64_t LeafOffset(int leaf) {
    int64_t offset = 0;
    for (int i = 0; i < leaf; ++i) offset += AlignUp(Config::LeafBytes(i), 16);
    return offset;
  }

  static constexpr DispatchShape kShape = MakeDispatchShape(
      MakeWire(LeafOffset(Config::kNumLeaves), kTopk, Config::kHasWeights));
  static constexpr int kPieceBytes = kShape.wire.piece_bytes;
  static constexpr int kSlotBytes = kShape.wire.slot_bytes;
  static constexpr int kNumPieces = kShape.wire.num_pieces;
  static constexpr int kThreads = 32 * (2 * kShape.channels + 1);

  // Whether bulk copies can move a leaf's rows; else the warp copies them itself.
  static constexpr bool IsBulk(int leaf) { return Config::LeafBytes(leaf) % 16 == 0; }

  __device__ static void Run(const DispatchParams& params, uint8_t* shared) {
    __shared__ CallState state_storage;
    __shared__ uint64_t roles_storage;
    CallState* state = ptx::HoldShared(&state_storage);
    // Completes when the block's senders and receivers are done.
    uint64_t* roles_done = ptx::HoldShared(&roles_storage);
    shared = ptx::HoldShared(shared);
    const CommonParams& common = params.common;
    const uint64_t signature = reinterpret_cast<uint64_t>(params.recv[0]) * 4 + 2;
    const RingShape ring = MakeRing(kRanks, kSlotBytes, gridDim.x * kShape.channels);
    const int warp = threadIdx.x / 32;
    const int channel = blockIdx.x + (warp >> 1) * gridDim.x;
    InitCall(state);
    if (threadIdx.x == 0) ptx::BarrierInit(roles_done, 2 * kShape.channels);
    ptx::BarrierInitFence();
    __syncthreads();
    if (warp == 2 * kShape.channels) {
      BeginCall(common, signature, /*ring_call=*/true, state);
      ZeroGaps(params, state, shared, roles_done);
    } else {
      if (channel >= ring.channels) {
        // Nothing to do.
      } else if ((warp & 1) == 0) {
        Send(params, state, channel, ring, SenderShared(shared, warp >> 1));
      } else {
        Receive(params, state, channel, ring, ReceiverShared(shared, warp >> 1));
      }
      __syncwarp();
      if (Lane() == 0) ptx::BarrierArrive(roles_done);
    }
    EndCall(
        common, state, [&](int part, int parts) { Poison(params, part, parts); },
        [&] { FinishRingCall(common, state); });
  }

 private:
  // Shared memory of a warp: pieces first, which need 128-byte alignment.
  struct Part {
    uint8_t* stages;
    uint64_t* barriers;
    int2* queue;  // [stage][lane]
    int32_t* batches;
    uint64_t* masks;  // [pair of a batch], sender only
  };
  static constexpr int64_t StageBytes(int stages) {
    return static_cast<int64_t>(stages) * kSlotBytes;
  }
  static constexpr int64_t kChannelStages = kShape.send_stages + kShape.recv_stages;

  __device__ static __forceinline__ Part SenderShared(uint8_t* shared, int index) {
    Part part;
    part.stages = shared + kZeroBytes + index * StageBytes(kChannelStages);
    uint8_t* meta = Meta(shared, index);
    part.queue = reinterpret_cast<int2*>(meta);
    meta += kChannelStages * kQueueBytes;
    part.batches = reinterpret_cast<int32_t*>(meta);
    part.masks = reinterpret_cast<uint64_t*>(meta + 2 * 3 * kBatchEntries * 4);
    meta += kSenderMetaBytes + kReceiverMetaBytes;
    part.barriers = reinterpret_cast<uint64_t*>(meta);
    return part;
  }
  __device__ static __forceinline__ Part ReceiverShared(uint8_t* shared, int index) {
    Part part = SenderShared(shared, index);
    part.stages += StageBytes(kShape.send_stages);
    part.queue += kShape.send_stages * 32;
    part.batches += kSenderMetaBytes / 4;
    part.barriers += kShape.send_stages;
    return part;
  }
  __device__ static __forceinline__ uint8_t* Meta(uint8_t* shared, int index) {
    return shared + kZeroBytes + kShape.channels * StageBytes(kChannelStages) +
           index * (kChannelStages * (kQueueBytes + 8) + kSenderMetaBytes +
                    kReceiverMetaBytes);
  }

  // The part of a piece that belongs to a leaf: bytes [begin, end) of the piece, which
  // are bytes `from` and on of the leaf's row. `end` is beyond the row where the wire
  // pads.
  struct Segment {
    int32_t begin, end;
    int64_t from;
  };
  __device__ static __forceinline__ Segment LeafSegment(int leaf, int piece) {
    const int64_t offset = LeafOffset(leaf);
    const int64_t padded = AlignUp(Config::LeafBytes(leaf), 16);
    const int64_t start = static_cast<int64_t>(piece) * kPieceBytes;
    const int64_t begin = Max(offset, start);
    const int64_t end = Min(offset + padded, start + kPieceBytes);
    return {static_cast<int32_t>(begin - start),
            static_cast<int32_t>(Max(begin, end) - start), begin - offset};
  }

  // Bytes that the ring carries for a piece.
  __device__ static __forceinline__ uint32_t WireBytes(int piece) {
    if (piece == 0 && Config::kHasWeights) {
      return kPieceBytes + kShape.wire.extra_bytes;
    }
    return static_cast<uint32_t>(
        Min(kPieceBytes,
            kShape.wire.row_bytes - static_cast<int64_t>(piece) * kPieceBytes));
  }

  // The widest access that fits every row of a leaf that bulk copies cannot move.
  template <int kBytes>
  __device__ static __forceinline__ void CopyRow(uint8_t* to, const uint8_t* from,
                                                 int64_t bytes) {
    using Unit = typename UnitOf<kBytes>::Type;
    for (int64_t i = Lane(); i < bytes / kBytes; i += 32) {
      reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    }
  }
  template <int kBytes, class = void>
  struct UnitOf;
  template <class Void>
  struct UnitOf<1, Void> {
    using Type = uint8_t;
  };
  template <class Void>
  struct UnitOf<2, Void> {
    using Type = uint16_t;
  };
  template <class Void>
  struct UnitOf<4, Void> {
    using Type = uint32_t;
  };
  template <class Void>
  struct UnitOf<8, Void> {
    using Type = uint64_t;
  };
  static constexpr int UnitBytes(int64_t row_bytes) {
    return row_bytes % 8 == 0 ? 8 : row_bytes % 4 == 0 ? 4 : row_bytes % 2 == 0 ? 2 : 1;
  }

  // Copies rows of a leaf that is not IsBulk between global and shared memory.
  template <int kLeaf>
  __device__ static __forceinline__ void LoadSmall(const DispatchParams& params,
                                                   int64_t token, int piece,
                                                   uint8_t* stage) {
    if constexpr (!IsBulk(kLeaf)) {
      constexpr int64_t kBytes = Config::LeafBytes(kLeaf);
      const Segment part = LeafSegment(kLeaf, piece);
      CopyRow<UnitBytes(kBytes)>(
          stage + part.begin,
          static_cast<const uint8_t*>(params.x[kLeaf]) + token * kBytes + part.from,
          Min(part.end - part.begin, kBytes - part.from));
    }
    if constexpr (kLeaf + 1 < Config::kNumLeaves) {
      LoadSmall<kLeaf + 1>(params, token, piece, stage);
    }
  }
  template <int kLeaf>
  __device__ static __forceinline__ void StoreSmall(const DispatchParams& params,
                                                    int64_t row, int piece,
                                                    const uint8_t* stage) {
    if constexpr (!IsBulk(kLeaf)) {
      constexpr int64_t kBytes = Config::LeafBytes(kLeaf);
      const Segment part = LeafSegment(kLeaf, piece);
      CopyRow<UnitBytes(kBytes)>(
          static_cast<uint8_t*>(params.recv[kLeaf]) + row * kBytes + part.from,
          stage + part.begin, Min(part.end - part.begin, kBytes - part.from));
    }
    if constexpr (kLeaf + 1 < Config::kNumLeaves) {
      StoreSmall<kLeaf + 1>(params, row, piece, stage);
    }
  }
  static constexpr bool HasSmall() {
    for (int i = 0; i < Config::kNumLeaves; ++i) {
      if (!IsBulk(i)) return true;
    }
    return false;
  }

  // Starts the load of a token's piece; one lane.
  __device__ static __forceinline__ void LoadBulk(const DispatchParams& params,
                                                  int64_t token, int piece,
                                                  uint8_t* stage, uint64_t* barrier) {
    uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < Config::kNumLeaves; ++i) {
      const Segment part = LeafSegment(i, piece);
      if (IsBulk(i)) bytes += part.end - part.begin;
    }
    ptx::BarrierArriveExpect(barrier, bytes);
#pragma unroll
    for (int i = 0; i < Config::kNumLeaves; ++i) {
      const Segment part = LeafSegment(i, piece);
      if (!IsBulk(i) || part.begin >= part.end) continue;
      ptx::BulkLoad(stage + part.begin,
                    static_cast<const uint8_t*>(params.x[i]) +
                        token * Config::LeafBytes(i) + part.from,
                    part.end - part.begin, barrier);
    }
  }

  // Starts the load of a token's piece to a stage, where weights may be already.
  __device__ static __forceinline__ void Load(const DispatchParams& params,
                                              int64_t token, int piece, Part part,
                                              uint32_t stage) {
    uint8_t* bytes = part.stages + stage * kSlotBytes;
    if (HasSmall()) LoadSmall<0>(params, token, piece, bytes);
    if (HasSmall() || Config::kHasWeights) {
      ptx::FenceSharedForBulk();
      __syncwarp();
    }
    if (Lane() == 0) LoadBulk(params, token, piece, bytes, part.barriers + stage);
  }

  // Copies a piece to a row of this rank in each lane that has one; all lanes.
  __device__ static __forceinline__ void StoreRows(const DispatchParams& params,
                                                   int row, int piece,
                                                   const uint8_t* stage) {
    if (row >= 0) {
#pragma unroll
      for (int i = 0; i < Config::kNumLeaves; ++i) {
        const Segment part = LeafSegment(i, piece);
        if (!IsBulk(i) || part.begin >= part.end) continue;
        ptx::BulkStore(static_cast<uint8_t*>(params.recv[i]) +
                           static_cast<int64_t>(row) * Config::LeafBytes(i) + part.from,
                       stage + part.begin, part.end - part.begin);
      }
    }
    if constexpr (HasSmall()) {
      for (uint32_t lanes = __ballot_sync(kAllLanes, row >= 0); lanes != 0;
           lanes &= lanes - 1) {
        StoreSmall<0>(params, __shfl_sync(kAllLanes, row, __ffs(lanes) - 1), piece,
                      stage);
      }
    }
  }

  // Lane 31 - k acts for entry k, so that lanes 0, 1, ... are left to act for ranks.
  __device__ static __forceinline__ int MyEntry() { return 31 - Lane(); }

  // Items per queue entry: {row of this rank, piece and the ranks to send to}.
  static constexpr int kFlagBits = kPerLane;
  // And of the receiver: {row, piece and source}.
  static constexpr int kRankBits = 6;
  static_assert(1 << kRankBits == kMaxRanks, "");

  __device__ static __forceinline__ void Send(const DispatchParams& params,
                                              CallState* state, int channel,
                                              RingShape ring, Part part) {
    constexpr int kStages = kShape.send_stages;
    constexpr int kAhead = kStages / 2;  // items loaded before their turn
    const CommonParams& common = params.common;
    const int me = common.rank;
    const auto token_of = [=](int pair) -> int64_t {
      return channel + static_cast<int64_t>(pair) * ring.channels;
    };

    RoutingBatches<kTopk, Config::kHasWeights ? 3 : 2, 0> batches;
    const float* const none[1] = {nullptr};
    const int num_tokens = TokensOfChannel(params.num_tokens, channel, ring.channels);
    const int64_t first_shared = FirstShared(params.num_tokens, ring.channels);
    if constexpr (Config::kHasWeights) {
      const int32_t* const arrays[3] = {
          params.slot, params.slot_rank,
          reinterpret_cast<const int32_t*>(params.weights)};
      batches.Start(part.batches, num_tokens, arrays, none, token_of);
    } else {
      const int32_t* const arrays[2] = {params.slot, params.slot_rank};
      batches.Start(part.batches, num_tokens, arrays, none, token_of);
    }
    InitBarriers(part.barriers, kStages);
    Sender<kRanks> sender(common, state, channel, ring, kSlotBytes, kPhaseDispatchReuse,
                          kPhaseDispatchCredit, /*prompt=*/true);

    uint32_t pairs = 0;  // of the batch, not yet begun
    int piece = 0;       // of the first of them, next to load
    bool more = true, begun = false;
    uint32_t loaded = 0, handled = 0;
    while (true) {
      while (loaded - handled <= kAhead) {
        // The next token with a destination.
        while (more && pairs == 0) {
          more = batches.Next(token_of);
          if (more) {
            pairs = Destinations(batches, me, token_of, first_shared, part.masks);
          }
        }
        if (!more) break;
        const int pair = __ffs(pairs) - 1;
        const uint32_t stage = loaded % kStages;
        // Stores of the item that used the stage before have read it.
        ptx::BulkWaitRead<kStages - 1 - kAhead>();
        __syncwarp();
        const int64_t token = token_of(batches.FirstPair() + pair);
        const uint64_t mask = part.masks[pair];
        const int k = MyEntry();
        int row = -1;
        if (k < kTopk && (mask >> me & 1) != 0 && batches.Entry(1, pair, k) == me) {
          row = batches.Entry(0, pair, k);
        }
        int flags = piece << kFlagBits;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const int rank = sender.Rank(i);
          if (rank >= 0 && rank != me && (mask >> rank & 1) != 0) flags |= 1 << i;
        }
        part.queue[stage * 32 + Lane()] = make_int2(row, flags);
        uint8_t* bytes = part.stages + stage * kSlotBytes;
        if (Config::kHasWeights && piece == 0 && k < kTopk) {
          const int weight = batches.Entry(Config::kHasWeights ? 2 : 0, pair, k);
          reinterpret_cast<int32_t*>(bytes + kPieceBytes)[k] = weight;
          if (row >= 0) params.recv_weights[row] = __int_as_float(weight);
        }
        Load(params, token, piece, part, stage);
        ++loaded;
        if (++piece == kNumPieces) {
          piece = 0;
          pairs &= pairs - 1;
        }
      }
      if (!begun) {  // with the first loads under way
        AwaitBegin(state);
        sender.Begin();
        begun = true;
      }
      if (loaded == handled) break;

      const uint32_t stage = handled % kStages;
      const int2 item = part.queue[stage * 32 + Lane()];
      const int item_piece = kNumPieces == 1 ? 0 : item.y >> kFlagBits;
      uint8_t* bytes = part.stages + stage * kSlotBytes;
      const uint32_t parity = handled / kStages & 1;
      if (!__all_sync(kAllLanes, ptx::BarrierTestWait(part.barriers + stage, parity))) {
        sender.Flush();  // there is time for it
      }
      // Pairs with the copy engine's completion of LoadBulk.
      ptx::BarrierWait(part.barriers + stage, parity);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sender.Reserve(i, (item.y >> i & 1) != 0);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if ((item.y >> i & 1) != 0) sender.Send(i, bytes, WireBytes(item_piece));
      }
      StoreRows(params, item.x, item_piece, bytes);
      sender.Commit();
      ++handled;
    }
    if (Lane() == 0) NoteStamp(state, kStampLastSend);
    sender.Flush();
    if (kMemoryBinds && first_shared < params.num_tokens) {
      WriteShared(params, first_shared, part, handled);
    }
    ptx::BulkWaitWritten<0>();
  }

  // With more ranks more rows cross the link, which is ten times slower than memory.
  static constexpr bool kMemoryBinds = kRanks <= 2;

  // A third of the tokens is shared; of few, where it would even out less than it costs
  // to load a token twice, none.
  static constexpr int kMinTokensToShare = 8;  // times the channels
  __device__ static __forceinline__ int64_t FirstShared(int64_t num_tokens,
                                                        int channels) {
    const bool share = kMemoryBinds &&
                       num_tokens >= static_cast<int64_t>(kMinTokensToShare) * channels;
    return share ? num_tokens - num_tokens / 3 : num_tokens;
  }

  // Writes the rows on this rank of tokens from `first` on, a chunk of them at a time,
  // through the sender's stages, of which the warp has used `handled` before.
  __device__ static __forceinline__ void WriteShared(const DispatchParams& params,
                                                     int64_t first, Part part,
                                                     uint32_t handled) {
    constexpr int kStages = kShape.send_stages;
    constexpr int kAhead = kStages / 2;
    constexpr int kTokens = 32 / kTopk;  // of a chunk: a lane per entry
    const int me = params.common.rank;
    uint32_t* taken = &ControlOf(params.common, me)->token_chunks;
    int64_t begin = 0;   // first token of the chunk
    int row = -1;        // of this lane's entry, if it is on this rank
    uint32_t lanes = 0;  // with rows that are not yet begun
    int piece = 0;       // of the first of their tokens, next to load
    uint32_t loaded = handled;
    while (true) {
      while (loaded - handled <= kAhead) {
        while (lanes == 0 && begin < params.num_tokens) {
          uint32_t chunk = 0;
          if (Lane() == 0) chunk = atomicAdd(taken, 1u);
          begin =
              first + static_cast<int64_t>(__shfl_sync(kAllLanes, chunk, 0)) * kTokens;
          const int64_t entry = begin * kTopk + Lane();
          row = -1;
          if (Lane() < kTokens * kTopk && entry < params.num_tokens * kTopk &&
              params.slot_rank[entry] == me) {
            row = params.slot[entry];
          }
          if (Config::kHasWeights && row >= 0) {
            params.recv_weights[row] = params.weights[entry];
          }
          lanes = __ballot_sync(kAllLanes, row >= 0);
        }
        if (lanes == 0) break;
        const int index = (__ffs(lanes) - 1) / kTopk;
        const int k = MyEntry();
        const int my_row = __shfl_sync(kAllLanes, row, (index * kTopk + k) & 31);
        const uint32_t stage = loaded % kStages;
        // Stores of the item that used the stage before have read it.
        ptx::BulkWaitRead<kStages - 1 - kAhead>();
        __syncwarp();
        part.queue[stage * 32 + Lane()] = make_int2(k < kTopk ? my_row : -1, piece);
        Load(params, begin + index, piece, part, stage);
        ++loaded;
        if (++piece == kNumPieces) {
          piece = 0;
          // Those of this token and of the ones before it are the lowest.
          lanes &= static_cast<uint32_t>(~0ull << (index + 1) * kTopk);
        }
      }
      if (loaded == handled) break;

      const uint32_t stage = handled % kStages;
      const int2 item = part.queue[stage * 32 + Lane()];
      // Pairs with the copy engine's completion of the load.
      ptx::BarrierWait(part.barriers + stage, handled / kStages & 1);
      StoreRows(params, item.x, kNumPieces == 1 ? 0 : item.y,
                part.stages + stage * kSlotBytes);
      ptx::BulkCommit();
      ++handled;
    }
  }

  // Finds each pair's destination ranks, this one only for tokens that are not shared;
  // returns the pairs that have any.
  template <class Batches, class TokenOf>
  __device__ static __forceinline__ uint32_t Destinations(const Batches& batches,
                                                          int me, TokenOf token_of,
                                                          int64_t first_shared,
                                                          uint64_t* masks) {
    uint64_t mask = 0;
    if (Lane() < Batches::kPairs) {
#pragma unroll
      for (int k = 0; k < kTopk; ++k) {
        // Entries past the end have slot -1 and no rank.
        if (batches.Entry(0, Lane(), k) >= 0) {
          mask |= 1ull << (batches.Entry(1, Lane(), k) & 63);
        }
      }
      if (token_of(batches.FirstPair() + Lane()) >= first_shared) {
        mask &= ~(1ull << me);
      }
      masks[Lane()] = mask;
    }
    return __ballot_sync(kAllLanes, mask != 0);
  }

  __device__ static __forceinline__ void Receive(const DispatchParams& params,
                                                 CallState* state, int channel,
                                                 RingShape ring, Part part) {
    constexpr int kStages = kShape.recv_stages;
    constexpr int kAhead = kStages / 2;
    constexpr int kSources = kRanks - 1;
    if constexpr (kSources > 0) {
      const CommonParams& common = params.common;
      // In this order no ring of any size can make ranks wait in a circle: tokens, then
      // pieces, then sources, from the next rank on so that not all listen to the same.
      const auto piece_of = [=](int pair) {
        return kNumPieces == 1 ? 0 : pair / kSources % kNumPieces;
      };
      const auto source_of = [=](int pair) {
        const int source = common.rank + 1 + pair % kSources;
        return source >= kRanks ? source - kRanks : source;
      };
      const auto index = [=](int pair) -> int64_t {
        return source_of(pair) * params.num_tokens + channel +
               static_cast<int64_t>(pair / (kSources * kNumPieces)) * ring.channels;
      };
      RoutingBatches<kTopk, 1, 0> batches;
      const int32_t* const arrays[1] = {params.recv_slot};
      const float* const none[1] = {nullptr};
      batches.Start(part.batches,
                    TokensOfChannel(params.num_tokens, channel, ring.channels) *
                        kSources * kNumPieces,
                    arrays, none, index);
      InitBarriers(part.barriers, kStages);
      AwaitBegin(state);
      Receiver<kRanks> receiver(common, state, channel, ring, kSlotBytes,
                                kPhaseDispatchRows);

      uint32_t pairs = 0;  // of the batch, not yet loaded
      bool more = true, all_arrived = false;
      uint32_t loaded = 0, handled = 0;
      while (true) {
        while (loaded - handled <= kAhead) {
          while (more && pairs == 0) {
            more = batches.Next(index);
            if (!more) break;
            bool any = false;
            if (Lane() < batches.kPairs) {
#pragma unroll
              for (int k = 0; k < kTopk; ++k) {
                any |= batches.Entry(0, Lane(), k) >= 0;
              }
            }
            pairs = __ballot_sync(kAllLanes, any);
          }
          if (!more) {
            if (!all_arrived && Lane() == 0) NoteStamp(state, kStampLastArrival);
            all_arrived = true;
            break;
          }
          const int pair = __ffs(pairs) - 1;
          const int source = source_of(batches.FirstPair() + pair);
          const int piece = piece_of(batches.FirstPair() + pair);
          if (!receiver.Arrived(source)) {
            if (loaded != handled) break;  // first what is here
            receiver.Await(source);
          }
          const uint32_t stage = loaded % kStages;
          ptx::BulkWaitRead<kStages - 1 - kAhead>();
          __syncwarp();
          const int k = MyEntry();
          const int row = k < kTopk ? batches.Entry(0, pair, k) : -1;
          part.queue[stage * 32 + Lane()] = make_int2(row, piece << kRankBits | source);
          const uint8_t* slot;
          if (receiver.Take(source, &slot)) {
            const uint32_t bytes = WireBytes(piece);
            ptx::BarrierArriveExpect(part.barriers + stage, bytes);
            ptx::BulkLoad(part.stages + stage * kSlotBytes, slot, bytes,
                          part.barriers + stage);
          }
          ++loaded;
          pairs &= pairs - 1;
        }
        if (loaded == handled) break;

        const uint32_t stage = handled % kStages;
        const int2 item = part.queue[stage * 32 + Lane()];
        const uint8_t* bytes = part.stages + stage * kSlotBytes;
        // Pairs with the copy engine's completion of the load above.
        ptx::BarrierWait(part.barriers + stage, handled / kStages & 1);
        const int item_piece = kNumPieces == 1 ? 0 : item.y >> kRankBits;
        receiver.Consume(item.y & (kMaxRanks - 1));
        StoreRows(params, item.x, item_piece, bytes);
        if (Config::kHasWeights && item_piece == 0 && item.x >= 0) {
          params.recv_weights[item.x] =
              reinterpret_cast<const float*>(bytes + kPieceBytes)[MyEntry()];
        }
        ptx::BulkCommit();
        ++handled;
      }
      ptx::BulkWaitWritten<0>();
    }
  }

  __device__ static __forceinline__ void InitBarriers(uint64_t* barriers, int count) {
    if (Lane() < count) ptx::BarrierInit(barriers + Lane(), 1);
    ptx::BarrierInitFence();
    __syncwarp();
  }

  // Zeroes the rows between groups and after the last; one warp per block.
  __device__ static __forceinline__ void ZeroGaps(const DispatchParams& params,
                                                  CallState* state, uint8_t* zeros,
                                                  uint64_t* roles_done) {
    for (int i = Lane(); i < kZeroBytes / 16; i += 32) {
      reinterpret_cast<uint4*>(zeros)[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::FenceSharedForBulk();
    __syncwarp();
    AwaitBegin(state);
    const int groups = params.num_local_experts;
    // Small gaps: a lane each, the rows of a gap dealt out to blocks.
    for (int group = Lane(); group < groups - 1; group += 32) {
      const int64_t begin = params.group_offsets[group] + params.group_counts[group];
      const int64_t end = params.group_offsets[group + 1];
      const int64_t first = (blockIdx.x + gridDim.x - group % gridDim.x) % gridDim.x;
      for (int64_t row = begin + first; row < end; row += gridDim.x) {
        ZeroRows(params, zeros, row, row + 1, 0, 1);
      }
    }
    // The rest of the buffer, in chunks for whoever has time: two SMs share a path to
    // memory, so blocks that have one alone are done with their rows earlier.
    const int64_t used =
        params.group_offsets[groups - 1] + params.group_counts[groups - 1];
    const int64_t chunks = (params.capacity - used + kRowsPerChunk - 1) / kRowsPerChunk;
    uint32_t* taken = &ControlOf(params.common, params.common.rank)->zero_chunks;
    // Few zeros had better fill what blocks that are done early leave of the memory.
    if (kMemoryBinds && gridDim.x >= kBlocksThatFillMemory &&
        params.capacity - used <= used / 2) {
      // Pairs with the arrivals in Run.
      ptx::BarrierWait(roles_done, 0);
    }
    while (true) {
      uint32_t chunk = 0;
      if (Lane() == 0) chunk = atomicAdd(taken, 1u);
      chunk = __shfl_sync(kAllLanes, chunk, 0);
      if (chunk >= chunks) break;
      const int64_t begin = used + chunk * kRowsPerChunk;
      const int64_t end = Min(params.capacity, begin + kRowsPerChunk);
      // While rows arrive, few stores at a time leave the memory to them; more where
      // zeros are the most that there is to write.
      const bool busy = !ptx::BarrierTestWait(roles_done, 0);
      const int lanes = !__any_sync(kAllLanes, busy)        ? kZeroLanes
                        : params.capacity - used > 2 * used ? 3
                                                            : 1;
      if (Lane() < lanes) ZeroRows(params, zeros, begin, end, Lane(), lanes);
      __syncwarp();
    }
    ptx::BulkWaitWritten<0>();
  }

  static constexpr int kZeroLanes = 8;
  static constexpr int kBlocksThatFillMemory = 64;  // with at most 60 GB/s each
  // A chunk is 128 KiB, or a row.
  static constexpr int64_t kRowsPerChunk = Max(1, 128 * kKiB / kShape.wire.row_bytes);

  // Zeroes rows [begin, end): lane `lane` of `lanes` its chunks of every leaf's bytes.
  __device__ static __forceinline__ void ZeroRows(const DispatchParams& params,
                                                  const uint8_t* zeros, int64_t begin,
                                                  int64_t end, int lane, int lanes) {
#pragma unroll
    for (int i = 0; i < Config::kNumLeaves; ++i) {
      uint8_t* data = static_cast<uint8_t*>(params.recv[i]);
      const int64_t first = begin * Config::LeafBytes(i);
      const int64_t last = end * Config::LeafBytes(i);
      const int64_t bulk_first = Min(last, AlignUp(first, 16));
      const int64_t bulk_last = Max(bulk_first, last / 16 * 16);
      if (lane == 0 && !IsBulk(i)) {
        for (int64_t b = first; b < bulk_first; ++b) data[b] = 0;
        for (int64_t b = bulk_last; b < last; ++b) data[b] = 0;
      }
      for (int64_t b = bulk_first + static_cast<int64_t>(lane) * kZeroBytes;
           b < bulk_last; b += static_cast<int64_t>(lanes) * kZeroBytes) {
        ptx::BulkStore(data + b, zeros,
                       static_cast<uint32_t>(Min(kZeroBytes, bulk_last - b)));
        ptx::BulkCommit();
        ptx::BulkWaitWritten<1>();
      }
    }
    if (Config::kHasWeights) {
      for (int64_t row = begin + lane; row < end; row += lanes) {
        params.recv_weights[row] = 0;
      }
    }
  }

  __device__ static void Poison(const DispatchParams& params, int part, int parts) {
#pragma unroll
    for (int i = 0; i < Config::kNumLeaves; ++i) {
      FillBytes(params.recv[i], params.capacity * Config::LeafBytes(i), kPoison, part,
                parts);
    }
    if (Config::kHasWeights) {
      FillBytes(params.recv_weights, params.capacity * 4, kPoison, part, parts);
    }
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DISPATCH_CUH_
