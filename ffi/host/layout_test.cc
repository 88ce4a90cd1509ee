#include "ffi/host/layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "ffi/testing/check.h"
#include "ffi/testing/threads.h"

namespace jax_ep::host {
namespace {

using Counts = std::vector<int64_t>;

// The filling rule, word for word.
Counts LiteralFill(const Counts& demands, int64_t capacity, int64_t alignment) {
  auto rows = [&](const Counts& kept) {
    int64_t sum = 0;
    for (int64_t n : kept) sum += (n + alignment - 1) / alignment * alignment;
    return sum;
  };
  auto held_to = [&](int64_t limit) {
    Counts kept;
    for (int64_t n : demands) kept.push_back(std::min(n, limit));
    return kept;
  };
  int64_t most = 0;
  for (int64_t n : demands) most = std::max(most, n);
  int64_t limit = (most + alignment - 1) / alignment * alignment;
  while (rows(held_to(limit)) > capacity) limit -= alignment;
  Counts kept = held_to(limit);
  for (size_t i = 0; i < demands.size(); ++i) {
    if (demands[i] <= limit) continue;
    Counts more = kept;
    more[i] = std::min(demands[i], limit + alignment);
    if (rows(more) <= capacity) kept = more;
  }
  return kept;
}

void FillingExample() {
  const Counts kept = FillCapacity({1000, 900, 300, 20}, 1408, 128);
  CHECK((kept == Counts{512, 384, 300, 20}));
  // With alignment 1 exactly demand - capacity rows drop.
  Counts ones = FillCapacity({1000, 900, 300, 20}, 1500, 1);
  CHECK_EQ(ones[0] + ones[1] + ones[2] + ones[3], 1500);
  CHECK((FillCapacity({1, 2}, 3, 1) == Counts{1, 2}));
  CHECK((FillCapacity({5, 0, 5}, 0, 1) == Counts{0, 0, 0}));
  CHECK(FillCapacity({}, 8, 8).empty());
}

void FillingAgainstLiteral() {
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    const int64_t alignment = 1 + random() % 5;
    Counts demands(random() % 6);
    for (int64_t& n : demands) n = random() % 20;
    const int64_t capacity = random() % 12 * alignment;
    CHECK(FillCapacity(demands, capacity, alignment) ==
          LiteralFill(demands, capacity, alignment));
  }
}

// The arrays of all ranks, filled with garbage before use.
struct Arrays {
  explicit Arrays(const LayoutShape& shape) {
    const size_t ids = shape.tokens * shape.topk;
    const size_t local = shape.num_experts / shape.num_ranks;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      for (size_t size :
           {ids, ids, ids, ids * shape.num_ranks, local, local, local,
            size_t(shape.num_ranks), size_t(shape.num_ranks), size_t(1)}) {
        arrays[rank].emplace_back(size, 0x5a5a5a5a);
      }
    }
  }

  std::vector<LayoutBuffers> Buffers() {
    std::vector<LayoutBuffers> buffers;
    for (auto& [rank, a] : arrays) {
      buffers.push_back({a[0].data(), a[1].data(), a[2].data(), a[3].data(),
                         a[4].data(), a[5].data(), a[6].data(), a[7].data(),
                         a[8].data(), a[9].data()});
    }
    return buffers;
  }

  std::map<int, std::vector<std::vector<int32_t>>> arrays;
};

// Sorts the wanted rows of every expert and keeps what the rule lets it keep.
void LiteralLayout(const LayoutShape& shape, Arrays& all) {
  const int ranks = shape.num_ranks;
  const int local = shape.num_experts / ranks;
  const int64_t ids = shape.tokens * shape.topk;
  // (expert, source, i), sorted, is the order of rows.
  std::vector<std::tuple<int, int, int64_t>> wanted;
  for (int source = 0; source < ranks; ++source) {
    auto& a = all.arrays[source];
    a[9][0] = 0;
    for (int64_t i = 0; i < ids; ++i) {
      const int id = a[0][i];
      a[1][i] = a[2][i] = -1;
      if (id >= shape.num_experts) ++a[9][0];
      if (id < 0 || id >= shape.num_experts) continue;
      a[2][i] = id / local;
      wanted.emplace_back(id, source, i);
    }
    std::fill(a[3].begin(), a[3].end(), -1);
  }
  std::sort(wanted.begin(), wanted.end());
  for (int owner = 0; owner < ranks; ++owner) {
    Counts demands(local);
    std::vector<Counts> by_source(local, Counts(ranks));
    for (auto [expert, source, i] : wanted) {
      if (expert / local != owner) continue;
      ++demands[expert % local];
      ++by_source[expert % local][source];
    }
    const Counts kept = LiteralFill(demands, shape.capacity, shape.alignment);
    int64_t row = 0;
    int64_t dropped = 0;
    auto& a = all.arrays[owner];
    for (int e = 0; e < local; ++e) {
      const Counts left = LiteralFill(by_source[e], kept[e], 1);
      a[4][e] = (kept[e] + shape.alignment - 1) / shape.alignment * shape.alignment;
      a[5][e] = kept[e];
      a[6][e] = row;
      dropped += demands[e] - kept[e];
      Counts used(ranks, 0);
      int64_t position = row;
      for (auto [expert, source, i] : wanted) {
        if (expert != owner * local + e || used[source]++ >= left[source]) continue;
        all.arrays[source][1][i] = position;
        a[3][source * ids + i] = position++;
      }
      row += a[4][e];
    }
    for (int rank = 0; rank < ranks; ++rank) {
      all.arrays[rank][7][owner] = std::accumulate(demands.begin(), demands.end(), 0);
      all.arrays[rank][8][owner] = dropped;
    }
  }
}

void LayoutAgainstLiteral() {
  Threads pool(2);
  const Parallel parallel(pool.schedule(), 2);
  std::mt19937 random(2);
  for (int i = 0; i < 400; ++i) {
    LayoutShape shape;
    shape.num_ranks = 1 + random() % 4;
    shape.num_experts = shape.num_ranks * (1 + random() % 4);
    shape.tokens = random() % 12;
    shape.topk = 1 + random() % 4;
    shape.alignment = 1 + random() % 4;
    shape.capacity = random() % 20 * shape.alignment;
    if (i % 40 == 0) shape.tokens = 5000;  // above the threshold of parallel loops
    Arrays actual(shape);
    // From all-masked to no mask, from even to one expert only, some out of range.
    const int skew = 1 + random() % shape.num_experts;
    const int masked = random() % 3 - 1;
    for (auto& [rank, arrays] : actual.arrays) {
      for (int32_t& id : arrays[0]) {
        id = int(random() % (skew + 2)) - 1;
        if (id == skew) id = shape.num_experts + (random() % 2 ? 0 : 1 << 30);
        if (masked == rank) id = -int(random() % 1000) - 1;
      }
    }
    Arrays expected = actual;
    ComputeLayout(shape, actual.Buffers(), parallel);
    LiteralLayout(shape, expected);
    CHECK(actual.arrays == expected.arrays);
  }
}

}  // namespace
}  // namespace jax_ep::host

int main() {
  using namespace jax_ep::host;
  return jax_ep::RunTests({
      {"FillingExample", FillingExample},
      {"FillingAgainstLiteral", FillingAgainstLiteral},
      {"LayoutAgainstLiteral", LayoutAgainstLiteral},
  });
}
