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
#include "combine_leaves.cuh"
#include "combine_receive.cuh"
#include "combine_send.cuh"
#include "combine_stages.cuh"
#include "launch_shape.h"
#include "ptx.cuh"
#include "ring.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// `Config` has kRanks, kTopk, kHasWeights, kHasRowValues, kHasBias, kWireF32,
// kNumLeaves, Dtype(leaf) and Width(leaf).
template <class Config>
class Combine {
 public:
  static constexpr CombineLayout kShape = CombineLeaves<Config>::kShape;
  static constexpr int kThreads = 32 * kCombineWarps;

  __device__ static void Run(const CombineParams& params, uint8_t* shared) {
    __shared__ CallState state_storage;
    CallState* state = ptx::HoldShared(&state_storage);
    shared = ptx::HoldShared(shared);
    const CommonParams& common = params.common;
    const uint64_t signature = reinterpret_cast<uint64_t>(params.out[0]) * 4 + 3;
    const RingShape ring = MakeRing(Config::kRanks, kShape.wire.slot_bytes, gridDim.x);
    const int channel = blockIdx.x;
    const CombineParts<Config> parts(shared);
    const int senders =
        static_cast<int>(gridDim.x) <= kMaxBlocksWithTwoSenders ? kSenderWarps : 1;
    InitStages<kShape.send_stages>(parts.send_full, parts.send_empty, 1, kTeamWarps);
    InitStages<kShape.out_stages>(parts.out_full, parts.out_empty, kTeamWarps, senders);
    InitStages<kShape.recv_stages>(parts.recv_full, parts.recv_empty, 1, kTeamWarps);
    InitCall(state);
    ptx::BarrierInitFence();
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      BeginCall(common, signature, CallKind::kRing, state);
      if (channel == 0) TellPeers(common, state, false);
    }
    if (channel >= ring.channels || (warp >= senders && warp < kSenderWarps)) {
      // Nothing to do.
    } else if (warp < kSenderWarps) {
      CombineSend<Config>::SendSums(params, state, channel, ring, parts, warp, senders);
      if (warp == 0 && channel == 0) AwaitPeers(common, state, kPhaseCombinePeer);
    } else if (warp == kSenderWarps) {
      CombineSend<Config>::LoadRows(params, channel, ring, parts);
    } else if (warp == kSenderWarps + 1) {
      CombineReceive<Config>::LoadSums(params, state, channel, ring, parts);
    } else if (warp < kSenderWarps + 2 + kTeamWarps) {
      CombineSend<Config>::AddRows(params, parts,
                                   threadIdx.x - 32 * (kSenderWarps + 2));
    } else {
      CombineReceive<Config>::WriteSums(
          params, parts, threadIdx.x - 32 * (kSenderWarps + 2 + kTeamWarps));
    }
    EndCall(
        common, state,
        [&](int part, int count) { PoisonCombine<Config>(params, part, count); },
        [&] { FinishRingCall(common, state); });
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_COMBINE_CUH_
