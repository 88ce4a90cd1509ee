// A token's row in dispatch for few tokens, 16 bytes at a time: in the arrays, where
// leaves have their own rows, and on the wire, where they follow one another.

#ifndef JAX_EP_FFI_CUDA_FEW_ROWS_CUH_
#define JAX_EP_FFI_CUDA_FEW_ROWS_CUH_

#include "call.cuh"
#include "dispatch_rows.cuh"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// `Config` is that of Dispatch.
template <class Config>
class FewRows {
  using Rows = DispatchRows<Config>;

 public:
  static constexpr int kVectors =
      static_cast<int>(Rows::LeafOffset(Config::kNumLeaves) / 16);

  // Vector `index` of a token's row.
  template <int kLeaf = 0>
  __device__ static __forceinline__ uint4 Load(const DispatchParams& params,
                                               int64_t token, int index) {
    constexpr int64_t kBytes = Config::LeafBytes(kLeaf);
    constexpr int kFirst = static_cast<int>(Rows::LeafOffset(kLeaf) / 16);
    if constexpr (kLeaf + 1 < Config::kNumLeaves) {
      constexpr int kNext = static_cast<int>(Rows::LeafOffset(kLeaf + 1) / 16);
      if (index >= kNext) return Load<kLeaf + 1>(params, token, index);
    }
    const uint8_t* row = static_cast<const uint8_t*>(params.x[kLeaf]) + token * kBytes;
    if constexpr (Rows::IsBulk(kLeaf)) {
      return reinterpret_cast<const uint4*>(row)[index - kFirst];
    } else {
      constexpr int kUnit = Rows::UnitBytes(kBytes);
      using Unit = typename Rows::template UnitOf<kUnit>::Type;
      uint64_t halves[2] = {};
#pragma unroll
      for (int i = 0; i < 16 / kUnit; ++i) {
        const int64_t unit = (index - kFirst) * (16 / kUnit) + i;
        if (unit >= kBytes / kUnit) continue;
        const uint64_t value = reinterpret_cast<const Unit*>(row)[unit];
        halves[i * kUnit / 8] |= value << (8 * (i * kUnit % 8));
      }
      return make_uint4(
          static_cast<uint32_t>(halves[0]), static_cast<uint32_t>(halves[0] >> 32),
          static_cast<uint32_t>(halves[1]), static_cast<uint32_t>(halves[1] >> 32));
    }
  }

  // Writes vector `index` of a row of the receive buffers.
  template <int kLeaf = 0>
  __device__ static __forceinline__ void Store(const DispatchParams& params,
                                               int64_t row_index, int index,
                                               uint4 bits) {
    constexpr int64_t kBytes = Config::LeafBytes(kLeaf);
    constexpr int kFirst = static_cast<int>(Rows::LeafOffset(kLeaf) / 16);
    if constexpr (kLeaf + 1 < Config::kNumLeaves) {
      constexpr int kNext = static_cast<int>(Rows::LeafOffset(kLeaf + 1) / 16);
      if (index >= kNext) {
        Store<kLeaf + 1>(params, row_index, index, bits);
        return;
      }
    }
    uint8_t* row = static_cast<uint8_t*>(params.recv[kLeaf]) + row_index * kBytes;
    if constexpr (Rows::IsBulk(kLeaf)) {
      ptx::StoreStreaming(reinterpret_cast<uint4*>(row) + (index - kFirst), bits);
    } else {
      constexpr int kUnit = Rows::UnitBytes(kBytes);
      using Unit = typename Rows::template UnitOf<kUnit>::Type;
      const uint64_t halves[2] = {bits.x | static_cast<uint64_t>(bits.y) << 32,
                                  bits.z | static_cast<uint64_t>(bits.w) << 32};
#pragma unroll
      for (int i = 0; i < 16 / kUnit; ++i) {
        const int64_t unit = (index - kFirst) * (16 / kUnit) + i;
        if (unit >= kBytes / kUnit) continue;
        reinterpret_cast<Unit*>(row)[unit] =
            static_cast<Unit>(halves[i * kUnit / 8] >> (8 * (i * kUnit % 8)));
      }
    }
  }

  // Zeroes rows [begin, end): the share of worker `worker` of `workers` warps.
  template <int kLeaf = 0>
  __device__ static __forceinline__ void Zero(const DispatchParams& params,
                                              int64_t begin, int64_t end, int worker,
                                              int workers) {
    constexpr int64_t kBytes = Config::LeafBytes(kLeaf);
    uint8_t* data = static_cast<uint8_t*>(params.recv[kLeaf]);
    const int64_t first = begin * kBytes, last = end * kBytes;
    const int64_t aligned_first = Min(last, AlignUp(first, 16));
    const int64_t aligned_last = Max(aligned_first, last / 16 * 16);
    for (int64_t v = aligned_first / 16 + worker * 32 + Lane(); v < aligned_last / 16;
         v += workers * 32) {
      ptx::StoreStreaming(reinterpret_cast<uint4*>(data) + v, make_uint4(0, 0, 0, 0));
    }
    if (!Rows::IsBulk(kLeaf) && worker == 0 && Lane() < 16) {
      if (first + Lane() < aligned_first) data[first + Lane()] = 0;
      if (aligned_last + Lane() < last) data[aligned_last + Lane()] = 0;
    }
    if constexpr (kLeaf + 1 < Config::kNumLeaves) {
      Zero<kLeaf + 1>(params, begin, end, worker, workers);
    } else if (Config::kHasWeights) {
      for (int64_t row = begin + worker * 32 + Lane(); row < end; row += workers * 32) {
        params.recv_weights[row] = 0;
      }
    }
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_FEW_ROWS_CUH_
