// A kernel that only copies rows, by bulk copies through shared memory.
// ROW_BYTES, WARPS (per block) and STAGES (rows per warp) are defined by ceilings.py.

constexpr int kRowBytes = ROW_BYTES, kWarps = WARPS, kStages = STAGES;

__device__ unsigned Shared(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Row i of `source` to row i of every target, one row and target per warp at a time.
extern "C" __global__ void copy_rows(const char* source,
                                     const unsigned long long* targets, int num_targets,
                                     int num_rows) {
  extern __shared__ __align__(128) char shared[];
  __shared__ unsigned long long barriers[kWarps][kStages];
  if (threadIdx.x % 32 != 0) return;
  const int warp = threadIdx.x / 32;
  char* stages = shared + warp * kStages * kRowBytes;
  for (int stage = 0; stage < kStages; ++stage) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(Shared(&barriers[warp][stage]))
        : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");

  const long long first = blockIdx.x * kWarps + warp;
  const long long stride = gridDim.x * kWarps;
  const long long all = static_cast<long long>(num_rows) * num_targets;
  const long long count = first < all ? (all - first + stride - 1) / stride : 0;
  auto load = [&](long long i) {
    const int stage = i % kStages;
    const unsigned barrier = Shared(&barriers[warp][stage]);
    const char* row = source + (first + i * stride) / num_targets * kRowBytes;
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
        "r"(kRowBytes)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(Shared(stages + stage * kRowBytes)),
        "l"(row), "r"(kRowBytes), "r"(barrier)
        : "memory");
  };
  if (count > 0) load(0);
  for (long long i = 0; i < count; ++i) {
    if (i + 1 < count) {
      // The other stage's store has read its row.
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      load(i + 1);
    }
    const int stage = i % kStages;
    unsigned there = 0;
    while (there == 0) {
      asm volatile(
          "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
          "selp.u32 %0, 1, 0, p;}"
          : "=r"(there)
          : "r"(Shared(&barriers[warp][stage])),
            "r"(static_cast<unsigned>(i / kStages % 2))
          : "memory");
    }
    const long long index = first + i * stride;
    const unsigned long long place =
        targets[index % num_targets] + index / num_targets * kRowBytes;
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(place),
        "r"(Shared(stages + stage * kRowBytes)), "r"(kRowBytes)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
