// The element types of payloads, for host handlers, CUDA handlers and kernels. Python
// reads them from the compiled module. In this folder because kernels are compiled
// where only it is.

#ifndef JAX_EP_FFI_CUDA_DTYPES_H_
#define JAX_EP_FFI_CUDA_DTYPES_H_

#include "portable.h"

namespace jax_ep {

// Numbers that programs (attribute leaf_dtypes) and kernels (LEAF_DTYPES) carry: places
// in kDtypes.
enum LeafDtype : int32_t {
  kLeafF32 = 0,
  kLeafBf16 = 1,
  kLeafF16 = 2,
  kLeafU8 = 3,
  kLeafU16 = 4,
  kLeafU32 = 5,
};

struct DtypeFacts {
  const char* name;  // jax.numpy's
  int32_t bytes;     // of an element
  bool is_summed;    // whether combine takes it; dispatch moves any of them
};
constexpr DtypeFacts kDtypes[] = {
    {"float32", 4, true}, {"bfloat16", 2, true}, {"float16", 2, true},
    {"uint8", 1, false},  {"uint16", 2, false},  {"uint32", 4, false},
};
constexpr int kNumDtypes = sizeof(kDtypes) / sizeof(kDtypes[0]);

JAX_EP_HD constexpr int LeafItemBytes(int dtype) { return kDtypes[dtype].bytes; }

// What combine reads of a leaf, what crosses a link, and what it writes. Sums are made
// in float32 in between.
struct CombineTypes {
  int32_t load;
  int32_t wire;
  int32_t store;
};
JAX_EP_HD constexpr CombineTypes MakeCombineTypes(int dtype, bool wire_f32) {
  return {dtype, wire_f32 ? kLeafF32 : dtype, dtype};
}

}  // namespace jax_ep

#endif  // JAX_EP_FFI_CUDA_DTYPES_H_
