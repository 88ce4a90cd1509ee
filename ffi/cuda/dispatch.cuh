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
#include "dispatch_channel.cuh"
#include "dispatch_receive.cuh"
#include "dispatch_rows.cuh"
#include "dispatch_send.cuh"
#include "dispatch_zeros.cuh"
#include "launch_shape.h"
#include "ptx.cuh"
#include "ring.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// `Config` has kRanks, kTopk, kHasWeights, kNumLeaves and LeafBytes(leaf).
template <class Config>
class Dispatch {
 public:
  static constexpr DispatchShape kShape = DispatchRows<Config>::kShape;
  static constexpr int kThreads = 32 * (2 * kShape.channels + 1);

  __device__ static void Run(const DispatchParams& params, uint8_t* shared) {
    __shared__ CallState state_storage;
    __shared__ uint64_t roles_storage;
    CallState* state = ptx::HoldShared(&state_storage);
    // Completes when the block's senders and receivers are done.
    uint64_t* roles_done = ptx::HoldShared(&roles_storage);
    shared = ptx::HoldShared(shared);
    const CommonParams& common = params.common;
    const uint64_t signature = reinterpret_cast<uint64_t>(params.recv[0]) * 4 + 2;
    const RingShape ring =
        MakeRing(Config::kRanks, kShape.wire.slot_bytes, gridDim.x * kShape.channels);
    const int warp = threadIdx.x / 32;
    const int channel = blockIdx.x + (warp >> 1) * gridDim.x;
    InitCall(state);
    if (threadIdx.x == 0) ptx::BarrierInit(roles_done, 2 * kShape.channels);
    ptx::BarrierInitFence();
    __syncthreads();
    if (warp == 2 * kShape.channels) {
      BeginCall(common, signature, CallKind::kRing, state);
      if (blockIdx.x == 0) TellPeers(common, state, false);
      DispatchZeros<Config>::ZeroGaps(params, state, shared, roles_done);
    } else {
      if (channel >= ring.channels) {
        // Nothing to do.
      } else if ((warp & 1) == 0) {
        DispatchSend<Config>::Send(params, state, channel, ring,
                                   Channel::SenderShared(shared, warp >> 1));
        if (channel == 0) AwaitPeers(common, state, kPhaseDispatchPeer);
      } else {
        DispatchReceive<Config>::Receive(params, state, channel, ring,
                                         Channel::ReceiverShared(shared, warp >> 1));
      }
      __syncwarp();
      if (Lane() == 0) ptx::BarrierArrive(roles_done);
    }
    EndCall(
        common, state,
        [&](int part, int parts) { PoisonDispatch<Config>(params, part, parts); },
        [&] { FinishRingCall(common, state); });
  }

 private:
  using Channel = DispatchChannel<Config>;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DISPATCH_CUH_
