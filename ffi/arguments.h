// What a custom call brings to its handler, decoded and checked alike on every
// platform: HLO can come here without Python's checks.
#ifndef JAX_EP_FFI_ARGUMENTS_H_
#define JAX_EP_FFI_ARGUMENTS_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/host/status.h"
#include "ffi/registration.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

using host::Concat;
using host::InvalidArgument;
using host::Status;

inline constexpr int64_t kMaxNumExperts = 2048;
inline constexpr int64_t kMaxNumRanks = 64;
inline constexpr int64_t kMaxNumTopk = 32;
// Beyond this (30 years) a deadline would overflow the clock.
inline constexpr double kMaxTimeoutSeconds = 1e9;

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

  const Status& status() const { return status_; }

 private:
  const ffi::Dictionary& attrs_;
  Status status_;
};

// The attributes that all three calls have.
inline Status ReadCommon(Attributes& attrs, Config& config) {
  const int64_t abi_version = attrs.Get<int64_t>("abi_version");
  config.axis = attrs.Get<std::string_view>("axis");
  config.num_ranks = attrs.Get<int64_t>("num_ranks");
  const auto groups = attrs.Get<ffi::Span<const int64_t>>("groups");
  config.num_experts = attrs.Get<int64_t>("num_experts");
  config.alignment = attrs.Get<int64_t>("expert_alignment");
  config.capacity = attrs.Get<int64_t>("capacity");
  config.num_sms = attrs.Get<int64_t>("num_sms");
  config.timeout_s = attrs.Get<double>("timeout_s");
  config.stamps = attrs.Get<bool>("stamps");
  if (!attrs.status().ok()) return attrs.status();

  if (abi_version != kAbiVersion) {
    return InvalidArgument("abi_version (=", abi_version,
                           ") of the program must be that of the installed jax_ep (=",
                           kAbiVersion, "); compile or export it again.");
  }
  if (config.num_ranks < 1 || config.num_ranks > kMaxNumRanks) {
    return InvalidArgument("num_ranks (=", config.num_ranks, ") must be in [1, ",
                           kMaxNumRanks, "].");
  }
  config.groups.assign(groups.begin(), groups.end());
  if (groups.size() == 0 || groups.size() % config.num_ranks != 0) {
    return InvalidArgument("groups must hold num_ranks (=", config.num_ranks,
                           ") positions per group, got ", groups.size(), " in all.");
  }
  if (config.num_experts < 1 || config.num_experts > kMaxNumExperts ||
      config.num_experts % config.num_ranks != 0) {
    return InvalidArgument("num_experts (=", config.num_experts,
                           ") must be a multiple of num_ranks (=", config.num_ranks,
                           ") and at most ", kMaxNumExperts, ".");
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

inline const char* Name(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::U16:
      return "uint16";
    case ffi::DataType::U32:
      return "uint32";
    default:
      return "another dtype";
  }
}

inline int64_t Bytes(ffi::DataType dtype) {
  return static_cast<int64_t>(ffi::ByteWidth(dtype));
}

// Matches any size of a dimension.
inline constexpr int64_t kAny = -1;
using Dims = std::vector<int64_t>;

inline std::string Describe(const char* dtype, const Dims& dims) {
  std::string text = Concat(dtype, "[");
  for (size_t i = 0; i < dims.size(); ++i) {
    text += i ? ", " : "";
    text += dims[i] == kAny ? "any" : std::to_string(dims[i]);
  }
  return text + "]";
}

// The operands or results of a call, taken one after another. The first one that is not
// what it should be is the error; what is taken after it is null.
class Buffers {
 public:
  Buffers(const char* kind, std::vector<ffi::AnyBuffer> buffers)
      : kind_(kind), buffers_(std::move(buffers)) {}

  // The next buffer, of the given dtype and dimensions.
  template <typename T>
  T* Take(const char* name, ffi::DataType dtype, const Dims& dims) {
    const std::optional<ffi::AnyBuffer> buffer = Next(name);
    if (!buffer) return nullptr;
    if (buffer->element_type() != dtype || !Matches(*buffer, dims)) {
      Fail(name, *buffer, Name(dtype), dims);
      return nullptr;
    }
    return static_cast<T*>(buffer->untyped_data());
  }

  // The next buffer, of one of `dtypes`, with two dimensions, of which the second is
  // not zero.
  std::optional<ffi::AnyBuffer> TakeRows(const char* name,
                                         std::initializer_list<ffi::DataType> dtypes,
                                         int64_t num_rows) {
    const std::optional<ffi::AnyBuffer> buffer = Next(name);
    if (!buffer) return std::nullopt;
    const bool known =
        std::find(dtypes.begin(), dtypes.end(), buffer->element_type()) != dtypes.end();
    if (!known || !Matches(*buffer, {num_rows, kAny}) || buffer->dimensions()[1] < 1) {
      std::string names;
      for (ffi::DataType dtype : dtypes) {
        names += Concat(names.empty() ? "" : "|", Name(dtype));
      }
      Fail(name, *buffer, names.c_str(), {num_rows, kAny});
      return std::nullopt;
    }
    return buffer;
  }

  // The dimensions of the next buffer, which is not taken, where it has `ndim` of them.
  Dims Peek(const char* name, size_t ndim) {
    const size_t position = position_;
    const std::optional<ffi::AnyBuffer> buffer = Next(name);
    position_ = position;
    if (!buffer) return Dims(ndim, 0);
    const auto dims = buffer->dimensions();
    if (dims.size() == ndim) return Dims(dims.begin(), dims.end());
    Fail(name, *buffer, "int32", Dims(ndim, kAny));
    return Dims(ndim, 0);
  }

  size_t num_left() const { return buffers_.size() - position_; }

  Status Finish() {
    if (status_.ok() && num_left() > 0) {
      status_ = InvalidArgument("expected ", position_, " ", kind_, "s, got ",
                                buffers_.size(), ".");
    }
    return status_;
  }

 private:
  std::optional<ffi::AnyBuffer> Next(const char* name) {
    if (!status_.ok()) return std::nullopt;
    if (position_ < buffers_.size()) return buffers_[position_++];
    status_ = InvalidArgument(kind_, " ", name, " is missing; got ", buffers_.size(),
                              " ", kind_, "s.");
    return std::nullopt;
  }

  static bool Matches(const ffi::AnyBuffer& buffer, const Dims& dims) {
    const auto actual = buffer.dimensions();
    if (actual.size() != dims.size()) return false;
    for (size_t i = 0; i < dims.size(); ++i) {
      if (dims[i] != kAny && dims[i] != actual[i]) return false;
    }
    return true;
  }

  void Fail(const char* name, const ffi::AnyBuffer& buffer, const char* dtypes,
            const Dims& dims) {
    const auto actual = buffer.dimensions();
    status_ = InvalidArgument(
        kind_, " ", name, " must be ", Describe(dtypes, dims), ", got ",
        Describe(Name(buffer.element_type()), Dims(actual.begin(), actual.end())), ".");
  }

  const char* kind_;
  std::vector<ffi::AnyBuffer> buffers_;
  size_t position_ = 0;
  Status status_;
};

inline Buffers OperandsOf(const ffi::RemainingArgs& args) {
  std::vector<ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) break;  // not a buffer; then one is missing
    buffers.push_back(*buffer);
  }
  return Buffers("operand", std::move(buffers));
}

inline Buffers ResultsOf(const ffi::RemainingRets& rets) {
  std::vector<ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) break;
    buffers.push_back(**buffer);
  }
  return Buffers("result", std::move(buffers));
}

inline Status CheckTokens(const Config& config, int64_t num_tokens, int64_t num_topk) {
  if (num_topk > kMaxNumTopk) {
    return InvalidArgument("top-k (=", num_topk, ") must be at most ", kMaxNumTopk,
                           ".");
  }
  // Rows wanted at one rank are counted in int32.
  const int64_t limit = INT32_MAX / config.num_ranks / std::max<int64_t>(1, num_topk);
  if (num_tokens > limit) {
    return InvalidArgument("tokens per rank (=", num_tokens, ") must be at most ",
                           limit, " with top-k ", num_topk, " and ", config.num_ranks,
                           " ranks.");
  }
  return Status();
}

}  // namespace jax_ep

#endif  // JAX_EP_FFI_ARGUMENTS_H_
