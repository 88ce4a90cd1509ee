// The three custom calls: what each reads of its attributes, and its operands and
// results by name. The order in which they cross stands here, and in jax_ep/ffi.py.
#ifndef JAX_EP_FFI_CALLS_H_
#define JAX_EP_FFI_CALLS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/buffers.h"
#include "ffi/cuda/dtypes.h"
#include "ffi/cuda/limits.h"
#include "ffi/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// A leaf of a payload: dispatch moves rows [T, width] to rows [C, width], combine adds
// rows [C, width] to rows [T, width].
struct Leaf {
  LeafDtype dtype = kLeafF32;
  int64_t width = 0;
  const void* in = nullptr;
  void* out = nullptr;
  const void* bias = nullptr;  // [T, width], of a combine with has_bias

  int64_t row_bytes() const { return width * LeafItemBytes(dtype); }
};

// What every call has.
struct AnyCall {
  const int32_t* rank = nullptr;  // [2]: on the axis, and of the replica group
  int64_t num_tokens = 0;         // T
  int64_t num_topk = 0;           // K
  std::vector<Leaf> leaves;

  // Whether another rank's operands have the same shapes and dtypes.
  bool HasShapeOf(const AnyCall& other) const {
    return num_tokens == other.num_tokens && num_topk == other.num_topk &&
           std::equal(leaves.begin(), leaves.end(), other.leaves.begin(),
                      other.leaves.end(), [](const Leaf& a, const Leaf& b) {
                        return a.dtype == b.dtype && a.width == b.width;
                      });
  }
};

inline Status CheckTokens(const Config& config, const AnyCall& call) {
  if (call.num_topk > kMaxTopk) {
    return InvalidArgument("top-k (=", call.num_topk, ") must be at most ", kMaxTopk,
                           ".");
  }
  // Rows wanted at one rank are counted in int32.
  const int64_t limit =
      INT32_MAX / config.num_ranks / std::max<int64_t>(1, call.num_topk);
  if (call.num_tokens > limit) {
    return InvalidArgument("tokens per rank (=", call.num_tokens, ") must be at most ",
                           limit, " with top-k ", call.num_topk, " and ",
                           config.num_ranks, " ranks.");
  }
  return Status();
}

// The operands by which dispatch and combine find rows; slot fixes T and K.
struct RoutedCall : AnyCall {
  const int32_t* slot = nullptr;       // [T, K]
  const int32_t* slot_rank = nullptr;  // [T, K]
  const int32_t* recv_slot = nullptr;  // [R, T, K]

 protected:
  void TakeRouting(const Config& config, Buffers& operands) {
    const Dims dims = operands.Peek("slot", 2);
    num_tokens = dims[0];
    num_topk = dims[1];
    slot = operands.Take<int32_t>("slot", kS32, dims);
    slot_rank = operands.Take<int32_t>("slot_rank", kS32, dims);
    recv_slot =
        operands.Take<int32_t>("recv_slot", kS32, {config.num_ranks, dims[0], dims[1]});
  }

  // As many leaves as the program says or, where it does not, as there are operands.
  static size_t NumLeaves(const Config& config, const Buffers& operands,
                          size_t operands_per_leaf) {
    if (config.num_leaves > 0) return config.num_leaves;
    return std::max<size_t>(1, operands.num_left() / operands_per_leaf);
  }
};

struct LayoutCall : AnyCall {
  static constexpr char kOp[] = "dispatch_layout";
  static constexpr char kTarget[] = "jax_ep_layout";
  static constexpr char kStage[] = "layout";

  const int32_t* topk_idx = nullptr;  // [T, K]
  int32_t* slot = nullptr;            // [T, K]
  int32_t* slot_rank = nullptr;       // [T, K]
  int32_t* recv_slot = nullptr;       // [R, T, K]
  int32_t* group_sizes = nullptr;     // [L]
  int32_t* group_counts = nullptr;    // [L]
  int32_t* group_offsets = nullptr;   // [L]
  int32_t* num_recv = nullptr;        // [R]
  int32_t* num_dropped = nullptr;     // [R]
  int32_t* num_invalid = nullptr;     // [1]

  static void ReadFlags(Attributes&, Config&) {}

  void Take(const Config& config, Buffers& operands, Buffers& results) {
    const int64_t num_ranks = config.num_ranks;
    const int64_t num_local = config.num_local_experts();
    const Dims ids = operands.Peek("topk_idx", 2);
    num_tokens = ids[0];
    num_topk = ids[1];
    topk_idx = operands.Take<int32_t>("topk_idx", kS32, ids);
    slot = results.Take<int32_t>("slot", kS32, ids);
    slot_rank = results.Take<int32_t>("slot_rank", kS32, ids);
    recv_slot = results.Take<int32_t>("recv_slot", kS32, {num_ranks, ids[0], ids[1]});
    group_sizes = results.Take<int32_t>("group_sizes", kS32, {num_local});
    group_counts = results.Take<int32_t>("group_counts", kS32, {num_local});
    group_offsets = results.Take<int32_t>("group_offsets", kS32, {num_local});
    num_recv = results.Take<int32_t>("num_recv", kS32, {num_ranks});
    num_dropped = results.Take<int32_t>("num_dropped", kS32, {num_ranks});
    num_invalid = results.Take<int32_t>("num_invalid", kS32, {1});
  }
};

struct DispatchCall : RoutedCall {
  static constexpr char kOp[] = "dispatch";
  static constexpr char kTarget[] = "jax_ep_dispatch";
  static constexpr char kStage[] = "dispatch";

  const int32_t* group_counts = nullptr;   // [L]
  const int32_t* group_offsets = nullptr;  // [L]
  const float* weights = nullptr;          // [T, K], with has_weights
  float* recv_weights = nullptr;           // [C], with has_weights

  static void ReadFlags(Attributes& attrs, Config& config) {
    config.has_weights = attrs.Get<bool>("has_weights");
  }

  void Take(const Config& config, Buffers& operands, Buffers& results) {
    TakeRouting(config, operands);
    const int64_t num_local = config.num_local_experts();
    group_counts = operands.Take<int32_t>("group_counts", kS32, {num_local});
    group_offsets = operands.Take<int32_t>("group_offsets", kS32, {num_local});
    if (config.has_weights) {
      weights = operands.Take<float>("weights", kF32, {num_tokens, num_topk});
      recv_weights = results.Take<float>("recv_weights", kF32, {config.capacity});
    }
    const size_t num_leaves = NumLeaves(config, operands, 1);
    while (leaves.size() < num_leaves) {
      const auto x = operands.TakeRows("x", num_tokens, /*summed=*/false);
      if (!x) break;
      void* recv =
          results.Take<void>("recv", ToXla(x->dtype), {config.capacity, x->width});
      leaves.push_back({x->dtype, x->width, x->data, recv});
    }
  }
};

struct CombineCall : RoutedCall {
  static constexpr char kOp[] = "combine";
  static constexpr char kTarget[] = "jax_ep_combine";
  static constexpr char kStage[] = "combine";

  const float* weights = nullptr;     // [C], with has_weights
  const float* row_values = nullptr;  // [C], with has_row_values
  float* values = nullptr;            // [T, K], with has_row_values

  static void ReadFlags(Attributes& attrs, Config& config) {
    config.has_weights = attrs.Get<bool>("has_weights");
    config.has_row_values = attrs.Get<bool>("has_row_values");
    config.has_bias = attrs.Get<bool>("has_bias");
    config.wire_f32 = attrs.Get<bool>("wire_f32");
    config.out_f32 = attrs.Get<bool>("out_f32");
  }

  void Take(const Config& config, Buffers& operands, Buffers& results) {
    TakeRouting(config, operands);
    if (config.has_weights) {
      weights = operands.Take<float>("weights", kF32, {config.capacity});
    }
    if (config.has_row_values) {
      row_values = operands.Take<float>("row_values", kF32, {config.capacity});
      values = results.Take<float>("values", kF32, {num_tokens, num_topk});
    }
    const size_t num_leaves = NumLeaves(config, operands, config.has_bias ? 2 : 1);
    while (leaves.size() < num_leaves) {
      const auto y = operands.TakeRows("y", config.capacity, /*summed=*/true);
      if (!y) break;
      const LeafDtype stored = config.out_f32 ? kLeafF32 : y->dtype;
      void* out = results.Take<void>("out", ToXla(stored), {num_tokens, y->width});
      leaves.push_back({y->dtype, y->width, y->data, out});
    }
    if (!config.has_bias) return;
    for (Leaf& leaf : leaves) {
      leaf.bias =
          operands.Take<void>("bias", ToXla(leaf.dtype), {num_tokens, leaf.width});
    }
  }
};

// The attributes that a call has on every platform.
template <typename Call>
Status ReadConfig(Attributes& attrs, Config& config) {
  if (Status status = CheckVersion(attrs); !status.ok()) return status;
  Call::ReadFlags(attrs, config);
  return ReadCommon(attrs, config);
}

// All operands and results of a call, or of its start, which has one more of both:
// `order`, for XLA alone. Where it fails, `rank` is there if it is good.
template <typename Call, bool kIsStart = false>
Status Decode(const Config& config, const ffi::RemainingArgs& args,
              const ffi::RemainingRets& rets, Call& call) {
  Buffers operands(args), results(rets);
  call.rank = operands.Take<int32_t>("rank", kS32, {2});
  call.Take(config, operands, results);
  if (kIsStart) {
    operands.Take<float>("order", kF32, {1});
    results.Take<float>("order", kF32, {1});
  }
  // What operands say fixes what results must be: theirs is the first error.
  if (Status status = operands.Finish(); !status.ok()) return status;
  if (Status status = results.Finish(); !status.ok()) return status;
  return CheckTokens(config, call);
}

}  // namespace jax_ep

#endif  // JAX_EP_FFI_CALLS_H_
