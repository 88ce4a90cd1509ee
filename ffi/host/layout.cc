#include "ffi/host/layout.h"

#include <algorithm>
#include <limits>

namespace jax_ep::host {
namespace {

// Below this many ids, scheduling a task costs more than the loop it would share.
constexpr int64_t kMinParallelIds = 1 << 14;

}  // namespace

std::vector<int64_t> FillCapacity(const std::vector<int64_t>& demands, int64_t capacity,
                                  int64_t alignment) {
  // Rows occupied when every claimant is held to `limit`.
  auto occupied = [&](int64_t limit) {
    int64_t rows = 0;
    for (int64_t demand : demands) rows += AlignUp(std::min(demand, limit), alignment);
    return rows;
  };
  if (occupied(std::numeric_limits<int64_t>::max()) <= capacity) return demands;

  // The highest number of blocks that fits, by bisection. None always fits. `high`
  // never does: either nobody is held back by it, or one claimant alone exceeds the
  // capacity.
  int64_t low = 0;
  int64_t high = capacity / alignment + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (occupied(middle * alignment) <= capacity ? low : high) = middle;
  }
  int64_t limit = low * alignment;
  int64_t rows = occupied(limit);
  std::vector<int64_t> kept(demands.size());
  for (size_t i = 0; i < demands.size(); ++i) {
    const bool one_more = demands[i] > limit && rows + alignment <= capacity;
    if (one_more) rows += alignment;
    kept[i] = std::min(demands[i], limit + (one_more ? alignment : 0));
  }
  return kept;
}

void ComputeLayout(const LayoutShape& shape, const std::vector<LayoutBuffers>& ranks,
                   const Parallel& parallel) {
  const int num_ranks = shape.num_ranks;
  const int num_experts = shape.num_experts;
  const int num_local = num_experts / num_ranks;
  const int64_t num_ids = shape.tokens * shape.topk;
  const Parallel serial;
  const Parallel& loop = num_ids * num_ranks < kMinParallelIds ? serial : parallel;

  // By (source, expert): first how many slots want it, then how many are kept and the
  // row of the first.
  std::vector<int64_t> wanted(size_t(num_ranks) * num_experts, 0);
  std::vector<int64_t> kept(wanted.size(), 0);
  std::vector<int64_t> first_row(wanted.size(), 0);

  loop.For(num_ranks, [&](int64_t source) {
    int64_t* counts = &wanted[source * num_experts];
    int32_t num_invalid = 0;
    for (int64_t i = 0; i < num_ids; ++i) {
      const int32_t id = ranks[source].topk_idx[i];
      if (id >= num_experts) {
        ++num_invalid;
      } else if (id >= 0) {
        ++counts[id];
      }
    }
    *ranks[source].num_invalid = num_invalid;
  });

  std::vector<int32_t> num_recv(num_ranks);
  std::vector<int32_t> num_dropped(num_ranks);
  for (int owner = 0; owner < num_ranks; ++owner) {
    std::vector<int64_t> demands(num_local, 0);
    for (int local = 0; local < num_local; ++local) {
      for (int source = 0; source < num_ranks; ++source) {
        demands[local] += wanted[source * num_experts + owner * num_local + local];
      }
    }
    const std::vector<int64_t> shares =
        FillCapacity(demands, shape.capacity, shape.alignment);
    int64_t offset = 0;
    int64_t all_wanted = 0;
    int64_t all_kept = 0;
    for (int local = 0; local < num_local; ++local) {
      const int expert = owner * num_local + local;
      std::vector<int64_t> by_source(num_ranks);
      for (int source = 0; source < num_ranks; ++source) {
        by_source[source] = wanted[source * num_experts + expert];
      }
      if (shares[local] < demands[local]) {
        by_source = FillCapacity(by_source, shares[local], /*alignment=*/1);
      }
      int64_t row = offset;
      for (int source = 0; source < num_ranks; ++source) {
        kept[source * num_experts + expert] = by_source[source];
        first_row[source * num_experts + expert] = row;
        row += by_source[source];
      }
      const int64_t size = AlignUp(shares[local], shape.alignment);
      ranks[owner].group_counts[local] = static_cast<int32_t>(shares[local]);
      ranks[owner].group_sizes[local] = static_cast<int32_t>(size);
      ranks[owner].group_offsets[local] = static_cast<int32_t>(offset);
      offset += size;
      all_wanted += demands[local];
      all_kept += shares[local];
    }
    num_recv[owner] = static_cast<int32_t>(all_wanted);
    num_dropped[owner] = static_cast<int32_t>(all_wanted - all_kept);
  }

  loop.For(num_ranks, [&](int64_t source) {
    const LayoutBuffers& rank = ranks[source];
    std::copy(num_recv.begin(), num_recv.end(), rank.num_recv);
    std::copy(num_dropped.begin(), num_dropped.end(), rank.num_dropped);
    std::vector<int64_t> seen(num_experts, 0);
    for (int64_t i = 0; i < num_ids; ++i) {
      const int32_t id = rank.topk_idx[i];
      if (id < 0 || id >= num_experts) {
        rank.slot[i] = -1;
        rank.slot_rank[i] = -1;
        continue;
      }
      const int64_t cell = source * num_experts + id;
      const int64_t position = seen[id]++;
      rank.slot[i] =
          position < kept[cell] ? static_cast<int32_t>(first_row[cell] + position) : -1;
      rank.slot_rank[i] = id / num_local;
    }
  });

  // What the sources see, seen from the owners. `slot` is -1 where nothing is kept.
  loop.For(int64_t{num_ranks} * num_ranks, [&](int64_t pair) {
    const int32_t owner = static_cast<int32_t>(pair / num_ranks);
    const int64_t source = pair % num_ranks;
    const int32_t* slot = ranks[source].slot;
    const int32_t* slot_rank = ranks[source].slot_rank;
    int32_t* recv_slot = ranks[owner].recv_slot + source * num_ids;
    for (int64_t i = 0; i < num_ids; ++i) {
      recv_slot[i] = slot_rank[i] == owner ? slot[i] : -1;
    }
  });
}

}  // namespace jax_ep::host
