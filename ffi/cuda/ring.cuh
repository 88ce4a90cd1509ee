// The staging rings between ranks, as one warp sees its channel.
//
// Source s owns a range of the ring at each rank d. In a call it is cut into
// channels, and a channel into slots of one piece. Channel c of (s, d) is written by
// one warp of s and read by one warp of d. `head` (at d) counts the pieces sent,
// `tail` (at s) those consumed, each with the call's number in the upper bits of the
// word; so words only grow and no call inherits state, but for one rule: s touches
// its range at d only when d has read all that s sent it in earlier calls (`done`).
//
// Lane l keeps the books of the ranks with numbers l and l + 32 in an order that each
// channel of each rank starts elsewhere, so that not all send to the same rank first.
//
// No waiting in circles: a channel's tokens are sent and received in the same order on
// all ranks, and within a token the pieces too: a receiver takes no piece before the
// pieces of lower number of all ranks. A sender that waits for a slot waits for a
// receiver that is behind it, and that one for a sender that is no further than it,
// provided that nobody waits while it holds back a word it could publish. (A combine
// sends a token's sums rank by rank. Then the receiver may be behind by pieces only if
// a ring holds less than a row; in that case ranks come in one order everywhere.)

#ifndef JAX_EP_FFI_CUDA_RING_CUH_
#define JAX_EP_FFI_CUDA_RING_CUH_

#include "call.cuh"
#include "launch_shape.h"
#include "ptx.cuh"

namespace jax_ep::cuda {

// A channel has at most this many slots: a small ring stays in the L2 between its ends.
#ifndef JAX_EP_TUNE_SLOTS
#define JAX_EP_TUNE_SLOTS 32
#endif
constexpr int kMaxSlots = JAX_EP_TUNE_SLOTS;

// A sender with more to send publishes its head once per this many bytes, since each
// release store waits for the link; one with nothing to do publishes at once.
constexpr int kBytesPerPublish = 64 * kKiB;
// A step that took so many cycles (10 us) came to a sender with time for one.
constexpr uint32_t kSlowStepCycles = 18000;

struct RingShape {
  int channels;            // per pair of ranks
  int slots;               // per channel
  int pieces_per_publish;  // by the sender
  int pieces_per_release;  // by the receiver, so that the sender hears in time
};

// The same on all ranks, since grids are equal.
__device__ __forceinline__ RingShape MakeRing(int num_ranks, int slot_bytes,
                                              int wanted_channels) {
  const int64_t slots = RingRangeBytes(num_ranks) / slot_bytes;
  RingShape ring;
  ring.channels = NumChannels(num_ranks, slot_bytes, wanted_channels);
  ring.slots = static_cast<int>(Min(kMaxSlots, slots / ring.channels));
  ring.pieces_per_publish =
      static_cast<int>(Max(1, Min(kBytesPerPublish / slot_bytes, ring.slots / 4)));
  ring.pieces_per_release = static_cast<int>(Max(1, ring.slots / 4));
  return ring;
}

__device__ __forceinline__ uint64_t CountWord(uint64_t call, uint32_t count) {
  return call << kCountBits | count;
}

__device__ __forceinline__ int64_t SignalIndex(int channel, int rank) {
  return static_cast<int64_t>(channel) * kMaxRanks + rank;
}

// The sending end of a channel to all ranks.
template <int kRanks>
class Sender {
 public:
  static constexpr int kPerLane = (kRanks + 31) / 32;

  // `prompt` publishes after each slow step; it pays where a step sends to many ranks.
  __device__ __forceinline__ Sender(const CommonParams& common, CallState* state,
                                    int channel, RingShape ring, int slot_bytes,
                                    Phase reuse, Phase credit, bool prompt)
      : common_(common),
        state_(state),
        channel_(channel),
        ring_(ring),
        slot_bytes_(slot_bytes),
        reuse_(reuse),
        credit_(credit),
        prompt_(prompt),
        rotation_((common.rank + channel) % kRanks),
        last_step_(ptx::Cycles()) {}

  // The rank with this lane's number i, or -1.
  __device__ __forceinline__ int Rank(int i) const {
    const int number = Lane() + 32 * i;
    const int rank = rotation_ + number;
    return number >= kRanks ? -1 : rank < kRanks ? rank : rank - kRanks;
  }

  // Waits until all ranks have read what earlier calls sent them; all lanes, before the
  // first Reserve.
  __device__ __forceinline__ void Begin() {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int rank = Rank(i);
      // Pairs with the release in FinishRingCall.
      AwaitAtLeast(&common_, state_, reuse_, rank, -1,
                   Word(common_.peers[common_.rank], kDoneOffset, rank),
                   state_->number - 1, rank >= 0);
    }
    ptx::FenceGlobalForBulk();
  }

  // Makes sure that this lane's rank number i has a free slot, where `wanted`. A step
  // reserves all its slots, then sends: waiting publishes what was sent before.
  __device__ __forceinline__ void Reserve(int i, bool wanted) {
    if (!__any_sync(kAllLanes, wanted && Full(i))) return;
    const int rank = Rank(i);
    const uint64_t* tail =
        Word(common_.peers[common_.rank], kTailOffset, SignalIndex(channel_, rank));
    if (rank >= 0) {
      // Pairs with the release in Receiver::Release: the slots have been read.
      consumed_[i] = CountIn(ptx::LoadAcquireSystem(tail), state_->number);
    }
    const bool needs = wanted && Full(i);
    if (__any_sync(kAllLanes, needs)) {
      Flush();  // or two ranks could wait for what the other holds back
      // As above.
      const uint64_t word =
          AwaitAtLeast(&common_, state_, credit_, rank, channel_, tail,
                       CountWord(state_->number, sent_[i] + 1 - ring_.slots), needs);
      if (needs) consumed_[i] = CountIn(word, state_->number);
    }
    ptx::FenceGlobalForBulk();
  }

  // Starts the copy of a piece to this lane's rank number i.
  __device__ __forceinline__ void Send(int i, const void* piece, uint32_t bytes) {
    if (!Failed(state_)) {
      const int64_t slot =
          static_cast<int64_t>(channel_) * ring_.slots + sent_[i] % ring_.slots;
      ptx::BulkStore(common_.peers[Rank(i)] + kRingOffset +
                         common_.rank * RingRangeBytes(kRanks) + slot * slot_bytes_,
                     piece, bytes);
    }
    ++sent_[i];
    latest_ |= 1u << i;
  }

  // Ends a step of at most one Send per rank; all lanes, once per step.
  __device__ __forceinline__ void Commit() {
    ptx::BulkCommit();
    const uint32_t now = ptx::Cycles();
    const bool slow = prompt_ && now - last_step_ > kSlowStepCycles;
    last_step_ = now;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t before = sent_[i] - (latest_ >> i & 1);  // this step
      const uint32_t due = slow ? 1 : ring_.pieces_per_publish;
      if (before - published_[i] >= due) {
        ptx::BulkWaitWritten<1>();
        Publish(i, before);
      }
    }
    latest_ = 0;
  }

  // Publishes all that was sent; waits until it is written.
  __device__ __forceinline__ void Flush() {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (sent_[i] != published_[i]) {
        ptx::BulkWaitWritten<0>();
        Publish(i, sent_[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ bool Full(int i) const {
    return sent_[i] - consumed_[i] >= static_cast<uint32_t>(ring_.slots);
  }

  __device__ __forceinline__ void Publish(int i, uint32_t count) {
    published_[i] = count;
    if (Failed(state_)) return;
    // Pairs with the acquire in Receiver::Await and Poll. The pieces are written.
    ptx::StoreReleaseSystem(
        Word(common_.peers[Rank(i)], kHeadOffset, SignalIndex(channel_, common_.rank)),
        CountWord(state_->number, count));
  }

  const CommonParams& common_;
  CallState* state_;
  int channel_;
  RingShape ring_;
  int slot_bytes_;
  Phase reuse_;
  Phase credit_;
  bool prompt_;
  int rotation_;
  uint32_t last_step_;
  uint32_t latest_ = 0;  // bit i: this step sent to rank number i
  uint32_t sent_[kPerLane] = {};
  uint32_t published_[kPerLane] = {};
  uint32_t consumed_[kPerLane] = {};
};

// The receiving end of a channel from all ranks. Pieces of a rank are taken in order;
// a taken piece is in the ring and may be copied out, a consumed one has been.
template <int kRanks>
class Receiver {
 public:
  static constexpr int kPerLane = (kRanks + 31) / 32;

  __device__ __forceinline__ Receiver(const CommonParams& common, CallState* state,
                                      int channel, RingShape ring, int slot_bytes,
                                      Phase rows)
      : common_(common),
        state_(state),
        channel_(channel),
        ring_(ring),
        slot_bytes_(slot_bytes),
        rows_(rows) {}

  // Whether the next piece of `rank` (the same in all lanes) has arrived.
  __device__ __forceinline__ bool Arrived(int rank) {
    if (__any_sync(kAllLanes, Failed(state_)) || Available(rank)) return true;
    Poll();
    return Available(rank);
  }

  // Waits for it. The caller has consumed all it took.
  __device__ __forceinline__ void Await(int rank) {
    ReleaseAll();  // or two ranks could wait for what the other holds back
    const int mine = rank & 31;
    const int i = rank >> 5;
    // Pairs with the release in Sender::Publish: the piece is in the ring.
    const uint64_t word = AwaitAtLeast(
        &common_, state_, rows_, rank, channel_,
        Word(common_.peers[common_.rank], kHeadOffset, SignalIndex(channel_, rank)),
        CountWord(state_->number, Get(taken_, i) + 1), Lane() == mine);
    if (Lane() == mine) Set(arrived_, i, CountIn(word, state_->number));
    ptx::FenceGlobalForBulk();
  }

  // Takes the next piece of `rank`. True in the lane that is to copy it, with its
  // address.
  __device__ __forceinline__ bool Take(int rank, const uint8_t** piece) {
    if (Lane() != (rank & 31)) return false;
    const uint32_t taken = Get(taken_, rank >> 5);
    Set(taken_, rank >> 5, taken + 1);
    const int64_t slot =
        static_cast<int64_t>(channel_) * ring_.slots + taken % ring_.slots;
    *piece = common_.peers[common_.rank] + kRingOffset + rank * RingRangeBytes(kRanks) +
             slot * slot_bytes_;
    return true;
  }

  // Frees the slot of the oldest piece of `rank` that is not yet freed; all lanes,
  // each of which has seen the end of its copy.
  __device__ __forceinline__ void Consume(int rank) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (Lane() + 32 * i != rank) continue;
      ++consumed_[i];
      if (consumed_[i] - released_[i] >=
          static_cast<uint32_t>(ring_.pieces_per_release)) {
        Release(i);
      }
    }
  }

 private:
  __device__ __forceinline__ bool Available(int rank) {
    const int i = rank >> 5;
    const bool here = static_cast<int32_t>(Get(arrived_, i) - Get(taken_, i)) > 0;
    return __shfl_sync(kAllLanes, here, rank & 31);
  }

  __device__ __forceinline__ void Poll() {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int rank = Lane() + 32 * i;
      if (rank >= kRanks) continue;
      // Pairs with the release in Sender::Publish: the pieces are in the ring.
      arrived_[i] =
          CountIn(ptx::LoadAcquireSystem(Word(common_.peers[common_.rank], kHeadOffset,
                                              SignalIndex(channel_, rank))),
                  state_->number);
    }
    ptx::FenceGlobalForBulk();
  }

  __device__ __forceinline__ void ReleaseAll() {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (consumed_[i] != released_[i]) Release(i);
    }
  }

  __device__ __forceinline__ void Release(int i) {
    released_[i] = consumed_[i];
    if (Failed(state_)) return;
    // Pairs with the acquire in Sender::Reserve. Our reads of the slots are over.
    ptx::StoreReleaseSystem(Word(common_.peers[Lane() + 32 * i], kTailOffset,
                                 SignalIndex(channel_, common_.rank)),
                            CountWord(state_->number, consumed_[i]));
  }

  // Register arrays are indexed by constants only: a lane has one or two ranks.
  __device__ __forceinline__ static uint32_t Get(const uint32_t (&array)[kPerLane],
                                                 int i) {
    return i == 0 ? array[0] : array[kPerLane - 1];
  }
  __device__ __forceinline__ static void Set(uint32_t (&array)[kPerLane], int i,
                                             uint32_t value) {
    if (i == 0) array[0] = value;
    if (i != 0) array[kPerLane - 1] = value;
  }

  const CommonParams& common_;
  CallState* state_;
  int channel_;
  RingShape ring_;
  int slot_bytes_;
  Phase rows_;
  uint32_t taken_[kPerLane] = {};
  uint32_t arrived_[kPerLane] = {};
  uint32_t consumed_[kPerLane] = {};
  uint32_t released_[kPerLane] = {};
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_RING_CUH_
