// The three stages as the host handlers see them: what is checked of a rank's operands
// when it arrives, and what is done once all ranks have.
#ifndef JAX_EP_FFI_HOST_STAGES_H_
#define JAX_EP_FFI_HOST_STAGES_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/calls.h"
#include "ffi/host/combine.h"
#include "ffi/host/dispatch.h"
#include "ffi/host/layout.h"
#include "ffi/host/parallel.h"
#include "ffi/host/routing.h"
#include "ffi/status.h"

namespace jax_ep::host {

inline Routing ToRouting(const RoutedCall& call) {
  return {call.slot, call.slot_rank, call.recv_slot};
}

inline RoutingShape ToRoutingShape(const Config& config, const RoutedCall& call) {
  return RoutingShape{static_cast<int>(config.num_ranks), call.num_tokens,
                      call.num_topk, config.capacity};
}

struct LayoutStage {
  using Call = LayoutCall;

  static Status Check(const Config&, const Call&) { return Status(); }

  static Status Run(const Config& config, const std::vector<const Call*>& ranks,
                    const Parallel& parallel) {
    std::vector<LayoutBuffers> buffers;
    for (const Call* call : ranks) {
      buffers.push_back({call->topk_idx, call->slot, call->slot_rank, call->recv_slot,
                         call->group_sizes, call->group_counts, call->group_offsets,
                         call->num_recv, call->num_dropped, call->num_invalid});
    }
    ComputeLayout(
        LayoutShape{static_cast<int>(config.num_ranks),
                    static_cast<int>(config.num_experts), ranks[0]->num_tokens,
                    ranks[0]->num_topk, config.capacity, config.alignment},
        buffers, parallel);
    return Status();
  }
};

struct DispatchStage {
  using Call = DispatchCall;

  static Status Check(const Config& config, const Call& call) {
    for (int64_t e = 0; e < config.num_local_experts(); ++e) {
      const int64_t offset = call.group_offsets[e], count = call.group_counts[e];
      if (count >= 0 && offset >= 0 && offset + count <= config.capacity) continue;
      return InvalidArgument(
          "group_offsets[", e, "] (=", offset, ") and group_counts[", e, "] (=", count,
          ") must name rows below the capacity (=", config.capacity, ").");
    }
    return Status();
  }

  static Status Run(const Config& config, const std::vector<const Call*>& ranks,
                    const Parallel& parallel) {
    std::vector<int64_t> row_bytes;
    for (const Leaf& leaf : ranks[0]->leaves) row_bytes.push_back(leaf.row_bytes());
    std::vector<DispatchBuffers> buffers;
    for (const Call* call : ranks) {
      DispatchBuffers b{ToRouting(*call), call->weights, call->recv_weights, {}, {}};
      for (const Leaf& leaf : call->leaves) {
        b.x.push_back(static_cast<const char*>(leaf.in));
        b.recv.push_back(static_cast<char*>(leaf.out));
      }
      buffers.push_back(std::move(b));
    }
    return Dispatch(ToRoutingShape(config, *ranks[0]), row_bytes, buffers, parallel);
  }
};

struct CombineStage {
  using Call = CombineCall;

  static Status Check(const Config&, const Call&) { return Status(); }

  static Status Run(const Config& config, const std::vector<const Call*>& ranks,
                    const Parallel& parallel) {
    std::vector<CombineLeaf> leaves;
    for (const Leaf& leaf : ranks[0]->leaves) {
      leaves.push_back({leaf.dtype, leaf.width});
    }
    std::vector<CombineBuffers> buffers;
    for (const Call* call : ranks) {
      CombineBuffers b{};
      b.routing = ToRouting(*call);
      b.weights = call->weights;
      b.row_values = call->row_values;
      b.values = call->values;
      for (const Leaf& leaf : call->leaves) {
        b.y.push_back(static_cast<const char*>(leaf.in));
        b.out.push_back(static_cast<char*>(leaf.out));
        if (config.has_bias) b.bias.push_back(static_cast<const char*>(leaf.bias));
      }
      buffers.push_back(std::move(b));
    }
    return Combine(ToRoutingShape(config, *ranks[0]), leaves, config.wire_f32,
                   config.out_f32, buffers, parallel);
  }
};

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_STAGES_H_
