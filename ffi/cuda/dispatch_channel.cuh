// What the two warps of a dispatch's channel have of the block's shared memory.

#ifndef JAX_EP_FFI_CUDA_DISPATCH_CHANNEL_CUH_
#define JAX_EP_FFI_CUDA_DISPATCH_CHANNEL_CUH_

#include "call.cuh"
#include "dispatch_rows.cuh"
#include "launch_shape.h"
#include "ptx.cuh"

namespace jax_ep::cuda {

template <class Config>
class DispatchChannel {
 public:
  // Shared memory of a warp: pieces first, which need 128-byte alignment.
  struct Part {
    uint8_t* stages;
    uint64_t* barriers;
    int2* queue;  // [stage][lane]
    int32_t* batches;
    uint64_t* masks;  // [pair of a batch], sender only
  };

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

  // Lane 31 - k acts for entry k, so that lanes 0, 1, ... are left to act for ranks.
  __device__ static __forceinline__ int MyEntry() { return 31 - Lane(); }

  __device__ static __forceinline__ void InitBarriers(uint64_t* barriers, int count) {
    if (Lane() < count) ptx::BarrierInit(barriers + Lane(), 1);
    ptx::BarrierInitFence();
    __syncwarp();
  }

 private:
  static constexpr DispatchShape kShape = DispatchRows<Config>::kShape;

  static constexpr int64_t StageBytes(int stages) {
    return static_cast<int64_t>(stages) * kShape.wire.slot_bytes;
  }
  static constexpr int64_t kChannelStages = kShape.send_stages + kShape.recv_stages;

  __device__ static __forceinline__ uint8_t* Meta(uint8_t* shared, int index) {
    return shared + kZeroBytes + kShape.channels * StageBytes(kChannelStages) +
           index * (kChannelStages * (kQueueBytes + 8) + kSenderMetaBytes +
                    kReceiverMetaBytes);
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DISPATCH_CHANNEL_CUH_
