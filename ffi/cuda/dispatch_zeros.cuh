// The rows that dispatch fills with zeros: between groups and after the last.

#ifndef JAX_EP_FFI_CUDA_DISPATCH_ZEROS_CUH_
#define JAX_EP_FFI_CUDA_DISPATCH_ZEROS_CUH_

#include "call.cuh"
#include "dispatch_rows.cuh"
#include "launch_shape.h"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

template <class Config>
class DispatchZeros {
  using Rows = DispatchRows<Config>;

 public:
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
      const int64_t begin = EndOfGroup(params, group);
      const int64_t end = InBuffer(params, params.group_offsets[group + 1]);
      const int64_t first = (blockIdx.x + gridDim.x - group % gridDim.x) % gridDim.x;
      for (int64_t row = begin + first; row < end; row += gridDim.x) {
        Rows::ZeroRows(params, zeros, row, row + 1, 0, 1);
      }
    }
    // The rest of the buffer, in chunks for whoever has time: two SMs share a path to
    // memory, so blocks that have one alone are done with their rows earlier.
    const int64_t used = EndOfGroup(params, groups - 1);
    const int64_t chunks = (params.capacity - used + kRowsPerChunk - 1) / kRowsPerChunk;
    uint32_t* taken = &ControlOf(params.common, params.common.rank)->zero_chunks;
    // Few zeros had better fill what blocks that are done early leave of the memory.
    if (Rows::kMemoryBinds && gridDim.x >= kBlocksThatFillMemory &&
        params.capacity - used <= used / 2) {
      // Pairs with the arrivals in Dispatch::Run.
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
      if (Lane() < lanes) Rows::ZeroRows(params, zeros, begin, end, Lane(), lanes);
      __syncwarp();
    }
    ptx::BulkWaitWritten<0>();
  }

 private:
  // Groups come from outside and may be anything; what is beyond the buffer's ends is
  // taken as its ends.
  __device__ static __forceinline__ int64_t InBuffer(const DispatchParams& params,
                                                     int64_t row) {
    return Max(0, Min(row, params.capacity));
  }
  __device__ static __forceinline__ int64_t EndOfGroup(const DispatchParams& params,
                                                       int group) {
    return InBuffer(params, static_cast<int64_t>(params.group_offsets[group]) +
                                params.group_counts[group]);
  }

  static constexpr int kZeroLanes = 8;
  static constexpr int kBlocksThatFillMemory = 64;  // with at most 60 GB/s each
  // A chunk is 128 KiB, or a row.
  static constexpr int64_t kRowsPerChunk =
      Max(1, 128 * kKiB / Rows::kShape.wire.row_bytes);
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DISPATCH_ZEROS_CUH_
