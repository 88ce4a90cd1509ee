// How our C++ says what went wrong; knows nothing of XLA or CUDA.
//
// A message is a sentence with its full stop and without a name in front: whoever hands
// it to XLA puts "jax_ep.dispatch: " there, and whoever passes it on says what it was
// doing with Within.
#ifndef JAX_EP_FFI_STATUS_H_
#define JAX_EP_FFI_STATUS_H_

#include <sstream>
#include <string>
#include <utility>

namespace jax_ep {

enum class Code {
  kOk,
  kInvalidArgument,
  kDeadlineExceeded,
  kFailedPrecondition,
  kInternal
};

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

  // The same failure, told from further out: "`what`: message". Success stays success.
  Status Within(const std::string& what) const {
    return ok() ? *this : Status(code_, Concat(what, ": ", message_));
  }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return Status(Code::kInvalidArgument, Concat(parts...));
}

template <typename... Parts>
Status FailedPrecondition(const Parts&... parts) {
  return Status(Code::kFailedPrecondition, Concat(parts...));
}

template <typename... Parts>
Status Internal(const Parts&... parts) {
  return Status(Code::kInternal, Concat(parts...));
}

}  // namespace jax_ep

#endif  // JAX_EP_FFI_STATUS_H_
