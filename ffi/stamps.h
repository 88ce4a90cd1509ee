// When the phases of an exchange began and ended, for the tools that measure.
#ifndef JAX_EP_FFI_STAMPS_H_
#define JAX_EP_FFI_STAMPS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

// Of the latest stamped call of a stage on one rank.
struct StampRecord {
  std::string stage;               // "layout", "dispatch" or "combine"
  int32_t rank = 0;                // on the expert axis
  int32_t device = 0;              // ordinal in this process; host devices: the rank
  std::vector<std::string> names;  // of the phases, in order
  std::vector<int64_t> times;      // [blocks][names], ns; 0: nothing of the kind
};

}  // namespace jax_ep

#endif  // JAX_EP_FFI_STAMPS_H_
