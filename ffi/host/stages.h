// The three stages as the host handlers see them: what each reads of the attributes
// when a program is compiled, what a rank brings, what is done for all.
#ifndef JAX_EP_FFI_HOST_STAGES_H_
#define JAX_EP_FFI_HOST_STAGES_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/host/combine.h"
#include "ffi/host/dispatch.h"
#include "ffi/host/layout.h"
#include "ffi/host/parallel.h"
#include "ffi/host/rendezvous.h"
#include "ffi/host/routing.h"
#include "ffi/host/status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::host {

static_assert(kMaxNumTopk <= kMaxTopk, "Combine holds a token's rows on the stack");

// What all ranks of a call must have in common besides the attributes.
struct Shape {
  int64_t tokens = 0;
  int64_t topk = 0;
  std::vector<ffi::DataType> dtypes;  // of the leaves
  std::vector<int64_t> widths;

  bool operator==(const Shape& other) const {
    return tokens == other.tokens && topk == other.topk && dtypes == other.dtypes &&
           widths == other.widths;
  }
};

// slot, slot_rank, recv_slot, of which the first fixes T and K.
inline Routing TakeRouting(const Config& config, Buffers& operands, Shape& shape) {
  const Dims dims = operands.Peek("slot", 2);
  shape.tokens = dims[0];
  shape.topk = dims[1];
  Routing routing;
  routing.slot = operands.Take<int32_t>("slot", ffi::DataType::S32, dims);
  routing.slot_rank = operands.Take<int32_t>("slot_rank", ffi::DataType::S32, dims);
  routing.recv_slot = operands.Take<int32_t>("recv_slot", ffi::DataType::S32,
                                             {config.num_ranks, dims[0], dims[1]});
  return routing;
}

inline RoutingShape ToRoutingShape(const Config& config, const Shape& shape) {
  return RoutingShape{static_cast<int>(config.num_ranks), shape.tokens, shape.topk,
                      config.capacity};
}

// A stage: what is read at compile time, what a rank brings, what is done for all.
struct LayoutStage {
  static constexpr char kOp[] = "dispatch_layout";
  static constexpr char kName[] = "layout";

  struct Brought : Participant {
    int64_t arrived = 0;  // see stamps.h
    Shape shape;
    LayoutBuffers buffers;
  };

  static void ReadFlags(Attributes&, Config&) {}

  static Status Decode(const Config& config, Buffers& operands, Buffers& results,
                       Brought& brought) {
    constexpr auto kS32 = ffi::DataType::S32;
    const int64_t num_ranks = config.num_ranks;
    const int64_t num_local = config.num_experts / num_ranks;
    LayoutBuffers& b = brought.buffers;
    const Dims ids = operands.Peek("topk_idx", 2);
    brought.shape.tokens = ids[0];
    brought.shape.topk = ids[1];
    b.topk_idx = operands.Take<int32_t>("topk_idx", kS32, ids);
    b.slot = results.Take<int32_t>("slot", kS32, ids);
    b.slot_rank = results.Take<int32_t>("slot_rank", kS32, ids);
    b.recv_slot = results.Take<int32_t>("recv_slot", kS32, {num_ranks, ids[0], ids[1]});
    b.group_sizes = results.Take<int32_t>("group_sizes", kS32, {num_local});
    b.group_counts = results.Take<int32_t>("group_counts", kS32, {num_local});
    b.group_offsets = results.Take<int32_t>("group_offsets", kS32, {num_local});
    b.num_recv = results.Take<int32_t>("num_recv", kS32, {num_ranks});
    b.num_dropped = results.Take<int32_t>("num_dropped", kS32, {num_ranks});
    b.num_invalid = results.Take<int32_t>("num_invalid", kS32, {1});
    return CheckTokens(config, brought.shape.tokens, brought.shape.topk);
  }

  static Status Run(const Config& config, const std::vector<Brought*>& ranks,
                    const Parallel& parallel) {
    std::vector<LayoutBuffers> buffers;
    for (const Brought* rank : ranks) buffers.push_back(rank->buffers);
    const Shape& shape = ranks[0]->shape;
    ComputeLayout(LayoutShape{static_cast<int>(config.num_ranks),
                              static_cast<int>(config.num_experts), shape.tokens,
                              shape.topk, config.capacity, config.alignment},
                  buffers, parallel);
    return Status();
  }
};

struct DispatchStage {
  static constexpr char kOp[] = "dispatch";
  static constexpr char kName[] = "dispatch";

  struct Brought : Participant {
    int64_t arrived = 0;  // see stamps.h
    Shape shape;
    DispatchBuffers buffers;
  };

  static void ReadFlags(Attributes& attrs, Config& config) {
    config.has_weights = attrs.Get<bool>("has_weights");
  }

  static Status Decode(const Config& config, Buffers& operands, Buffers& results,
                       Brought& brought) {
    Shape& shape = brought.shape;
    DispatchBuffers& b = brought.buffers;
    b.routing = TakeRouting(config, operands, shape);
    const int64_t num_local = config.num_experts / config.num_ranks;
    const auto* counts =
        operands.Take<int32_t>("group_counts", ffi::DataType::S32, {num_local});
    const auto* offsets =
        operands.Take<int32_t>("group_offsets", ffi::DataType::S32, {num_local});
    b.weights = nullptr;
    b.recv_weights = nullptr;
    if (config.has_weights) {
      b.weights = operands.Take<float>("weights", ffi::DataType::F32,
                                       {shape.tokens, shape.topk});
      b.recv_weights =
          results.Take<float>("recv_weights", ffi::DataType::F32, {config.capacity});
    }
    do {
      const auto x = operands.TakeRows(
          "x",
          {ffi::DataType::F32, ffi::DataType::BF16, ffi::DataType::F16,
           ffi::DataType::U8, ffi::DataType::U16, ffi::DataType::U32},
          shape.tokens);
      if (!x) break;
      const int64_t width = x->dimensions()[1];
      shape.dtypes.push_back(x->element_type());
      shape.widths.push_back(width);
      b.x.push_back(static_cast<const char*>(x->untyped_data()));
      b.recv.push_back(
          results.Take<char>("recv", x->element_type(), {config.capacity, width}));
    } while (operands.num_left() > 0);
    if (Status status = operands.Finish(); !status.ok()) return status;
    for (int64_t e = 0; e < num_local; ++e) {
      if (counts[e] < 0 || offsets[e] < 0 ||
          int64_t{offsets[e]} + counts[e] > config.capacity) {
        return InvalidArgument(
            "group_offsets[", e, "] (=", offsets[e], ") and group_counts[", e,
            "] (=", counts[e],
            ") must name rows below the capacity (=", config.capacity, ").");
      }
    }
    return CheckTokens(config, shape.tokens, shape.topk);
  }

  static Status Run(const Config& config, const std::vector<Brought*>& ranks,
                    const Parallel& parallel) {
    const Shape& shape = ranks[0]->shape;
    std::vector<int64_t> row_bytes;
    for (size_t i = 0; i < shape.widths.size(); ++i) {
      row_bytes.push_back(shape.widths[i] * Bytes(shape.dtypes[i]));
    }
    std::vector<DispatchBuffers> buffers;
    for (Brought* rank : ranks) buffers.push_back(std::move(rank->buffers));
    return Dispatch(ToRoutingShape(config, shape), row_bytes, buffers, parallel);
  }
};

struct CombineStage {
  static constexpr char kOp[] = "combine";
  static constexpr char kName[] = "combine";

  struct Brought : Participant {
    int64_t arrived = 0;  // see stamps.h
    Shape shape;
    CombineBuffers buffers;
  };

  static void ReadFlags(Attributes& attrs, Config& config) {
    config.has_weights = attrs.Get<bool>("has_weights");
    config.has_row_values = attrs.Get<bool>("has_row_values");
    config.has_bias = attrs.Get<bool>("has_bias");
    config.wire_f32 = attrs.Get<bool>("wire_f32");
  }

  static Status Decode(const Config& config, Buffers& operands, Buffers& results,
                       Brought& brought) {
    constexpr auto kF32 = ffi::DataType::F32;
    Shape& shape = brought.shape;
    CombineBuffers& b = brought.buffers;
    b.routing = TakeRouting(config, operands, shape);
    b.weights = nullptr;
    b.row_values = nullptr;
    b.values = nullptr;
    if (config.has_weights) {
      b.weights = operands.Take<float>("weights", kF32, {config.capacity});
    }
    if (config.has_row_values) {
      b.row_values = operands.Take<float>("row_values", kF32, {config.capacity});
      b.values = results.Take<float>("values", kF32, {shape.tokens, shape.topk});
    }
    const size_t num_leaves = operands.num_left() / (config.has_bias ? 2 : 1);
    do {
      const auto y = operands.TakeRows(
          "y", {kF32, ffi::DataType::BF16, ffi::DataType::F16}, config.capacity);
      if (!y) break;
      const int64_t width = y->dimensions()[1];
      shape.dtypes.push_back(y->element_type());
      shape.widths.push_back(width);
      b.y.push_back(static_cast<const char*>(y->untyped_data()));
      b.out.push_back(
          results.Take<char>("out", y->element_type(), {shape.tokens, width}));
    } while (shape.widths.size() < num_leaves);
    if (config.has_bias) {
      for (size_t i = 0; i < shape.widths.size(); ++i) {
        b.bias.push_back(operands.Take<char>("bias", shape.dtypes[i],
                                             {shape.tokens, shape.widths[i]}));
      }
    }
    return CheckTokens(config, shape.tokens, shape.topk);
  }

  static Status Run(const Config& config, const std::vector<Brought*>& ranks,
                    const Parallel& parallel) {
    const Shape& shape = ranks[0]->shape;
    std::vector<CombineLeaf> leaves;
    for (size_t i = 0; i < shape.widths.size(); ++i) {
      const ffi::DataType dtype = shape.dtypes[i];
      leaves.push_back({dtype == ffi::DataType::F32    ? Dtype::kF32
                        : dtype == ffi::DataType::BF16 ? Dtype::kBf16
                                                       : Dtype::kF16,
                        shape.widths[i]});
    }
    std::vector<CombineBuffers> buffers;
    for (Brought* rank : ranks) buffers.push_back(std::move(rank->buffers));
    return Combine(ToRoutingShape(config, shape), leaves, config.wire_f32, buffers,
                   parallel);
  }
};

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_STAGES_H_
