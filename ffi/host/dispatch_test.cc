#include "ffi/host/dispatch.h"

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "ffi/testing/check.h"
#include "ffi/testing/exchange.h"
#include "ffi/testing/threads.h"

namespace jax_ep::host {
namespace {

using Bytes = std::vector<char>;

// The arrays of all ranks for one payload; outputs start as garbage.
struct Payload {
  Payload(const Exchange& exchange, std::vector<int64_t> row_bytes, bool weighted,
          std::mt19937& random)
      : row_bytes(std::move(row_bytes)) {
    const LayoutShape& shape = exchange.shape;
    const size_t num_leaves = this->row_bytes.size();
    x.resize(shape.num_ranks, std::vector<Bytes>(num_leaves));
    recv = x;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      for (size_t leaf = 0; leaf < num_leaves; ++leaf) {
        x[rank][leaf].resize(shape.tokens * this->row_bytes[leaf]);
        for (char& byte : x[rank][leaf]) byte = static_cast<char>(random());
        recv[rank][leaf].assign(shape.capacity * this->row_bytes[leaf], '\x5a');
      }
      weights.emplace_back(weighted ? shape.tokens * shape.topk : 0);
      for (float& weight : weights.back()) weight = static_cast<float>(random());
      recv_weights.emplace_back(weighted ? shape.capacity : 0, -1.0f);
    }
    this->weighted = weighted;
  }

  std::vector<DispatchBuffers> Buffers(const Exchange& exchange) {
    std::vector<DispatchBuffers> buffers;
    for (int rank = 0; rank < exchange.shape.num_ranks; ++rank) {
      DispatchBuffers b;
      b.routing = exchange.RoutingOf(rank);
      b.weights = weighted ? weights[rank].data() : nullptr;
      b.recv_weights = weighted ? recv_weights[rank].data() : nullptr;
      for (const Bytes& leaf : x[rank]) b.x.push_back(leaf.data());
      for (Bytes& leaf : recv[rank]) b.recv.push_back(leaf.data());
      buffers.push_back(b);
    }
    return buffers;
  }

  std::vector<int64_t> row_bytes;
  bool weighted;
  std::vector<std::vector<Bytes>> x, recv;  // by rank, by leaf
  std::vector<std::vector<float>> weights, recv_weights;
};

// Every row by itself: zero, or that of the one slot that names it.
void LiteralDispatch(const Exchange& exchange, Payload& payload) {
  const LayoutShape& shape = exchange.shape;
  for (int owner = 0; owner < shape.num_ranks; ++owner) {
    for (Bytes& leaf : payload.recv[owner]) std::fill(leaf.begin(), leaf.end(), 0);
    for (float& weight : payload.recv_weights[owner]) weight = 0;
    for (int source = 0; source < shape.num_ranks; ++source) {
      for (int64_t i = 0; i < shape.tokens * shape.topk; ++i) {
        const int64_t row = exchange.slot[source][i];
        if (exchange.slot_rank[source][i] != owner || row < 0) continue;
        for (size_t leaf = 0; leaf < payload.row_bytes.size(); ++leaf) {
          const int64_t bytes = payload.row_bytes[leaf];
          for (int64_t j = 0; j < bytes; ++j) {
            payload.recv[owner][leaf][row * bytes + j] =
                payload.x[source][leaf][i / shape.topk * bytes + j];
          }
        }
        if (payload.weighted) {
          payload.recv_weights[owner][row] = payload.weights[source][i];
        }
      }
    }
  }
}

void AgainstLiteral() {
  Threads pool(2);
  const Parallel parallel(pool.schedule(), 2);
  std::mt19937 random(3);
  const std::vector<std::vector<int64_t>> payloads = {
      {1}, {16}, {7, 4, 1}, {4096}, {4096, 66000}};
  for (int i = 0; i < 300; ++i) {
    const Exchange exchange(RandomShape(random), random);
    Payload actual(exchange, payloads[i % payloads.size()], i % 2, random);
    Payload expected = actual;
    const Status status = Dispatch(exchange.routing_shape(), actual.row_bytes,
                                   actual.Buffers(exchange), parallel);
    CHECK_EQ(status.message(), "");
    LiteralDispatch(exchange, expected);
    CHECK(actual.recv == expected.recv);
    CHECK(actual.recv_weights == expected.recv_weights);
  }
}

// Whatever a handle holds, the result is right or an error, and nothing outside a
// buffer is touched (the sanitizers watch).
void SpoiledHandles() {
  std::mt19937 random(4);
  int num_errors = 0;
  for (int i = 0; i < 3000; ++i) {
    LayoutShape shape = RandomShape(random);
    shape.tokens += 1;
    Exchange exchange(shape, random);
    for (int spoils = 1 + random() % 2; spoils > 0; --spoils) {
      auto& array = (i % 3 == 0   ? exchange.slot
                     : i % 3 == 1 ? exchange.slot_rank
                                  : exchange.recv_slot)[random() % shape.num_ranks];
      const int32_t values[] = {-1,
                                -2,
                                0,
                                1,
                                INT32_MAX,
                                INT32_MIN,
                                static_cast<int32_t>(shape.capacity),
                                static_cast<int32_t>(shape.num_ranks)};
      array[random() % array.size()] = values[random() % 8];
    }
    Payload payload(exchange, {8}, true, random);
    Payload expected = payload;
    const Status status = Dispatch(exchange.routing_shape(), payload.row_bytes,
                                   payload.Buffers(exchange), Parallel());
    if (!status.ok()) {
      ++num_errors;
      CHECK(status.code() == Code::kInvalidArgument);
      continue;
    }
    LiteralDispatch(exchange, expected);
    CHECK(payload.recv == expected.recv);
  }
  CHECK(num_errors > 1000);
}

void ErrorsNameValueAndRule() {
  std::mt19937 random(5);
  LayoutShape shape;
  shape.num_ranks = 2;
  shape.num_experts = 4;
  shape.tokens = 3;
  shape.topk = 2;
  shape.capacity = 12;
  shape.alignment = 1;
  auto message = [&](std::function<void(Exchange&)> spoil) {
    std::mt19937 same(6);
    Exchange exchange(shape, same);
    for (int rank = 0; rank < 2; ++rank) {
      // Token 1's first slot on both ranks: the first row of expert 0.
      std::fill(exchange.slot[rank].begin(), exchange.slot[rank].end(), -1);
      std::fill(exchange.slot_rank[rank].begin(), exchange.slot_rank[rank].end(), -1);
      std::fill(exchange.recv_slot[rank].begin(), exchange.recv_slot[rank].end(), -1);
    }
    exchange.slot[1][2] = 5;
    exchange.slot_rank[1][2] = 0;
    exchange.recv_slot[0][6 + 2] = 5;
    spoil(exchange);
    Payload payload(exchange, {8}, true, random);
    return Dispatch(exchange.routing_shape(), payload.row_bytes,
                    payload.Buffers(exchange), Parallel())
        .message();
  };
  CHECK_EQ(message([](Exchange&) {}), "");
  CHECK_EQ(message([](Exchange& e) { e.slot[1][2] = 12; }),
           "slot[1, 0] (=12) on rank 1 must be -1 or a row below the capacity (=12).");
  CHECK_EQ(message([](Exchange& e) { e.recv_slot[0][8] = -7; }),
           "recv_slot[1, 1, 0] (=-7) on rank 0 must be -1 or a row below the capacity "
           "(=12).");
  CHECK_EQ(
      message([](Exchange& e) { e.slot_rank[1][2] = 2; }),
      "slot_rank[1, 0] (=2) on rank 1 must be the rank that owns slot (=5), one of "
      "2, or -1 for none.");
  CHECK_EQ(message([](Exchange& e) { e.slot[1][2] = 6; }),
           "slot[1, 0] (=6) on rank 1 and recv_slot[1, 1, 0] (=5) on rank 0 must be "
           "equal; the handle must be the same on all ranks.");
  CHECK_EQ(message([](Exchange& e) { e.recv_slot[0][0] = 5; }),
           "recv_slot[1, 1, 0] (=5) on rank 0 must not name the row of another slot.");
  CHECK_EQ(message([](Exchange& e) { e.recv_slot[1][0] = 5; }),
           "recv_slot names 2 rows and slot 1; the handle must be the same on all "
           "ranks.");
}

}  // namespace
}  // namespace jax_ep::host

int main() {
  using namespace jax_ep::host;
  return jax_ep::RunTests({
      {"AgainstLiteral", AgainstLiteral},
      {"SpoiledHandles", SpoiledHandles},
      {"ErrorsNameValueAndRule", ErrorsNameValueAndRule},
  });
}
