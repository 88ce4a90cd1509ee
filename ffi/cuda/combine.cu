// Translation unit of the combine kernel for NVRTC; workspace.h lists the macros.

#include "combine.cuh"

namespace {

struct Config {
  static constexpr int kRanks = JAX_EP_RANKS;
  static constexpr int kTopk = JAX_EP_TOPK;
  static constexpr bool kHasWeights = JAX_EP_HAS_WEIGHTS;
  static constexpr bool kHasRowValues = JAX_EP_HAS_ROW_VALUES;
  static constexpr bool kHasBias = JAX_EP_HAS_BIAS;
  static constexpr bool kWireF32 = JAX_EP_WIRE_F32;
  static constexpr bool kOutF32 = JAX_EP_OUT_F32;
  static constexpr int kDtypes[] = {JAX_EP_LEAF_DTYPES};
  static constexpr long long kWidths[] = {JAX_EP_LEAF_WIDTHS};
  static constexpr int kNumLeaves = sizeof(kDtypes) / sizeof(kDtypes[0]);
  static constexpr int Dtype(int leaf) { return kDtypes[leaf]; }
  static constexpr long long Width(int leaf) { return kWidths[leaf]; }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(jax_ep::cuda::Combine<Config>::kThreads, 1)
    jax_ep_combine(const __grid_constant__ jax_ep::cuda::CombineParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  jax_ep::cuda::Combine<Config>::Run(params, shared);
}
