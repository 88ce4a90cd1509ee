#include "ffi/cuda/communicator.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/cuda/agreement.h"
#include "ffi/cuda/watcher.h"

namespace jax_ep::cuda {
namespace {

// Behind the workspace proper, a page by which every rank checks what it sees of the
// others. It is written before the window is registered, whose closing barrier makes
// it visible to all, and never again.
struct Hello {
  uint64_t magic;
  int32_t kernel_abi;
  int32_t num_ranks;
  int32_t rank;
  int32_t num_sms;
  uint64_t workspace_bytes;
};
constexpr uint64_t kMagic = 0x6a61785f65702e31;  // "jax_ep.1"
constexpr size_t kHelloBytes = 4096;             // keeps the window a multiple of pages

// A stream of our own for the few copies of the first use. It must not synchronise
// with the legacy stream: kernels of other devices may wait for us meanwhile.
class Stream {
 public:
  explicit Stream(const Driver& driver) : driver_(driver) {
    result = driver.cuStreamCreate(&stream, kStreamNonBlocking);
  }
  ~Stream() {
    if (result == 0) driver_.cuStreamDestroy(stream);
  }
  CUstream stream = nullptr;
  CUresult result;

 private:
  const Driver& driver_;
};

// One (communicator, device). XLA keeps communicators until exit, save those of tasks
// that died; should a new one come to live at an old one's address, its window is not
// mapped (NCCL unmaps a communicator's windows with it), and a new workspace is made.
// Its predecessor is kept: captured graphs and late peers may hold its addresses.
struct Slot {
  std::mutex mutex;
  std::vector<std::unique_ptr<Workspace>> generations;
  Status failure;  // after ranks met: trying again would meet nobody
};

struct Slots {
  std::mutex mutex;
  std::map<std::pair<ncclComm_t, CUdevice>, Slot> slots;

  Slot& Find(ncclComm_t comm, CUdevice device) {
    std::lock_guard<std::mutex> lock(mutex);
    return slots[{comm, device}];
  }
  // Those there are. Nobody may wait for a slot with all slots locked: it is locked
  // while its rank waits for others, which must find theirs.
  std::vector<Slot*> All() {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<Slot*> all;
    for (auto& [key, slot] : slots) all.push_back(&slot);
    return all;
  }
};

Slots& AllSlots() {
  static Slots& slots = *new Slots;  // lives until exit
  return slots;
}

Status ReadDevice(const Driver& driver, Workspace* workspace) {
  const std::pair<int*, int> wanted[] = {
      {&workspace->num_sms, kAttributeNumSms},
      {&workspace->max_shared_bytes, kAttributeMaxSharedBytes},
      {&workspace->compute_major, kAttributeComputeMajor},
      {&workspace->compute_minor, kAttributeComputeMinor},
  };
  for (const auto& [value, attribute] : wanted) {
    const CUresult result =
        driver.cuDeviceGetAttribute(value, attribute, workspace->device);
    if (result != 0) return driver.Failure("cuDeviceGetAttribute", result);
  }
  return Status();
}

// Zeroes the workspace and writes the hello page behind it.
CUresult Prepare(const Driver& driver, CUdeviceptr base, const Hello& hello,
                 CUstream stream) {
  const size_t bytes = hello.workspace_bytes;
  CUresult result = driver.cuMemsetD8Async(base, 0, bytes + kHelloBytes, stream);
  if (result == 0) {
    result = driver.cuMemcpyHtoDAsync(base + bytes, &hello, sizeof(hello), stream);
  }
  return result == 0 ? driver.cuStreamSynchronize(stream) : result;
}

// Reads every peer's hello page through the addresses that the kernels will use.
Status CheckPeers(const Driver& driver, Hello expected, CUstream stream,
                  Workspace* workspace) {
  for (int r = 0; r < workspace->num_ranks; ++r) {
    Hello seen{};
    CUresult result = driver.cuMemcpyDtoHAsync(
        &seen, workspace->peers[r] + expected.workspace_bytes, sizeof(seen), stream);
    if (result == 0) result = driver.cuStreamSynchronize(stream);
    if (result != 0) {
      return driver.Failure("reading a peer's workspace", result, Concat(", rank ", r));
    }
    expected.rank = r;
    expected.num_sms = seen.num_sms;
    if (std::memcmp(&seen, &expected, sizeof(seen)) != 0) {
      return FailedPrecondition("expected the workspace of rank ", r, " (kernel ABI ",
                                expected.kernel_abi, ", ", expected.num_ranks,
                                " ranks), got rank ", seen.rank, " (kernel ABI ",
                                seen.kernel_abi, ", ", seen.num_ranks,
                                " ranks); all processes must run the same jax_ep.");
    }
    workspace->num_sms = std::min(workspace->num_sms, seen.num_sms);
  }
  return Status();
}

Status MakeErrorRecord(const Driver& driver, const std::string& axis,
                       Workspace* workspace) {
  void* record = nullptr;
  CUresult result = driver.cuMemHostAlloc(&record, sizeof(ErrorRecord),
                                          kHostAllocPortable | kHostAllocDeviceMap);
  if (result != 0) return driver.Failure("cuMemHostAlloc", result);
  std::memset(record, 0, sizeof(ErrorRecord));
  result = driver.cuMemHostGetDevicePointer(&workspace->error_record, record, 0);
  if (result != 0) return driver.Failure("cuMemHostGetDevicePointer", result);
  WatchRecord(static_cast<const ErrorRecord*>(record), axis, workspace->rank,
              workspace->num_ranks, workspace->device);
  return Status();
}

// Checks that the group is what the program says and lies in one NVLink domain. A group
// is the ranks of a `domain_size`, or of the whole axis without one.
Status CheckGroup(const Nccl& nccl, ncclComm_t comm, int num_ranks, int* rank) {
  int count = 0;
  ncclResult result = nccl.ncclCommCount(comm, &count);
  if (result == 0) result = nccl.ncclCommUserRank(comm, rank);
  if (result != 0) return nccl.Failure("ncclCommUserRank", result, comm);
  if (count != num_ranks || *rank < 0 || *rank >= count) {
    return FailedPrecondition("expected a communicator of ", num_ranks,
                              " ranks, got rank ", *rank, " of ", count, ".");
  }
  const NcclTeam team = nccl.ncclTeamLsa(comm);
  if (team.num_ranks != num_ranks || team.rank != *rank) {
    return FailedPrecondition(
        "expected all ", num_ranks, " ranks in one NVLink domain, got ", team.num_ranks,
        " that reach each other by load and store; domain_size (=", num_ranks,
        ") must be at most ", team.num_ranks,
        ", or implementation='xla', which runs on any network.");
  }
  return Status();
}

// Allocates the workspace of a group's rank and clears it.
Status Allocate(const Nccl& nccl, const Driver& driver, ncclComm_t comm,
                const Hello& hello, size_t bytes, CUstream stream, void** memory) {
  const ncclResult result = nccl.ncclMemAlloc(memory, bytes);
  if (result != 0) {
    return nccl.Failure(
        Concat("ncclMemAlloc of ", bytes, " bytes"), result, comm,
        "; a smaller XLA_PYTHON_CLIENT_MEM_FRACTION leaves less to XLA");
  }
  const CUresult prepared =
      Prepare(driver, reinterpret_cast<CUdeviceptr>(*memory), hello, stream);
  return prepared == 0 ? Status() : driver.Failure("clearing the workspace", prepared);
}

// Registers it, collectively, and finds every peer's.
Status Register(const Nccl& nccl, const Driver& driver, ncclComm_t comm,
                const Hello& hello, size_t bytes, CUstream stream, void* memory,
                Workspace* workspace) {
  ncclWindow_t window = nullptr;
  ncclResult result =
      nccl.ncclCommWindowRegister(comm, memory, bytes, &window, kWindowCollSymmetric);
  result = AwaitCommunicator(nccl, comm, result);
  if (result != 0) return nccl.Failure("ncclCommWindowRegister", result, comm);
  Status status = PeerAddresses(nccl, driver, comm, window, workspace->num_ranks,
                                workspace->rank, stream, workspace->peers.data());
  if (status.ok()) status = CheckPeers(driver, hello, stream, workspace);
  return status;
}

// `met` is set once other ranks may wait for this one, or may have seen it fail.
Status Make(const Driver& driver, ncclComm_t comm, const std::string& axis,
            double timeout_s, Workspace* workspace, bool* met) {
  const int num_ranks = workspace->num_ranks;
  if (Status status = ReadDevice(driver, workspace); !status.ok()) return status;
  const Nccl* nccl = nullptr;
  if (comm != nullptr) {
    nccl = &Nccl::Get();
    if (!nccl->status.ok()) return nccl->status;
    if (Status status = CheckGroup(*nccl, comm, num_ranks, &workspace->rank);
        !status.ok()) {
      return status;
    }
  }
  const Hello hello{kMagic,
                    kKernelAbi,
                    num_ranks,
                    workspace->rank,
                    workspace->num_sms,
                    static_cast<uint64_t>(WorkspaceBytes(num_ranks))};
  const size_t bytes = hello.workspace_bytes + kHelloBytes;
  Stream stream(driver);
  if (stream.result != 0) return driver.Failure("cuStreamCreate", stream.result);
  if (comm == nullptr) {  // one rank: any memory will do
    CUresult result = driver.cuMemAlloc(&workspace->peers[0], bytes);
    if (result == 0)
      result = Prepare(driver, workspace->peers[0], hello, stream.stream);
    if (result != 0) {
      return driver.Failure(Concat("cuMemAlloc of ", bytes, " bytes"), result);
    }
    return MakeErrorRecord(driver, axis, workspace);
  }
  *met = true;
  Agreement agreement(*nccl, driver, comm, num_ranks, workspace->rank, stream.stream,
                      timeout_s);
  if (Status status = agreement.Open(); !status.ok()) return status;
  void* memory = nullptr;
  Status status = Allocate(*nccl, driver, comm, hello, bytes, stream.stream, &memory);
  // No rank waits in NCCL for one that has no memory.
  status = agreement.Reach(1, status);
  if (!status.ok()) return status;
  status =
      Register(*nccl, driver, comm, hello, bytes, stream.stream, memory, workspace);
  if (status.ok()) status = MakeErrorRecord(driver, axis, workspace);
  // Nor in a kernel for one that launches none.
  return agreement.Reach(2, status);
}

constexpr const char* kStampNames[kNumStamps] = {"began", "last_send", "last_arrival",
                                                 "planned", "last_row"};
constexpr const char* kStampedStages[kNumStampedStages] = {"layout", "dispatch",
                                                           "combine"};

// The stages that left stamps, with the blocks that took part.
void AppendStamps(const std::vector<int64_t>& words, const Workspace& workspace,
                  std::vector<StampRecord>* records) {
  for (int stage = 0; stage < kNumStampedStages; ++stage) {
    const int64_t* begin = words.data() + stage * kMaxStampedBlocks * kMaxStamps;
    StampRecord record;
    record.stage = kStampedStages[stage];
    record.rank = workspace.rank;
    record.device = workspace.device;
    std::vector<int> events;
    for (int event = 0; event < kNumStamps; ++event) {
      if (event == kStampPlanned && stage != 0) continue;
      events.push_back(event);
      record.names.push_back(kStampNames[event]);
    }
    for (int block = 0; block < kMaxStampedBlocks; ++block) {
      const int64_t* stamps = begin + block * kMaxStamps;
      if (stamps[kStampBegan] == 0) continue;
      for (int event : events) record.times.push_back(stamps[event]);
    }
    if (!record.times.empty()) records->push_back(std::move(record));
  }
}

}  // namespace

bool IsMapped(const Driver& driver, const Workspace& workspace) {
  // Where the driver could not tell of a new workspace either, it is taken on trust.
  if (!workspace.is_checkable) return true;
  CUdeviceptr base = 0;
  size_t bytes = 0;
  return driver.cuMemGetAddressRange(&base, &bytes, workspace.peers[workspace.rank]) ==
         0;
}

Status ObtainWorkspace(ncclComm_t comm, CUstream stream, int num_ranks,
                       const std::string& axis, double timeout_s,
                       const Workspace** workspace) {
  Slots& slots = AllSlots();
  const Driver& driver = Driver::Get();
  if (!driver.status.ok()) return driver.status;
  CUcontext context = nullptr;
  CUdevice device = 0;
  CUresult result = driver.cuStreamGetCtx(stream, &context);
  if (result != 0) return driver.Failure("cuStreamGetCtx", result);
  ScopedContext current(driver, context);
  result = driver.cuCtxGetDevice(&device);
  if (result != 0) return driver.Failure("cuCtxGetDevice", result);

  Slot& slot = slots.Find(comm, device);
  // Only this slot is locked while ranks meet inside NCCL: other communicators, and
  // the same one on other devices of this process, must get on meanwhile.
  std::lock_guard<std::mutex> lock(slot.mutex);
  if (!slot.generations.empty() && IsMapped(driver, *slot.generations.back())) {
    *workspace = slot.generations.back().get();
    return Status();
  }
  if (!slot.failure.ok()) return slot.failure;
  auto made = std::make_unique<Workspace>();
  made->context = context;
  made->device = device;
  made->num_ranks = num_ranks;
  bool met = false;
  Status status = Make(driver, comm, axis, timeout_s, made.get(), &met);
  if (!status.ok()) {
    status = status.Within(Concat("no workspace for axis \"", axis, "\", rank ",
                                  made->rank, " of ", num_ranks, ", device ", device));
    if (met) {
      slot.failure = status;
      PrintLine("jax_ep: " + status.message());
    }
    return status;
  }
  made->is_checkable = true;
  made->is_checkable = IsMapped(driver, *made);
  slot.generations.push_back(std::move(made));
  *workspace = slot.generations.back().get();
  return Status();
}

Status CopyStamps(std::vector<StampRecord>* records) {
  const Driver& driver = Driver::Get();
  for (Slot* slot : AllSlots().All()) {
    std::lock_guard<std::mutex> lock(slot->mutex);
    if (slot->generations.empty()) continue;
    const Workspace& workspace = *slot->generations.back();
    ScopedContext current(driver, workspace.context);
    if (!IsMapped(driver, workspace)) continue;
    Stream stream(driver);
    if (stream.result != 0) return driver.Failure("cuStreamCreate", stream.result);
    const CUdeviceptr from = workspace.peers[workspace.rank] + kStampsOffset;
    std::vector<int64_t> words(kStampsBytes / sizeof(int64_t));
    CUresult result =
        driver.cuMemcpyDtoHAsync(words.data(), from, kStampsBytes, stream.stream);
    if (result == 0)
      result = driver.cuMemsetD8Async(from, 0, kStampsBytes, stream.stream);
    if (result == 0) result = driver.cuStreamSynchronize(stream.stream);
    if (result != 0) return driver.Failure("reading stamps", result);
    AppendStamps(words, workspace, records);
  }
  return Status();
}

}  // namespace jax_ep::cuda
