// The machine that emulated kernels run on: every CUDA thread of every rank is a fiber
// of one OS thread, and a seed decides who runs next and when each copy happens.
//
// Whatever the memory model leaves open is decided by the seed: bulk copies read and
// write late, in parts and in any order; stores to other ranks become visible late;
// words of cp.async arrive at once or at the wait. Time stands still while anything can
// happen, so that a wait that nothing can end is found at once.

#ifndef JAX_EP_TESTS_EMULATOR_MACHINE_H_
#define JAX_EP_TESTS_EMULATOR_MACHINE_H_

#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

namespace emu {

struct Block;
struct Warp;

struct Kernel {
  const char* name;
  const char* stage;  // whose parameters it has
  bool few;           // one for few tokens
  void (*run)(const void* params);
  int threads;       // 0: of launch_shape.h, from the case
  int shared_bytes;  // likewise
};

// One launch of a kernel on one rank.
struct Launch {
  const Kernel* kernel;
  int rank;
  int blocks;
  int threads;
  int shared_bytes;
  int resident;  // blocks that run at a time, in order
  const void* params;
  int started = 0, running = 0;
  std::vector<Block*> live;
};

// Bulk stores of a thread that it waits for together.
struct Group {
  int unread = 0, unwritten = 0;
};

struct WordCopy {
  void* to;
  const void* from;
};

enum class State {
  kReady,
  kCollective,
  kBlockBarrier,
  kWord,
  kBarrier,
  kCopies,
  kDone
};

struct Fiber {
  std::jmp_buf context;
  char* stack = nullptr;
  bool started = false;
  Warp* warp = nullptr;
  unsigned lane = 0, thread = 0;
  State state = State::kDone;
  const void* address = nullptr;  // what it waits for
  // The latest poll: the second of an unchanged word waits for a change.
  const void* polled = nullptr;
  uint64_t polled_value[2] = {};
  uint64_t polled_tick = 0;
  std::deque<Group> groups;  // the last one is open
  std::vector<WordCopy> words;
  std::deque<std::vector<WordCopy>> word_groups;
  // Whether it acquired a head or a tail since its last fence for bulk copies.
  bool unfenced_head = false, unfenced_tail = false;
};

enum class Collective {
  kNone,
  kSync,
  kWait,
  kShfl,
  kShflUp,
  kShflXor,
  kBallot,
  kMatch,
  kAdd,
  kOr
};

struct Warp {
  Block* block;
  int index;
  bool slow;
  Fiber* lanes[32];
  uint32_t ready = 0;  // lanes
  int position = -1;   // among the ready warps
  Collective collective = Collective::kNone;
  uint32_t arrived = 0;
  uint64_t values[32], arguments[32], results[32];
};

struct Static {
  int line;
  size_t bytes;
  char* data;
};

struct Block {
  Launch* launch;
  int index;
  std::vector<Warp> warps;
  int alive;
  int at_barrier = 0;
  char* shared;  // dynamic
  // What the copy engine is known to see of it, and when it last used each 16 bytes.
  char* seen_by_engine;
  std::vector<uint64_t> used;
  uint64_t fenced = 0;
  std::vector<Static> statics;
  int copies = 0;  // that still read or write `shared`
};

// A part of a bulk copy.
struct Copy {
  Fiber* owner;
  Block* block;
  Launch* launch;
  Group* group;       // of a store
  uint64_t* barrier;  // of a load
  char* to;
  const char* from;
  uint32_t bytes;
  bool read = false;
  std::vector<char> data;
};

struct Store {
  Block* block;
  void* address;
  uint64_t value[2];
  int bytes;
};

struct Schedule {
  uint64_t seed = 0;
  int copy_rarity = 2;     // a copy moves in one of so many steps; 0: at once
  int jump_rarity = 1000;  // the clock jumps in one of so many looks at it
  int slow_rank = -1, slow_warp = -1, slow_block = -1;
  bool pauses = false;  // of some warp, for long
  int resident = 0;     // 0: the whole grid
  // Whether lanes of a warp pass a barrier's wait on their own, as the language allows,
  // or together, as the hardware does.
  bool independent_lanes = false;
  bool hasty = false;  // waits give up while others could still go on
  uint64_t tick_ns = 2000;
  int max_ticks = 16;  // in a row without anything happening: then it is a deadlock
};

// Workspaces and arrays that copies may touch.
struct Range {
  const char* begin;
  int64_t bytes;
  int workspace_of = -1;  // rank
};

struct Mbarrier {
  uint64_t magic : 8;
  uint64_t phase : 1;
  uint64_t arrivals : 10;
  uint64_t pending : 10;
  int64_t bytes : 35;
};
static_assert(sizeof(Mbarrier) == 8, "");

class Machine {
 public:
  Machine(const Schedule& schedule, std::vector<Range> ranges);

  // Runs each rank's launches in order. "" or what went wrong; after that the machine
  // is of no use.
  std::string Run(std::vector<std::vector<Launch>> streams);

  // --- for the threads of a kernel ---------------------------------------------------

  Fiber* current() { return current_; }
  uint64_t Random(uint64_t below);
  void MaybeYield();
  void Rendezvous(Collective kind, uint64_t value, uint64_t argument);
  uint64_t Result() { return current_->warp->results[current_->lane]; }
  void BlockBarrier();
  char* StaticShared(int line, size_t bytes);
  // Before a load in a loop: waits if nothing has changed since the last one.
  void BeforePoll(const void* address, int bytes);
  // A store that other ranks see later. A release comes after all that the block
  // stored.
  void StoreLater(void* address, const void* value, int bytes, bool release);
  void FlushStores(const Block* block);
  void Changed(const void* address);  // wakes who waits for it
  void AcquiredSystem(const void* address);
  uint32_t Cycles();
  uint64_t Nanoseconds();

  void BarrierInit(uint64_t* barrier, uint32_t arrivals);
  void BarrierArrive(uint64_t* barrier, uint32_t bytes);
  bool BarrierDone(const uint64_t* barrier, uint32_t parity);
  void BarrierWait(const uint64_t* barrier, uint32_t parity);
  void BulkLoad(void* shared, const void* global, uint32_t bytes, uint64_t* barrier);
  void BulkStore(void* global, const void* shared, uint32_t bytes);
  void BulkCommit();
  void BulkWait(size_t pending, bool written);
  void FenceShared();
  void FenceGlobal();
  void CopyWord(void* shared, const void* global);
  void CopyCommit();
  void CopyWait(size_t pending);

  [[noreturn]] void Violation(const std::string& message);

 private:
  friend void FiberMain();

  void StartBlocks(Launch* launch);
  void StartBlock(Launch* launch);
  void EndBlock(Block* block);
  bool EndLaunches();
  void Resume(Fiber* fiber);
  void Suspend(State state, const void* address);
  void Ready(Fiber* fiber);
  bool RunWarp();  // whether a block ended
  bool StepMemory();
  void MoveCopy(size_t index);
  void MoveStore(size_t index);
  void Settle(const Mbarrier& barrier, uint64_t* address);
  bool Tick();
  void AddCopy(Copy copy);
  const Range* Find(const void* address, int64_t bytes) const;
  void CheckBulk(const Block* block, const void* shared, const void* global,
                 uint32_t bytes);
  std::string Where(const Fiber* fiber) const;
  std::string Name(const void* address, const Block* block) const;
  std::string Describe() const;

  Schedule schedule_;
  std::vector<Range> ranges_;
  uint64_t random_;
  std::vector<std::vector<Launch>> streams_;
  std::vector<size_t> next_;  // by rank: its launch that runs
  std::vector<Warp*> ready_;
  std::vector<Copy*> copies_;
  std::vector<Store> stores_;
  std::unordered_map<const void*, std::vector<Fiber*>> sleepers_;
  Fiber* current_ = nullptr;
  std::jmp_buf scheduler_;
  uint64_t now_ns_ = 1000;
  uint32_t cycles_ = 12345;
  uint64_t tick_ = 0;
  int idle_ticks_ = 0;
  uint64_t uses_ = 0;  // of shared memory by the copy engine, and its fences
  uint64_t steps_ = 0, paused_until_ = 0;
  Warp* paused_ = nullptr;
  std::string failure_;
};

extern Machine* machine;

// printf of long long values.
std::string Format(const char* format, int64_t a = 0, int64_t b = 0, int64_t c = 0,
                   int64_t d = 0);

// In memory that nobody has written.
constexpr char kGarbage = 0x5d;

}  // namespace emu

#endif  // JAX_EP_TESTS_EMULATOR_MACHINE_H_
