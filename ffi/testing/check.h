// The smallest test framework: CHECK, and a main that runs the named tests.
#ifndef JAX_EP_FFI_TESTING_CHECK_H_
#define JAX_EP_FFI_TESTING_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <sstream>
#include <string>
#include <utility>

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) ::jax_ep::CheckFailed(__FILE__, __LINE__, #condition, ""); \
  } while (false)

#define CHECK_EQ(left, right) \
  ::jax_ep::CheckEq(__FILE__, __LINE__, #left " == " #right, left, right)

namespace jax_ep {

[[noreturn]] inline void CheckFailed(const char* file, int line, const char* condition,
                                     const std::string& detail) {
  std::fprintf(stderr, "%s:%d: CHECK(%s) failed%s\n", file, line, condition,
               detail.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

template <typename L, typename R>
void CheckEq(const char* file, int line, const char* condition, const L& left,
             const R& right) {
  if (left == right) return;
  std::ostringstream detail;
  detail << ": <" << left << "> vs <" << right << ">";
  CheckFailed(file, line, condition, detail.str());
}

inline int RunTests(std::initializer_list<std::pair<const char*, void (*)()>> tests) {
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  return 0;
}

}  // namespace jax_ep

#endif  // JAX_EP_FFI_TESTING_CHECK_H_
