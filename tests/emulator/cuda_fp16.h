// What the kernels use of CUDA's header: pairs of floats to float16, to nearest even.
#ifndef JAX_EP_TESTS_EMULATOR_CUDA_FP16_H_
#define JAX_EP_TESTS_EMULATOR_CUDA_FP16_H_

#include <cmath>

#include "cuda_shim.h"

struct __half2 {
  uint16_t x, y;
};

namespace emu {
inline uint16_t RoundToF16(float value) {
  const uint32_t sign = __float_as_uint(value) >> 16 & 0x8000u;
  const float size = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
  if (size < 0x1p-14f) {  // subnormal: steps of 2^-24; a carry makes it normal
    return static_cast<uint16_t>(
        sign | static_cast<uint32_t>(std::nearbyintf(size * 0x1p24f)));
  }
  const uint32_t bits = __float_as_uint(size);
  const uint32_t rounded = bits + 0xfffu + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}
inline float FromF16(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int fraction = half & 1023;
  const float size = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                     : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                      : std::ldexp(1024.0f + fraction, exponent - 25);
  return (half & 0x8000) != 0 ? -size : size;
}
}  // namespace emu

inline __half2 __floats2half2_rn(float low, float high) {
  return {emu::RoundToF16(low), emu::RoundToF16(high)};
}
inline float2 __half22float2(__half2 pair) {
  return {emu::FromF16(pair.x), emu::FromF16(pair.y)};
}

#endif  // JAX_EP_TESTS_EMULATOR_CUDA_FP16_H_
