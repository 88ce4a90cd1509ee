// The part of a handle by which dispatch and combine find rows.
//
// Its values come from outside and may be anything: a handle of another call, or HLO
// written by hand. So each is checked before it is used as an index.
#ifndef JAX_EP_FFI_HOST_ROUTING_H_
#define JAX_EP_FFI_HOST_ROUTING_H_

#include <cstdint>

#include "ffi/status.h"

namespace jax_ep::host {

struct RoutingShape {
  int num_ranks;     // R
  int64_t tokens;    // T
  int64_t topk;      // K
  int64_t capacity;  // C
};

// The arrays of one rank.
struct Routing {
  const int32_t* slot;       // [T, K] row on the owner, -1 if masked or dropped
  const int32_t* slot_rank;  // [T, K] the owner, -1 if masked
  const int32_t* recv_slot;  // [R, T, K] my row for (source, token, k), -1 if not mine
};

// Checks that a value names a row or says that there is none.
inline bool IsRowOrNone(int32_t row, int64_t capacity) {
  return row >= -1 && row < capacity;
}

inline Status BadRow(const char* name, int rank, const std::string& index, int32_t row,
                     int64_t capacity) {
  return InvalidArgument(name, "[", index, "] (=", row, ") on rank ", rank,
                         " must be -1 or a row below the capacity (=", capacity, ").");
}

// Checks slot `i` of rank `source` against the shape and against what its owner has in
// recv_slot. `ranks` is indexed by rank and its elements have a member `routing`.
template <typename Ranks>
Status CheckSlot(const RoutingShape& shape, const Ranks& ranks, int source, int64_t i) {
  const int32_t row = ranks[source].routing.slot[i];
  const int32_t owner = ranks[source].routing.slot_rank[i];
  auto index = [&] { return Concat(i / shape.topk, ", ", i % shape.topk); };
  if (!IsRowOrNone(row, shape.capacity)) {
    return BadRow("slot", source, index(), row, shape.capacity);
  }
  if (owner < -1 || owner >= shape.num_ranks || (owner < 0 && row >= 0)) {
    return InvalidArgument("slot_rank[", index(), "] (=", owner, ") on rank ", source,
                           " must be the rank that owns slot (=", row, "), one of ",
                           shape.num_ranks, ", or -1 for none.");
  }
  if (owner < 0) return Status();
  const int64_t seen = source * shape.tokens * shape.topk + i;
  const int32_t recv_row = ranks[owner].routing.recv_slot[seen];
  if (recv_row != row) {
    return InvalidArgument("slot[", index(), "] (=", row, ") on rank ", source,
                           " and recv_slot[", source, ", ", index(), "] (=", recv_row,
                           ") on rank ", owner,
                           " must be equal; the handle must be the same on all ranks.");
  }
  return Status();
}

}  // namespace jax_ep::host

#endif  // JAX_EP_FFI_HOST_ROUTING_H_
