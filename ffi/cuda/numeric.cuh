// Elements of a leaf as float32 and back, a 16-byte vector at a time. Sums must have
// the same bits on every backend: no contraction, no reassociation, one rounding.

#ifndef JAX_EP_FFI_CUDA_NUMERIC_CUH_
#define JAX_EP_FFI_CUDA_NUMERIC_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "workspace.h"

namespace jax_ep::cuda {

// `kItem` bytes an element, `kVector` elements in 16 bytes.
template <int kDtype>
struct Numeric;

template <>
struct Numeric<kLeafF32> {
  static constexpr int kItem = 4;
  static constexpr int kVector = 4;
  __device__ static __forceinline__ void Unpack(uint4 bits, float (&values)[4]) {
    values[0] = __uint_as_float(bits.x);
    values[1] = __uint_as_float(bits.y);
    values[2] = __uint_as_float(bits.z);
    values[3] = __uint_as_float(bits.w);
  }
  __device__ static __forceinline__ uint4 Pack(const float (&values)[4]) {
    return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                      __float_as_uint(values[2]), __float_as_uint(values[3]));
  }
};

template <>
struct Numeric<kLeafBf16> {
  static constexpr int kItem = 2;
  static constexpr int kVector = 8;
  __device__ static __forceinline__ void Unpack(uint4 bits, float (&values)[8]) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static __forceinline__ uint32_t PackPair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ static __forceinline__ uint4 Pack(const float (&values)[8]) {
    return make_uint4(PackPair(values[0], values[1]), PackPair(values[2], values[3]),
                      PackPair(values[4], values[5]), PackPair(values[6], values[7]));
  }
};

template <>
struct Numeric<kLeafF16> {
  static constexpr int kItem = 2;
  static constexpr int kVector = 8;
  __device__ static __forceinline__ void Unpack(uint4 bits, float (&values)[8]) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
  __device__ static __forceinline__ uint32_t PackPair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ static __forceinline__ uint4 Pack(const float (&values)[8]) {
    return make_uint4(PackPair(values[0], values[1]), PackPair(values[2], values[3]),
                      PackPair(values[4], values[5]), PackPair(values[6], values[7]));
  }
};

// One vector of a leaf's elements: loaded and stored as 16 bytes, or element by
// element where rows do not keep 16-byte alignment.
template <int kDtype>
struct Vector {
  using Traits = Numeric<kDtype>;
  static constexpr int kSize = Traits::kVector;

  // Elements [first, first + kSize) of the row at `row`; zeros from `width` on.
  __device__ static __forceinline__ uint4 LoadTail(const uint8_t* row, int64_t first,
                                                   int64_t width) {
    if constexpr (Traits::kItem == 4) {
      const uint32_t* items = reinterpret_cast<const uint32_t*>(row) + first;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = first + i < width ? items[i] : 0;
      return make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      const uint16_t* items = reinterpret_cast<const uint16_t*>(row) + first;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low = first + 2 * i < width ? items[2 * i] : 0;
        const uint32_t high = first + 2 * i + 1 < width ? items[2 * i + 1] : 0;
        words[i] = low | high << 16;
      }
      return make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ static __forceinline__ void StoreTail(uint8_t* row, int64_t first,
                                                   int64_t width, uint4 bits) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    if constexpr (Traits::kItem == 4) {
      uint32_t* items = reinterpret_cast<uint32_t*>(row) + first;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < width) items[i] = words[i];
      }
    } else {
      uint16_t* items = reinterpret_cast<uint16_t*>(row) + first;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first + i < width) {
          items[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
        }
      }
    }
  }
};

// sums += values; with a weight, sums += weight * values in two roundings.
template <bool kWeighted, int kSize>
__device__ __forceinline__ void Accumulate(float (&sums)[kSize],
                                           const float (&values)[kSize], float weight) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    sums[i] = __fadd_rn(sums[i], kWeighted ? __fmul_rn(weight, values[i]) : values[i]);
  }
}

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_NUMERIC_CUH_
