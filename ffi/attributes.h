// The attributes of a custom call, decoded and checked alike on every platform: HLO can
// come here without Python's checks.
#ifndef JAX_EP_FFI_ATTRIBUTES_H_
#define JAX_EP_FFI_ATTRIBUTES_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/cuda/limits.h"
#include "ffi/registration.h"
#include "ffi/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

// Three years. Beyond a hundred times this a deadline would overflow the clock, and
// the host's rendezvous waits for ten.
inline constexpr double kMaxTimeoutSeconds = 1e8;

// The attributes of a call that shapes do not tell.
struct Config {
  std::string axis;
  int64_t num_ranks = 0;
  std::vector<int64_t> groups;  // mesh positions, num_ranks per group
  int64_t num_experts = 0;
  int64_t alignment = 1;
  int64_t capacity = 0;
  int64_t num_sms = 0;
  double timeout_s = 0;
  bool stamps = false;  // whether the tools want to know when phases began and ended
  bool has_weights = false;
  bool has_row_values = false;
  bool has_bias = false;
  bool wire_f32 = false;
  bool out_f32 = false;
  size_t num_leaves = 0;  // that a kernel was compiled for; 0: as many as there are

  int64_t num_groups() const { return static_cast<int64_t>(groups.size()) / num_ranks; }
  int64_t num_local_experts() const { return num_experts / num_ranks; }
};

// Reads attributes by name; the first that is missing or of another type is the error.
class Attributes {
 public:
  explicit Attributes(const ffi::Dictionary& attrs) : attrs_(attrs) {}

  template <typename T>
  T Get(std::string_view name) {
    auto value = attrs_.get<T>(name);
    if (value.has_value()) return *value;
    if (status_.ok()) {
      status_ = InvalidArgument("attribute ", name, ": ", value.error().message(), ".");
    }
    return T();
  }

  template <typename T>
  std::vector<T> GetArray(std::string_view name) {
    const auto span = Get<ffi::Span<const T>>(name);
    return std::vector<T>(span.begin(), span.end());
  }

  const Status& status() const { return status_; }

 private:
  const ffi::Dictionary& attrs_;
  Status status_;
};

// The groups are a partition of the positions 0, 1, ... of all devices.
inline Status CheckGroups(const std::vector<int64_t>& groups, int64_t num_ranks) {
  if (groups.empty() || groups.size() % num_ranks != 0) {
    return InvalidArgument("groups must hold num_ranks (=", num_ranks,
                           ") positions per group, got ", groups.size(), " in all.");
  }
  std::vector<bool> seen(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto position = static_cast<uint64_t>(groups[i]);
    if (position < groups.size() && !seen[position]) {
      seen[position] = true;
      continue;
    }
    return InvalidArgument("groups[", i, "] (=", groups[i],
                           ") must be another of the positions 0 to ",
                           groups.size() - 1, " than those before it.");
  }
  return Status();
}

// First of all: a program of another version may lack, or mean otherwise, the rest.
inline Status CheckVersion(Attributes& attrs) {
  const int64_t abi_version = attrs.Get<int64_t>("abi_version");
  if (!attrs.status().ok() || abi_version == kAbiVersion) return attrs.status();
  return InvalidArgument("abi_version (=", abi_version,
                         ") of the program must be that of the installed jax_ep (=",
                         kAbiVersion, "); compile or export it again.");
}

// The attributes that all three calls have.
inline Status ReadCommon(Attributes& attrs, Config& config) {
  config.axis = attrs.Get<std::string_view>("axis");
  config.num_ranks = attrs.Get<int64_t>("num_ranks");
  config.groups = attrs.GetArray<int64_t>("groups");
  config.num_experts = attrs.Get<int64_t>("num_experts");
  config.alignment = attrs.Get<int64_t>("expert_alignment");
  config.capacity = attrs.Get<int64_t>("capacity");
  config.num_sms = attrs.Get<int64_t>("num_sms");
  config.timeout_s = attrs.Get<double>("timeout_s");
  config.stamps = attrs.Get<bool>("stamps");
  if (!attrs.status().ok()) return attrs.status();

  if (config.num_ranks < 1 || config.num_ranks > kMaxRanks) {
    return InvalidArgument("num_ranks (=", config.num_ranks, ") must be in [1, ",
                           kMaxRanks, "].");
  }
  if (Status status = CheckGroups(config.groups, config.num_ranks); !status.ok()) {
    return status;
  }
  if (config.num_experts < 1 || config.num_experts > kMaxExperts ||
      config.num_experts % config.num_ranks != 0) {
    return InvalidArgument("num_experts (=", config.num_experts,
                           ") must be a multiple of num_ranks (=", config.num_ranks,
                           ") and at most ", kMaxExperts, ".");
  }
  if (config.capacity < 0 || config.capacity > INT32_MAX) {
    return InvalidArgument("capacity (=", config.capacity, ") must be in [0, 2^31).");
  }
  if (config.alignment > INT32_MAX) {
    return InvalidArgument("expert_alignment (=", config.alignment,
                           ") must be below 2^31.");
  }
  if (config.alignment < 1 || config.capacity % config.alignment != 0) {
    return InvalidArgument(
        "expert_alignment (=", config.alignment,
        ") must be positive and divide the capacity (=", config.capacity, ").");
  }
  if (config.num_sms < 0 || config.num_sms > INT32_MAX) {
    return InvalidArgument("num_sms (=", config.num_sms, ") must be in [0, 2^31).");
  }
  if (!(config.timeout_s > 0)) {
    return InvalidArgument("timeout_s (=", config.timeout_s, ") must be positive.");
  }
  config.timeout_s = std::min(config.timeout_s, kMaxTimeoutSeconds);
  return Status();
}

// A failure as XLA wants it.
inline ffi::Error ToFfi(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      return ffi::Error::InvalidArgument(status.message());
    case Code::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, status.message());
    case Code::kFailedPrecondition:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, status.message());
    case Code::kInternal:
      return ffi::Error::Internal(status.message());
  }
  return ffi::Error::Internal(status.message());
}

// "jax_ep.dispatch": who speaks.
inline std::string OpName(const std::string& op) { return Concat("jax_ep.", op); }

}  // namespace jax_ep

#endif  // JAX_EP_FFI_ATTRIBUTES_H_
