#include "ffi/host/combine.h"

#include <algorithm>
#include <cstring>

#include "ffi/cuda/limits.h"
#include "ffi/host/float.h"

// The sums below are compiled for AVX2 as well and the version is chosen at run time.
// Not with target_clones: its resolvers run before the sanitizers are ready.
#if defined(__x86_64__) && defined(__GNUC__)
#define JAX_EP_AVX2 __attribute__((target("avx2")))
#endif
#define JAX_EP_INLINE inline __attribute__((always_inline))

namespace jax_ep::host {
namespace {

// Bytes read by one chunk of the parallel loop; see dispatch.cc.
constexpr int64_t kChunkBytes = 1 << 18;

// Elements that are summed at a time: two arrays of them stay in the first-level cache,
// and each row is read in a run long enough for the memory to stream.
constexpr int64_t kTile = 1024;

constexpr int64_t kCacheLine = 64;

// One row of one token to be summed, in the order of the sum.
struct Term {
  const char* row;
  float weight;
  bool last_of_owner;
};

struct Sum {
  const Term* terms;
  int64_t num_terms;
  const char* bias;  // or null
  char* out;
  int64_t width;
  bool weighted;
  bool wire_f32;
  bool out_f32;
};

// Asks for the elements that come after those of term `i` in the tile. Rows lie
// anywhere, so the processor cannot guess. Without this, sums of 4 KiB rows take 1.4
// times as long.
template <typename T>
JAX_EP_INLINE void PrefetchNext(const Sum& sum, int64_t i, int64_t begin, int64_t n) {
  const bool last = i + 1 == sum.num_terms;
  const char* row = sum.terms[last ? 0 : i + 1].row;
  const char* next = row + (last ? begin + n : begin) * int64_t{sizeof(T)};
  const int64_t bytes = n * int64_t{sizeof(T)};
  for (int64_t j = 0; j < bytes; j += kCacheLine) __builtin_prefetch(next + j);
}

template <typename T, bool kWeighted>
JAX_EP_INLINE float Value(const T* row, int64_t j, float weight) {
  return kWeighted ? weight * ToFloat(row[j]) : ToFloat(row[j]);
}

// A partial as it arrives at the source.
template <typename T, bool kWireF32>
JAX_EP_INLINE float OverWire(float partial) {
  return kWireF32 ? partial : ToFloat(FromFloat<T>(partial));
}

// Elements [begin, begin + n) of a sum. The zeros are part of it: they turn -0 into +0.
template <typename T, bool kWeighted, bool kWireF32>
JAX_EP_INLINE void SumTile(const Sum& sum, int64_t begin, int64_t n) {
  float total[kTile];
  float partial[kTile];
  for (int64_t j = 0; j < n; ++j) total[j] = 0.0f;
  bool first_of_owner = true;
  for (int64_t i = 0; i < sum.num_terms; ++i) {
    PrefetchNext<T>(sum, i, begin, n);
    const T* row = reinterpret_cast<const T*>(sum.terms[i].row) + begin;
    const float w = sum.terms[i].weight;
    const bool last_of_owner = sum.terms[i].last_of_owner;
    if (first_of_owner && last_of_owner) {
      for (int64_t j = 0; j < n; ++j) {
        total[j] += OverWire<T, kWireF32>(0.0f + Value<T, kWeighted>(row, j, w));
      }
    } else if (first_of_owner) {
      for (int64_t j = 0; j < n; ++j) {
        partial[j] = 0.0f + Value<T, kWeighted>(row, j, w);
      }
    } else if (!last_of_owner) {
      for (int64_t j = 0; j < n; ++j) partial[j] += Value<T, kWeighted>(row, j, w);
    } else {
      for (int64_t j = 0; j < n; ++j) {
        total[j] += OverWire<T, kWireF32>(partial[j] + Value<T, kWeighted>(row, j, w));
      }
    }
    first_of_owner = last_of_owner;
  }
  if (sum.bias != nullptr) {
    const T* bias = reinterpret_cast<const T*>(sum.bias) + begin;
    for (int64_t j = 0; j < n; ++j) total[j] += ToFloat(bias[j]);
  }
  if (sum.out_f32) {
    std::memcpy(reinterpret_cast<float*>(sum.out) + begin, total, n * sizeof(float));
    return;
  }
  T* out = reinterpret_cast<T*>(sum.out) + begin;
  for (int64_t j = 0; j < n; ++j) out[j] = FromFloat<T>(total[j]);
}

template <typename T, bool kWeighted, bool kWireF32>
JAX_EP_INLINE void SumTiles(const Sum& sum) {
  for (int64_t begin = 0; begin < sum.width; begin += kTile) {
    SumTile<T, kWeighted, kWireF32>(sum, begin, std::min(kTile, sum.width - begin));
  }
}

template <typename T>
JAX_EP_INLINE void SumRow(const Sum& sum) {
  if (sum.weighted && sum.wire_f32) return SumTiles<T, true, true>(sum);
  if (sum.weighted) return SumTiles<T, true, false>(sum);
  if (sum.wire_f32) return SumTiles<T, false, true>(sum);
  return SumTiles<T, false, false>(sum);
}

using SumFn = void (*)(const Sum&);

void SumF32(const Sum& sum) { SumRow<float>(sum); }
void SumBf16(const Sum& sum) { SumRow<Bf16>(sum); }
void SumF16(const Sum& sum) { SumRow<F16>(sum); }

#ifdef JAX_EP_AVX2
JAX_EP_AVX2 void SumF32Avx2(const Sum& sum) { SumRow<float>(sum); }
JAX_EP_AVX2 void SumBf16Avx2(const Sum& sum) { SumRow<Bf16>(sum); }
JAX_EP_AVX2 void SumF16Avx2(const Sum& sum) { SumRow<F16>(sum); }
#endif

SumFn SumFor(LeafDtype dtype) {
#ifdef JAX_EP_AVX2
  if (__builtin_cpu_supports("avx2")) {
    switch (dtype) {
      case kLeafF32:
        return SumF32Avx2;
      case kLeafBf16:
        return SumBf16Avx2;
      case kLeafF16:
        return SumF16Avx2;
      default:
        return nullptr;  // not summed
    }
  }
#endif
  switch (dtype) {
    case kLeafF32:
      return SumF32;
    case kLeafBf16:
      return SumBf16;
    case kLeafF16:
      return SumF16;
    default:
      return nullptr;
  }
}

}  // namespace

Status Combine(const RoutingShape& shape, const std::vector<CombineLeaf>& leaves,
               bool wire_f32, bool out_f32, const std::vector<CombineBuffers>& ranks,
               const Parallel& parallel) {
  const int64_t topk = shape.topk;
  int64_t token_bytes = sizeof(float);
  for (const CombineLeaf& leaf : leaves) {
    token_bytes += leaf.width * LeafItemBytes(leaf.dtype);
  }
  token_bytes *= std::max<int64_t>(1, topk);
  const int64_t tokens_per_chunk = std::max<int64_t>(1, kChunkBytes / token_bytes);
  const int64_t token_chunks = NumChunks(shape.tokens, tokens_per_chunk);
  const Parallel serial;
  const Parallel& loop =
      token_bytes * shape.tokens * shape.num_ranks <= kChunkBytes ? serial : parallel;

  auto sum_token = [&](int source, int64_t token) -> Status {
    const CombineBuffers& to = ranks[source];
    // The token's slots by ascending owner, in each by ascending k.
    int64_t order[kMaxTopk];
    int64_t num_terms = 0;
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t i = token * topk + k;
      if (Status status = CheckSlot(shape, ranks, source, i); !status.ok()) {
        return status;
      }
      const int32_t row = to.routing.slot[i];
      const int32_t owner = to.routing.slot_rank[i];
      if (to.values != nullptr)
        to.values[i] = row < 0 ? 0.0f : ranks[owner].row_values[row];
      if (row < 0) continue;
      int64_t place = num_terms++;
      for (; place > 0 && to.routing.slot_rank[order[place - 1]] > owner; --place) {
        order[place] = order[place - 1];
      }
      order[place] = i;
    }
    for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
      const int64_t row_bytes = leaves[leaf].width * LeafItemBytes(leaves[leaf].dtype);
      Term terms[kMaxTopk];
      for (int64_t i = 0; i < num_terms; ++i) {
        const int64_t row = to.routing.slot[order[i]];
        const int32_t owner = to.routing.slot_rank[order[i]];
        const CombineBuffers& from = ranks[owner];
        terms[i].row = from.y[leaf] + row * row_bytes;
        terms[i].weight = from.weights != nullptr ? from.weights[row] : 1.0f;
        terms[i].last_of_owner =
            i + 1 == num_terms || to.routing.slot_rank[order[i + 1]] != owner;
      }
      Sum sum;
      sum.terms = terms;
      sum.num_terms = num_terms;
      sum.bias = to.bias.empty() ? nullptr : to.bias[leaf] + token * row_bytes;
      const int64_t out_bytes = out_f32 ? leaves[leaf].width * 4 : row_bytes;
      sum.out = to.out[leaf] + token * out_bytes;
      sum.width = leaves[leaf].width;
      sum.weighted = to.weights != nullptr;
      sum.wire_f32 = wire_f32;
      sum.out_f32 = out_f32;
      SumFor(leaves[leaf].dtype)(sum);
    }
    return Status();
  };

  ErrorSink errors;
  loop.For(shape.num_ranks * token_chunks, [&](int64_t chunk) {
    const int source = static_cast<int>(chunk / token_chunks);
    const int64_t begin = chunk % token_chunks * tokens_per_chunk;
    const int64_t end = std::min(begin + tokens_per_chunk, shape.tokens);
    for (int64_t token = begin; token < end; ++token) {
      if (Status status = sum_token(source, token); !status.ok()) {
        errors.Report(chunk, std::move(status));
        return;
      }
    }
  });
  return errors.status();
}

}  // namespace jax_ep::host
