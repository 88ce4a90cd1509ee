// The contract between the host and the CUDA kernels: every byte offset of the
// symmetric workspace, the parameter block of each kernel, and its launch shape.
//
// Compiles as plain C++17 on the host and under NVRTC. Letters: T tokens per
// rank, K top-k, E experts, R ranks, L = E / R, C rows of the receive buffer.

#ifndef JAX_EP_FFI_CUDA_WORKSPACE_H_
#define JAX_EP_FFI_CUDA_WORKSPACE_H_

#include "dtypes.h"
#include "limits.h"
#include "portable.h"

namespace jax_ep::cuda {

// Changed with every struct, offset or launch shape that host and kernels share, here
// and in launch_shape.h; kAbiVersion with it, since programs carry their kernels.
constexpr int kKernelAbi = 5;

// ---------------------------------------------------------------------------
// Workspace. Every rank of a communicator holds one, registered as a symmetric
// window and zeroed once before the first kernel (no kernel of any rank may run
// before all ranks have zeroed theirs). Its size follows from R alone.
// ---------------------------------------------------------------------------

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;

// Signals wait in their own channel's line: `word[channel][rank]`, so one warp
// polls all ranks of a channel with one load.
constexpr int kMaxChannels = 256;

// Words that decide the fate of a call. Peers write only `abort`.
struct Control {
  // 0, or 1 + the rank that gave up. Written by any rank, never cleared.
  uint64_t abort;
  uint64_t pad0[7];
  // Signature of the call that runs now, 0 between calls.
  uint64_t busy;
  // Dispatch and combine calls begun here; 1 for the first.
  uint64_t ring_calls;
  // Rounds of id exchange done here.
  uint64_t id_rounds;
  // Blocks of the running call that are done.
  uint32_t blocks_done;
  // Layout: blocks that reached the grid barrier in this call.
  uint32_t barrier;
  // Layout: ids >= E seen in this call.
  uint32_t invalid_ids;
  // 1 once this rank wrote its error record.
  uint32_t reported;
  // Dispatch: chunks of the buffer's rest that blocks have taken to zero, and of the
  // shared tokens that they have taken to write.
  uint32_t zero_chunks;
  uint32_t token_chunks;
  // Dispatch and combine calls for few tokens that are done here.
  uint64_t few_calls;
  // Calls of any kind that are done here.
  uint64_t calls;
};
static_assert(sizeof(Control) == 128, "one line for peers, one for this rank");

enum Phase : int32_t {
  kPhaseNone = 0,
  kPhaseLayoutIds = 1,       // ids of `peer`; expected / seen: exchange round
  kPhaseLayoutGrid = 2,      // own blocks; expected / seen: blocks arrived
  kPhaseDispatchReuse = 3,   // `peer` still reads an earlier call; ring calls
  kPhaseDispatchCredit = 4,  // `peer` frees no ring slots; pieces consumed
  kPhaseDispatchRows = 5,    // `peer` sends no rows; pieces arrived
  kPhaseCombineReuse = 6,
  kPhaseCombineCredit = 7,
  kPhaseCombineRows = 8,
  kPhaseOverlap = 9,        // two calls at once here; seen: the other's signature
  kPhaseRankMismatch = 10,  // axis index (seen) is not the communicator's rank
  // `peer` has not begun this call; call words. Rows for few tokens have not come;
  // epochs.
  kPhaseDispatchPeer = 11,
  kPhaseFewDispatchRows = 12,
  kPhaseCombinePeer = 13,
  kPhaseFewCombineRows = 14,
  kPhaseLayoutPeer = 15,
  kPhaseSite = 16,  // `peer` has begun another call than this one; call words
};

// What a wait that gave up leaves behind: in host-visible memory here, and in
// every peer's workspace under this rank's index.
struct ErrorRecord {
  uint32_t written;  // 0, or 1 once all other fields are valid (stored last)
  int32_t phase;     // Phase
  int32_t rank;      // the rank that gave up: another one's if it told us so
  int32_t peer;      // the rank waited for, -1 if none
  int32_t channel;   // -1 if none
  int32_t behind;    // the rank that is the most calls behind, -1 if none is
  uint64_t expected;
  uint64_t seen;
  uint64_t call;  // ring call or id round
  uint64_t waited_ns;
  uint64_t pad1;
};
static_assert(sizeof(ErrorRecord) == 64, "one line");

constexpr int64_t kControlOffset = 0;
constexpr int64_t kErrorsOffset = 4 * kKiB;  // ErrorRecord[kMaxRanks], by origin
// uint64_t[kMaxRanks]: the last ring call in which that rank has read all we sent.
constexpr int64_t kDoneOffset = 8 * kKiB;
// uint64_t[kMaxRanks]: the last call that that rank has begun, as a call word: the
// call's number, counted over all kinds, above a hash of its site. The program's calls
// are those of every rank, so two ranks with one number must have one site; else they
// would take each other's data for what they wait for.
constexpr int64_t kBegunOffset = 12 * kKiB;
// 2^40 calls last for years at any rate.
constexpr int kSiteBits = 24;
JAX_EP_HD constexpr uint64_t CallOf(uint64_t word) { return word >> kSiteBits; }
// uint64_t[kNumStampedStages][kMaxStampedBlocks][kMaxStamps]: when the blocks of the
// latest call of a stage reached its phases, in ns; written by kernels compiled with
// JAX_EP_STAMPS only, read by the tools.
constexpr int64_t kStampsOffset = 16 * kKiB;
constexpr int kMaxStampedBlocks = 256;
constexpr int kMaxStamps = 8;
enum Stamp : int {
  kStampBegan = 0,
  kStampLastSend = 1,     // issued
  kStampLastArrival = 2,  // of what other ranks sent
  kStampPlanned = 3,      // layout only: first rows known
  kStampLastRow = 4,      // in its place, and all else done
};
constexpr int kNumStamps = 5;
constexpr int kNumStampedStages = 3;  // layout, dispatch, combine
constexpr int64_t kStampsBytes =
    int64_t{kNumStampedStages} * kMaxStampedBlocks * kMaxStamps * 8;

// uint64_t[kMaxChannels][kMaxRanks] each; a word has the ring call it belongs to, so
// nothing is reset between calls. `head`: pieces that
// rank has sent to us. `tail`: pieces that rank has consumed of ours.
constexpr int64_t kHeadOffset = 64 * kKiB;
constexpr int64_t kTailOffset = kHeadOffset + kMaxChannels * kMaxRanks * 8;
// A signal word: the call's number above the count of pieces. 2^40 calls last for
// years at any rate. A call with 2^24 pieces in a channel is refused: CheckPieces.
constexpr int kCountBits = 24;
// The count of a call in a head or tail word; 0 if the word is older.
JAX_EP_HD constexpr uint32_t CountIn(uint64_t word, uint64_t call) {
  return word >> kCountBits == call
             ? static_cast<uint32_t>(word) & ((1u << kCountBits) - 1)
             : 0;
}

// Scratch of the layout, used by its own rank only.
// uint32_t[kMaxTiles][E]: ids per tile and expert.
constexpr int kMaxTiles = 64;
constexpr int64_t kTileCountOffset = 512 * kKiB;
// int32_t[R][E] each: first row of (source, expert), and how many it keeps.
constexpr int64_t kRowBaseOffset = 1 * kMiB;
constexpr int64_t kKeptOffset = kRowBaseOffset + kMaxRanks * kMaxExperts * 4;
// Two halves, used in turn, of 16-byte words: eight 12-bit ids and the round's
// 32-bit number. One range per source rank.
constexpr int64_t kIdsOffset = 2 * kMiB;
constexpr int64_t kIdsHalfBytes = 1 * kMiB;
constexpr int64_t kRingOffset = 4 * kMiB;

static_assert(kBegunOffset + kMaxRanks * 8 <= kStampsOffset, "");
static_assert(kStampsOffset + kStampsBytes <= kHeadOffset, "");
static_assert(kTailOffset + kMaxChannels * kMaxRanks * 8 <= kTileCountOffset, "");
static_assert(kTileCountOffset + kMaxTiles * kMaxExperts * 4 <= kRowBaseOffset, "");
static_assert(kKeptOffset + kMaxRanks * kMaxExperts * 4 <= kIdsOffset, "");
static_assert(kIdsOffset + 2 * kIdsHalfBytes <= kRingOffset, "");

constexpr int kIdsPerWord = 8;

// 16-byte words of one source in one half.
JAX_EP_HD constexpr int64_t IdWordsPerRound(int num_ranks) {
  return kIdsHalfBytes / num_ranks / 16;
}

// Slots of calls for few tokens, behind the ring: in each of two halves, used in turn,
// one range per source rank. 256 tokens of 16.5 KiB up to R = 8; beyond, their share.
JAX_EP_HD constexpr int64_t FewRangeBytes(int num_ranks) {
  constexpr int64_t kRange = 4 * kMiB + 256 * kKiB;
  return num_ranks <= 8 ? kRange : 8 * kRange / num_ranks / (64 * kKiB) * (64 * kKiB);
}

// The whole workspace has at most so many bytes.
constexpr int64_t kMaxWorkspaceBytes = 256 * kMiB;

// Bytes of the ring that one source owns at each peer: 30 MiB, or from R = 7 on the
// share of what is left (23 MiB at R = 8, 2.8 at R = 64, where a peer gets 1/63 of the
// link).
JAX_EP_HD constexpr int64_t RingRangeBytes(int num_ranks) {
  const int64_t share =
      (kMaxWorkspaceBytes - kRingOffset) / num_ranks - 2 * FewRangeBytes(num_ranks);
  return share < 30 * kMiB ? share / (64 * kKiB) * (64 * kKiB) : 30 * kMiB;
}

JAX_EP_HD constexpr int64_t FewOffset(int num_ranks) {
  return kRingOffset + num_ranks * RingRangeBytes(num_ranks);
}

// 42.5 MiB at R = 1, 81 at 2, 158 at 4, 256 at 8.
JAX_EP_HD constexpr int64_t WorkspaceBytes(int num_ranks) {
  return FewOffset(num_ranks) + 2 * num_ranks * FewRangeBytes(num_ranks);
}

// ---------------------------------------------------------------------------
// Kernel parameters, passed by value as the only (__grid_constant__) argument.
// ---------------------------------------------------------------------------

struct CommonParams {
  // Workspace of every rank as this device addresses it; [rank] is our own.
  uint8_t* peers[kMaxRanks];
  // Device address of this rank's pinned, zeroed host record.
  ErrorRecord* error;
  // The custom call's `rank` operand; null skips the comparison.
  const int32_t* rank_operand;
  // Every block of a start counts itself here when it begins; null in other calls.
  uint32_t* resident;
  uint64_t timeout_ns;
  uint64_t site;  // a hash of kSiteBits
  int32_t rank;
  int32_t num_ranks;
};

struct LayoutParams {
  CommonParams common;
  const int32_t* topk_idx;  // [T * K]
  int32_t* slot;            // [T * K]
  int32_t* slot_rank;       // [T * K]
  int32_t* recv_slot;       // [R * T * K], 16-byte aligned
  int32_t* group_sizes;     // [L]
  int32_t* group_counts;    // [L]
  int32_t* group_offsets;   // [L]
  int32_t* num_recv;        // [R]
  int32_t* num_dropped;     // [R]
  int32_t* num_invalid;     // [1]
  int64_t num_ids;          // T * K
  int64_t capacity;         // C, a multiple of the alignment
  int32_t num_experts;
  int32_t expert_alignment;
};

struct DispatchParams {
  CommonParams common;
  const int32_t* slot;
  const int32_t* slot_rank;
  const int32_t* recv_slot;
  const int32_t* group_counts;
  const int32_t* group_offsets;
  const float* weights;       // [T, K], null without has_weights
  float* recv_weights;        // [C], null without has_weights
  const void* x[kMaxLeaves];  // [T, leaf bytes], 16-byte aligned
  void* recv[kMaxLeaves];     // [C, leaf bytes], 16-byte aligned
  int64_t num_tokens;
  int64_t capacity;
  int32_t num_local_experts;
  int32_t pad;
};

struct CombineParams {
  CommonParams common;
  const int32_t* slot;
  const int32_t* slot_rank;
  const int32_t* recv_slot;
  const float* weights;          // [C], null without has_weights
  const float* row_values;       // [C], null without has_row_values
  float* values;                 // [T, K], null without has_row_values
  const void* y[kMaxLeaves];     // [C, W_i], 16-byte aligned
  const void* bias[kMaxLeaves];  // [T, W_i], 16-byte aligned, null without bias
  void* out[kMaxLeaves];         // [T, W_i], 16-byte aligned
  int64_t num_tokens;
  int64_t capacity;
};

static_assert(sizeof(LayoutParams) <= 4096, "");
static_assert(sizeof(DispatchParams) <= 4096, "");
static_assert(sizeof(CombineParams) <= 4096, "");

// ---------------------------------------------------------------------------
// Compilation. One source per kernel, one entry point in it, no name mangling:
//
//   layout.cu    jax_ep_layout    one cubin for all shapes
//   dispatch.cu  jax_ep_dispatch  JAX_EP_RANKS, JAX_EP_TOPK, JAX_EP_HAS_WEIGHTS,
//                                 JAX_EP_LEAF_BYTES (comma list: bytes of a row)
//   combine.cu   jax_ep_combine   JAX_EP_RANKS, JAX_EP_TOPK, JAX_EP_HAS_WEIGHTS,
//                                 JAX_EP_HAS_ROW_VALUES, JAX_EP_HAS_BIAS,
//                                 JAX_EP_WIRE_F32, JAX_EP_OUT_F32,
//                                 JAX_EP_LEAF_DTYPES (comma list of LeafDtype),
//                                 JAX_EP_LEAF_WIDTHS (comma list)
//
// Flags are 0 or 1. JAX_EP_STAMPS=1 makes any of them note its phases;
// JAX_EP_TUNE_SLOTS and JAX_EP_TUNE_PIECE are for tests, which want small rings. NVRTC
// options: -std=c++17 -default-device, this folder and the CUDA headers on the include
// path, -arch=sm_90a or sm_100a. -use_fast_math, -fmad and the like must stay at their
// defaults.
// ---------------------------------------------------------------------------

JAX_EP_HD constexpr int64_t AlignUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// ---------------------------------------------------------------------------
// The wire. A row crosses a link in pieces; a ring slot holds one piece and,
// behind it, K floats (weights or row values) where the call has any.
// ---------------------------------------------------------------------------

#ifndef JAX_EP_TUNE_PIECE
#define JAX_EP_TUNE_PIECE (16 * 1024)
#endif
constexpr int64_t kMaxPieceBytes = JAX_EP_TUNE_PIECE;

struct WireShape {
  int64_t row_bytes;    // one row, leaves at 16-byte offsets (dispatch only)
  int32_t num_pieces;   // per row
  int32_t piece_bytes;  // the largest piece, a multiple of 16
  int32_t extra_bytes;  // the K floats behind it, a multiple of 16 or 0
  int32_t slot_bytes;   // stride of the ring, a multiple of 128
};

JAX_EP_HD constexpr WireShape MakeWire(int64_t row_bytes, int num_topk, bool extra) {
  WireShape wire{};
  wire.row_bytes = row_bytes;
  wire.num_pieces =
      static_cast<int32_t>((row_bytes + kMaxPieceBytes - 1) / kMaxPieceBytes);
  wire.piece_bytes = static_cast<int32_t>(
      AlignUp((row_bytes + wire.num_pieces - 1) / wire.num_pieces, 16));
  wire.extra_bytes = extra ? static_cast<int32_t>(AlignUp(4 * num_topk, 16)) : 0;
  wire.slot_bytes =
      static_cast<int32_t>(AlignUp(wire.piece_bytes + wire.extra_bytes, 128));
  return wire;
}

// All leaves of a dispatch share one wire row.
JAX_EP_HD constexpr WireShape DispatchWire(const int64_t* leaf_bytes, int num_leaves,
                                           int num_topk, bool has_weights) {
  int64_t row_bytes = 0;
  for (int i = 0; i < num_leaves; ++i) row_bytes += AlignUp(leaf_bytes[i], 16);
  return MakeWire(row_bytes, num_topk, has_weights);
}

// Each leaf of a combine has its own pieces; `wire_item` is the size of an
// element on the link (4 when partial sums cross as float32). Pieces are cut at
// multiples of 16 bytes of both y and the wire.
struct CombineLeaf {
  int32_t num_pieces;
  int32_t piece_elems;  // a multiple of 8
};

JAX_EP_HD constexpr CombineLeaf MakeCombineLeaf(int64_t width, int wire_item) {
  CombineLeaf leaf{};
  const int64_t max_elems = kMaxPieceBytes / wire_item;
  leaf.num_pieces = static_cast<int32_t>((width + max_elems - 1) / max_elems);
  leaf.piece_elems =
      static_cast<int32_t>(AlignUp((width + leaf.num_pieces - 1) / leaf.num_pieces, 8));
  return leaf;
}

struct CombineShape {
  int32_t num_pieces;   // per token, over all leaves
  int32_t in_bytes;     // the largest piece of a row of y, a multiple of 16
  int32_t wire_bytes;   // the largest piece on the link, a multiple of 16
  int32_t extra_bytes;  // K floats behind the first piece, or 0
  int32_t slot_bytes;   // stride of the ring, a multiple of 128
};

JAX_EP_HD constexpr CombineShape MakeCombineShape(const int32_t* dtypes,
                                                  const int64_t* widths, int num_leaves,
                                                  int num_topk, bool wire_f32,
                                                  bool has_row_values) {
  CombineShape shape{};
  for (int i = 0; i < num_leaves; ++i) {
    const CombineTypes types = MakeCombineTypes(dtypes[i], wire_f32);
    const int item = LeafItemBytes(types.load);
    const int wire_item = LeafItemBytes(types.wire);
    const CombineLeaf leaf = MakeCombineLeaf(widths[i], wire_item);
    shape.num_pieces += leaf.num_pieces;
    const int32_t in = static_cast<int32_t>(AlignUp(leaf.piece_elems * item, 16));
    const int32_t wire =
        static_cast<int32_t>(AlignUp(leaf.piece_elems * wire_item, 16));
    if (in > shape.in_bytes) shape.in_bytes = in;
    if (wire > shape.wire_bytes) shape.wire_bytes = wire;
  }
  shape.extra_bytes =
      has_row_values ? static_cast<int32_t>(AlignUp(4 * num_topk, 16)) : 0;
  shape.slot_bytes =
      static_cast<int32_t>(AlignUp(shape.wire_bytes + shape.extra_bytes, 128));
  return shape;
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_WORKSPACE_H_
