// Attributes, operands and results of every handler, changed at random: an error that
// reads well, or a call, but never a crash. From a fixed seed; FUZZ_SEED and
// FUZZ_TRIALS make it another or a longer run.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "ffi/host/handlers.h"
#include "ffi/registration.h"
#include "tests/cuda/harness.h"

namespace jax_ep::cuda {
namespace {

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoll(text) : otherwise;
}

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed) {}

  int64_t Below(int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(random_);
  }
  template <typename T>
  T Pick(const std::vector<T>& from) {
    return from[Below(from.size())];
  }

  int64_t Int() {
    return Pick<int64_t>({-1,
                          0,
                          1,
                          2,
                          3,
                          4,
                          5,
                          8,
                          16,
                          32,
                          33,
                          64,
                          65,
                          128,
                          256,
                          2048,
                          INT32_MAX,
                          INT32_MIN,
                          int64_t{1} << 31,
                          int64_t{1} << 40,
                          int64_t{1} << 62,
                          INT64_MAX,
                          INT64_MIN,
                          -Below(1000)});
  }
  int32_t Int32() { return static_cast<int32_t>(Int()); }

  template <typename T>
  std::vector<T> Array() {
    std::vector<T> values(Below(4) == 0 ? Below(40) : Below(5));
    for (T& value : values) value = static_cast<T>(Int());
    return values;
  }

  // Returns whether the call may have another number of ranks now.
  bool Change(Attrs& attrs) {
    const std::vector<std::string> names = {
        "abi_version",        "axis",         "num_ranks",   "groups",
        "num_experts",        "capacity",     "num_sms",     "expert_alignment",
        "timeout_s",          "stamps",       "has_weights", "has_row_values",
        "has_bias",           "wire_f32",     "out_f32",     "num_topk",
        "leaf_bytes",         "leaf_dtypes",  "leaf_widths", "cubin_archs",
        "call_site",          "cubin_sm_90a", "more",        "num_topk",
        "cubin_sm_90a_sha256"};
    const std::string name = Pick(names);
    // Of its own type more often than not.
    const bool is_array = name == "groups" || name.compare(0, 5, "leaf_") == 0;
    const bool is_string =
        name == "axis" || name == "call_site" || name.compare(0, 5, "cubin") == 0;
    const bool is_flag = name == "stamps" || name == "wire_f32" || name == "out_f32" ||
                         name.compare(0, 4, "has_") == 0;
    const int64_t kind = Below(12);
    if (kind == 0) {
      attrs.Remove(name);
    } else if (kind == 1) {
      attrs.Int(name.c_str(), Int());
    } else if (kind == 2) {
      attrs.Ints32(name.c_str(), Array<int32_t>());
    } else if (kind == 3 || is_string) {
      std::string text;
      for (int64_t i = Below(20); i > 0; --i) text += ",sm_90a\377x1"[Below(11)];
      attrs.String(name.c_str(), text);
    } else if (name == "leaf_dtypes") {
      attrs.Ints32(name.c_str(), Array<int32_t>());
    } else if (is_array) {
      attrs.Ints(name.c_str(), Array<int64_t>());
    } else if (is_flag) {
      attrs.Bool(name.c_str(), Below(2) == 1);
    } else if (name == "timeout_s") {
      attrs.Float(name.c_str(), Pick<double>({0, -1, 1e-9, 1e300, INFINITY, NAN}));
    } else {
      attrs.Int(name.c_str(), Int());
    }
    return name == "num_ranks" || name == "groups";
  }

  // One buffer has another shape, dtype or place, or is not there.
  void Change(Buffers& buffers) {
    Buffers changed;
    const int64_t victim = Below(buffers.size() + 1);
    const int64_t kind = Below(6);
    for (int64_t i = 0; i < static_cast<int64_t>(buffers.size()); ++i) {
      std::vector<int64_t> dims = buffers.Dims(i);
      XLA_FFI_DataType dtype = buffers[i].dtype;
      size_t shift = 0;
      if (i == victim) {
        if (kind == 0) continue;
        if (kind == 1) dims.push_back(Below(3));
        if (kind == 2) dims.resize(Below(dims.size() + 1));
        if (kind == 3 && !dims.empty()) {
          dims[Below(dims.size())] =
              Pick<int64_t>({0, 1, 2, 3, 8, 33, 64, 256, int64_t{1} << 33});
        }
        if (kind == 4) dtype = static_cast<XLA_FFI_DataType>(Below(30));
        if (kind == 5) shift = Pick<size_t>({4, 8, 16});
      }
      changed.Add(dtype, dims, shift);
    }
    if (victim == static_cast<int64_t>(buffers.size())) changed.Add(kF32, {2});
    buffers = std::move(changed);
  }

  // Values that some layout could have made, or that none could.
  void FillInts(Buffers& buffers, size_t from) {
    const bool wild = Below(2) == 0;
    for (size_t i = from; i < buffers.size(); ++i) {
      if (buffers[i].dtype != kI32) continue;
      int64_t count = 1;
      for (int64_t dim : buffers.Dims(i)) count *= dim;
      auto* data = static_cast<int32_t*>(buffers[i].data);
      if (reinterpret_cast<uintptr_t>(data) % 4 != 0 || count > 100000) continue;
      for (int64_t at = 0; at < count; ++at) {
        data[at] = wild ? Int32() : static_cast<int32_t>(Below(3)) - 1;
      }
    }
  }

 private:
  std::mt19937_64 random_;
};

// One sentence or more, of one speaker.
void CheckReadsWell(const std::string& message) {
  // The host adds which rank found it.
  const std::string sentence = message.substr(0, message.find(" [rank 0 of 1 on axis"));
  const auto has = [&](const char* part) {
    return message.find(part) != std::string::npos;
  };
  if (message.compare(0, 7, "jax_ep.") != 0 ||
      message.find("jax_ep:") < message.size() ||
      message.find("jax_ep.", 1) < message.size() || has("..") || has(" .") ||
      sentence.back() != '.') {
    CheckFailed(__FILE__, __LINE__, "reads well", ": <" + message + ">");
  }
}

void Fuzz(const std::vector<Registration>& handlers, bool is_cuda) {
  Fuzzer fuzzer(FromEnvironment("FUZZ_SEED", 0));
  const int64_t trials = FromEnvironment("FUZZ_TRIALS", 6000);
  const CUstream stream = is_cuda ? Stream(0) : nullptr;
  int64_t refused = 0, failed = 0, ran = 0;
  for (int64_t trial = 0; trial < trials; ++trial) {
    const std::string target = fuzzer.Pick<std::string>(
        {"jax_ep_layout", "jax_ep_dispatch", "jax_ep_combine"});
    Attrs attrs = For(target, 1);
    // A third each: attributes, operands or results, values of operands only.
    const int64_t what = fuzzer.Below(3);
    bool other_ranks = false;
    for (int64_t n = what == 0 ? 1 + fuzzer.Below(3) : 0; n > 0; --n) {
      other_ranks |= fuzzer.Change(attrs);
    }
    CallSite site(target, std::move(attrs), handlers);
    std::string error = site.Instantiate();
    if (!error.empty()) {
      CHECK(what == 0);
      CheckReadsWell(error);
      ++refused;
      continue;
    }
    if (other_ranks) continue;  // it would wait for the others
    const XLA_FFI_InvokeContext context = site.On(0, stream, nullptr, trial);
    if (is_cuda) {
      error = site.Prepare(context);
      if (error.empty()) error = site.Initialize(context);
    }
    Buffers in, out;
    AddBuffers(target, 1, in, out);
    if (what == 1) fuzzer.Change(fuzzer.Below(2) == 0 ? in : out);
    fuzzer.FillInts(in, fuzzer.Below(10) == 0 ? 0 : 1);  // from 0: the rank too
    if (error.empty()) error = site.Execute(context, in, out);
    if (error.empty()) {
      ++ran;
    } else {
      CheckReadsWell(error);
      ++failed;
    }
  }
  std::printf("%lld refused, %lld failed, %lld ran\n", static_cast<long long>(refused),
              static_cast<long long>(failed), static_cast<long long>(ran));
  // Each kind often enough to say something.
  CHECK(std::min({refused, failed, ran}) > trials / 20);
}

TEST(fuzz_host) { Fuzz(host::Registrations(), false); }

TEST(fuzz_cuda) {
  OpenCuda();
  Fuzz(cuda::Registrations(), true);
}

}  // namespace
}  // namespace jax_ep::cuda
