// A stand-in for libnccl.so.2 over shared memory: every rank maps every rank's memory
// at its own addresses, 4 GiB apart, as NCCL does. Built with STANDIN_LSA_POINTER it is
// 2.29, else 2.28.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "tests/cuda/standin.h"

using namespace jax_ep::cuda;

namespace {

constexpr int kMaxRanks = 8, kNumPools = 4;
constexpr size_t kStride = size_t{1} << 32, kLeastBytes = size_t{2} << 20;
constexpr ncclResult kUnhandledCudaError = 1, kInvalidArgument = 4;

struct Memory {
  int file = -1;
  size_t bytes = 0;
};

struct Group {
  std::mutex mutex;
  std::condition_variable all_here;
  int num_ranks = 0;
  int arrived = 0;
  int round = 0;
  Memory memories[kMaxRanks];
};

std::mutex mutex;
std::map<void*, Memory> allocated;
int swapping_rank = -1;
size_t swapping_above = 0;
int failing_rank = -1;
int slow_rank = -1, slow_ms = 0;
int registrations = 0;
thread_local int next_rank = -1;  // of the communicator asked about last, see MemAlloc

template <typename Fn>
Fn* Cuda(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Fn*>(dlsym(library, name));
}

}  // namespace

struct ncclComm {
  Group* group;
  int rank;
  std::vector<char*> flats;  // each reserved for all ranks' memories of one window
};

// The device-side window of 2.28.
struct ncclWindow_vidmem {
  void* host;
  char* lsa_flat_base;
  int lsa_rank, world_rank;
  uint32_t stride_4g, multicast_offset_4k;
};

namespace {
ncclComm pools[kNumPools][kMaxRanks];
Group groups[kNumPools];
}  // namespace

extern "C" {

ncclResult ncclGetVersion(int* version) {
  const char* text = std::getenv("STANDIN_NCCL_VERSION");
#ifdef STANDIN_LSA_POINTER
  *version = text ? std::atoi(text) : 22903;
#else
  *version = text ? std::atoi(text) : 22809;
#endif
  return 0;
}
const char* ncclGetErrorString(ncclResult) { return "stand-in error"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult ncclCommGetAsyncError(ncclComm_t, ncclResult* state) {
  *state = 0;
  return 0;
}
ncclResult ncclCommCount(ncclComm_t comm, int* count) {
  *count = comm->group->num_ranks;
  return 0;
}
ncclResult ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = next_rank = comm->rank;
  return 0;
}
NcclTeam ncclTeamLsa(ncclComm_t comm) {
  const char* text = std::getenv("STANDIN_LSA_RANKS");
  const int num_ranks = text ? std::atoi(text) : comm->group->num_ranks;
  return {num_ranks, comm->rank % num_ranks, 1};
}

ncclResult ncclMemAlloc(void** pointer, size_t bytes) {
  // What is small still fits.
  if (bytes > kLeastBytes && next_rank == failing_rank) return kUnhandledCudaError;
  if (bytes > kLeastBytes && next_rank == slow_rank) usleep(1000 * slow_ms);
  Memory memory{memfd_create("standin", 0), bytes};
  if (ftruncate(memory.file, bytes) != 0) return kUnhandledCudaError;
  *pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.file, 0);
  Cuda<void(void*, size_t)>("standin_map")(*pointer, bytes);
  std::lock_guard<std::mutex> lock(mutex);
  allocated[*pointer] = memory;
  return 0;
}

ncclResult ncclCommWindowRegister(ncclComm_t comm, void* pointer, size_t bytes,
                                  ncclWindow_t* window, int flags) {
  if (flags != kWindowCollSymmetric || bytes % 4096 != 0) return kInvalidArgument;
  if (std::getenv("STANDIN_NO_SYMMETRIC") != nullptr) {
    // What 2.28 does without peer access: a host handle that is no window.
    *window = static_cast<ncclWindow_t>(std::malloc(256));
    return 0;
  }
  Group& group = *comm->group;
  {
    std::unique_lock<std::mutex> lock(group.mutex);
    {
      std::lock_guard<std::mutex> global(mutex);
      group.memories[comm->rank] = allocated[pointer];
      ++registrations;
    }
    const int round = group.round;
    if (++group.arrived == group.num_ranks) {
      group.arrived = 0;
      ++group.round;
      group.all_here.notify_all();
    }
    group.all_here.wait(lock, [&] { return group.round != round; });
  }
  auto* map = Cuda<void(void*, size_t)>("standin_map");
  auto* flat =
      static_cast<char*>(mmap(nullptr, kStride * group.num_ranks, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  const bool swaps = comm->rank == swapping_rank && bytes > swapping_above;
  for (int r = 0; r < group.num_ranks; ++r) {
    const int seen = swaps && r < 2 ? 1 - r : r;
    void* at = mmap(flat + kStride * r, bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED, group.memories[seen].file, 0);
    if (at == MAP_FAILED) return kUnhandledCudaError;
    map(at, bytes);
  }
  comm->flats.push_back(flat);
  *window = new ncclWindow_vidmem{nullptr, flat, comm->rank, comm->rank, 1, 0};
  map(*window, sizeof(ncclWindow_vidmem));
  return 0;
}

#ifdef STANDIN_LSA_POINTER
ncclResult ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int rank,
                                   void** pointer) {
  *pointer = window->lsa_flat_base + kStride * rank + offset;
  return 0;
}
#endif

void standin_group(int num_ranks, int pool, ncclComm_t* communicators) {
  groups[pool].num_ranks = num_ranks;
  for (int r = 0; r < num_ranks; ++r) {
    pools[pool][r] = {&groups[pool], r, {}};
    communicators[r] = &pools[pool][r];
  }
}

void standin_destroy(ncclComm_t comm) {
  auto* unmap = Cuda<void(void*)>("standin_unmap");
  Group& group = *comm->group;
  for (int r = 0; r < group.num_ranks; ++r) {
    ncclComm& member = comm[r - comm->rank];
    for (char* flat : member.flats) {
      for (int peer = 0; peer < group.num_ranks; ++peer) unmap(flat + kStride * peer);
      munmap(flat, kStride * group.num_ranks);
    }
    member.flats.clear();
  }
}

void standin_swap_peers(int rank, size_t above) {
  swapping_rank = rank;
  swapping_above = above;
}
void standin_fail_alloc(int rank) { failing_rank = rank; }
void standin_slow_alloc(int rank, int ms) {
  slow_rank = rank;
  slow_ms = ms;
}
int standin_registrations() {
  std::lock_guard<std::mutex> lock(mutex);
  return registrations;
}

}  // extern "C"
