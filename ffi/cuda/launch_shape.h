// Grid, block and shared memory of each kernel, computed alike by the host (to
// launch) and by the kernel (to find its parts). All ranks must launch equal grids.

#ifndef JAX_EP_FFI_CUDA_LAUNCH_SHAPE_H_
#define JAX_EP_FFI_CUDA_LAUNCH_SHAPE_H_

#include "workspace.h"

namespace jax_ep::cuda {

struct LaunchDims {
  int32_t blocks;
  int32_t threads;
  int32_t shared_bytes;  // dynamic; above 48 KiB the function attribute is needed
  // Of dispatch and combine:
  int32_t channels;    // of all blocks, if the ring has room
  int32_t slot_bytes;  // of the ring
  int32_t num_pieces;  // of a token
  int32_t few_tokens;  // the most per rank, of a call for few tokens; else 0
};

JAX_EP_HD constexpr int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
JAX_EP_HD constexpr int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

// SMs that stay free by default. A NCCL collective that runs beside us needs some,
// or the two kernels wait for each other's SMs for ever.
constexpr int kFreeSms = 32;

// One block per SM: `num_sms` of them, by default all but kFreeSms.
JAX_EP_HD constexpr int GridBlocks(int device_sms, int num_sms) {
  const int64_t wanted = num_sms > 0 ? num_sms : device_sms - kFreeSms;
  return static_cast<int>(Max(1, Min(wanted, device_sms)));
}

// A channel has at least this many slots of the ring, or fewer channels are used.
constexpr int kMinSlots = 4;

// Channels between two ranks, of which `wanted` would be one for each warp.
JAX_EP_HD constexpr int NumChannels(int num_ranks, int slot_bytes, int wanted) {
  const int64_t slots = RingRangeBytes(num_ranks) / slot_bytes;
  return static_cast<int>(Max(1, Min(Min(wanted, kMaxChannels), slots / kMinSlots)));
}

// The most tokens per rank: the pieces of a channel are counted in kCountBits. A layout
// has none.
JAX_EP_HD constexpr int64_t MaxTokens(const LaunchDims& dims, int num_ranks) {
  if (dims.few_tokens > 0) return dims.few_tokens;
  if (dims.num_pieces == 0) return int64_t{1} << 62;
  const int64_t pieces = (int64_t{1} << kCountBits) - 1;
  return pieces / dims.num_pieces *
         NumChannels(num_ranks, dims.slot_bytes, dims.channels);
}

// Dynamic shared memory a block may have on sm_90 and sm_100: 227 KiB, less what the
// kernels declare statically (the call's state).
constexpr int64_t kMaxSharedBytes = 226 * kKiB;

// Routing entries (slot, rank or weight of one (token, k)) a warp fetches at once.
constexpr int kBatchEntries = 256;

// (token, source) pairs of one such batch, at most one per lane.
JAX_EP_HD constexpr int BatchPairs(int num_topk) {
  return static_cast<int>(Min(32, kBatchEntries / num_topk));
}

// --- layout ----------------------------------------------------------------

constexpr int kLayoutWarps = 16;
constexpr int kMaxLayoutBlocks = 64;
// Ids of a tile that a block keeps in shared memory, 2 bytes each.
constexpr int kMaxHeldIds = 16 * 1024;

// Ids of one source are counted in this many contiguous tiles.
JAX_EP_HD constexpr int LayoutTilesPerSource(int blocks, int num_ranks) {
  return static_cast<int>(Max(1, blocks / num_ranks));
}

JAX_EP_HD constexpr LaunchDims LayoutLaunch(int device_sms, int num_sms, int num_ranks,
                                            int num_experts) {
  LaunchDims dims{};
  const int blocks =
      static_cast<int>(Min(kMaxLayoutBlocks, GridBlocks(device_sms, num_sms)));
  const int tiles = num_ranks * LayoutTilesPerSource(blocks, num_ranks);
  dims.blocks = static_cast<int32_t>(Min(blocks, tiles));
  dims.threads = 32 * kLayoutWarps;
  dims.shared_bytes =
      static_cast<int32_t>(2 * kMaxHeldIds + (kLayoutWarps + 2) * 4 * num_experts);
  return dims;
}

// --- dispatch ----------------------------------------------------------------

// A block has `channels` channels, each with a sender and a receiver warp, and one
// warp that zeroes gaps: every block holds all roles, so any resident prefix of
// the grid makes progress.
struct DispatchShape {
  WireShape wire;
  int32_t channels;
  int32_t send_stages;  // pieces in shared memory, per channel
  int32_t recv_stages;
  int32_t shared_bytes;
};

constexpr int kZeroBytes = 8 * 1024;  // source of the stores that zero gaps

// Routing batches and queues of one channel, beside its stages.
constexpr int kSenderMetaBytes = 2 * 3 * kBatchEntries * 4 + 32 * 8;
constexpr int kReceiverMetaBytes = 2 * kBatchEntries * 4;
constexpr int kQueueBytes = 32 * 8;  // per stage
constexpr int kMaxStages = 8;

JAX_EP_HD constexpr DispatchShape MakeDispatchShape(const WireShape& wire) {
  DispatchShape shape{};
  shape.wire = wire;
  shape.channels = wire.slot_bytes > 8 * kKiB ? 1 : wire.slot_bytes > 4 * kKiB ? 2 : 4;
  const int64_t meta = kSenderMetaBytes + kReceiverMetaBytes;
  const int64_t budget = kMaxSharedBytes - kZeroBytes - 1024 - shape.channels * meta;
  const int64_t stage = wire.slot_bytes + kQueueBytes + 8;
  const int64_t stages = budget / stage / shape.channels;
  shape.send_stages = static_cast<int32_t>(Min(kMaxStages, Max(2, stages * 3 / 7)));
  shape.recv_stages =
      static_cast<int32_t>(Min(kMaxStages, Max(2, stages - shape.send_stages)));
  shape.shared_bytes = static_cast<int32_t>(
      1024 + kZeroBytes +
      shape.channels * (meta + (shape.send_stages + shape.recv_stages) * stage));
  return shape;
}

JAX_EP_HD constexpr LaunchDims DispatchLaunch(int device_sms, int num_sms,
                                              const int64_t* leaf_bytes, int num_leaves,
                                              int num_topk, bool has_weights) {
  const DispatchShape shape =
      MakeDispatchShape(DispatchWire(leaf_bytes, num_leaves, num_topk, has_weights));
  LaunchDims dims{};
  dims.blocks = GridBlocks(device_sms, num_sms);
  dims.threads = 32 * (2 * shape.channels + 1);
  dims.shared_bytes = shape.shared_bytes;
  dims.channels = dims.blocks * shape.channels;
  dims.slot_bytes = shape.wire.slot_bytes;
  dims.num_pieces = shape.wire.num_pieces;
  return dims;
}

// --- combine -----------------------------------------------------------------

// One channel per block: a warp that loads rows of y, a team of warps that adds them,
// and up to two warps that send the sums, one to odd and one to even ranks; a warp that
// loads sums and a team that adds those.
constexpr int kTeamWarps = 4;
constexpr int kSenderWarps = 2;
// Up to this many blocks a block has more sums than one warp can send; with more
// blocks, two would only publish more often.
constexpr int kMaxBlocksWithTwoSenders = 48;
constexpr int kCombineWarps = kSenderWarps + 2 + 2 * kTeamWarps;

struct CombineLayout {
  CombineShape wire;
  int32_t send_stages;  // pieces of rows of y
  int32_t recv_stages;  // pieces of partial sums
  int32_t out_stages;   // sums on their way to a peer
  int32_t shared_bytes;
};

// Rows, weights and values of a batch, three deep; the receiver has ranks and slots.
constexpr int kCombineMetaBytes = (3 * 3 + 2 * 2) * kBatchEntries * 4;
// Barriers and description of a stage.
constexpr int kStageMetaBytes = 64;

JAX_EP_HD constexpr CombineLayout MakeCombineLayout(const CombineShape& wire) {
  CombineLayout shape{};
  shape.wire = wire;
  shape.out_stages = 3;
  const int64_t in = AlignUp(wire.in_bytes, 128) + kStageMetaBytes;
  const int64_t out = wire.slot_bytes + kStageMetaBytes;
  const int64_t fixed = 1024 + kCombineMetaBytes + shape.out_stages * out;
  const int64_t budget = kMaxSharedBytes - fixed;
  // A third of what is left to the receiver, which sees fewer rows.
  shape.recv_stages = static_cast<int32_t>(Min(kMaxStages, Max(2, budget / 3 / out)));
  shape.send_stages = static_cast<int32_t>(
      Min(2 * kMaxStages, Max(2, (budget - shape.recv_stages * out) / in)));
  shape.shared_bytes =
      static_cast<int32_t>(fixed + shape.recv_stages * out + shape.send_stages * in);
  return shape;
}

JAX_EP_HD constexpr LaunchDims CombineLaunch(int device_sms, int num_sms,
                                             const int32_t* dtypes,
                                             const int64_t* widths, int num_leaves,
                                             int num_topk, bool wire_f32,
                                             bool has_row_values) {
  const CombineLayout shape = MakeCombineLayout(
      MakeCombineShape(dtypes, widths, num_leaves, num_topk, wire_f32, has_row_values));
  LaunchDims dims{};
  dims.blocks = GridBlocks(device_sms, num_sms);
  dims.threads = 32 * kCombineWarps;
  dims.shared_bytes = shape.shared_bytes;
  dims.channels = dims.blocks;
  dims.slot_bytes = shape.wire.slot_bytes;
  dims.num_pieces = shape.wire.num_pieces;
  return dims;
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LAUNCH_SHAPE_H_
