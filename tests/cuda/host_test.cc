// The host side of the CUDA handlers from `instantiate` to the launch, on the stand-in
// libraries. `host_test NAME` runs one test, `host_test` lists the names.
#include <chrono>
#include <cstdio>
#include <deque>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ffi/cuda/stages.h"
#include "tests/cuda/harness.h"

namespace jax_ep::cuda {
namespace {

TEST(launches) {
  Open();
  OnLaunch(Record);
  constexpr int kRanks = 2;
  Devices devices(Group(kRanks));
  for (const char* target : {"jax_ep_layout", "jax_ep_dispatch", "jax_ep_combine"}) {
    CallSite site(target, For(target, kRanks));
    CHECK_EQ(site.Instantiate(), std::string());
    for (int run = 0; run < 3; ++run) AllFine(devices.Run(site, run));
    CheckPeersMeet(devices);
  }
  // Two windows per rank, one image per process, one function per kernel and device.
  CHECK_EQ(Windows(), 2 * kRanks);
  CHECK_EQ(Counts().libraries, 1);
  CHECK_EQ(Counts().functions, 3 * kRanks);
  CHECK_EQ(Counts().launches, 3 * 3 * kRanks);

  const int64_t leaf_bytes[] = {2 * kWidth};
  const int64_t leaf_widths[] = {kWidth};
  const int32_t leaf_dtypes[] = {kLeafBf16};
  const LaunchDims want[] = {
      LayoutLaunch(132, 0, kRanks, kExperts),
      DispatchLaunch(132, 0, leaf_bytes, 1, kTopk, true),
      CombineLaunch(132, 0, leaf_dtypes, leaf_widths, 1, kTopk, false, false)};
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<Launch>& seen = launches[devices.stream[rank]];
    for (size_t i = 0; i < seen.size(); ++i) {
      const LaunchDims& dims = want[i / 3];
      CHECK_EQ(seen[i].config.grid[0], unsigned(dims.blocks));
      CHECK_EQ(seen[i].config.block[0], unsigned(dims.threads));
      CHECK_EQ(seen[i].config.shared_bytes, unsigned(dims.shared_bytes));
      CHECK_EQ(seen[i].config.grid[1] * seen[i].config.grid[2], 1u);
      CHECK_EQ(seen[i].common.timeout_ns, uint64_t{2500000000});
      CHECK(seen[i].common.error != nullptr);
      CHECK(seen[i].common.rank_operand != nullptr);
    }
    CHECK_EQ(seen[0].kernel, std::string("jax_ep_layout"));
    CHECK_EQ(seen[0].layout.num_ids, int64_t{kTokens * kTopk});
    CHECK_EQ(seen[0].layout.num_experts, kExperts);
    CHECK_EQ(seen[3].kernel, std::string("jax_ep_dispatch"));
    CHECK_EQ(seen[3].dispatch.num_tokens, int64_t{kTokens});
    CHECK_EQ(seen[3].dispatch.capacity, int64_t{kCapacity});
    CHECK_EQ(seen[3].dispatch.num_local_experts, kExperts / kRanks);
    CHECK(seen[3].dispatch.weights && seen[3].dispatch.recv_weights);
    CHECK(seen[3].dispatch.x[0] && seen[3].dispatch.recv[0]);
    CHECK(!seen[3].dispatch.x[1] && !seen[3].dispatch.recv[1]);
    CHECK_EQ(seen[6].kernel, std::string("jax_ep_combine"));
    CHECK(seen[6].combine.weights && !seen[6].combine.row_values);
    CHECK(!seen[6].combine.values && seen[6].combine.bias[0]);
  }
  CHECK_EQ(CheckError(), std::string());
}

// Rank order is the group's, whatever the order of the devices.
TEST(reversed_devices) {
  Open();
  OnLaunch(Record);
  Devices devices(Group(4), {3, 1, 2, 0});
  CallSite site("jax_ep_layout", For("jax_ep_layout", 4));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site));
  CheckPeersMeet(devices);
}

// Sub-axis groups, and another group over the same devices, at once.
TEST(several_groups) {
  Open();
  OnLaunch(Record);
  Devices low(Group(2, 0), {0, 1}), high(Group(2, 1), {2, 3});
  Devices all(Group(4, 2));
  CallSite pairs("jax_ep_layout", For("jax_ep_layout", 2, {0, 1, 2, 3}));
  CallSite fours("jax_ep_layout", For("jax_ep_layout", 4));
  CHECK_EQ(pairs.Instantiate(), std::string());
  CHECK_EQ(fours.Instantiate(), std::string());
  AllFine(OnEachRank(8, [&](int i) {
    if (i < 4) return all.RunOn(fours, i, 1);
    return i < 6 ? low.RunOn(pairs, i - 4, 2) : high.RunOn(pairs, i - 6, 2);
  }));
  CheckPeersMeet(low);
  CheckPeersMeet(high);
  CheckPeersMeet(all);
  CHECK_EQ(Windows(), 2 * 8);
  std::set<const void*> workspaces;
  for (const Devices* devices : {&low, &high, &all}) {
    for (CUstream stream : devices->stream) {
      const CommonParams common = LastCommon(stream);
      workspaces.insert(common.peers[common.rank]);
    }
  }
  CHECK_EQ(workspaces.size(), size_t{8});
}

// A communicator that lives where a destroyed one did.
TEST(second_group) {
  Open();
  OnLaunch(Record);
  std::vector<ncclComm_t> comms = Group(2);
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  {
    Devices devices(comms);
    AllFine(devices.Run(site, 1));
    CheckPeersMeet(devices);
  }
  Standin<void(ncclComm_t)>(nccl_library, "standin_destroy")(comms[0]);
  const std::vector<ncclComm_t> again = Group(2);
  CHECK(again == comms);
  Devices devices(again);
  AllFine(devices.Run(site, 2));
  CheckPeersMeet(devices);
  CHECK_EQ(Windows(), 2 * 4);
}

// A driver that does not know the range of a window must not make it look lost.
TEST(unknown_range) {
  Open();
  Standin<void(const char*, int)>(cuda_library, "standin_fail")("cuMemGetAddressRange",
                                                                1);
  Devices devices(Group(2));
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  for (int run = 0; run < 3; ++run) AllFine(devices.Run(site, run));
  CHECK_EQ(Windows(), 2 * 2);
}

TEST(concurrent) {
  Open();
  OnLaunch(Record);
  constexpr int kSites = 6, kRuns = 20;
  Devices devices(Group(2));
  std::deque<CallSite> sites;
  for (int i = 0; i < kSites; ++i) {
    const char* target = i % 2 ? "jax_ep_dispatch" : "jax_ep_combine";
    sites.emplace_back(target, For(target, 2));
    CHECK_EQ(sites.back().Instantiate(), std::string());
  }
  AllFine(OnEachRank(2 * kSites, [&](int i) {
    for (int run = 0; run < kRuns; ++run) {
      const std::string error = devices.RunOn(sites[i / 2], i % 2, run);
      if (!error.empty()) return error;
    }
    return std::string();
  }));
  CHECK_EQ(Windows(), 2 * 2);
  CHECK_EQ(Counts().functions, 4);
  CHECK_EQ(Counts().launches, 2 * kSites * kRuns);
}

// A group of one needs neither NCCL nor XLA's extension.
TEST(one_rank) {
  OpenCuda();
  OnLaunch(Record);
  CallSite site("jax_ep_layout", For("jax_ep_layout", 1, {0, 1, 2, 3}));
  CHECK_EQ(site.Instantiate(), std::string());
  const CUstream stream = Stream(2);
  for (int run = 0; run < 2; ++run) {
    const XLA_FFI_InvokeContext context = site.On(2, stream, nullptr, run);
    CHECK_EQ(site.Prepare(context), std::string());
    CHECK_EQ(site.Initialize(context), std::string());
    Buffers in, out;
    AddBuffers(site.target, 1, in, out);
    CHECK_EQ(site.Execute(context, in, out), std::string());
  }
  const CommonParams common = LastCommon(stream);
  CHECK_EQ(common.rank, 0);
  CHECK_EQ(common.num_ranks, 1);
  CHECK(common.peers[0] != nullptr);
}

ErrorRecord* RecordOf(CUstream stream) { return LastCommon(stream).error; }

// The word that was seen may be of an earlier call.
void WriteRecord(ErrorRecord* record, int rank, uint64_t calls_ago = 0,
                 int behind = -1) {
  record->phase = kPhaseCombineRows;
  record->rank = rank;
  record->peer = 1;
  record->behind = behind;
  record->channel = 3;
  record->call = 5;
  record->expected = record->call << kCountBits | 17;
  record->seen = (record->call - calls_ago) << kCountBits | 16;
  record->waited_ns = 2600000000;
  __atomic_store_n(&record->written, 1u, __ATOMIC_RELEASE);
}

// What a kernel leaves behind is printed at once, and raised ever after. The line
// itself is read by cuda_host_test.py.
TEST(timeout) {
  Open();
  OnLaunch(Record);
  Devices devices(Group(2));
  CallSite site("jax_ep_combine", For("jax_ep_combine", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site, 1));
  WriteRecord(RecordOf(devices.stream[0]), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  std::fprintf(stderr, "-- later\n");
  const std::string error = CheckError();
  for (const char* part :
       {"rank 0 of the 2 ranks", "axis \"expert\"", "after 2.6 s", "waiting for rank 1",
        "combine, rows of the peer", "expected: 17", "seen: 16"}) {
    Contains(error, part);
  }
  for (const std::string& text : devices.Run(site, 2)) CHECK_EQ(text, error);
  CallSite other("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(other.Instantiate(), std::string());
  for (const std::string& text : devices.Run(other, 3)) CHECK_EQ(text, error);
}

// CheckError does not wait for the thread to look.
TEST(timeout_seen_at_once) {
  Open();
  OnLaunch(Record);
  Devices devices(Group(2));
  CallSite site("jax_ep_combine", For("jax_ep_combine", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site, 1));
  WriteRecord(RecordOf(devices.stream[1]), 0, /*calls_ago=*/1);
  Contains(CheckError(), "reported to rank 1");
  Contains(CheckError(), "expected: 17; seen: 0");
}

const std::string kFinal =
    "; device: 0. Outputs are NaN from here on; jax_ep cannot be used in this process "
    "again.";

// Rank 1, which rank 0 waited for, waits itself.
TEST(another_rank_is_behind) {
  Open();
  OnLaunch(Record);
  Devices devices(Group(4));
  CallSite site("jax_ep_combine", For("jax_ep_combine", 4));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site, 1));
  WriteRecord(RecordOf(devices.stream[0]), 0, 0, /*behind=*/2);
  CHECK_EQ(CheckError(),
           "jax_ep: rank 0 of the 4 ranks of axis \"expert\" gave up after 2.6 s "
           "waiting for rank 2, which has not begun this call; phase: combine, rows of "
           "the peer (pieces arrived); expected: 17; seen: 16; call: 5; peer: 1, which "
           "may wait itself; channel: 3" +
               kFinal);
}

// What kernels compare is the same for all ranks of a call, and another for any other.
TEST(different_calls) {
  Open();
  OnLaunch(Record);
  Devices devices(Group(2));
  std::vector<uint64_t> sites;
  for (const char* name : {"jit_step 3", "jit_step 4", "jit_step 3"}) {
    Attrs attrs = For("jax_ep_dispatch", 2);
    attrs.String("call_site", name);
    CallSite site("jax_ep_dispatch", std::move(attrs));
    CHECK_EQ(site.Instantiate(), std::string());
    AllFine(devices.Run(site, static_cast<int64_t>(sites.size())));
    sites.push_back(LastCommon(devices.stream[0]).site);
    CHECK_EQ(LastCommon(devices.stream[1]).site, sites.back());
    CHECK_EQ(sites.back() >> kSiteBits, uint64_t{0});
  }
  CallSite combine("jax_ep_combine", For("jax_ep_combine", 2));
  CHECK_EQ(combine.Instantiate(), std::string());
  AllFine(devices.Run(combine, 9));
  const uint64_t other = LastCommon(devices.stream[0]).site;
  CHECK(sites[1] != sites[0] && sites[2] == sites[0] && other != sites[0]);

  ErrorRecord* record = RecordOf(devices.stream[0]);
  record->phase = kPhaseSite;
  record->rank = 1;
  record->peer = 0;
  record->behind = record->channel = -1;
  record->expected = uint64_t{7} << kSiteBits | sites[1];
  record->seen = uint64_t{7} << kSiteBits | other;
  __atomic_store_n(&record->written, 1u, __ATOMIC_RELEASE);
  const std::string shape =
      ": 8 tokens per rank, top-k 4, 16 experts, capacity 256, alignment 1, "
      "bfloat16[64], weights)";
  CHECK_EQ(
      CheckError(),
      "jax_ep: ranks of axis \"expert\" are in different calls: rank 1 in dispatch "
      "(jit_step 4" +
          shape + ", rank 0 in combine (jit_step 3" + shape +
          "; all ranks must make the same calls in the same order; call: 7" + kFinal);
}

// All devices of one launch get one answer: XLA makes them wait for each other.
TEST(timeout_between_devices) {
  Open();
  OnLaunch(Record);
  Devices devices(Group(2));
  CallSite site("jax_ep_combine", For("jax_ep_combine", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site, 1));
  CHECK_EQ(devices.RunOn(site, 0, 2), std::string());
  WriteRecord(RecordOf(devices.stream[0]), 0);
  CHECK_EQ(devices.RunOn(site, 1, 2), std::string());
  Contains(devices.RunOn(site, 1, 3), "gave up");
  Contains(devices.RunOn(site, 0, 3), "gave up");
}

// A stamped dispatch of two blocks, as its kernel leaves it behind.
void WriteStamps(const LaunchConfig* config, const char* kernel, void* params) {
  Record(config, kernel, params);
  const CommonParams common = LastCommon(config->stream);
  auto* words = reinterpret_cast<int64_t*>(common.peers[common.rank] + kStampsOffset);
  for (int block : {0, 2}) {
    int64_t* stamps = words + (kMaxStampedBlocks + block) * kMaxStamps;
    stamps[kStampBegan] = 100 + 10 * common.rank + block;
    stamps[kStampLastSend] = 200;
    stamps[kStampLastRow] = 300 + block;
  }
}

// From a thread without a context: every rank's stamps, once.
TEST(stamps) {
  Open();
  OnLaunch(WriteStamps);
  Devices devices(Group(2));
  CallSite site("jax_ep_dispatch", For("jax_ep_dispatch", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site, 1));
  std::vector<StampRecord> records;
  CHECK(TakeStamps(&records).ok());
  CHECK_EQ(records.size(), size_t{2});
  const std::vector<std::string> names = {"began", "last_send", "last_arrival",
                                          "last_row"};
  std::set<int> ranks;
  for (const StampRecord& record : records) {
    ranks.insert(record.rank);
    CHECK_EQ(record.stage, std::string("dispatch"));
    CHECK_EQ(record.device, devices.ordinal[record.rank]);
    CHECK_EQ(record.names == names, true);
    const int64_t began = 100 + 10 * record.rank;
    const std::vector<int64_t> times = {began, 200, 0, 300, began + 2, 200, 0, 302};
    CHECK_EQ(record.times == times, true);
  }
  CHECK_EQ(ranks.size(), size_t{2});
  records.clear();
  CHECK(TakeStamps(&records).ok());
  CHECK_EQ(records.size(), size_t{0});
}

// A channel's pieces fit the count of a signal word.
TEST(many_tokens) {
  const int64_t wide[] = {14336}, widths[] = {20000};
  const int32_t dtypes[] = {kLeafBf16};
  constexpr int64_t kPieces = (1 << 24) - 1;
  CHECK_EQ(MaxTokens(DispatchLaunch(132, 0, wide, 1, 8, true), 2), 100 * kPieces);
  CHECK_EQ(MaxTokens(DispatchLaunch(132, 1, wide, 1, 8, true), 2), kPieces);
  // A ring at 64 ranks has 212 slots of 14464 bytes, 4 at least to a channel.
  CHECK_EQ(MaxTokens(DispatchLaunch(132, 0, wide, 1, 8, true), 64), 53 * kPieces);
  // Rows of three pieces.
  const LaunchDims combine = CombineLaunch(132, 7, dtypes, widths, 1, 8, false, false);
  CHECK_EQ(MaxTokens(combine, 2), 7 * (kPieces / 3));
  const Status status = CheckPieces(combine, 2, 7 * (kPieces / 3) + 1);
  CHECK_EQ(status.message(), std::string("tokens per rank (=39146836) must be at most "
                                         "39146835 on 7 SMs (num_sms)."));
  CHECK_EQ(CheckPieces(combine, 2, 7 * (kPieces / 3)).ok(), true);
  // 4.25 MiB hold 134 rows of 32 KiB and an eighth.
  const int64_t half[] = {28672};
  const LaunchDims few =
      FewLaunch(132, 0, 2, FewDispatchSlot(half, 1, 8, false), kFewDispatchWarps);
  CHECK_EQ(CheckPieces(few, 2, 136).ok(), true);
  CHECK_EQ(
      CheckPieces(few, 2, 137).message(),
      std::string("tokens per rank (=137) must be at most 136 with a kernel for few "
                  "tokens."));
}

// Stamps are read while a rank waits inside NCCL for one that is yet to come.
TEST(stamps_while_ranks_meet) {
  Open();
  Devices devices(Group(2));
  CallSite site("jax_ep_dispatch", For("jax_ep_dispatch", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  std::thread first([&] { CHECK_EQ(devices.RunOn(site, 0, 1), std::string()); });
  while (Windows() < 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::thread reader([&] {
    std::vector<StampRecord> records;
    CHECK(TakeStamps(&records).ok());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::thread second([&] { CHECK_EQ(devices.RunOn(site, 1, 1), std::string()); });
  first.join();
  second.join();
  reader.join();
}

}  // namespace
}  // namespace jax_ep::cuda

int main(int argc, char** argv) {
  for (const auto& [name, run] : jax_ep::cuda::Test::All()) {
    if (argc == 1) {
      std::printf("%s\n", name.c_str());
    } else if (argv[1] == name) {
      run();
      return 0;
    }
  }
  return argc == 1 ? 0 : 1;
}
