// A token's row in dispatch: how it is cut in pieces, and how pieces move between
// arrays and shared memory.

#ifndef JAX_EP_FFI_CUDA_DISPATCH_ROWS_CUH_
#define JAX_EP_FFI_CUDA_DISPATCH_ROWS_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// `Config` is that of Dispatch.
template <class Config>
class DispatchRows {
 public:
  static constexpr int64_t LeafOffset(int leaf) {
    int64_t offset = 0;
    for (int i = 0; i < leaf; ++i) offset += AlignUp(Config::LeafBytes(i), 16);
    return offset;
  }

  static constexpr DispatchShape kShape = MakeDispatchShape(
      MakeWire(LeafOffset(Config::kNumLeaves), Config::kTopk, Config::kHasWeights));
  static constexpr int kPieceBytes = kShape.wire.piece_bytes;

  // With more ranks more rows cross the link, which is ten times slower than memory.
  static constexpr bool kMemoryBinds = Config::kRanks <= 2;

  // Whether bulk copies can move a leaf's rows; else the warp copies them itself.
  static constexpr bool IsBulk(int leaf) { return Config::LeafBytes(leaf) % 16 == 0; }

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
                                              int64_t token, int piece, uint8_t* stage,
                                              uint64_t* barrier) {
    if (HasSmall()) LoadSmall<0>(params, token, piece, stage);
    if (HasSmall() || Config::kHasWeights) {
      ptx::FenceSharedForBulk();
      __syncwarp();
    }
    if (Lane() == 0) LoadBulk(params, token, piece, stage, barrier);
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
};

// What a dispatch that gave up leaves: every byte of its results.
template <class Config>
__device__ void PoisonDispatch(const DispatchParams& params, int part, int parts) {
#pragma unroll
  for (int i = 0; i < Config::kNumLeaves; ++i) {
    FillBytes(params.recv[i], params.capacity * Config::LeafBytes(i), kPoison, part,
              parts);
  }
  if (Config::kHasWeights) {
    FillBytes(params.recv_weights, params.capacity * 4, kPoison, part, parts);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DISPATCH_ROWS_CUH_
