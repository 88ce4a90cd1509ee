// The part of the CUDA language and library that the kernels use, on the machine.

#ifndef JAX_EP_TESTS_EMULATOR_CUDA_SHIM_H_
#define JAX_EP_TESTS_EMULATOR_CUDA_SHIM_H_

#include <cstdint>
#include <cstring>

#include "machine.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

// `__shared__` declarations are rewritten to these before compilation.
namespace emu {
template <class T>
T& StaticShared(int line) {
  return *reinterpret_cast<T*>(machine->StaticShared(line, sizeof(T)));
}
template <class T>
T* DynamicShared() {
  return reinterpret_cast<T*>(machine->current()->warp->block->shared);
}

struct Index {
  unsigned x;
};
inline Index ThreadIdx() { return {machine->current()->thread}; }
inline Index BlockIdx() {
  return {static_cast<unsigned>(machine->current()->warp->block->index)};
}
inline Index BlockDim() {
  return {static_cast<unsigned>(machine->current()->warp->block->launch->threads)};
}
inline Index GridDim() {
  return {static_cast<unsigned>(machine->current()->warp->block->launch->blocks)};
}

template <class To, class From>
To BitCast(From from) {
  static_assert(sizeof(To) >= sizeof(From), "");
  To to{};
  std::memcpy(&to, &from, sizeof(from));
  return to;
}
template <class T>
T Shuffle(Collective kind, T value, unsigned argument) {
  machine->Rendezvous(kind, BitCast<uint64_t>(value), argument);
  const uint64_t result = machine->Result();
  T out;
  std::memcpy(&out, &result, sizeof(out));
  return out;
}
inline uint64_t Reduce(Collective kind, uint64_t value) {
  machine->Rendezvous(kind, value, 0);
  return machine->Result();
}
}  // namespace emu

#define threadIdx (emu::ThreadIdx())
#define blockIdx (emu::BlockIdx())
#define blockDim (emu::BlockDim())
#define gridDim (emu::GridDim())

inline void __syncthreads() { emu::machine->BlockBarrier(); }
inline void __syncwarp() { emu::Reduce(emu::Collective::kSync, 0); }

template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
  return emu::Shuffle(emu::Collective::kShfl, value, lane);
}
template <class T>
T __shfl_up_sync(uint32_t, T value, unsigned step) {
  return emu::Shuffle(emu::Collective::kShflUp, value, step);
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  return emu::Shuffle(emu::Collective::kShflXor, value, mask);
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  return static_cast<uint32_t>(emu::Reduce(emu::Collective::kBallot, value));
}
inline bool __any_sync(uint32_t lanes, bool value) {
  return __ballot_sync(lanes, value) != 0;
}
inline bool __all_sync(uint32_t lanes, bool value) {
  return __ballot_sync(lanes, value) == 0xffffffffu;
}
inline uint32_t __match_any_sync(uint32_t, int value) {
  return static_cast<uint32_t>(
      emu::Reduce(emu::Collective::kMatch, static_cast<uint32_t>(value)));
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  return static_cast<uint32_t>(emu::Reduce(emu::Collective::kAdd, value));
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
  return static_cast<uint32_t>(emu::Reduce(emu::Collective::kOr, value));
}

namespace emu {
// Relaxed: orders nothing else.
template <class T, class Change>
T Atomic(T* address, Change change) {
  machine->MaybeYield();
  const T old = *address;
  *address = change(old);
  machine->Changed(address);
  return old;
}
}  // namespace emu

template <class T, class U>
T atomicAdd(T* address, U value) {
  return emu::Atomic(address, [=](T old) { return old + static_cast<T>(value); });
}
template <class T>
T atomicExch(T* address, T value) {
  return emu::Atomic(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, T compare, T value) {
  return emu::Atomic(address, [=](T old) { return old == compare ? value : old; });
}
template <class T, class U>
T atomicMax(T* address, U value) {
  const T wanted = value;
  return emu::Atomic(address, [=](T old) { return old > wanted ? old : wanted; });
}

inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __ffsll(uint64_t bits) {
  return __builtin_ffsll(static_cast<long long>(bits));
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __popcll(uint64_t bits) { return __builtin_popcountll(bits); }

inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

inline float __int_as_float(int32_t bits) { return emu::BitCast<float>(bits); }
inline float __uint_as_float(uint32_t bits) { return emu::BitCast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return emu::BitCast<uint32_t>(value); }
// Compiled with -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }

struct int2 {
  int x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}

#endif  // JAX_EP_TESTS_EMULATOR_CUDA_SHIM_H_
