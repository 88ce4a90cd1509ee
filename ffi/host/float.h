// Float formats of rows, and the rounding mode sums are made in.
#ifndef JAX_EP_FFI_HOST_FLOAT_H_
#define JAX_EP_FFI_HOST_FLOAT_H_

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace jax_ep::host {

// Flushes denormals to zero, as operands and as results, while it lives.
//
// XLA sets this mode on the threads that execute a CPU program and on those of its
// pool. Sums must have the bits of the same sums in jax.lax, whichever thread makes
// them, so every thread of ours sets it too rather than inherit it.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(Read()) { Write(saved_ | kFlush); }
  ~FlushDenormals() { Write(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__SSE2__)
  using Register = uint32_t;
  static constexpr Register kFlush = 0x8040;  // MXCSR: FTZ (bit 15) and DAZ (bit 6)
  static Register Read() { return _mm_getcsr(); }
  static void Write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kFlush = Register{1} << 24;  // FPCR.FZ
  static Register Read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void Write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  using Register = uint32_t;
  static constexpr Register kFlush = 0;
  static Register Read() { return 0; }
  static void Write(Register) {}
#endif
  Register saved_;
};

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The conversions below are free of branches and table look-ups, so that loops over
// them become vector code, and mean the same with and without FlushDenormals.

// `condition ? yes : no`, which compilers would make a branch of.
inline uint32_t Select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

struct Bf16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

inline float ToFloat(float value) { return value; }

inline float ToFloat(Bf16 value) { return BitCast<float>(uint32_t{value.bits} << 16); }

inline float ToFloat(F16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{value.bits & 0x7fffu} << 13;
  // Normal numbers: the exponent's bias grows from 15 to 127; infinity and NaN have all
  // its bits set in both formats.
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t special = magnitude + (224u << 23);
  // Denormals: the mantissa below a leading 2^-14, which then is taken away exactly.
  const uint32_t denormal =
      BitCast<uint32_t>(BitCast<float>(magnitude + (113u << 23)) - 0x1p-14f);
  // NaN becomes quiet, as the conversions of hardware make it.
  const uint32_t quiet = Select(magnitude > 0x0f800000u, 0x00400000u, 0u);
  uint32_t bits = Select(magnitude >= 0x0f800000u, special | quiet, normal);
  bits = Select(magnitude < 0x00800000u, denormal, bits);
  return BitCast<float>(bits | sign);
}

// Rounds to nearest, ties to even; overflow gives infinity, NaN stays NaN.
template <typename T>
T FromFloat(float value);

template <>
inline float FromFloat<float>(float value) {
  return value;
}

template <>
inline Bf16 FromFloat<Bf16>(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  // A carry out of the mantissa counts the exponent up, to infinity if need be.
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;  // as XLA makes it
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return Bf16{static_cast<uint16_t>(Select(is_nan, nan, rounded))};
}

template <>
inline F16 FromFloat<F16>(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebias the exponent from 127 to 15 and round away 13 bits.
  const uint32_t normal =
      (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Denormal results: adding 0.5 leaves the wanted bits, rounded by the addition, at
  // the low end of the mantissa. Float denormals are far below and give zero.
  const uint32_t denormal =
      BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - BitCast<uint32_t>(0.5f);
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  // From 65520 on the nearest number is infinity.
  uint32_t half = Select(magnitude >= 0x477ff000u, 0x7c00u, normal);
  half = Select(magnitude > 0x7f800000u, nan, half);
  half = Select(magnitude < 0x38800000u, denormal, half);
  return F16{static_cast<uint16_t>(half | sign)};
}

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_FLOAT_H_
