// Layout: every rank learns all ids, counts them, and derives the handle alone.
//
// Ids cross the link in 16-byte words of eight ids and the round's number, so the
// data is its own flag. The flat list of a source's ids is cut into tiles. Steps, with
// a barrier of this small grid between them:
//   1. send the own ids; take the tile's ids, count and hold them
//   2. per destination rank: capacity, first rows, what each source keeps
//   3. positions by prefix sums; recv_slot, slot and slot_rank
// A block with one tile that fits holds its ids in shared memory; else they wait in
// recv_slot. Positions never depend on the order in which atomics arrive.

#ifndef JAX_EP_FFI_CUDA_LAYOUT_CUH_
#define JAX_EP_FFI_CUDA_LAYOUT_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "layout_place.cuh"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

class Layout : public LayoutPlace {
 public:
  using LayoutPlace::LayoutPlace;

  __device__ static void Run(const LayoutParams& params, int32_t* shared) {
    __shared__ CallState state_storage;
    CallState* state = ptx::HoldShared(&state_storage);
    shared = ptx::HoldShared(shared);
    const uint64_t signature = reinterpret_cast<uint64_t>(params.slot) * 4 + 1;
    Layout layout(params, state, shared);
    InitCall(state);
    if (layout.holds_) layout.ClearCounts();
    __syncthreads();
    if (threadIdx.x < 32) {
      BeginCall(params.common, signature, CallKind::kIdRounds, state);
      if (blockIdx.x == 0) TellPeers(params.common, state, false);
    }
    AwaitBegin(state);
    const int rounds = layout.Exchange();
    if (Lane() == 0) NoteStamp(state, kStampLastArrival);
    layout.CountTiles();
    layout.GridBarrier();
    for (int rank = blockIdx.x; rank < layout.num_ranks_; rank += gridDim.x) {
      layout.PlanRank(rank);
    }
    layout.ArriveAtGrid();
    if (layout.HasOneTile()) layout.AddEarlierTiles(blockIdx.x);
    // While other blocks plan.
    if (blockIdx.x == 0 && threadIdx.x / 32 == kLayoutWarps - 1) {
      AwaitPeers(params.common, state, kPhaseLayoutPeer);
    }
    layout.AwaitGrid();
    if (threadIdx.x == 0) NoteStamp(state, kStampPlanned);
    layout.Place();
    EndCall(
        params.common, state,
        [&](int part, int parts) { PoisonLayout(params, part, parts); },
        [&] {
          if (threadIdx.x != 0) return;
          Control* control = ControlOf(params.common, params.common.rank);
          params.num_invalid[0] = control->invalid_ids;
          control->id_rounds = state->number + rounds;
        });
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LAYOUT_CUH_
