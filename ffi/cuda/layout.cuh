// Layout: every rank learns all ids, counts them, and derives the handle alone.
//
// Ids cross the link in 16-byte words of eight ids and the round's number, so the
// data is its own flag. The flat list of a source's ids is cut into tiles. Steps, with
// a barrier of this small grid between them:
//   1. send the own ids; take the tile's ids, count and hold them
//   2. per destination rank: capacity, first rows, what each source keeps
//   3. positions by prefix sums; recv_slot, slot and slot_rank
// A block with one tile that fits holds its ids in shared memory; else they wait in
// recv_slot. Positions never depend on the order in which atomics arrive.

#ifndef JAX_EP_FFI_CUDA_LAYOUT_CUH_
#define JAX_EP_FFI_CUDA_LAYOUT_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "ptx.cuh"
#include "workspace.h"

namespace jax_ep::cuda {

// Sum over the block; all threads call.
__device__ __noinline__ int64_t BlockSum(int64_t value) {
  __shared__ int64_t sums[kLayoutWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  if (Lane() == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  int64_t total = 0;
  for (int w = 0; w < kLayoutWarps; ++w) total += sums[w];
  __syncthreads();
  return total;
}

// Sum over the threads before this one; all threads call.
__device__ __noinline__ int64_t BlockPrefix(int64_t value) {
  __shared__ int64_t sums[kLayoutWarps];
  int64_t inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, inclusive, step);
    if (Lane() >= step) inclusive += other;
  }
  if (Lane() == 31) sums[threadIdx.x / 32] = inclusive;
  __syncthreads();
  int64_t before = inclusive - value;
  for (int w = 0; w < kLayoutWarps; ++w) {
    if (w < static_cast<int>(threadIdx.x) / 32) before += sums[w];
  }
  __syncthreads();
  return before;
}

class Layout {
 public:
  static constexpr int kThreads = 32 * kLayoutWarps;

  __device__ Layout(const LayoutParams& params, CallState* state, int32_t* shared)
      : params_(params),
        common_(params.common),
        state_(state),
        rank_(params.common.rank),
        num_ranks_(params.common.num_ranks),
        num_experts_(params.num_experts),
        local_experts_(params.num_experts / params.common.num_ranks),
        owner_factor_(local_experts_ == 1 ? 0 : 0xffffffffu / local_experts_ + 1),
        tiles_per_source_(LayoutTilesPerSource(gridDim.x, params.common.num_ranks)),
        tiles_(params.common.num_ranks * tiles_per_source_),
        num_words_((params.num_ids + kIdsPerWord - 1) / kIdsPerWord),
        words_per_tile_((num_words_ + tiles_per_source_ - 1) / tiles_per_source_),
        own_(params.common.peers[params.common.rank]),
        tile_counts_(reinterpret_cast<uint32_t*>(own_ + kTileCountOffset)),
        row_base_(reinterpret_cast<int32_t*>(own_ + kRowBaseOffset)),
        kept_(reinterpret_cast<int32_t*>(own_ + kKeptOffset)),
        holds_(HasOneTile() && words_per_tile_ * kIdsPerWord <= kMaxHeldIds),
        held_(reinterpret_cast<uint16_t*>(shared)),
        counts_(shared + kMaxHeldIds / 2),
        first_(counts_ + kLayoutWarps * params.num_experts),
        second_(first_ + params.num_experts) {}

  __device__ static void Run(const LayoutParams& params, int32_t* shared) {
    __shared__ CallState state_storage;
    CallState* state = ptx::HoldShared(&state_storage);
    shared = ptx::HoldShared(shared);
    const uint64_t signature = reinterpret_cast<uint64_t>(params.slot) * 4 + 1;
    Layout layout(params, state, shared);
    InitCall(state);
    if (layout.holds_) layout.ClearCounts();
    __syncthreads();
    if (threadIdx.x < 32) {
      BeginCall(params.common, signature, /*ring_call=*/false, state);
    }
    AwaitBegin(state);
    const int rounds = layout.Exchange();
    if (Lane() == 0) NoteStamp(state, kStampLastArrival);
    layout.CountTiles();
    layout.GridBarrier();
    for (int rank = blockIdx.x; rank < layout.num_ranks_; rank += gridDim.x) {
      layout.PlanRank(rank);
    }
    layout.ArriveAtGrid();
    if (layout.HasOneTile()) layout.AddEarlierTiles(blockIdx.x);
    layout.AwaitGrid();
    if (threadIdx.x == 0) NoteStamp(state, kStampPlanned);
    layout.Place();
    EndCall(
        params.common, state, [&](int part, int parts) { layout.Poison(part, parts); },
        [&] {
          if (threadIdx.x != 0) return;
          Control* control = ControlOf(params.common, params.common.rank);
          params.num_invalid[0] = control->invalid_ids;
          control->id_rounds = state->number + rounds;
        });
  }

 private:
  static constexpr uint32_t kNoId = 0xfff;  // on the wire
  static constexpr uint32_t kNoHeldId = 0xffff;
  static_assert(kMaxExperts <= kNoId, "ids have 12 bits");
  static constexpr int kUnroll = 8;        // loads in flight
  static constexpr int kTilesAtOnce = 16;  // the same, of counts

  // Whether no block has a second tile.
  __device__ bool HasOneTile() const { return tiles_ <= static_cast<int>(gridDim.x); }

  // --- step 1 -----------------------------------------------------------------------

  // A number that no earlier round left in the half, and never 0.
  __device__ static uint32_t RoundStamp(uint64_t round) {
    return static_cast<uint32_t>(round % 0xffffffffu) + 1;
  }

  __device__ static ptx::Word128 PackIds(const uint32_t (&ids)[kIdsPerWord],
                                         uint32_t stamp) {
    ptx::Word128 word;
    word.low = stamp | static_cast<uint64_t>(ids[0]) << 32 |
               static_cast<uint64_t>(ids[1]) << 44 |
               static_cast<uint64_t>(ids[7] & 0xff) << 56;
    word.high = ids[2] | ids[3] << 12 | static_cast<uint64_t>(ids[4]) << 24 |
                static_cast<uint64_t>(ids[5]) << 36 |
                static_cast<uint64_t>(ids[6]) << 48 |
                static_cast<uint64_t>(ids[7] >> 8) << 60;
    return word;
  }

  __device__ static uint32_t UnpackId(const ptx::Word128& word, int i) {
    if (i == 0) return word.low >> 32 & 0xfff;
    if (i == 1) return word.low >> 44 & 0xfff;
    if (i == 7) return (word.low >> 56) | (word.high >> 60) << 8;
    return word.high >> (12 * (i - 2)) & 0xfff;
  }

  // This rank's id `index` as the wire has it.
  __device__ uint32_t OwnId(int64_t index) const {
    if (index >= params_.num_ids) return kNoId;
    const int32_t id = params_.topk_idx[index];
    return id >= 0 && id < num_experts_ ? id : kNoId;
  }

  __device__ ptx::Word128* Words(int rank, int source, uint64_t round) const {
    return reinterpret_cast<ptx::Word128*>(common_.peers[rank] + kIdsOffset +
                                           (round & 1) * kIdsHalfBytes) +
           source * IdWordsPerRound(num_ranks_);
  }

  __device__ int64_t TileBegin(int tile) const {
    return Min(num_words_, tile % tiles_per_source_ * words_per_tile_);
  }
  // First word of a warp's share of a tile; shares are contiguous.
  __device__ int64_t WarpBegin(int tile, int warp) const {
    const int64_t begin = TileBegin(tile);
    const int64_t end = Min(num_words_, begin + words_per_tile_);
    return begin + (end - begin) * warp / kLayoutWarps;
  }

  // Brings all ids of this block's tiles to `held_`, counted, or to recv_slot, as ids
  // or -1. Returns the number of rounds, which is the same on all ranks.
  //
  // A half is written again two rounds later: its writer has then read the round
  // between, which a rank sends only after it has read this one (a barrier of its
  // grid, or the end of its kernel).
  __device__ int Exchange() {
    const int64_t per_round = IdWordsPerRound(num_ranks_);
    const int rounds =
        num_ranks_ == 1
            ? 1
            : static_cast<int>(Max(1, (num_words_ + per_round - 1) / per_round));
    for (int i = 0; i < rounds; ++i) {
      if (i > 0) GridBarrier();
      const uint64_t round = state_->number + i;
      const int64_t begin = i * per_round;
      const int64_t end =
          num_ranks_ == 1 ? num_words_ : Min(num_words_, begin + per_round);
      if (num_ranks_ > 1 && !Failed(state_)) SendIds(round, begin, end);
      if (Lane() == 0) NoteStamp(state_, kStampLastSend);
      for (int tile = blockIdx.x; tile < tiles_; tile += gridDim.x) {
        TakeIds(tile, round, begin, end);
      }
    }
    return rounds;
  }

  __device__ void SendIds(uint64_t round, int64_t begin, int64_t end) const {
    const uint32_t stamp = RoundStamp(round);
#pragma unroll 1
    for (int64_t w = begin + blockIdx.x * kThreads + threadIdx.x; w < end;
         w += static_cast<int64_t>(gridDim.x) * kThreads) {
      uint32_t ids[kIdsPerWord];
#pragma unroll
      for (int i = 0; i < kIdsPerWord; ++i) ids[i] = OwnId(w * kIdsPerWord + i);
      const ptx::Word128 word = PackIds(ids, stamp);
#pragma unroll 1
      for (int hop = 1; hop < num_ranks_; ++hop) {
        const int rank =
            rank_ + hop < num_ranks_ ? rank_ + hop : rank_ + hop - num_ranks_;
        // Pairs with the load in TakeIds by the stamp inside the word.
        ptx::StoreRelaxedSystem(Words(rank, rank_, round) + (w - begin), word);
      }
    }
  }

  __device__ void TakeIds(int tile, uint64_t round, int64_t begin, int64_t end) {
    const int source = tile / tiles_per_source_;
    const int warp = threadIdx.x / 32;
    const int64_t first = Max(begin, WarpBegin(tile, warp));
    const int64_t last = Min(end, WarpBegin(tile, warp + 1));
    int32_t* ids = params_.recv_slot + source * params_.num_ids;
    int32_t* counts = counts_ + warp * num_experts_;
    uint16_t* held = held_ - TileBegin(tile) * kIdsPerWord;
    uint32_t invalid = 0;
    if (source == rank_) {
      const int64_t end = Min(last * kIdsPerWord, params_.num_ids);
#pragma unroll 1
      for (int64_t block = first * kIdsPerWord + Lane(); block < end;
           block += 32 * kUnroll) {
        int32_t batch[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          batch[i] = block + i * 32 < end ? params_.topk_idx[block + i * 32] : -1;
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          invalid += batch[i] >= num_experts_;
          if (block + i * 32 >= end) continue;
          const bool valid = batch[i] >= 0 && batch[i] < num_experts_;
          if (!holds_) {
            ids[block + i * 32] = valid ? batch[i] : -1;
            continue;
          }
          held[block + i * 32] = static_cast<uint16_t>(valid ? batch[i] : kNoHeldId);
          if (valid) atomicAdd(counts + batch[i], 1);
        }
      }
      invalid = __reduce_add_sync(kAllLanes, invalid);
      if (Lane() == 0 && invalid > 0) {
        atomicAdd(&ControlOf(common_, rank_)->invalid_ids, invalid);
      }
      return;
    }
    const ptx::Word128* words = Words(rank_, source, round) - begin;
    const uint32_t stamp = RoundStamp(round);
    // A row of recv_slot starts 16-byte aligned for every source, or for the first.
    const bool aligned = params_.num_ids % 4 == 0;
#pragma unroll 1
    for (int64_t w = first; w < last; w += 32) {
      const int64_t mine = w + Lane();
      const ptx::Word128 word = AwaitWord(words + mine, stamp, mine < last, source);
      if (mine >= last) continue;
      int32_t values[kIdsPerWord];
#pragma unroll
      for (int i = 0; i < kIdsPerWord; ++i) {
        const uint32_t id = UnpackId(word, i);
        values[i] = id == kNoId ? -1 : static_cast<int32_t>(id);
      }
      const int64_t index = mine * kIdsPerWord;
      if (holds_) {
        // The list's last word has no id past the list's end: OwnId.
        uint32_t pairs[kIdsPerWord / 2];
#pragma unroll
        for (int i = 0; i < kIdsPerWord; ++i) {
          if (values[i] >= 0) atomicAdd(counts + values[i], 1);
          const uint32_t half = values[i] & 0xffff;
          pairs[i / 2] = i % 2 == 0 ? half : pairs[i / 2] | half << 16;
        }
        *reinterpret_cast<uint4*>(held + index) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        continue;
      }
      if (aligned && index + kIdsPerWord <= params_.num_ids) {
        int4* out = reinterpret_cast<int4*>(ids + index);
        out[0] = make_int4(values[0], values[1], values[2], values[3]);
        out[1] = make_int4(values[4], values[5], values[6], values[7]);
      } else {
#pragma unroll
        for (int i = 0; i < kIdsPerWord; ++i) {
          if (index + i < params_.num_ids) ids[index + i] = values[i];
        }
      }
    }
  }

  // Waits for a word of this round in every lane that `needs` one.
  __device__ ptx::Word128 AwaitWord(const ptx::Word128* address, uint32_t stamp,
                                    bool needs, int source) {
    // No ids at all in words that never came.
    ptx::Word128 word = {~0ull, ~0ull};
    if (__any_sync(kAllLanes, Failed(state_))) return word;
    Patience patience;
    while (true) {
      if (needs) {
        // Pairs with the store in SendIds by the stamp.
        const ptx::Word128 seen = ptx::LoadRelaxedSystem(address);
        if (static_cast<uint32_t>(seen.low) == stamp) {
          word = seen;
          needs = false;
        }
      }
      const uint32_t waiting = __ballot_sync(kAllLanes, needs);
      if (waiting == 0) return word;
      bool over = false;
      if (Lane() == __ffs(waiting) - 1) {
        over = patience.Over(&common_, state_);
        if (over && patience.Overdue()) {
          GiveUp(&common_, state_, kPhaseLayoutIds, source, -1, stamp,
                 static_cast<uint32_t>(ptx::LoadRelaxedSystem(address).low),
                 patience.WaitedNs());
        }
      }
      if (__any_sync(kAllLanes, over)) return word;
    }
  }

  __device__ void ClearCounts() {
    for (int i = threadIdx.x; i < kLayoutWarps * num_experts_; i += kThreads) {
      counts_[i] = 0;
    }
  }

  // counts_[warp][e]: ids of the warp's share of a tile in recv_slot.
  __device__ void CountTile(int tile) {
    ClearCounts();
    __syncthreads();
    const int warp = threadIdx.x / 32;
    const int32_t* ids = params_.recv_slot + tile / tiles_per_source_ * params_.num_ids;
    const int64_t end = Min(WarpBegin(tile, warp + 1) * kIdsPerWord, params_.num_ids);
#pragma unroll 1
    for (int64_t block = WarpBegin(tile, warp) * kIdsPerWord + Lane(); block < end;
         block += 32 * kUnroll) {
      int32_t batch[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        batch[i] = block + i * 32 < end ? ids[block + i * 32] : -1;
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (batch[i] >= 0) atomicAdd(&counts_[warp * num_experts_ + batch[i]], 1);
      }
    }
  }

  // Makes counts_ those before the warp's share of a tile, and notes the tile's.
  __device__ void SumCounts(int tile) {
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts_; e += kThreads) {
      int32_t total = 0;
      for (int w = 0; w < kLayoutWarps; ++w) {
        const int32_t count = counts_[w * num_experts_ + e];
        counts_[w * num_experts_ + e] = total;
        total += count;
      }
      tile_counts_[static_cast<int64_t>(tile) * num_experts_ + e] = total;
    }
  }

  __device__ void CountTiles() {
    for (int tile = blockIdx.x; tile < tiles_; tile += gridDim.x) {
      __syncthreads();
      if (!holds_) CountTile(tile);
      SumCounts(tile);
    }
  }

  // Waits for all blocks; what they wrote before they arrived is visible after.
  __device__ void GridBarrier() {
    ArriveAtGrid();
    AwaitGrid();
  }

  __device__ void ArriveAtGrid() {
    ++barriers_;
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::AddAcquireReleaseDevice(&ControlOf(common_, rank_)->barrier, 1);
    }
  }

  __device__ void AwaitGrid() {
    if (threadIdx.x == 0) {
      Control* control = ControlOf(common_, rank_);
      const uint32_t expected = barriers_ * gridDim.x;
      Patience patience(kIndirectGraceNs);  // other blocks may wait for ranks
      while (!Failed(state_)) {
        // Pairs with the additions of the other blocks.
        const uint32_t seen = ptx::LoadAcquireDevice(&control->barrier);
        if (seen >= expected) break;
        if (patience.Over(&common_, state_) && patience.Overdue()) {
          GiveUp(&common_, state_, kPhaseLayoutGrid, -1, -1, expected, seen,
                 patience.WaitedNs());
        }
      }
    }
    __syncthreads();
  }

  // --- step 2 -----------------------------------------------------------------------

  // Ids of an expert in `tiles` tiles from `first` on.
  __device__ int32_t CountOf(int first, int tiles, int expert) const {
    const uint32_t* counts = tile_counts_ + first * num_experts_ + expert;
    uint32_t total = 0;
#pragma unroll 1
    for (int begin = 0; begin < tiles; begin += kTilesAtOnce) {
      uint32_t batch[kTilesAtOnce];
#pragma unroll
      for (int i = 0; i < kTilesAtOnce; ++i) {
        batch[i] = begin + i < tiles ? counts[(begin + i) * num_experts_] : 0;
      }
#pragma unroll
      for (int i = 0; i < kTilesAtOnce; ++i) total += batch[i];
    }
    return static_cast<int32_t>(total);
  }

  // id / L, for ids: a division takes long.
  __device__ int OwnerOf(int id) const {
    return owner_factor_ == 0 ? id : static_cast<int>(__umulhi(id, owner_factor_));
  }

  // What the experts of one rank take: first rows and kept ids of each source.
  __device__ void PlanRank(int rank) {
    const int first_expert = rank * local_experts_;
    int32_t* demand = first_;  // [source][local expert]
    int32_t* taken = second_;  // [local expert], kept ids
    for (int i = threadIdx.x; i < num_experts_; i += kThreads) {
      const int source = i / local_experts_;
      const int expert = first_expert + i % local_experts_;
      demand[i] = CountOf(source * tiles_per_source_, tiles_per_source_, expert);
    }
    __syncthreads();

    // Experts are dealt to threads in contiguous shares, so that prefix sums over
    // threads are prefix sums over experts.
    const int share = (local_experts_ + kThreads - 1) / kThreads;
    const int begin = static_cast<int>(Min(local_experts_, threadIdx.x * share));
    const int end = static_cast<int>(Min(local_experts_, begin + share));
    int64_t wanted = 0, padded = 0, largest = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      const int64_t total = ExpertDemand(demand, e);
      taken[e] = static_cast<int32_t>(total);
      wanted += total;
      padded += Padded(total);
      largest = Max(largest, total);
    }
    wanted = BlockSum(wanted);
    if (BlockSum(padded) > params_.capacity) {
      LimitExperts(taken, begin, end, largest);
    }

    int64_t kept = 0, rows = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      kept += taken[e];
      rows += Padded(taken[e]);
    }
    int64_t offset = BlockPrefix(rows);
    kept = BlockSum(kept);
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      ShareExpert(demand, e, first_expert + e, taken[e], offset);
      if (rank == rank_) {
        params_.group_counts[e] = taken[e];
        params_.group_sizes[e] = static_cast<int32_t>(Padded(taken[e]));
        params_.group_offsets[e] = static_cast<int32_t>(offset);
      }
      offset += Padded(taken[e]);
    }
    if (threadIdx.x == 0) {
      params_.num_recv[rank] = static_cast<int32_t>(wanted);
      params_.num_dropped[rank] = static_cast<int32_t>(wanted - kept);
    }
    __syncthreads();
  }

  // Counts of rows fit 31 bits, as slots do.
  __device__ int64_t Padded(int64_t rows) const {
    const uint32_t align = params_.expert_alignment;
    return (static_cast<uint32_t>(rows) + align - 1) / align * align;
  }

  __device__ int64_t ExpertDemand(const int32_t* demand, int expert) const {
    int64_t total = 0;
#pragma unroll 1
    for (int s = 0; s < num_ranks_; ++s) total += demand[s * local_experts_ + expert];
    return total;
  }

  // Cuts the experts' ids down to what fits: all to the highest multiple of the
  // alignment that does, then the first ones by one more block.
  __device__ void LimitExperts(int32_t* taken, int begin, int end, int64_t largest) {
    const int64_t align = params_.expert_alignment;
    // Rows of this thread's experts at a limit.
    const auto rows_at = [&](int64_t limit) {
      int64_t rows = 0;
#pragma unroll 1
      for (int e = begin; e < end; ++e) rows += Padded(Min(taken[e], limit));
      return rows;
    };
    // fits(low) and not fits(high), in units of the alignment. A sum of the largest
    // counts bounds the largest.
    int64_t low = 0, high = BlockSum(largest) / align + 1;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (BlockSum(rows_at(middle * align)) <= params_.capacity) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int64_t limit = low * align;
    const int64_t spare = (params_.capacity - BlockSum(rows_at(limit))) / align;
    int64_t over = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) over += taken[e] > limit;
    int64_t turn = BlockPrefix(over);
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      if (taken[e] <= limit) continue;
      taken[e] =
          static_cast<int32_t>(Min(taken[e], turn < spare ? limit + align : limit));
      ++turn;
    }
  }

  // Deals an expert's kept ids to its sources, by the same rule with single rows.
  __device__ void ShareExpert(const int32_t* demand, int local, int expert,
                              int64_t kept, int64_t row) {
    int64_t limit = kept, spare = 0;
    if (ExpertDemand(demand, local) > kept) {
      const auto sum_at = [&](int64_t limit) {
        int64_t sum = 0;
#pragma unroll 1
        for (int s = 0; s < num_ranks_; ++s) {
          sum += Min(demand[s * local_experts_ + local], limit);
        }
        return sum;
      };
      // fits(low) and not fits(high).
      int64_t low = 0, high = kept + 1;
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (sum_at(middle) <= kept) {
          low = middle;
        } else {
          high = middle;
        }
      }
      limit = low;
      spare = kept - sum_at(limit);
    }
#pragma unroll 1
    for (int s = 0; s < num_ranks_; ++s) {
      const int64_t count = demand[s * local_experts_ + local];
      int64_t mine = Min(count, limit);
      if (count > limit && spare > 0) {
        ++mine;
        --spare;
      }
      const int64_t index = static_cast<int64_t>(s) * num_experts_ + expert;
      row_base_[index] = static_cast<int32_t>(row);
      kept_[index] = static_cast<int32_t>(mine);
      row += mine;
    }
  }

  // --- step 3 -----------------------------------------------------------------------

  __device__ void Place() {
    for (int tile = blockIdx.x; tile < tiles_; tile += gridDim.x) {
      if (!HasOneTile()) {
        __syncthreads();
        CountTile(tile);  // counts_ is of the block's last tile
        SumCounts(tile);
        __syncthreads();
        AddEarlierTiles(tile);
      }
      PlaceTile(tile);
    }
  }

  // Experts whose positions are needed in a source's tiles: a rank's own in those of
  // others, all in its own.
  __device__ int FirstNeeded(int source) const {
    return source == rank_ ? 0 : rank_ * local_experts_;
  }
  __device__ int LastNeeded(int source) const {
    return source == rank_ ? num_experts_ : (rank_ + 1) * local_experts_;
  }

  // Makes counts_ positions in the whole list of the source.
  __device__ void AddEarlierTiles(int tile) {
    if (tile >= tiles_) return;
    const int source = tile / tiles_per_source_;
    const int first_tile = source * tiles_per_source_;
    const int last = LastNeeded(source);
    for (int e = FirstNeeded(source) + threadIdx.x; e < last; e += kThreads) {
      const int32_t before = CountOf(first_tile, tile - first_tile, e);
      for (int w = 0; w < kLayoutWarps; ++w) counts_[w * num_experts_ + e] += before;
    }
  }

  __device__ void PlaceTile(int tile) {
    const int source = tile / tiles_per_source_;
    const bool own = source == rank_;
    int32_t* row_base = first_;
    int32_t* kept = second_;
    const int first = FirstNeeded(source), last = LastNeeded(source);
    for (int e = first + threadIdx.x; e < last; e += kThreads) {
      const int64_t index = static_cast<int64_t>(source) * num_experts_ + e;
      row_base[e] = row_base_[index];
      kept[e] = kept_[index];
    }
    __syncthreads();

    // The warp's share, from its first id on: 32 bits are enough.
    const int warp = threadIdx.x / 32;
    int32_t* next = counts_ + warp * num_experts_;  // position of the next id
    const int64_t begin = WarpBegin(tile, warp) * kIdsPerWord;
    const int64_t end = Min(WarpBegin(tile, warp + 1) * kIdsPerWord, params_.num_ids);
    const int count = static_cast<int>(end - begin);
    int32_t* recv_slot = params_.recv_slot + source * params_.num_ids + begin;
    int32_t* slot = params_.slot + begin;
    int32_t* slot_rank = params_.slot_rank + begin;
    const uint16_t* held = held_ + (begin - TileBegin(tile) * kIdsPerWord);
#pragma unroll 1
    for (int block = 0; block < count; block += 32 * kUnroll) {
      int32_t ids[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int at = block + i * 32 + Lane();
        ids[i] = at >= count ? -1 : holds_ ? HeldId(held[at]) : recv_slot[at];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int32_t id = ids[i];
        const bool needed = id >= first && id < last;
        // Lanes with an id nobody needs match no other lane.
        const uint32_t same = __match_any_sync(kAllLanes, needed ? id : ~Lane());
        const uint32_t before = same & ((1u << Lane()) - 1);
        const int position = needed ? next[id] + __popc(before) : 0;
        __syncwarp();
        if (needed && (same >> Lane()) == 1) next[id] = position + 1;  // the last lane
        __syncwarp();
        const int row = needed && position < kept[id] ? row_base[id] + position : -1;
        const int at = block + i * 32 + Lane();
        if (at >= count) continue;
        if (own) {
          const int owner = needed ? OwnerOf(id) : -1;
          recv_slot[at] = owner == rank_ ? row : -1;
          slot[at] = row;
          slot_rank[at] = owner;
        } else {
          recv_slot[at] = row;  // not ours where nobody here needs it
        }
      }
    }
  }

  __device__ static int32_t HeldId(uint32_t held) {
    return held == kNoHeldId ? -1 : static_cast<int32_t>(held);
  }

  __device__ void Poison(int part, int parts) const {
    const int64_t ids = params_.num_ids * 4;
    FillBytes(params_.slot, ids, kPoison, part, parts);
    FillBytes(params_.slot_rank, ids, kPoison, part, parts);
    FillBytes(params_.recv_slot, ids * num_ranks_, kPoison, part, parts);
    FillBytes(params_.group_sizes, 4 * local_experts_, 0, part, parts);
    FillBytes(params_.group_counts, 4 * local_experts_, 0, part, parts);
    FillBytes(params_.group_offsets, 4 * local_experts_, 0, part, parts);
    FillBytes(params_.num_recv, 4 * num_ranks_, 0, part, parts);
    FillBytes(params_.num_dropped, 4 * num_ranks_, 0, part, parts);
    FillBytes(params_.num_invalid, 4, 0, part, parts);
  }

  const LayoutParams& params_;
  const CommonParams& common_;
  CallState* state_;
  int rank_, num_ranks_, num_experts_, local_experts_;
  uint32_t owner_factor_;  // 2^32 / L, rounded up; 0 where that is 2^32
  int tiles_per_source_, tiles_;
  int64_t num_words_, words_per_tile_;
  uint8_t* own_;
  uint32_t* tile_counts_;
  int32_t* row_base_;
  int32_t* kept_;
  bool holds_;                // whether ids are in held_
  uint16_t* held_;            // shared [kMaxHeldIds], of the block's tile
  int32_t* counts_;           // shared [kLayoutWarps][E]
  int32_t *first_, *second_;  // shared [E] each
  uint32_t barriers_ = 0;
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_LAYOUT_CUH_
