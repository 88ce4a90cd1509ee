// The sender warp of a dispatch's channel: loads each token once, copies it to the ring
// of every destination and to its rows on this rank, then takes shared tokens.

#ifndef JAX_EP_FFI_CUDA_DISPATCH_SEND_CUH_
#define JAX_EP_FFI_CUDA_DISPATCH_SEND_CUH_

#include "call.cuh"
#include "dispatch_channel.cuh"
#include "dispatch_rows.cuh"
#include "launch_shape.h"
#include "ptx.cuh"
#include "ring.cuh"
#include "routing.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

template <class Config>
class DispatchSend {
  using Rows = DispatchRows<Config>;
  using Channel = DispatchChannel<Config>;
  using Part = typename Channel::Part;
  static constexpr int kRanks = Config::kRanks;
  static constexpr int kTopk = Config::kTopk;
  static constexpr DispatchShape kShape = Rows::kShape;
  static constexpr int kPieceBytes = kShape.wire.piece_bytes;
  static constexpr int kSlotBytes = kShape.wire.slot_bytes;
  static constexpr int kNumPieces = kShape.wire.num_pieces;
  static constexpr int kPerLane = (kRanks + 31) / 32;

 public:
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
      batches.Start(part.batches, num_tokens, params.capacity, arrays, none, token_of);
    } else {
      const int32_t* const arrays[2] = {params.slot, params.slot_rank};
      batches.Start(part.batches, num_tokens, params.capacity, arrays, none, token_of);
    }
    Channel::InitBarriers(part.barriers, kStages);
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
            pairs = Destinations(batches, params.capacity, me, token_of, first_shared,
                                 part.masks);
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
        const int k = Channel::MyEntry();
        int row = -1;
        if (k < kTopk && (mask >> me & 1) != 0 && batches.Entry(1, pair, k) == me) {
          row = batches.Entry(0, pair, k);
          if (!IsRow(row, params.capacity)) row = -1;
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
        Rows::Load(params, token, piece, bytes, part.barriers + stage);
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
        if ((item.y >> i & 1) != 0) sender.Send(i, bytes, Rows::WireBytes(item_piece));
      }
      Rows::StoreRows(params, item.x, item_piece, bytes);
      sender.Commit();
      ++handled;
    }
    if (Lane() == 0) NoteStamp(state, kStampLastSend);
    sender.Flush();
    if (Rows::kMemoryBinds && first_shared < params.num_tokens) {
      WriteShared(params, first_shared, part, handled);
    }
    ptx::BulkWaitWritten<0>();
  }

 private:
  // Items per queue entry: {row of this rank, piece and the ranks to send to}.
  static constexpr int kFlagBits = kPerLane;

  // A third of the tokens is shared; of few, where it would even out less than it costs
  // to load a token twice, none.
  static constexpr int kMinTokensToShare = 8;  // times the channels
  __device__ static __forceinline__ int64_t FirstShared(int64_t num_tokens,
                                                        int channels) {
    const bool share = Rows::kMemoryBinds &&
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
            if (!IsRow(row, params.capacity)) row = -1;
          }
          if (Config::kHasWeights && row >= 0) {
            params.recv_weights[row] = params.weights[entry];
          }
          lanes = __ballot_sync(kAllLanes, row >= 0);
        }
        if (lanes == 0) break;
        const int index = (__ffs(lanes) - 1) / kTopk;
        const int k = Channel::MyEntry();
        const int my_row = __shfl_sync(kAllLanes, row, (index * kTopk + k) & 31);
        const uint32_t stage = loaded % kStages;
        // Stores of the item that used the stage before have read it.
        ptx::BulkWaitRead<kStages - 1 - kAhead>();
        __syncwarp();
        part.queue[stage * 32 + Lane()] = make_int2(k < kTopk ? my_row : -1, piece);
        Rows::Load(params, begin + index, piece, part.stages + stage * kSlotBytes,
                   part.barriers + stage);
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
      Rows::StoreRows(params, item.x, kNumPieces == 1 ? 0 : item.y,
                      part.stages + stage * kSlotBytes);
      ptx::BulkCommit();
      ++handled;
    }
  }

  // Finds each pair's destination ranks, this one only for tokens that are not shared;
  // returns the pairs that have any.
  template <class Batches, class TokenOf>
  __device__ static __forceinline__ uint32_t Destinations(const Batches& batches,
                                                          int64_t capacity, int me,
                                                          TokenOf token_of,
                                                          int64_t first_shared,
                                                          uint64_t* masks) {
    uint64_t mask = 0;
    if (Lane() < Batches::kPairs) {
#pragma unroll
      for (int k = 0; k < kTopk; ++k) {
        // Entries past the end have slot -1 and no rank.
        const int rank = batches.Entry(1, Lane(), k);
        if (IsRow(batches.Entry(0, Lane(), k), capacity) && IsRank<kRanks>(rank)) {
          mask |= 1ull << rank;
        }
      }
      if (token_of(batches.FirstPair() + Lane()) >= first_shared) {
        mask &= ~(1ull << me);
      }
      masks[Lane()] = mask;
    }
    return __ballot_sync(kAllLanes, mask != 0);
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DISPATCH_SEND_CUH_
