// What the kernels use of CUDA's header: pairs of floats to bfloat16, to nearest even.
#ifndef JAX_EP_TESTS_EMULATOR_CUDA_BF16_H_
#define JAX_EP_TESTS_EMULATOR_CUDA_BF16_H_

#include "cuda_shim.h"

struct __nv_bfloat162 {
  uint16_t x, y;
};

namespace emu {
inline uint16_t RoundToBf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
}  // namespace emu

inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {emu::RoundToBf16(low), emu::RoundToBf16(high)};
}

#endif  // JAX_EP_TESTS_EMULATOR_CUDA_BF16_H_
