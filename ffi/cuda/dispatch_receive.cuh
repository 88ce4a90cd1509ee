// The receiver warp of a dispatch's channel: copies what arrives in the ring to rows.

#ifndef JAX_EP_FFI_CUDA_DISPATCH_RECEIVE_CUH_
#define JAX_EP_FFI_CUDA_DISPATCH_RECEIVE_CUH_

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
class DispatchReceive {
  using Rows = DispatchRows<Config>;
  using Channel = DispatchChannel<Config>;
  using Part = typename Channel::Part;
  static constexpr int kRanks = Config::kRanks;
  static constexpr int kTopk = Config::kTopk;
  static constexpr DispatchShape kShape = Rows::kShape;
  static constexpr int kPieceBytes = kShape.wire.piece_bytes;
  static constexpr int kSlotBytes = kShape.wire.slot_bytes;
  static constexpr int kNumPieces = kShape.wire.num_pieces;

 public:
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
                    params.capacity, arrays, none, index);
      Channel::InitBarriers(part.barriers, kStages);
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
                any |= IsRow(batches.Entry(0, Lane(), k), params.capacity);
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
          const int k = Channel::MyEntry();
          int row = k < kTopk ? batches.Entry(0, pair, k) : -1;
          if (!IsRow(row, params.capacity)) row = -1;
          part.queue[stage * 32 + Lane()] = make_int2(row, piece << kRankBits | source);
          const uint8_t* slot;
          if (receiver.Take(source, &slot)) {
            const uint32_t bytes = Rows::WireBytes(piece);
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
        Rows::StoreRows(params, item.x, item_piece, bytes);
        if (Config::kHasWeights && item_piece == 0 && item.x >= 0) {
          params.recv_weights[item.x] =
              reinterpret_cast<const float*>(bytes + kPieceBytes)[Channel::MyEntry()];
        }
        ptx::BulkCommit();
        ++handled;
      }
      ptx::BulkWaitWritten<0>();
    }
  }

 private:
  // Items per queue entry: {row of this rank, piece and source}.
  static constexpr int kRankBits = 6;
  static_assert(1 << kRankBits == kMaxRanks, "");
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DISPATCH_RECEIVE_CUH_
