// The three stages as the CUDA handlers see them: what each reads of the attributes
// when a program is compiled, the shape of its launch, and its operands and results as
// the parameters of its kernel.
#ifndef JAX_EP_FFI_CUDA_STAGES_H_
#define JAX_EP_FFI_CUDA_STAGES_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/cuda/communicator.h"
#include "ffi/cuda/driver.h"
#include "ffi/cuda/launch_shape.h"
#include "ffi/cuda/loader.h"
#include "ffi/cuda/workspace.h"
#include "xla/ffi/api/collectives_c_api.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::cuda {

inline constexpr auto kS32 = ffi::DataType::S32;
inline constexpr auto kF32 = ffi::DataType::F32;

// Rows and slots are moved by 16-byte accesses.
inline constexpr uintptr_t kBufferAlignment = 16;

// What `execute` needs of a device; filled in by `initialize`.
struct Ready {
  const Workspace* workspace = nullptr;
  CUfunction function = nullptr;
  LaunchDims dims{};
};

// One call site of one executable, shared by its devices.
struct CudaState {
  static ffi::TypeId id;

  Config config;
  int num_topk = 0;                      // dispatch and combine: what the kernel is for
  std::vector<int64_t> leaf_bytes;       // dispatch: bytes of a row of each leaf
  std::vector<int32_t> leaf_dtypes;      // combine: LeafDtype
  std::vector<int64_t> leaf_widths;      // combine: elements of a row
  std::map<std::string, Image*> images;  // by architecture
  std::vector<XLA_FFI_ReplicaGroup> groups;

  Ready GetReady(int32_t ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    return ready_[ordinal];
  }
  void SetReady(int32_t ordinal, const Ready& ready) {
    std::lock_guard<std::mutex> lock(mutex_);
    ready_[ordinal] = ready;
  }

 private:
  std::mutex mutex_;
  std::map<int32_t, Ready> ready_;  // by device ordinal
};

template <typename T>
std::vector<T> GetArray(Attributes& attrs, std::string_view name) {
  const auto span = attrs.Get<ffi::Span<const T>>(name);
  return std::vector<T>(span.begin(), span.end());
}

inline Status CheckLeaves(size_t num_leaves) {
  if (num_leaves >= 1 && num_leaves <= kMaxLeaves) return Status();
  return InvalidArgument("the number of leaves (=", num_leaves, ") must be in [1, ",
                         kMaxLeaves, "].");
}

inline void ReadImages(Attributes& attrs, CudaState& state) {
  std::string_view archs = attrs.Get<std::string_view>("cubin_archs");
  while (!archs.empty()) {
    const std::string_view arch = archs.substr(0, archs.find(','));
    archs.remove_prefix(std::min(archs.size(), arch.size() + 1));
    const std::string name = Concat("cubin_", arch);
    const auto bytes = attrs.Get<std::string_view>(name);
    const auto sha256 = attrs.Get<std::string_view>(name + "_sha256");
    if (!attrs.status().ok()) return;
    state.images[std::string(arch)] = InternImage(sha256, bytes);
  }
}

inline void CheckAligned(const char* name, const void* data, Status* status) {
  if (reinterpret_cast<uintptr_t>(data) % kBufferAlignment == 0 || !status->ok())
    return;
  *status = InvalidArgument(name, " must start at a multiple of ", kBufferAlignment,
                            " bytes.");
}

// The next buffer, which the kernel reads or writes 16 bytes at a time.
inline void* TakeAligned(Buffers& buffers, const char* name, ffi::DataType dtype,
                         const Dims& dims, Status* status) {
  void* data = buffers.Take<void>(name, dtype, dims);
  CheckAligned(name, data, status);
  return data;
}

struct Routing {
  int64_t num_tokens = 0;
  int64_t num_topk = 0;
  const int32_t* slot = nullptr;
  const int32_t* slot_rank = nullptr;
  const int32_t* recv_slot = nullptr;
};

// slot, slot_rank, recv_slot, of which the first fixes T and K.
inline Routing TakeRouting(const CudaState& state, Buffers& operands, Status* status) {
  const Dims dims = operands.Peek("slot", 2);
  Routing routing;
  routing.num_tokens = dims[0];
  routing.num_topk = dims[1];
  routing.slot = operands.Take<int32_t>("slot", kS32, dims);
  routing.slot_rank = operands.Take<int32_t>("slot_rank", kS32, dims);
  routing.recv_slot = static_cast<const int32_t*>(TakeAligned(
      operands, "recv_slot", kS32, {state.config.num_ranks, dims[0], dims[1]}, status));
  if (status->ok()) *status = CheckTokens(state.config, dims[0], dims[1]);
  if (status->ok() && routing.slot != nullptr && dims[1] != state.num_topk) {
    *status =
        InvalidArgument("operand slot has top-k ", dims[1],
                        ", and the kernel was compiled for ", state.num_topk, ".");
  }
  return routing;
}

// Of a dispatch or combine.
inline Status CheckPieces(const LaunchDims& dims, int num_ranks, int64_t num_tokens) {
  const int64_t most = MaxTokens(dims, num_ranks);
  if (num_tokens <= most) return Status();
  return InvalidArgument("tokens per rank (=", num_tokens, ") must be at most ", most,
                         " on ", dims.blocks, " SMs (num_sms).");
}

struct LayoutStage {
  static constexpr char kOp[] = "dispatch_layout";
  static constexpr char kEntry[] = "jax_ep_layout";
  using Params = LayoutParams;

  static Status Read(Attributes&, CudaState&) { return Status(); }

  static LaunchDims Shape(const CudaState& state, int device_sms) {
    const Config& config = state.config;
    return LayoutLaunch(device_sms, static_cast<int>(config.num_sms),
                        static_cast<int>(config.num_ranks),
                        static_cast<int>(config.num_experts));
  }

  static Status Decode(const CudaState& state, Buffers& operands, Buffers& results,
                       Params& params) {
    const Config& config = state.config;
    const int64_t num_ranks = config.num_ranks;
    const int64_t num_local = config.num_local_experts();
    const Dims ids = operands.Peek("topk_idx", 2);
    params.topk_idx = operands.Take<int32_t>("topk_idx", kS32, ids);
    params.slot = results.Take<int32_t>("slot", kS32, ids);
    params.slot_rank = results.Take<int32_t>("slot_rank", kS32, ids);
    Status status = CheckTokens(config, ids[0], ids[1]);
    params.recv_slot = static_cast<int32_t*>(
        TakeAligned(results, "recv_slot", kS32, {num_ranks, ids[0], ids[1]}, &status));
    params.group_sizes = results.Take<int32_t>("group_sizes", kS32, {num_local});
    params.group_counts = results.Take<int32_t>("group_counts", kS32, {num_local});
    params.group_offsets = results.Take<int32_t>("group_offsets", kS32, {num_local});
    params.num_recv = results.Take<int32_t>("num_recv", kS32, {num_ranks});
    params.num_dropped = results.Take<int32_t>("num_dropped", kS32, {num_ranks});
    params.num_invalid = results.Take<int32_t>("num_invalid", kS32, {1});
    params.num_ids = ids[0] * ids[1];
    params.capacity = config.capacity;
    params.num_experts = static_cast<int32_t>(config.num_experts);
    params.expert_alignment = static_cast<int32_t>(config.alignment);
    return status;
  }
};

struct DispatchStage {
  static constexpr char kOp[] = "dispatch";
  static constexpr char kEntry[] = "jax_ep_dispatch";
  using Params = DispatchParams;

  static Status Read(Attributes& attrs, CudaState& state) {
    state.config.has_weights = attrs.Get<bool>("has_weights");
    state.num_topk = static_cast<int>(attrs.Get<int64_t>("num_topk"));
    state.leaf_bytes = GetArray<int64_t>(attrs, "leaf_bytes");
    return attrs.status().ok() ? CheckLeaves(state.leaf_bytes.size()) : attrs.status();
  }

  static LaunchDims Shape(const CudaState& state, int device_sms) {
    return DispatchLaunch(device_sms, static_cast<int>(state.config.num_sms),
                          state.leaf_bytes.data(),
                          static_cast<int>(state.leaf_bytes.size()), state.num_topk,
                          state.config.has_weights);
  }

  static Status Decode(const CudaState& state, Buffers& operands, Buffers& results,
                       Params& params) {
    const Config& config = state.config;
    Status status;
    const Routing routing = TakeRouting(state, operands, &status);
    const int64_t num_local = config.num_local_experts();
    params.slot = routing.slot;
    params.slot_rank = routing.slot_rank;
    params.recv_slot = routing.recv_slot;
    params.group_counts = operands.Take<int32_t>("group_counts", kS32, {num_local});
    params.group_offsets = operands.Take<int32_t>("group_offsets", kS32, {num_local});
    if (config.has_weights) {
      params.weights =
          operands.Take<float>("weights", kF32, {routing.num_tokens, routing.num_topk});
      params.recv_weights =
          results.Take<float>("recv_weights", kF32, {config.capacity});
    }
    for (size_t i = 0; i < state.leaf_bytes.size(); ++i) {
      const auto x =
          operands.TakeRows("x",
                            {kF32, ffi::DataType::BF16, ffi::DataType::F16,
                             ffi::DataType::U8, ffi::DataType::U16, ffi::DataType::U32},
                            routing.num_tokens);
      if (!x) break;
      const int64_t width = x->dimensions()[1];
      const auto dtype = x->element_type();
      if (status.ok() && width * Bytes(dtype) != state.leaf_bytes[i]) {
        status = InvalidArgument("operand x has rows of ", width * Bytes(dtype),
                                 " bytes, and the kernel was compiled for ",
                                 state.leaf_bytes[i], ".");
      }
      params.x[i] = x->untyped_data();
      CheckAligned("x", params.x[i], &status);
      params.recv[i] =
          TakeAligned(results, "recv", dtype, {config.capacity, width}, &status);
    }
    params.num_tokens = routing.num_tokens;
    params.capacity = config.capacity;
    params.num_local_experts = static_cast<int32_t>(num_local);
    return status;
  }
};

struct CombineStage {
  static constexpr char kOp[] = "combine";
  static constexpr char kEntry[] = "jax_ep_combine";
  using Params = CombineParams;

  static Status Read(Attributes& attrs, CudaState& state) {
    Config& config = state.config;
    config.has_weights = attrs.Get<bool>("has_weights");
    config.has_row_values = attrs.Get<bool>("has_row_values");
    config.has_bias = attrs.Get<bool>("has_bias");
    config.wire_f32 = attrs.Get<bool>("wire_f32");
    state.num_topk = static_cast<int>(attrs.Get<int64_t>("num_topk"));
    state.leaf_dtypes = GetArray<int32_t>(attrs, "leaf_dtypes");
    state.leaf_widths = GetArray<int64_t>(attrs, "leaf_widths");
    if (!attrs.status().ok()) return attrs.status();
    if (state.leaf_dtypes.size() != state.leaf_widths.size()) {
      return InvalidArgument("leaf_dtypes and leaf_widths must have equal lengths.");
    }
    return CheckLeaves(state.leaf_widths.size());
  }

  static LaunchDims Shape(const CudaState& state, int device_sms) {
    const Config& config = state.config;
    return CombineLaunch(device_sms, static_cast<int>(config.num_sms),
                         state.leaf_dtypes.data(), state.leaf_widths.data(),
                         static_cast<int>(state.leaf_widths.size()), state.num_topk,
                         config.wire_f32, config.has_row_values);
  }

  static ffi::DataType Dtype(int32_t leaf_dtype) {
    return leaf_dtype == kLeafF32    ? kF32
           : leaf_dtype == kLeafBf16 ? ffi::DataType::BF16
                                     : ffi::DataType::F16;
  }

  static Status Decode(const CudaState& state, Buffers& operands, Buffers& results,
                       Params& params) {
    const Config& config = state.config;
    Status status;
    const Routing routing = TakeRouting(state, operands, &status);
    params.slot = routing.slot;
    params.slot_rank = routing.slot_rank;
    params.recv_slot = routing.recv_slot;
    if (config.has_weights) {
      params.weights = operands.Take<float>("weights", kF32, {config.capacity});
    }
    if (config.has_row_values) {
      params.row_values = operands.Take<float>("row_values", kF32, {config.capacity});
      params.values =
          results.Take<float>("values", kF32, {routing.num_tokens, routing.num_topk});
    }
    for (size_t i = 0; i < state.leaf_widths.size(); ++i) {
      const auto dtype = Dtype(state.leaf_dtypes[i]);
      const int64_t width = state.leaf_widths[i];
      params.y[i] =
          TakeAligned(operands, "y", dtype, {config.capacity, width}, &status);
      params.out[i] =
          TakeAligned(results, "out", dtype, {routing.num_tokens, width}, &status);
    }
    for (size_t i = 0; config.has_bias && i < state.leaf_widths.size(); ++i) {
      params.bias[i] = TakeAligned(operands, "bias", Dtype(state.leaf_dtypes[i]),
                                   {routing.num_tokens, state.leaf_widths[i]}, &status);
    }
    params.num_tokens = routing.num_tokens;
    params.capacity = config.capacity;
    return status;
  }
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_STAGES_H_
