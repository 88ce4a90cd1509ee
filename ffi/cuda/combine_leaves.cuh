// What is known of a combine's leaves when it is compiled, and their sums on the wire.

#ifndef JAX_EP_FFI_CUDA_COMBINE_LEAVES_CUH_
#define JAX_EP_FFI_CUDA_COMBINE_LEAVES_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "numeric.cuh"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// `Config` is that of Combine.
template <class Config>
class CombineLeaves {
  static constexpr int kNumLeaves = Config::kNumLeaves;

  static constexpr CombineShape MakeWireShape() {
    int32_t dtypes[kNumLeaves] = {};
    int64_t widths[kNumLeaves] = {};
    for (int i = 0; i < kNumLeaves; ++i) {
      dtypes[i] = Config::Dtype(i);
      widths[i] = Config::Width(i);
    }
    return MakeCombineShape(dtypes, widths, kNumLeaves, Config::kTopk, Config::kWireF32,
                            Config::kHasRowValues);
  }

 public:
  static constexpr CombineLayout kShape = MakeCombineLayout(MakeWireShape());
  static constexpr int kTeamThreads = 32 * kTeamWarps;

  // Compile-time facts of a leaf.
  template <int kLeaf>
  struct Leaf {
    static constexpr int kIndex = kLeaf;
    static constexpr int kDtype = Config::Dtype(kLeaf);
    using Traits = Numeric<kDtype>;
    static constexpr int64_t kWidth = Config::Width(kLeaf);
    static constexpr int kItem = Traits::kItem;
    static constexpr int kWireItem = Config::kWireF32 ? 4 : kItem;
    static constexpr int kOutItem = Config::kOutF32 ? 4 : kItem;
    static constexpr CombineLeaf kShape = MakeCombineLeaf(kWidth, kWireItem);
    static constexpr int kSize = Traits::kVector;
    // Vectors of a piece per thread of a team.
    static constexpr int kVectors =
        (kShape.piece_elems / kSize + kTeamThreads - 1) / kTeamThreads;
    // Whether every thread has exactly so many.
    static constexpr bool kExact =
        kShape.num_pieces == 1 &&
        (kWidth + kSize - 1) / kSize == kVectors * kTeamThreads;
    // Whether bulk copies can move rows of y, bias and the result.
    static constexpr bool kBulk = kWidth * kItem % 16 == 0;

    __device__ static __forceinline__ int64_t First(int piece) {
      return kShape.num_pieces == 1 ? 0
                                    : static_cast<int64_t>(piece) * kShape.piece_elems;
    }
    __device__ static __forceinline__ int Elements(int piece) {
      return static_cast<int>(Min(kShape.piece_elems, kWidth - First(piece)));
    }
    __device__ static __forceinline__ int NumVectors(int piece) {
      return (Elements(piece) + kSize - 1) / kSize;
    }
    __device__ static __forceinline__ uint32_t WireBytes(int piece) {
      return NumVectors(piece) * kSize * kWireItem;
    }
    __device__ static __forceinline__ int64_t ByteOffset(int64_t row, int piece) {
      return (row * kWidth + First(piece)) * kItem;
    }

    // Elements from `first` on of a token's sum, unrounded.
    template <int kCount>
    __device__ static __forceinline__ void StoreF32(void* out, int64_t token,
                                                    int64_t first,
                                                    const float (&sum)[kCount]) {
      uint8_t* row = static_cast<uint8_t*>(out) + token * kWidth * 4;
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float part[4] = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
        const uint4 bits = Numeric<kLeafF32>::Pack(part);
        if constexpr (kBulk) {
          ptx::StoreStreaming(reinterpret_cast<uint4*>(row + (first + i) * 4), bits);
        } else {
          Vector<kLeafF32>::StoreTail(row, first + i, kWidth, bits);
        }
      }
    }

    // Vector `index` of a sum on the wire: in the leaf's type, rounded once, or
    // float32.
    __device__ static __forceinline__ void StoreWire(uint8_t* out, int index,
                                                     const float (&sum)[kSize]) {
      uint4* vectors = reinterpret_cast<uint4*>(out);
      if constexpr (kWireItem == kItem) {
        vectors[index] = Traits::Pack(sum);
      } else {
#pragma unroll
        for (int h = 0; h < kSize / 4; ++h) {
          const float part[4] = {sum[4 * h], sum[4 * h + 1], sum[4 * h + 2],
                                 sum[4 * h + 3]};
          vectors[index * (kSize / 4) + h] = Numeric<kLeafF32>::Pack(part);
        }
      }
    }
    __device__ static __forceinline__ void LoadWire(const uint8_t* bytes, int index,
                                                    float (&values)[kSize]) {
      const uint4* vectors = reinterpret_cast<const uint4*>(bytes);
      if constexpr (kWireItem == kItem) {
        Traits::Unpack(vectors[index], values);
      } else {
#pragma unroll
        for (int h = 0; h < kSize / 4; ++h) {
          float part[4];
          Numeric<kLeafF32>::Unpack(vectors[index * (kSize / 4) + h], part);
#pragma unroll
          for (int j = 0; j < 4; ++j) values[4 * h + j] = part[j];
        }
      }
    }
  };

  // Calls visitor(Leaf) for the leaf with this number.
  template <int kLeaf = 0, class Visitor>
  __device__ static __forceinline__ void VisitLeaf(int leaf, Visitor visitor) {
    if (kLeaf + 1 == kNumLeaves || leaf == kLeaf) {
      visitor(Leaf<kLeaf>{});
    } else if constexpr (kLeaf + 1 < kNumLeaves) {
      VisitLeaf<kLeaf + 1>(leaf, visitor);
    }
  }
  // Calls visitor(Leaf) for every leaf in order.
  template <int kLeaf = 0, class Visitor>
  __device__ static __forceinline__ void ForEachLeaf(Visitor visitor) {
    visitor(Leaf<kLeaf>{});
    if constexpr (kLeaf + 1 < kNumLeaves) ForEachLeaf<kLeaf + 1>(visitor);
  }
  // Calls visitor(Leaf, leaf, piece) for every piece of every leaf in order.
  template <int kLeaf = 0, class Visitor>
  __device__ static __forceinline__ void ForEachPiece(Visitor visitor) {
    for (int piece = 0; piece < Leaf<kLeaf>::kShape.num_pieces; ++piece) {
      visitor(Leaf<kLeaf>{}, kLeaf, piece);
    }
    if constexpr (kLeaf + 1 < kNumLeaves) ForEachPiece<kLeaf + 1>(visitor);
  }
};

// What a combine that gave up leaves: every byte of its results.
template <class Config>
__device__ void PoisonCombine(const CombineParams& params, int part, int parts) {
  CombineLeaves<Config>::ForEachLeaf([&](auto leaf_type) {
    using L = decltype(leaf_type);
    FillBytes(params.out[L::kIndex], params.num_tokens * L::kWidth * L::kOutItem,
              kPoison, part, parts);
  });
  if (Config::kHasRowValues) {
    FillBytes(params.values, params.num_tokens * Config::kTopk * 4, kPoison, part,
              parts);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_COMBINE_LEAVES_CUH_
