// The functions of ffi/cuda/ptx.cuh, in whose place this is compiled, on the machine.

#ifndef JAX_EP_FFI_CUDA_PTX_CUH_
#define JAX_EP_FFI_CUDA_PTX_CUH_

#include "cuda_shim.h"
#include "workspace.h"

namespace jax_ep::cuda::ptx {

using emu::machine;

template <class T>
T* HoldShared(T* pointer) {
  return pointer;
}

// --- words other ranks write or read ------------------------------------------

template <class T>
T Poll(const T* address) {
  machine->BeforePoll(address, sizeof(T));
  return *address;
}

inline uint64_t LoadAcquireSystem(const uint64_t* address) {
  const uint64_t value = Poll(address);
  machine->AcquiredSystem(address);
  return value;
}

inline void StoreReleaseSystem(uint32_t* address, uint32_t value) {
  machine->StoreLater(address, &value, sizeof(value), /*release=*/true);
}
inline void StoreReleaseSystem(uint64_t* address, uint64_t value) {
  machine->StoreLater(address, &value, sizeof(value), /*release=*/true);
}

inline uint64_t LoadRelaxedSystem(const uint64_t* address) { return Poll(address); }

inline void StoreRelaxedSystem(uint64_t* address, uint64_t value) {
  machine->StoreLater(address, &value, sizeof(value), /*release=*/false);
}

struct Word128 {
  uint64_t low, high;
};

inline Word128 LoadRelaxedSystem(const Word128* address) { return Poll(address); }

inline void StoreRelaxedSystem(Word128* address, Word128 word) {
  machine->StoreLater(address, &word, sizeof(word), /*release=*/false);
}

// --- words of this device --------------------------------------------------------

inline uint32_t AddAcquireReleaseDevice(uint32_t* address, uint32_t value) {
  machine->MaybeYield();
  machine->FlushStores(machine->current()->warp->block);
  const uint32_t old = *address;
  *address = old + value;
  machine->Changed(address);
  return old;
}

inline uint32_t LoadAcquireDevice(const uint32_t* address) { return Poll(address); }

// --- loads and stores of rows -----------------------------------------------------

inline void StoreStreaming(uint4* address, uint4 value) { *address = value; }

// --- asynchronous copies ------------------------------------------------------------

inline void CopyAsync4(void* shared, const void* global) {
  machine->CopyWord(shared, global);
}
inline void CopyAsyncCommit() { machine->CopyCommit(); }
template <int kPending>
void CopyAsyncWait() {
  machine->CopyWait(kPending);
}

inline void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  machine->BarrierInit(barrier, arrivals);
}
inline void BarrierInitFence() {}
inline void BarrierArrive(uint64_t* barrier) { machine->BarrierArrive(barrier, 0); }
inline void BarrierArriveExpect(uint64_t* barrier, uint32_t bytes) {
  machine->BarrierArrive(barrier, bytes);
}
inline bool BarrierTestWait(uint64_t* barrier, uint32_t parity) {
  machine->BeforePoll(barrier, sizeof(*barrier));
  return machine->BarrierDone(barrier, parity);
}
inline void BarrierWait(uint64_t* barrier, uint32_t parity) {
  machine->BarrierWait(barrier, parity);
}

inline void BulkLoad(void* shared, const void* global, uint32_t bytes,
                     uint64_t* barrier) {
  machine->BulkLoad(shared, global, bytes, barrier);
}
inline void BulkStore(void* global, const void* shared, uint32_t bytes) {
  machine->BulkStore(global, shared, bytes);
}
inline void BulkCommit() { machine->BulkCommit(); }
template <int kPending>
void BulkWaitRead() {
  machine->BulkWait(kPending, /*written=*/false);
}
template <int kPending>
void BulkWaitWritten() {
  machine->BulkWait(kPending, /*written=*/true);
}
inline void FenceSharedForBulk() { machine->FenceShared(); }
inline void FenceGlobalForBulk() { machine->FenceGlobal(); }

// --- the rest ----------------------------------------------------------------------

inline uint32_t Cycles() { return machine->Cycles(); }
inline uint64_t Nanoseconds() { return machine->Nanoseconds(); }

}  // namespace jax_ep::cuda::ptx

#endif  // JAX_EP_FFI_CUDA_PTX_CUH_
