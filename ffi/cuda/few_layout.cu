// Translation unit of the layout of few ids for NVRTC.

#include "few_layout.cuh"

extern "C" __global__ void __launch_bounds__(jax_ep::cuda::FewLayout::kThreads, 1)
    jax_ep_layout(const __grid_constant__ jax_ep::cuda::LayoutParams params) {
  extern __shared__ __align__(16) int layout_shared[];
  jax_ep::cuda::FewLayout::Run(params, layout_shared);
}
