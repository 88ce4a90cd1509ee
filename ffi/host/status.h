// Errors of the host core, which knows nothing of XLA.
#ifndef JAX_EP_FFI_HOST_STATUS_H_
#define JAX_EP_FFI_HOST_STATUS_H_

#include <sstream>
#include <string>
#include <utility>

namespace jax_ep::host {

enum class Code { kOk, kInvalidArgument, kDeadlineExceeded, kInternal };

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return Status(Code::kInvalidArgument, Concat(parts...));
}

template <typename... Parts>
Status Internal(const Parts&... parts) {
  return Status(Code::kInternal, Concat(parts...));
}

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_STATUS_H_
