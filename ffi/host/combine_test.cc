#include "ffi/host/combine.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ffi/host/float.h"
#include "ffi/testing/check.h"
#include "ffi/testing/exchange.h"
#include "ffi/testing/threads.h"

namespace jax_ep::host {
namespace {

// The value of a 16-bit float by definition. Infinity counts as the number after the
// largest, which is how rounding treats it.
double Definition(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double magnitude = exponent == 0
                               ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                               : std::ldexp(mantissa + (1 << mantissa_bits),
                                            exponent - bias - mantissa_bits);
  return bits >> 15 ? -magnitude : magnitude;
}

// Round to nearest, ties to even, by search among all magnitudes.
template <typename T>
uint16_t LiteralRound(float value, int exponent_bits, int mantissa_bits) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  const uint16_t infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
  uint16_t low = 0;
  uint16_t high = infinity;
  while (high - low > 1) {
    const uint16_t middle = (low + high) / 2;
    const double at = Definition(middle, exponent_bits, mantissa_bits);
    (at <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - Definition(low, exponent_bits, mantissa_bits);
  const double above = Definition(high, exponent_bits, mantissa_bits) - magnitude;
  const bool up = above < below || (above == below && high % 2 == 0);
  return sign | (up ? high : low);
}

template <typename T>
void CheckConversions(int exponent_bits, int mantissa_bits) {
  const uint16_t infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
  for (uint32_t i = 0; i < (1 << 16); ++i) {
    const T value{static_cast<uint16_t>(i)};
    const float wide = ToFloat(value);
    if ((i & 0x7fff) > infinity) {
      CHECK(std::isnan(wide));
      CHECK((FromFloat<T>(wide).bits & 0x7fff) > infinity);
      continue;
    }
    if ((i & 0x7fff) == infinity) {
      CHECK(std::isinf(wide));
    } else {
      CHECK_EQ(double{wide}, Definition(i, exponent_bits, mantissa_bits));
    }
    CHECK_EQ(FromFloat<T>(wide).bits, i);
  }
  std::mt19937 random(7);
  for (int i = 0; i < 300000; ++i) {
    uint32_t bits = random();
    // Half of them near the range of float16 and near ties.
    if (i % 2) bits = (bits & 0x87ffffff) | (0x38000000 - ((random() % 5) << 25));
    if (i % 4 == 1) bits = (bits & 0xffffe000) | 0x1000;
    const float value = BitCast<float>(bits);
    if (std::isnan(value)) {
      CHECK((FromFloat<T>(value).bits & 0x7fff) > infinity);
    } else {
      CHECK_EQ(FromFloat<T>(value).bits,
               LiteralRound<T>(value, exponent_bits, mantissa_bits));
    }
  }
}

void Conversions() {
  CheckConversions<F16>(5, 10);
  CheckConversions<Bf16>(8, 7);
  // The same with denormals flushed: those of float16 are no denormals of float.
  FlushDenormals flush;
  for (uint32_t i = 0; i < (1 << 16); ++i) {
    const F16 value{static_cast<uint16_t>(i)};
    const bool is_nan = (i & 0x7fff) > 0x7c00;
    CHECK(is_nan || FromFloat<F16>(ToFloat(value)).bits == i);
  }
}

void FlushesAndRestores() {
  volatile float tiny = 1e-39f;
  CHECK(tiny + 0.0f != 0.0f);
  {
    FlushDenormals flush;
    CHECK_EQ(tiny + 0.0f, 0.0f);
  }
  CHECK(tiny + 0.0f != 0.0f);
  // On every thread of a loop, helpers included.
  Threads pool(2);
  std::vector<float> sums(64, 1.0f);
  Parallel(pool.schedule(), 2).For(64, [&](int64_t i) { sums[i] = tiny + 0.0f; });
  for (float sum : sums) CHECK_EQ(sum, 0.0f);
  CHECK(tiny + 0.0f != 0.0f);
}

template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr LeafDtype kValue = kLeafF32;
};
template <>
struct DtypeOf<Bf16> {
  static constexpr LeafDtype kValue = kLeafBf16;
};
template <>
struct DtypeOf<F16> {
  static constexpr LeafDtype kValue = kLeafF16;
};

struct Options {
  bool weighted, biased, valued, wire_f32, out_f32;
};

// One element of the sum, in the order of the definition, before its last rounding.
template <typename T>
float LiteralSum(const Exchange& exchange, const std::vector<std::vector<T>>& y,
                 const std::vector<std::vector<float>>& weights, const T* bias,
                 const Options& options, int source, int64_t token, int64_t width,
                 int64_t column) {
  const int64_t topk = exchange.shape.topk;
  float total = 0.0f;
  for (int owner = 0; owner < exchange.shape.num_ranks; ++owner) {
    float partial = 0.0f;
    bool any = false;
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t i = token * topk + k;
      const int64_t row = exchange.slot[source][i];
      if (row < 0 || exchange.slot_rank[source][i] != owner) continue;
      any = true;
      const float value = ToFloat(y[owner][row * width + column]);
      partial += options.weighted ? weights[owner][row] * value : value;
    }
    if (!any) continue;
    total += options.wire_f32 ? partial : ToFloat(FromFloat<T>(partial));
  }
  if (bias != nullptr) total += ToFloat(*bias);
  return total;
}

template <typename T>
void AgainstLiteral() {
  Threads pool(2);
  const Parallel parallel(pool.schedule(), 2);
  std::mt19937 random(8);
  std::uniform_real_distribution<float> uniform(-1, 1);
  auto number = [&] {
    switch (random() % 24) {
      case 0:
        return -0.0f;
      case 1:
        return std::numeric_limits<float>::infinity();
      case 2:
        return std::numeric_limits<float>::quiet_NaN();
      case 3:
        return 1e-40f * uniform(random);  // a denormal
      case 4:
        return 3e38f * uniform(random);
      default:
        return uniform(random);
    }
  };
  for (int i = 0; i < 200; ++i) {
    LayoutShape shape = RandomShape(random);
    if (i % 20 == 0) shape.tokens = 3000;
    const Exchange exchange(shape, random);
    const Options options{bool(i & 1), bool(i & 2), bool(i & 4), bool(i & 8),
                          bool(i & 16)};
    const std::vector<int64_t> widths = {1 + int64_t(random() % 70), 32};
    // By rank; y, bias and out by leaf, rank as well.
    std::vector<std::vector<float>> weights(shape.num_ranks), row_values = weights,
                                                              values = weights;
    std::vector<std::vector<T>> y[2], bias[2];
    std::vector<std::vector<char>> out[2];
    const int64_t out_item = options.out_f32 ? sizeof(float) : sizeof(T);
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      weights[rank].resize(shape.capacity);
      for (float& weight : weights[rank]) weight = uniform(random);
      row_values[rank] = weights[rank];
      values[rank].assign(shape.tokens * shape.topk, -7.0f);
      for (int leaf = 0; leaf < 2; ++leaf) {
        y[leaf].emplace_back(shape.capacity * widths[leaf]);
        for (T& value : y[leaf].back()) value = FromFloat<T>(number());
        bias[leaf].emplace_back(shape.tokens * widths[leaf]);
        for (T& value : bias[leaf].back()) value = FromFloat<T>(number());
        out[leaf].emplace_back(shape.tokens * widths[leaf] * out_item, 0x5a);
      }
    }
    std::vector<CombineBuffers> buffers;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      CombineBuffers b;
      b.routing = exchange.RoutingOf(rank);
      b.weights = options.weighted ? weights[rank].data() : nullptr;
      b.row_values = options.valued ? row_values[rank].data() : nullptr;
      b.values = options.valued ? values[rank].data() : nullptr;
      for (int leaf = 0; leaf < 2; ++leaf) {
        b.y.push_back(reinterpret_cast<const char*>(y[leaf][rank].data()));
        b.out.push_back(out[leaf][rank].data());
        if (!options.biased) continue;
        b.bias.push_back(reinterpret_cast<const char*>(bias[leaf][rank].data()));
      }
      buffers.push_back(b);
    }
    const Status status =
        Combine(exchange.routing_shape(),
                {{DtypeOf<T>::kValue, widths[0]}, {DtypeOf<T>::kValue, widths[1]}},
                options.wire_f32, options.out_f32, buffers, parallel);
    CHECK_EQ(status.message(), "");
    FlushDenormals flush;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      for (int leaf = 0; leaf < 2; ++leaf) {
        for (int64_t j = 0; j < shape.tokens * widths[leaf]; ++j) {
          const float expected =
              LiteralSum<T>(exchange, y[leaf], weights,
                            options.biased ? &bias[leaf][rank][j] : nullptr, options,
                            rank, j / widths[leaf], widths[leaf], j % widths[leaf]);
          const char* actual = out[leaf][rank].data() + j * out_item;
          const auto check = [&](auto rounded) {
            decltype(rounded) found;
            std::memcpy(&found, actual, sizeof(found));
            const bool both_nan =
                std::isnan(ToFloat(rounded)) && std::isnan(ToFloat(found));
            CHECK(both_nan || std::memcmp(&rounded, &found, sizeof(found)) == 0);
          };
          options.out_f32 ? check(expected) : check(FromFloat<T>(expected));
        }
      }
      if (!options.valued) continue;
      for (int64_t j = 0; j < shape.tokens * shape.topk; ++j) {
        const int64_t row = exchange.slot[rank][j];
        const float expected =
            row < 0 ? 0.0f : row_values[exchange.slot_rank[rank][j]][row];
        CHECK_EQ(values[rank][j], expected);
      }
    }
  }
}

void SpoiledHandles() {
  std::mt19937 random(9);
  int num_errors = 0;
  for (int i = 0; i < 3000; ++i) {
    LayoutShape shape = RandomShape(random);
    shape.tokens += 1;
    Exchange exchange(shape, random);
    auto& array = (i % 3 == 0   ? exchange.slot
                   : i % 3 == 1 ? exchange.slot_rank
                                : exchange.recv_slot)[random() % shape.num_ranks];
    const int32_t values[] = {-2, INT32_MAX, INT32_MIN,
                              static_cast<int32_t>(shape.capacity)};
    array[random() % array.size()] = values[random() % 4];
    const std::vector<float> y(shape.capacity * 3, 1.0f);
    std::vector<float> out(shape.tokens * 3);
    std::vector<float> slots(shape.tokens * shape.topk);
    std::vector<CombineBuffers> buffers;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      CombineBuffers b{
          exchange.RoutingOf(rank), nullptr, y.data(), slots.data(), {}, {}, {}};
      b.y.push_back(reinterpret_cast<const char*>(y.data()));
      b.out.push_back(reinterpret_cast<char*>(out.data()));
      buffers.push_back(b);
    }
    const Status status = Combine(exchange.routing_shape(), {{kLeafF32, 3}}, false,
                                  false, buffers, Parallel());
    num_errors += !status.ok();
    CHECK(status.ok() || status.code() == Code::kInvalidArgument);
  }
  CHECK(num_errors > 1000);
}

}  // namespace
}  // namespace jax_ep::host

int main() {
  using namespace jax_ep::host;
  return jax_ep::RunTests({
      {"Conversions", Conversions},
      {"FlushesAndRestores", FlushesAndRestores},
      {"AgainstLiteral<float>", AgainstLiteral<float>},
      {"AgainstLiteral<Bf16>", AgainstLiteral<Bf16>},
      {"AgainstLiteral<F16>", AgainstLiteral<F16>},
      {"SpoiledHandles", SpoiledHandles},
  });
}
