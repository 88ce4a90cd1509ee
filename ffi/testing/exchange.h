// The routing of all ranks for the tests of dispatch and combine.
#ifndef JAX_EP_FFI_TESTING_EXCHANGE_H_
#define JAX_EP_FFI_TESTING_EXCHANGE_H_

#include <random>
#include <vector>

#include "ffi/host/layout.h"
#include "ffi/host/routing.h"

namespace jax_ep::host {

// A layout of random ids, with masked and dropped slots, kept in plain arrays that a
// test may spoil.
class Exchange {
 public:
  Exchange(const LayoutShape& shape, std::mt19937& random) : shape(shape) {
    const size_t ids = shape.tokens * shape.topk;
    const size_t local = shape.num_experts / shape.num_ranks;
    std::vector<LayoutBuffers> buffers;
    // Room first: the pointers below must stay.
    for (auto* arrays :
         {&topk_idx, &slot, &slot_rank, &recv_slot, &counts, &offsets, &scratch}) {
      arrays->resize(shape.num_ranks);
    }
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      topk_idx[rank].resize(ids);
      for (int32_t& id : topk_idx[rank]) {
        id = static_cast<int32_t>(random() % (shape.num_experts + 2)) - 1;
      }
      slot[rank].resize(ids);
      slot_rank[rank].resize(ids);
      recv_slot[rank].resize(ids * shape.num_ranks);
      counts[rank].resize(local);
      offsets[rank].resize(local);
      scratch[rank].resize(local + 2 * shape.num_ranks + 1);
      int32_t* rest = scratch[rank].data();
      buffers.push_back({topk_idx[rank].data(), slot[rank].data(),
                         slot_rank[rank].data(), recv_slot[rank].data(), rest,
                         counts[rank].data(), offsets[rank].data(), rest + local,
                         rest + local + shape.num_ranks,
                         rest + local + 2 * shape.num_ranks});
    }
    ComputeLayout(shape, buffers, Parallel());
  }

  Routing RoutingOf(int rank) const {
    return {slot[rank].data(), slot_rank[rank].data(), recv_slot[rank].data()};
  }

  RoutingShape routing_shape() const {
    return {shape.num_ranks, shape.tokens, shape.topk, shape.capacity};
  }

  using Arrays = std::vector<std::vector<int32_t>>;  // by rank

  LayoutShape shape;
  Arrays topk_idx, slot, slot_rank, recv_slot, counts, offsets, scratch;
};

inline LayoutShape RandomShape(std::mt19937& random) {
  LayoutShape shape;
  shape.num_ranks = 1 + random() % 4;
  shape.num_experts = shape.num_ranks * (1 + random() % 3);
  shape.tokens = random() % 10;
  shape.topk = 1 + random() % 5;
  shape.alignment = 1 + random() % 4;
  shape.capacity = random() % 12 * shape.alignment;
  return shape;
}

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_TESTING_EXCHANGE_H_
