// Every message that a user can cause through the CUDA handlers, whole.
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cuda/sha256.h"
#include "tests/cuda/harness.h"

namespace jax_ep::cuda {
namespace {

std::string FirstUse(int num_ranks, Collectives* collectives) {
  CallSite site("jax_ep_layout", For("jax_ep_layout", num_ranks));
  CHECK_EQ(site.Instantiate(), std::string());
  const CUstream stream = cuda_library ? Stream(0) : nullptr;
  const XLA_FFI_InvokeContext context = site.On(0, stream, collectives);
  const std::string error = site.Prepare(context);
  return error.empty() ? site.Initialize(context) : error;
}

// How the first use of an axis over two ranks fails on a rank.
std::string NoWorkspace(const std::string& reason, int rank = 0) {
  return Concat("jax_ep.dispatch_layout: no workspace for axis \"expert\", rank ", rank,
                " of 2, device ", rank, ": ", reason);
}

// As the stand-in for NCCL that this test runs with says it.
std::string NcclVersion() {
  int version = 0;
  Standin<ncclResult(int*)>(nccl_library, "ncclGetVersion")(&version);
  return Concat("[NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100,
                "]");
}

TEST(no_extension) {
  Open();
  const std::string error = FirstUse(2, nullptr);
  // In parentheses, what XLA's headers say.
  CHECK_EQ(error.substr(0, error.find('(')),
           std::string("jax_ep: CUDA needs jaxlib >= 0.11.2, which lends its "
                       "communicators to custom calls "));
  CHECK_EQ(error.substr(error.size() - 2), std::string(")."));
}

TEST(extension_versions) {
  Open();
  const std::vector<ncclComm_t> comms = Group(2);
  Collectives newer(comms[0], 0, 2), other(comms[0], 1, 0);
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  CHECK_EQ(site.Prepare(site.On(0, nullptr, &newer)), std::string());
  Contains(site.Prepare(site.On(0, nullptr, &other)), "version mismatch");
}

TEST(no_driver) {
  fake_xla::Collectives collectives(nullptr);
  collectives.comm = reinterpret_cast<ncclComm_t>(&collectives);
  CHECK_EQ(FirstUse(2, &collectives),
           std::string("jax_ep.dispatch_layout: the CUDA driver library libcuda.so.1 "
                       "cannot be opened (libcuda.so.1: cannot open shared object "
                       "file: No such file or directory)."));
}

TEST(old_driver) {
  Open();
  Collectives collectives(Group(2)[0]);
  CHECK_EQ(FirstUse(2, &collectives),
           std::string("jax_ep.dispatch_layout: the CUDA driver is too old, a driver "
                       "for CUDA 12 or later is needed (libcuda.so.1 lacks "
                       "cuLibraryLoadData)."));
}

TEST(no_nccl) {
  OpenCuda();
  Collectives collectives(nullptr);
  collectives.comm = reinterpret_cast<ncclComm_t>(&collectives);
  CHECK_EQ(FirstUse(2, &collectives),
           NoWorkspace("this process has not loaded libnccl.so.2, so XLA has no NCCL "
                       "communicator to share; jax[cuda13] brings it, with "
                       "nvidia-nccl-cu13."));
}

TEST(old_nccl) {
  Open();
  Collectives collectives(Group(2)[0]);
  CHECK_EQ(FirstUse(2, &collectives),
           NoWorkspace("expected NCCL >= 2.28, got 2.27.7; install "
                       "nvidia-nccl-cu13>=2.28.9."));
}

TEST(two_domains) {
  Open();
  Collectives collectives(Group(2)[0]);
  CHECK_EQ(FirstUse(2, &collectives),
           NoWorkspace("expected all 2 ranks in one NVLink domain, got 1 that reach "
                       "each other by load and store; domain_size (=2) must be at "
                       "most 1, or implementation='xla', which runs on any "
                       "network."));
}

TEST(no_symmetric_memory) {
  Open();
  Devices devices(Group(2));
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  CHECK_EQ(devices.Run(site)[0],
           NoWorkspace("reading the NCCL window: CUDA_ERROR_STANDIN (stand-in); NCCL "
                       "has no symmetric memory between these devices."));
}

// How the first use of an axis over two ranks fails on each, where rank 0 cannot go on.
void FailsEverywhere(Devices& devices, const std::string& reason, int windows) {
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  // Ranks that have met and failed do not try to meet again.
  for (int run = 0; run < 2; ++run) {
    const std::vector<std::string> said = devices.Run(site, run);
    CHECK_EQ(said[0], NoWorkspace(reason, 0));
    CHECK_EQ(said[1], NoWorkspace("rank 0 has none: " + reason, 1));
  }
  CHECK_EQ(Windows(), windows);
}

TEST(swapped_peers) {
  Open();
  // Those of the workspace, behind those of the pages.
  Standin<void(int, size_t)>(nccl_library, "standin_swap_peers")(0, kMiB * 2);
  Devices devices(Group(2));
  const std::string abi = Concat("(kernel ABI ", kKernelAbi, ", 2 ranks)");
  FailsEverywhere(devices,
                  "expected the workspace of rank 0 " + abi + ", got rank 1 " + abi +
                      "; all processes must run the same jax_ep.",
                  4);
}

TEST(swapped_pages) {
  Open();
  Standin<void(int, size_t)>(nccl_library, "standin_swap_peers")(0, 0);
  Devices devices(Group(2));
  FailsEverywhere(devices, "expected the page of rank 0, got that of rank 1.", 2);
}

TEST(out_of_memory) {
  Open();
  Standin<void(int)>(nccl_library, "standin_fail_alloc")(0);
  Devices devices(Group(2));
  FailsEverywhere(devices,
                  Concat("ncclMemAlloc of ", WorkspaceBytes(2) + 4096,
                         " bytes: stand-in error ", NcclVersion(),
                         "; a smaller XLA_PYTHON_CLIENT_MEM_FRACTION leaves less "
                         "to XLA."),
                  2);
}

// The rank that gives up first is the one that waited, and says so to the other.
TEST(a_rank_takes_too_long) {
  Open();
  Standin<void(int, int)>(nccl_library, "standin_slow_alloc")(1, 600);
  Devices devices(Group(2));
  CallSite site("jax_ep_layout",
                std::move(For("jax_ep_layout", 2).Float("timeout_s", 0.25)));
  CHECK_EQ(site.Instantiate(), std::string());
  const std::string late = "rank 1 did not say within 0.25 s whether it has one.";
  const std::vector<std::string> said = devices.Run(site);
  CHECK_EQ(said[0], NoWorkspace(late, 0));
  CHECK_EQ(said[1], NoWorkspace("rank 0 has none: " + late, 1));
}

TEST(out_of_memory_with_one_rank) {
  OpenCuda();
  Standin<void(const char*, int)>(cuda_library, "standin_fail")("cuMemAlloc", 2);
  CHECK_EQ(FirstUse(1, nullptr),
           Concat("jax_ep.dispatch_layout: no workspace for axis \"expert\", rank 0 of "
                  "1, device 0: cuMemAlloc of ",
                  WorkspaceBytes(1) + 4096, " bytes: CUDA_ERROR_STANDIN (stand-in)."));
}

TEST(wrong_architecture) {
  Open();
  Attrs attrs = For("jax_ep_layout", 2);
  attrs.String("cubin_archs", "sm_100a");
  Devices devices(Group(2));
  CallSite site("jax_ep_layout", std::move(attrs));
  CHECK_EQ(site.Instantiate(), std::string());
  for (const std::string& text : devices.Run(site)) {
    CHECK_EQ(text, std::string("jax_ep.dispatch_layout: the program has kernels for "
                               "sm_100a, and the device is sm_90a; compile it where "
                               "such a device is."));
  }
}

TEST(launch_fails) {
  Open();
  Devices devices(Group(2));
  CallSite site("jax_ep_layout", For("jax_ep_layout", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site));
  Standin<void(const char*, int)>(cuda_library, "standin_fail")("cuLaunchKernelEx",
                                                                700);
  for (const std::string& text : devices.Run(site)) {
    CHECK_EQ(text, std::string("jax_ep.dispatch_layout: cuLaunchKernelEx: "
                               "CUDA_ERROR_STANDIN (stand-in)."));
  }
}

// What an instantiation says of a good call's attributes after `change`.
void Refuses(const std::string& target, const std::function<void(Attrs&)>& change,
             const std::string& message) {
  Attrs attrs = For(target, 2);
  change(attrs);
  const std::string op = target == "jax_ep_layout"     ? "dispatch_layout"
                         : target == "jax_ep_dispatch" ? "dispatch"
                                                       : "combine";
  CHECK_EQ(CallSite(target, std::move(attrs)).Instantiate(),
           "jax_ep." + op + ": " + message);
}

TEST(bad_attributes) {
  const std::string layout = "jax_ep_layout", dispatch = "jax_ep_dispatch",
                    combine = "jax_ep_combine";
  constexpr int64_t kHuge = int64_t{1} << 62;
  for (const std::string& target : {layout, dispatch, combine}) {
    const auto refuses = [&](auto change, const std::string& message) {
      Refuses(target, change, message);
    };
    refuses([](Attrs& a) { a.Int("abi_version", 99); },
            Concat("abi_version (=99) of the program must be that of the installed "
                   "jax_ep (=",
                   kAbiVersion, "); compile or export it again."));
    refuses([](Attrs& a) { a.Int("num_experts", 15); },
            "num_experts (=15) must be a multiple of num_ranks (=2) and at most 2048.");
    refuses([](Attrs& a) { a.Ints("groups", {0, 1, 2}); },
            "groups must hold num_ranks (=2) positions per group, got 3 in all.");
    for (const auto& [groups, index] :
         std::vector<std::pair<std::vector<int64_t>, int>>{
             {{0, -1}, 1}, {{1, 1}, 1}, {{0, 2}, 1}, {{kHuge, 0}, 0}}) {
      refuses([g = groups](Attrs& a) { a.Ints("groups", g); },
              Concat("groups[", index, "] (=", groups[index],
                     ") must be another of the positions 0 to 1 than those before "
                     "it."));
    }
    refuses([](Attrs& a) { a.Ints("groups", {2, 0, 3, 2}); },
            "groups[3] (=2) must be another of the positions 0 to 3 than those before "
            "it.");
    refuses([](Attrs& a) { a.String("cubin_archs", ""); },
            "cubin_archs must name an architecture, got none.");
    // Another kernel's name, and code that was damaged.
    refuses([](Attrs& a) { a.String("cubin_sm_90a_sha256", Sha256(kBlackwell)); },
            "attribute cubin_sm_90a has the sha256 " + Sha256(kHopper) +
                ", and cubin_sm_90a_sha256 says " + Sha256(kBlackwell) +
                "; the program is damaged, compile or export it again.");
    refuses([](Attrs& a) { a.String("cubin_sm_90a", "\177ELF hoppeR"); },
            "attribute cubin_sm_90a has the sha256 " + Sha256("\177ELF hoppeR") +
                ", and cubin_sm_90a_sha256 says " + Sha256(kHopper) +
                "; the program is damaged, compile or export it again.");
    // Whoever came first: the good one still runs.
    CHECK_EQ(CallSite(target, For(target, 2)).Instantiate(), std::string());
  }
  for (const std::string& target : {dispatch, combine}) {
    for (int64_t topk : {int64_t{0}, int64_t{-1}, int64_t{33}, kHuge}) {
      Refuses(
          target, [=](Attrs& a) { a.Int("num_topk", topk); },
          Concat("num_topk (=", topk, ") must be in [1, 32]."));
    }
  }
  for (int64_t bytes : {int64_t{0}, int64_t{-16}, int64_t{1} << 31, kHuge, INT64_MIN}) {
    Refuses(
        dispatch, [=](Attrs& a) { a.Ints("leaf_bytes", {16, bytes}); },
        Concat("leaf_bytes[1] (=", bytes, ") must be in [1, 2147483647]."));
    Refuses(
        combine, [=](Attrs& a) { a.Ints("leaf_widths", {bytes}); },
        Concat("leaf_widths[0] (=", bytes, ") must be in [1, 2147483647]."));
  }
  for (int32_t dtype : {-1, 3, 6, INT32_MAX, INT32_MIN}) {
    Refuses(
        combine, [=](Attrs& a) { a.Ints32("leaf_dtypes", {dtype}); },
        Concat("leaf_dtypes[0] (=", dtype,
               ") must be the number of a dtype that combine adds."));
  }
  Refuses(
      combine, [](Attrs& a) { a.Ints32("leaf_dtypes", {0, 0}); },
      "leaf_dtypes (2 of them) and leaf_widths (1) must be equally many.");
  Refuses(
      dispatch, [](Attrs& a) { a.Ints("leaf_bytes", {}); },
      "the number of leaves (=0) must be in [1, 16].");
  Refuses(
      dispatch, [](Attrs& a) { a.Ints("leaf_bytes", std::vector<int64_t>(17, 16)); },
      "the number of leaves (=17) must be in [1, 16].");
  Refuses(
      layout, [](Attrs& a) { a.String("cubin_archs", "sm_120a"); },
      "attribute cubin_sm_120a: Unexpected attribute: cubin_sm_120a.");
  CHECK_EQ(CallSite(combine, For(dispatch, 2)).Instantiate(),
           std::string("jax_ep.combine: attribute has_row_values: Unexpected "
                       "attribute: has_row_values."));
}

TEST(bad_operands) {
  Open();
  Devices devices(Group(2));
  CallSite site("jax_ep_dispatch", For("jax_ep_dispatch", 2));
  CHECK_EQ(site.Instantiate(), std::string());
  AllFine(devices.Run(site));
  const int64_t local = kExperts / 2;
  const auto execute = [&](std::vector<int64_t> slot, std::vector<int64_t> x,
                           XLA_FFI_DataType dtype = kBf16, size_t shift = 0,
                           bool extra = false, int64_t recv = kWidth) {
    Buffers in, out;
    in.Add(kI32, {2}).Add(kI32, slot).Add(kI32, slot);
    if (slot.size() == 2) slot.insert(slot.begin(), 2);
    in.Add(kI32, slot).Add(kI32, {local}).Add(kI32, {local});
    in.Add(kF32, {kTokens, slot.back()}).Add(dtype, x, shift);
    if (extra) in.Add(kBf16, {1});
    out.Add(kF32, {kCapacity}).Add(kBf16, {kCapacity, recv});
    const std::string error =
        site.Execute(site.On(0, devices.stream[0], nullptr), in, out);
    const std::string prefix = "jax_ep.dispatch: ";
    CHECK_EQ(error.empty() || error.compare(0, prefix.size(), prefix) == 0, true);
    return error.empty() ? error : error.substr(prefix.size());
  };
  const std::vector<int64_t> good = {kTokens, kTopk}, x = {kTokens, kWidth};
  CHECK_EQ(execute(good, x), std::string());
  CHECK_EQ(execute({kTokens}, x),
           std::string("operand slot must be int32[any, any], got int32[8]."));
  CHECK_EQ(execute({kTokens, 3}, x),
           std::string("operand slot has top-k 3, and the kernel was compiled for 4."));
  CHECK_EQ(
      execute(good, {kTokens, 32}),
      std::string("result recv must be bfloat16[256, 32], got bfloat16[256, 64]."));
  CHECK_EQ(
      execute(good, {kTokens, 32}, kBf16, 0, false, 32),
      std::string("operand x has rows of 64 bytes, and the kernel was compiled for "
                  "128."));
  CHECK_EQ(execute(good, x, kI32),
           std::string("operand x must be float32|bfloat16|float16|uint8|uint16|uint32"
                       "[8, any], got int32[8, 64]."));
  CHECK_EQ(execute(good, x, kBf16, 8),
           std::string("x must start at a multiple of 16 bytes."));
  CHECK_EQ(execute(good, x, kBf16, 0, true),
           std::string("expected 8 operands, got 9."));
  Buffers none, out;
  CHECK_EQ(site.Execute(site.On(0, devices.stream[0], nullptr), none, out),
           std::string("jax_ep.dispatch: operand rank is missing; got 0 operands."));
  CHECK_EQ(site.Execute(site.On(5, devices.stream[0], nullptr), none, out),
           std::string("jax_ep.dispatch: executed before it was initialized."));

  CallSite sums("jax_ep_combine", For("jax_ep_combine", 2));
  CHECK_EQ(sums.Instantiate(), std::string());
  AllFine(devices.Run(sums, 2));
  Buffers in, sum;
  in.Add(kI32, {2}).Add(kI32, good).Add(kI32, good).Add(kI32, {2, kTokens, kTopk});
  in.Add(kF32, {kCapacity}).Add(kF32, {kCapacity, 32}).Add(kF32, {kTokens, 32});
  sum.Add(kF32, {kTokens, 32});
  CHECK_EQ(sums.Execute(sums.On(0, devices.stream[0], nullptr), in, sum),
           std::string("jax_ep.combine: operand y has rows of float32[32], and the "
                       "kernel was compiled for bfloat16[64]."));
}

// Digests of FIPS 180-4's examples and of every length around a block's end, the latter
// chained and computed with Python's hashlib.
TEST(sha256) {
  CHECK_EQ(Sha256(""),
           std::string("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495"
                       "991b7852b855"));
  CHECK_EQ(Sha256("abc"),
           std::string("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb"
                       "410ff61f20015ad"));
  CHECK_EQ(
      Sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
      std::string("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
  CHECK_EQ(
      Sha256(std::string(1000000, 'a')),
      std::string("cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
  std::string chain;
  for (int length = 0; length <= 200; ++length) {
    chain = Sha256(chain + std::string(length, static_cast<char>(length + 100)));
  }
  CHECK_EQ(
      chain,
      std::string("da011708f9ed85f2fa14e11268f86344cd3f0c9759ee15a2f885be313f068d52"));
}

}  // namespace
}  // namespace jax_ep::cuda
