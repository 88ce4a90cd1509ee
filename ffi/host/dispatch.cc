#include "ffi/host/dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace jax_ep::host {
namespace {

// Bytes written by one chunk of the parallel loop: large enough that taking it costs
// nothing, small enough that two threads finish together.
constexpr int64_t kChunkBytes = 1 << 18;

// Marks the rows that the slots of all sources name, each at most once.
Status MarkRows(const RoutingShape& shape, int owner, const int32_t* recv_slot,
                std::vector<uint8_t>& used, int64_t& num_used) {
  const int64_t num_ids = shape.tokens * shape.topk;
  used.assign(shape.capacity, 0);
  num_used = 0;
  for (int64_t i = 0; i < shape.num_ranks * num_ids; ++i) {
    const int32_t row = recv_slot[i];
    if (row == -1) continue;
    const bool valid = IsRowOrNone(row, shape.capacity);
    if (!valid || used[row]) {
      const std::string index = Concat(i / num_ids, ", ", i % num_ids / shape.topk,
                                       ", ", i % num_ids % shape.topk);
      if (!valid) return BadRow("recv_slot", owner, index, row, shape.capacity);
      return InvalidArgument("recv_slot[", index, "] (=", row, ") on rank ", owner,
                             " must not name the row of another slot.");
    }
    used[row] = 1;
    ++num_used;
  }
  return Status();
}

}  // namespace

Status Dispatch(const RoutingShape& shape, const std::vector<int64_t>& row_bytes,
                const std::vector<DispatchBuffers>& ranks, const Parallel& parallel) {
  int64_t token_bytes = sizeof(float);
  for (int64_t bytes : row_bytes) token_bytes += bytes;
  const Parallel serial;
  const Parallel& loop =
      token_bytes * shape.capacity * shape.num_ranks <= kChunkBytes ? serial : parallel;

  ErrorSink errors;
  std::vector<std::vector<uint8_t>> used(shape.num_ranks);
  std::vector<int64_t> num_used(shape.num_ranks);
  loop.For(shape.num_ranks, [&](int64_t owner) {
    Status status =
        MarkRows(shape, static_cast<int>(owner), ranks[owner].routing.recv_slot,
                 used[owner], num_used[owner]);
    if (!status.ok()) errors.Report(owner, std::move(status));
  });
  if (Status status = errors.status(); !status.ok()) return status;

  // Chunks of tokens, whose rows are read once and written to all their places, and
  // chunks of receive rows, of which the unused ones become zero.
  const int64_t num_leaves = static_cast<int64_t>(row_bytes.size());
  const int64_t tokens_per_chunk = std::max<int64_t>(
      1, kChunkBytes / (token_bytes * std::max<int64_t>(1, shape.topk)));
  const int64_t rows_per_chunk = std::max<int64_t>(1, kChunkBytes / token_bytes);
  const int64_t token_chunks = NumChunks(shape.tokens, tokens_per_chunk);
  const int64_t row_chunks = NumChunks(shape.capacity, rows_per_chunk);
  const int64_t num_copies = shape.num_ranks * token_chunks;

  std::atomic<int64_t> num_copied{0};
  auto copy_tokens = [&](int source, int64_t begin, int64_t end) -> Status {
    const DispatchBuffers& from = ranks[source];
    int64_t copied = 0;
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t k = 0; k < shape.topk; ++k) {
        const int64_t i = token * shape.topk + k;
        if (Status status = CheckSlot(shape, ranks, source, i); !status.ok()) {
          return status;
        }
        const int64_t row = from.routing.slot[i];
        if (row < 0) continue;
        const DispatchBuffers& to = ranks[from.routing.slot_rank[i]];
        for (int64_t leaf = 0; leaf < num_leaves; ++leaf) {
          const int64_t bytes = row_bytes[leaf];
          std::memcpy(to.recv[leaf] + row * bytes, from.x[leaf] + token * bytes, bytes);
        }
        if (from.weights != nullptr) to.recv_weights[row] = from.weights[i];
        ++copied;
      }
    }
    num_copied.fetch_add(copied, std::memory_order_relaxed);
    return Status();
  };
  auto zero_rows = [&](int owner, int64_t begin, int64_t end) {
    const DispatchBuffers& to = ranks[owner];
    for (int64_t row = begin; row < end; ++row) {
      if (used[owner][row]) continue;
      for (int64_t leaf = 0; leaf < num_leaves; ++leaf) {
        std::memset(to.recv[leaf] + row * row_bytes[leaf], 0, row_bytes[leaf]);
      }
      if (to.recv_weights != nullptr) to.recv_weights[row] = 0.0f;
    }
  };
  loop.For(num_copies + shape.num_ranks * row_chunks, [&](int64_t chunk) {
    if (chunk < num_copies) {
      const int64_t begin = chunk % token_chunks * tokens_per_chunk;
      Status status = copy_tokens(static_cast<int>(chunk / token_chunks), begin,
                                  std::min(begin + tokens_per_chunk, shape.tokens));
      if (!status.ok()) errors.Report(chunk, std::move(status));
    } else {
      const int64_t block = chunk - num_copies;
      const int64_t begin = block % row_chunks * rows_per_chunk;
      zero_rows(static_cast<int>(block / row_chunks), begin,
                std::min(begin + rows_per_chunk, shape.capacity));
    }
  });
  if (Status status = errors.status(); !status.ok()) return status;

  // Each copied slot agrees with a marked row and no row was marked twice, so equal
  // numbers mean that every marked row was written.
  int64_t num_marked = 0;
  for (int64_t rows : num_used) num_marked += rows;
  if (num_copied != num_marked) {
    return InvalidArgument("recv_slot names ", num_marked, " rows and slot ",
                           num_copied.load(),
                           "; the handle must be the same on all ranks.");
  }
  return Status();
}

}  // namespace jax_ep::host
