// The PTX instructions the kernels use, one function each. Nothing else here.

#ifndef JAX_EP_FFI_CUDA_PTX_CUH_
#define JAX_EP_FFI_CUDA_PTX_CUH_

#include "workspace.h"

namespace jax_ep::cuda::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same pointer to shared memory, held in a register: from the name of a variable
// the compiler would compute its address anew, slowly, at every use.
template <class T>
__device__ __forceinline__ T* HoldShared(T* pointer) {
  uint32_t address = SharedAddress(pointer);
  asm volatile("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// --- words other ranks write or read ------------------------------------------

__device__ __forceinline__ uint64_t LoadAcquireSystem(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void StoreReleaseSystem(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value)
               : "memory");
}

__device__ __forceinline__ void StoreReleaseSystem(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value)
               : "memory");
}

__device__ __forceinline__ uint64_t LoadRelaxedSystem(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void StoreRelaxedSystem(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value)
               : "memory");
}

// 16 bytes that no reader sees half of.
struct Word128 {
  uint64_t low, high;
};

__device__ __forceinline__ Word128 LoadRelaxedSystem(const Word128* address) {
  Word128 word;
  asm volatile(
      "{\n\t.reg .b128 w;\n\t"
      "ld.relaxed.sys.global.b128 w, [%2];\n\t"
      "mov.b128 {%0, %1}, w;\n\t}"
      : "=l"(word.low), "=l"(word.high)
      : "l"(address)
      : "memory");
  return word;
}

__device__ __forceinline__ void StoreRelaxedSystem(Word128* address, Word128 word) {
  asm volatile(
      "{\n\t.reg .b128 w;\n\t"
      "mov.b128 w, {%1, %2};\n\t"
      "st.relaxed.sys.global.b128 [%0], w;\n\t}" ::"l"(address),
      "l"(word.low), "l"(word.high)
      : "memory");
}

// --- words of this device --------------------------------------------------------

__device__ __forceinline__ uint32_t AddAcquireReleaseDevice(uint32_t* address,
                                                            uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}

__device__ __forceinline__ uint32_t LoadAcquireDevice(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(address)
               : "memory");
  return value;
}

// --- loads and stores of rows -----------------------------------------------------

__device__ __forceinline__ void StoreStreaming(uint4* address, uint4 value) {
  asm volatile(
      "st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

// --- asynchronous copies of single words ------------------------------------------

__device__ __forceinline__ void CopyAsync4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(shared)),
               "l"(global)
               : "memory");
}

// Ends this thread's group of CopyAsync4.
__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- bulk copies ---------------------------------------------------------------------

__device__ __forceinline__ void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes BarrierInit visible to the copy engine.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

__device__ __forceinline__ void BarrierArriveExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}

// Whether the phase of that parity is over.
__device__ __forceinline__ bool BarrierTestWait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for work that this device does alone (a copy from global memory, another
// warp's arithmetic) or for warps whose own waits are bounded, and so always ends.
__device__ __forceinline__ void BarrierWait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred p;\n"
      "wait_%=:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
      "@!p bra wait_%=;\n\t}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// All bulk copies: addresses and sizes are multiples of 16.
__device__ __forceinline__ void BulkLoad(void* shared, const void* global,
                                         uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

__device__ __forceinline__ void BulkStore(void* global, const void* shared,
                                          uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
      "r"(SharedAddress(shared)), "r"(bytes)
      : "memory");
}

// Ends this thread's group of BulkStore (an empty one too).
__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but this thread's `kPending` latest groups have read their source.
template <int kPending>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but this thread's `kPending` latest groups are written.
template <int kPending>
__device__ __forceinline__ void BulkWaitWritten() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before later bulk copies.
__device__ __forceinline__ void FenceSharedForBulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders what this thread has acquired in global memory before later bulk copies.
__device__ __forceinline__ void FenceGlobalForBulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// --- the rest ----------------------------------------------------------------------

__device__ __forceinline__ uint32_t Cycles() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles));
  return cycles;
}

__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

}  // namespace jax_ep::cuda::ptx

#endif  // JAX_EP_FFI_CUDA_PTX_CUH_
