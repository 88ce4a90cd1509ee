// The operands and results of a custom call, taken one after another and checked.
#ifndef JAX_EP_FFI_BUFFERS_H_
#define JAX_EP_FFI_BUFFERS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cuda/dtypes.h"
#include "ffi/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

inline constexpr auto kS32 = ffi::DataType::S32;
inline constexpr auto kF32 = ffi::DataType::F32;

inline constexpr ffi::DataType ToXla(LeafDtype dtype) {
  switch (dtype) {
    case kLeafF32:
      return ffi::DataType::F32;
    case kLeafBf16:
      return ffi::DataType::BF16;
    case kLeafF16:
      return ffi::DataType::F16;
    case kLeafU8:
      return ffi::DataType::U8;
    case kLeafU16:
      return ffi::DataType::U16;
    case kLeafU32:
      return ffi::DataType::U32;
  }
  return ffi::DataType::INVALID;
}

// The type of a leaf's elements, if a leaf may have it.
inline std::optional<LeafDtype> FromXla(ffi::DataType dtype) {
  for (int i = 0; i < kNumDtypes; ++i) {
    if (ToXla(static_cast<LeafDtype>(i)) == dtype) return static_cast<LeafDtype>(i);
  }
  return std::nullopt;
}

inline const char* Name(ffi::DataType dtype) {
  if (dtype == kS32) return "int32";  // no leaf has it
  const std::optional<LeafDtype> leaf = FromXla(dtype);
  return leaf ? kDtypes[*leaf].name : "another dtype";
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

// The first buffer that is not what it should be is the error; what is taken after it
// is null.
class Buffers {
 public:
  explicit Buffers(const ffi::RemainingArgs& args) : kind_("operand") {
    for (size_t i = 0; i < args.size(); ++i) {
      auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) break;  // not a buffer; then one is missing
      buffers_.push_back(*buffer);
    }
  }
  explicit Buffers(const ffi::RemainingRets& rets) : kind_("result") {
    for (size_t i = 0; i < rets.size(); ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) break;
      buffers_.push_back(**buffer);
    }
  }

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

  // The next buffer, with `num_rows` rows of at least one element of a leaf's type,
  // `summed` if it must be one that combine can add.
  struct Rows {
    LeafDtype dtype;
    int64_t width;
    const void* data;
  };
  std::optional<Rows> TakeRows(const char* name, int64_t num_rows, bool summed) {
    const std::optional<ffi::AnyBuffer> buffer = Next(name);
    if (!buffer) return std::nullopt;
    const std::optional<LeafDtype> dtype = FromXla(buffer->element_type());
    const bool known = dtype && (kDtypes[*dtype].is_summed || !summed);
    if (!known || !Matches(*buffer, {num_rows, kAny}) || buffer->dimensions()[1] < 1) {
      std::string names;
      for (const DtypeFacts& facts : kDtypes) {
        if (summed && !facts.is_summed) continue;
        names += Concat(names.empty() ? "" : "|", facts.name);
      }
      Fail(name, *buffer, names.c_str(), {num_rows, kAny});
      return std::nullopt;
    }
    return Rows{*dtype, buffer->dimensions()[1], buffer->untyped_data()};
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
      status_ =
          InvalidArgument("expected ", position_, " ", kind_, position_ == 1 ? "" : "s",
                          ", got ", buffers_.size(), ".");
    }
    return status_;
  }

 private:
  std::optional<ffi::AnyBuffer> Next(const char* name) {
    if (!status_.ok()) return std::nullopt;
    if (position_ < buffers_.size()) return buffers_[position_++];
    status_ = InvalidArgument(kind_, " ", name, " is missing; got ", buffers_.size(),
                              " ", kind_, buffers_.size() == 1 ? "." : "s.");
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

}  // namespace jax_ep

#endif  // JAX_EP_FFI_BUFFERS_H_
