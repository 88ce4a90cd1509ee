// Translation unit of dispatch for few tokens; macros as for dispatch.cu.

#include "few_dispatch.cuh"

namespace {

struct Config {
  static constexpr int kRanks = JAX_EP_RANKS;
  static constexpr int kTopk = JAX_EP_TOPK;
  static constexpr bool kHasWeights = JAX_EP_HAS_WEIGHTS;
  static constexpr long long kBytes[] = {JAX_EP_LEAF_BYTES};
  static constexpr int kNumLeaves = sizeof(kBytes) / sizeof(kBytes[0]);
  static constexpr long long LeafBytes(int leaf) { return kBytes[leaf]; }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(
    jax_ep::cuda::FewDispatch<Config>::kThreads, 1)
    jax_ep_dispatch(const __grid_constant__ jax_ep::cuda::DispatchParams params) {
  jax_ep::cuda::FewDispatch<Config>::Run(params);
}
