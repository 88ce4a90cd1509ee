// The three stages as the CUDA handlers see them: what their kernels were compiled for,
// the shape of the launch, and a call as the parameters of its kernel.
#ifndef JAX_EP_FFI_CUDA_STAGES_H_
#define JAX_EP_FFI_CUDA_STAGES_H_

#include <cstdint>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/calls.h"
#include "ffi/cuda/dtypes.h"
#include "ffi/cuda/few_shape.h"
#include "ffi/cuda/launch_shape.h"
#include "ffi/cuda/limits.h"
#include "ffi/cuda/state.h"
#include "ffi/cuda/workspace.h"
#include "ffi/status.h"

namespace jax_ep::cuda {

// Rows and receive slots are moved by 16-byte accesses.
inline constexpr uintptr_t kBufferAlignment = 16;

inline Status CheckAligned(const char* name, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % kBufferAlignment == 0) return Status();
  return InvalidArgument(name, " must start at a multiple of ", kBufferAlignment,
                         " bytes.");
}

inline Status CheckAllAligned(const char* in, const char* out, const AnyCall& call) {
  for (const Leaf& leaf : call.leaves) {
    if (Status status = CheckAligned(in, leaf.in); !status.ok()) return status;
    if (Status status = CheckAligned(out, leaf.out); !status.ok()) return status;
    if (Status status = CheckAligned("bias", leaf.bias); !status.ok()) return status;
  }
  return Status();
}

// Every element of an attribute in [least, most].
template <typename T>
Status CheckRange(const char* name, const std::vector<T>& values, int64_t least,
                  int64_t most) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] >= least && values[i] <= most) continue;
    return InvalidArgument(name, "[", i, "] (=", values[i], ") must be in [", least,
                           ", ", most, "].");
  }
  return Status();
}

// `num_topk`, and how many leaves there are.
inline Status ReadSizes(Attributes& attrs, size_t num_leaves, CudaState& state) {
  const int64_t num_topk = attrs.Get<int64_t>("num_topk");
  if (!attrs.status().ok()) return attrs.status();
  if (num_topk < 1 || num_topk > kMaxTopk) {
    return InvalidArgument("num_topk (=", num_topk, ") must be in [1, ", kMaxTopk,
                           "].");
  }
  if (num_leaves < 1 || num_leaves > kMaxLeaves) {
    return InvalidArgument("the number of leaves (=", num_leaves, ") must be in [1, ",
                           kMaxLeaves, "].");
  }
  state.sizes.num_topk = static_cast<int>(num_topk);
  state.config.num_leaves = num_leaves;
  return Status();
}

inline Status CheckTopk(const KernelSizes& sizes, const RoutedCall& call) {
  if (call.num_topk == sizes.num_topk) return Status();
  return InvalidArgument("operand slot has top-k ", call.num_topk,
                         ", and the kernel was compiled for ", sizes.num_topk, ".");
}

// The pieces of a channel must fit their count.
inline Status CheckPieces(const LaunchDims& dims, int num_ranks, int64_t num_tokens) {
  const int64_t most = MaxTokens(dims, num_ranks);
  if (num_tokens <= most) return Status();
  if (dims.few_tokens > 0) {
    return InvalidArgument("tokens per rank (=", num_tokens, ") must be at most ", most,
                           " with a kernel for few tokens.");
  }
  return InvalidArgument("tokens per rank (=", num_tokens, ") must be at most ", most,
                         " on ", dims.blocks, " SMs (num_sms).");
}

struct LayoutStage {
  using Call = LayoutCall;
  using Params = LayoutParams;

  static Status Read(Attributes&, CudaState& state) {
    const Config& config = state.config;
    const int num_ranks = static_cast<int>(config.num_ranks);
    state.sizes.most_ids = kMaxFewIds / num_ranks;
    if (!IsFewIds(0, num_ranks, static_cast<int>(config.num_experts))) {
      state.sizes.most_ids = 0;
    }
    return Status();
  }

  static LaunchDims Shape(const CudaState& state, int device_sms) {
    const Config& config = state.config;
    if (state.sizes.few) {
      return FewLayoutLaunch(static_cast<int>(config.num_ranks),
                             static_cast<int>(config.num_experts));
    }
    return LayoutLaunch(device_sms, static_cast<int>(config.num_sms),
                        static_cast<int>(config.num_ranks),
                        static_cast<int>(config.num_experts));
  }

  static Status Check(const KernelSizes& sizes, const Call& call) {
    const int64_t num_ids = call.num_tokens * call.num_topk;
    if (sizes.few && num_ids > sizes.most_ids) {
      return InvalidArgument("ids per rank (=", num_ids,
                             ") are too many for a kernel for few tokens.");
    }
    return CheckAligned("recv_slot", call.recv_slot);
  }

  static void Fill(const Config& config, const Call& call, Params& params) {
    params.topk_idx = call.topk_idx;
    params.slot = call.slot;
    params.slot_rank = call.slot_rank;
    params.recv_slot = call.recv_slot;
    params.group_sizes = call.group_sizes;
    params.group_counts = call.group_counts;
    params.group_offsets = call.group_offsets;
    params.num_recv = call.num_recv;
    params.num_dropped = call.num_dropped;
    params.num_invalid = call.num_invalid;
    params.num_ids = call.num_tokens * call.num_topk;
    params.capacity = config.capacity;
    params.num_experts = static_cast<int32_t>(config.num_experts);
    params.expert_alignment = static_cast<int32_t>(config.alignment);
  }
};

struct DispatchStage {
  using Call = DispatchCall;
  using Params = DispatchParams;

  static Status Read(Attributes& attrs, CudaState& state) {
    std::vector<int64_t>& bytes = state.sizes.leaf_bytes;
    bytes = attrs.GetArray<int64_t>("leaf_bytes");
    if (Status status = ReadSizes(attrs, bytes.size(), state); !status.ok()) {
      return status;
    }
    return CheckRange("leaf_bytes", bytes, 1, kMaxRow);
  }

  static LaunchDims Shape(const CudaState& state, int device_sms) {
    const KernelSizes& sizes = state.sizes;
    if (sizes.few) {
      const FewSlot slot = FewDispatchSlot(sizes.leaf_bytes.data(),
                                           static_cast<int>(sizes.leaf_bytes.size()),
                                           sizes.num_topk, state.config.has_weights);
      return FewLaunch(device_sms, static_cast<int>(state.config.num_sms),
                       static_cast<int>(state.config.num_ranks), slot,
                       kFewDispatchWarps);
    }
    return DispatchLaunch(device_sms, static_cast<int>(state.config.num_sms),
                          sizes.leaf_bytes.data(),
                          static_cast<int>(sizes.leaf_bytes.size()), sizes.num_topk,
                          state.config.has_weights);
  }

  static Status Check(const KernelSizes& sizes, const Call& call) {
    if (Status status = CheckTopk(sizes, call); !status.ok()) return status;
    for (size_t i = 0; i < call.leaves.size(); ++i) {
      const int64_t bytes = call.leaves[i].row_bytes();
      if (bytes == sizes.leaf_bytes[i]) continue;
      return InvalidArgument("operand x has rows of ", bytes,
                             " bytes, and the kernel was compiled for ",
                             sizes.leaf_bytes[i], ".");
    }
    if (Status status = CheckAligned("recv_slot", call.recv_slot); !status.ok()) {
      return status;
    }
    return CheckAllAligned("x", "recv", call);
  }

  static void Fill(const Config& config, const Call& call, Params& params) {
    params.slot = call.slot;
    params.slot_rank = call.slot_rank;
    params.recv_slot = call.recv_slot;
    params.group_counts = call.group_counts;
    params.group_offsets = call.group_offsets;
    params.weights = call.weights;
    params.recv_weights = call.recv_weights;
    for (size_t i = 0; i < call.leaves.size(); ++i) {
      params.x[i] = call.leaves[i].in;
      params.recv[i] = call.leaves[i].out;
    }
    params.num_tokens = call.num_tokens;
    params.capacity = config.capacity;
    params.num_local_experts = static_cast<int32_t>(config.num_local_experts());
  }
};

struct CombineStage {
  using Call = CombineCall;
  using Params = CombineParams;

  static Status Read(Attributes& attrs, CudaState& state) {
    KernelSizes& sizes = state.sizes;
    sizes.leaf_dtypes = attrs.GetArray<int32_t>("leaf_dtypes");
    sizes.leaf_widths = attrs.GetArray<int64_t>("leaf_widths");
    if (Status status = ReadSizes(attrs, sizes.leaf_widths.size(), state);
        !status.ok()) {
      return status;
    }
    if (sizes.leaf_dtypes.size() != sizes.leaf_widths.size()) {
      return InvalidArgument("leaf_dtypes (", sizes.leaf_dtypes.size(),
                             " of them) and leaf_widths (", sizes.leaf_widths.size(),
                             ") must be equally many.");
    }
    for (size_t i = 0; i < sizes.leaf_dtypes.size(); ++i) {
      const int32_t dtype = sizes.leaf_dtypes[i];
      if (dtype >= 0 && dtype < kNumDtypes && kDtypes[dtype].is_summed) continue;
      return InvalidArgument("leaf_dtypes[", i, "] (=", dtype,
                             ") must be the number of a dtype that combine adds.");
    }
    return CheckRange("leaf_widths", sizes.leaf_widths, 1, kMaxRow);
  }

  static LaunchDims Shape(const CudaState& state, int device_sms) {
    const Config& config = state.config;
    const KernelSizes& sizes = state.sizes;
    if (sizes.few) {
      const FewSlot slot =
          FewCombineSlot(sizes.leaf_dtypes.data(), sizes.leaf_widths.data(),
                         static_cast<int>(sizes.leaf_widths.size()), sizes.num_topk,
                         config.wire_f32, config.has_row_values);
      return FewLaunch(device_sms, static_cast<int>(config.num_sms),
                       static_cast<int>(config.num_ranks), slot, kFewCombineWarps);
    }
    return CombineLaunch(device_sms, static_cast<int>(config.num_sms),
                         sizes.leaf_dtypes.data(), sizes.leaf_widths.data(),
                         static_cast<int>(sizes.leaf_widths.size()), sizes.num_topk,
                         config.wire_f32, config.has_row_values);
  }

  static Status Check(const KernelSizes& sizes, const Call& call) {
    if (Status status = CheckTopk(sizes, call); !status.ok()) return status;
    for (size_t i = 0; i < call.leaves.size(); ++i) {
      const Leaf& leaf = call.leaves[i];
      if (leaf.dtype == sizes.leaf_dtypes[i] && leaf.width == sizes.leaf_widths[i]) {
        continue;
      }
      return InvalidArgument("operand y has rows of ", kDtypes[leaf.dtype].name, "[",
                             leaf.width, "], and the kernel was compiled for ",
                             kDtypes[sizes.leaf_dtypes[i]].name, "[",
                             sizes.leaf_widths[i], "].");
    }
    if (Status status = CheckAligned("recv_slot", call.recv_slot); !status.ok()) {
      return status;
    }
    return CheckAllAligned("y", "out", call);
  }

  static void Fill(const Config& config, const Call& call, Params& params) {
    params.slot = call.slot;
    params.slot_rank = call.slot_rank;
    params.recv_slot = call.recv_slot;
    params.weights = call.weights;
    params.row_values = call.row_values;
    params.values = call.values;
    for (size_t i = 0; i < call.leaves.size(); ++i) {
      params.y[i] = call.leaves[i].in;
      params.out[i] = call.leaves[i].out;
      params.bias[i] = call.leaves[i].bias;
    }
    params.num_tokens = call.num_tokens;
    params.capacity = config.capacity;
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_STAGES_H_
