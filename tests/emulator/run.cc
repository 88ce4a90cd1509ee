// Runs cases, each under a range of seeds, and compares every array with what is
// expected of it:
//
//   run together|independent FIRST_SEED LAST_SEED CASE...
//
// where lanes of a warp pass waits for barriers in shared memory together or not.
// A case is a text file that cases.py writes, with its arrays in the file beside it.
// Prints the error records that kernels leave; exits with 1 at the first thing wrong.

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "kernels.h"
#include "launch_shape.h"
#include "machine.h"
#include "workspace.h"

namespace {

using namespace jax_ep::cuda;

constexpr int kGuard = 256;  // bytes before and behind each array
constexpr unsigned char kGuardByte = 0xa7, kUnwritten = 0xcd;

struct Array {
  int64_t bytes, input, expected;  // offsets in the data, or -1
  std::vector<char> memory;
  char* data() {
    const auto start = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + ((start + kGuard + 127) / 128 * 128 - start);
  }
};

struct Step {
  std::string kernel;
  int blocks;
  std::set<int> skip;                                  // ranks that do not launch it
  std::vector<std::map<std::string, int64_t>> values;  // by rank
  std::vector<std::map<std::string, int>> arrays;
};

struct Case {
  std::string name;
  int ranks = 0;
  bool fails = false;  // error records are expected, on the ranks that launch all
  bool hasty = false;  // and under some seeds, waits end long before others
  std::vector<Array> arrays;
  std::vector<Step> steps;
  std::vector<char> data;
};

std::vector<char> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

Case ReadCase(const std::string& path) {
  Case test;
  test.name = path;
  test.data = ReadFile(path + ".bin");
  const std::vector<char> text = ReadFile(path);
  std::istringstream in(std::string(text.begin(), text.end()));
  std::string word, field;
  int rank;
  int64_t value;
  while (in >> word) {
    if (word == "ranks") {
      in >> test.ranks;
    } else if (word == "fails") {
      test.fails = true;
    } else if (word == "hasty") {
      test.hasty = true;
    } else if (word == "array") {
      Array array{};
      in >> array.bytes >> array.input >> array.expected;
      test.arrays.push_back(std::move(array));
    } else if (word == "step") {
      Step step;
      in >> step.kernel >> step.blocks;
      step.values.resize(test.ranks);
      step.arrays.resize(test.ranks);
      test.steps.push_back(std::move(step));
    } else if (word == "skip") {
      in >> rank;
      test.steps.back().skip.insert(rank);
    } else if (word == "value") {
      in >> rank >> field >> value;
      test.steps.back().values[rank][field] = value;
    } else if (word == "pointer") {
      in >> rank >> field >> value;
      test.steps.back().arrays[rank][field] = static_cast<int>(value);
    } else {
      std::fprintf(stderr, "%s: unknown word %s\n", path.c_str(), word.c_str());
      std::exit(2);
    }
  }
  return test;
}

struct Field {
  size_t offset, bytes;
};
#define FIELD(Params, name)                                 \
  {                                                         \
    #name, { offsetof(Params, name), sizeof(Params::name) } \
  }
// Fields of a step, by stage; "x0" is the first of an array of pointers.
const std::map<std::string, std::map<std::string, Field>> kFields = {
    {"layout",
     {FIELD(LayoutParams, topk_idx), FIELD(LayoutParams, slot),
      FIELD(LayoutParams, slot_rank), FIELD(LayoutParams, recv_slot),
      FIELD(LayoutParams, group_sizes), FIELD(LayoutParams, group_counts),
      FIELD(LayoutParams, group_offsets), FIELD(LayoutParams, num_recv),
      FIELD(LayoutParams, num_dropped), FIELD(LayoutParams, num_invalid),
      FIELD(LayoutParams, num_ids), FIELD(LayoutParams, capacity),
      FIELD(LayoutParams, num_experts), FIELD(LayoutParams, expert_alignment)}},
    {"dispatch",
     {FIELD(DispatchParams, slot), FIELD(DispatchParams, slot_rank),
      FIELD(DispatchParams, recv_slot), FIELD(DispatchParams, group_counts),
      FIELD(DispatchParams, group_offsets), FIELD(DispatchParams, weights),
      FIELD(DispatchParams, recv_weights), FIELD(DispatchParams, x),
      FIELD(DispatchParams, recv), FIELD(DispatchParams, num_tokens),
      FIELD(DispatchParams, capacity), FIELD(DispatchParams, num_local_experts)}},
    {"combine",
     {FIELD(CombineParams, slot), FIELD(CombineParams, slot_rank),
      FIELD(CombineParams, recv_slot), FIELD(CombineParams, weights),
      FIELD(CombineParams, row_values), FIELD(CombineParams, values),
      FIELD(CombineParams, y), FIELD(CombineParams, bias), FIELD(CombineParams, out),
      FIELD(CombineParams, num_tokens), FIELD(CombineParams, capacity)}},
};
#undef FIELD

void SetField(std::string* params, const std::string& stage, std::string name,
              uint64_t value) {
  size_t index = 0;
  const size_t digits = name.find_first_of("0123456789");
  if (digits != std::string::npos) {
    index = std::stoul(name.substr(digits));
    name = name.substr(0, digits);
  }
  const Field field = kFields.at(stage).at(name);
  std::memcpy(params->data() + field.offset + 8 * index, &value,
              field.bytes < 8 ? field.bytes : 8);
}

size_t ParamsBytes(const std::string& stage) {
  return stage == "layout"     ? sizeof(LayoutParams)
         : stage == "dispatch" ? sizeof(DispatchParams)
                               : sizeof(CombineParams);
}

// Six kinds of schedules, by seed.
emu::Schedule MakeSchedule(uint64_t seed, int ranks) {
  emu::Schedule schedule;
  schedule.seed = seed;
  const int number = static_cast<int>(seed / 6);
  // Copies move soon, at once, or (almost) only when nothing else can happen.
  schedule.copy_rarity = number % 3 == 0 ? 2 : number % 3 == 1 ? 0 : 500;
  schedule.jump_rarity = number % 2 == 0 ? 8 : 1000;
  switch (seed % 6) {
    case 0:
      schedule.pauses = true;
      break;
    case 1:
      schedule.copy_rarity = 500;
      break;
    case 2:
      schedule.slow_rank = number % ranks;
      break;
    case 3:
      schedule.slow_warp = number % 12;
      break;
    case 4:
      schedule.resident = 1;
      break;
    case 5:
      schedule.slow_block = number % 3;
      schedule.slow_warp = number / 3 % 4 - 1;
      break;
  }
  return schedule;
}

std::string Compare(Case& test) {
  for (size_t i = 0; i < test.arrays.size(); ++i) {
    Array& array = test.arrays[i];
    const char* data = array.data();
    for (int g = 0; g < kGuard; ++g) {
      if (static_cast<unsigned char>(data[array.bytes + g]) != kGuardByte ||
          (g < 128 && static_cast<unsigned char>(data[-1 - g]) != kGuardByte)) {
        return "written outside of array " + std::to_string(i);
      }
    }
    if (array.expected < 0) continue;
    const char* expected = test.data.data() + array.expected;
    for (int64_t b = 0; b < array.bytes; ++b) {
      if (data[b] == expected[b]) continue;
      std::string use;
      for (const Step& step : test.steps) {
        for (int rank = 0; rank < test.ranks; ++rank) {
          for (const auto& [field, index] : step.arrays[rank]) {
            if (index == static_cast<int>(i) && use.empty()) {
              use = field + " of rank " + std::to_string(rank) + " in " + step.kernel;
            }
          }
        }
      }
      char text[128];
      std::snprintf(text, sizeof(text), ": byte %lld of %lld is %02x instead of %02x",
                    static_cast<long long>(b), static_cast<long long>(array.bytes),
                    static_cast<unsigned char>(data[b]),
                    static_cast<unsigned char>(expected[b]));
      return "wrong data in " + use + text;
    }
  }
  return "";
}

std::string RunSeed(Case& test, uint64_t seed, bool independent) {
  const int64_t workspace_bytes = WorkspaceBytes(test.ranks);
  std::vector<uint8_t*> workspaces;
  std::vector<emu::Range> ranges;
  for (int rank = 0; rank < test.ranks; ++rank) {
    void* memory = mmap(nullptr, workspace_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return "no memory for a workspace";
    workspaces.push_back(static_cast<uint8_t*>(memory));
    ranges.push_back({static_cast<char*>(memory), workspace_bytes, rank});
  }
  for (Array& array : test.arrays) {
    array.memory.assign(array.bytes + 3 * kGuard, static_cast<char>(kGuardByte));
    if (array.input >= 0) {
      std::memcpy(array.data(), test.data.data() + array.input, array.bytes);
    } else {
      std::memset(array.data(), kUnwritten, array.bytes);
    }
    ranges.push_back({array.data(), array.bytes});
  }

  emu::Schedule schedule = MakeSchedule(seed, test.ranks);
  schedule.independent_lanes = independent;
  if (test.fails) {
    schedule.tick_ns = 3'000'000;  // a wait looks at the clock every 32nd time
    schedule.max_ticks = 3000;
    schedule.hasty = test.hasty && seed / 6 % 2 == 1;
  }
  std::vector<ErrorRecord> errors(test.ranks);
  std::vector<std::string> params;
  params.reserve(test.ranks * test.steps.size());
  std::vector<std::vector<emu::Launch>> streams(test.ranks);
  for (int rank = 0; rank < test.ranks; ++rank) {
    CommonParams common{};
    for (int peer = 0; peer < test.ranks; ++peer) common.peers[peer] = workspaces[peer];
    common.error = &errors[rank];
    common.timeout_ns = 1'000'000'000;
    common.rank = rank;
    common.num_ranks = test.ranks;
    for (Step& step : test.steps) {
      // Each step is a site of its own.
      common.site = &step - test.steps.data() + 1;
      if (step.skip.count(rank) > 0) continue;
      const emu::Kernel* kernel = FindKernel(step.kernel);
      std::string bytes(ParamsBytes(kernel->stage), '\0');
      std::memcpy(&bytes[0], &common, sizeof(common));
      for (const auto& [field, value] : step.values[rank]) {
        SetField(&bytes, kernel->stage, field, value);
      }
      for (const auto& [field, index] : step.arrays[rank]) {
        SetField(&bytes, kernel->stage, field,
                 reinterpret_cast<uintptr_t>(test.arrays[index].data()));
      }
      params.push_back(std::move(bytes));
      emu::Launch launch{};
      launch.kernel = kernel;
      launch.rank = rank;
      launch.blocks = step.blocks;
      launch.threads = kernel->threads;
      launch.shared_bytes = kernel->shared_bytes;
      if (std::string(kernel->stage) == "layout") {
        const LaunchDims dims =
            LayoutDims(kernel->few, step.blocks, test.ranks,
                       static_cast<int>(step.values[rank].at("num_experts")));
        launch.blocks = dims.blocks;
        launch.threads = dims.threads;
        launch.shared_bytes = dims.shared_bytes;
        launch.resident = launch.blocks;  // it has barriers over its grid
      } else {
        launch.resident = schedule.resident > 0 ? schedule.resident : launch.blocks;
      }
      launch.params = params.back().data();
      streams[rank].push_back(std::move(launch));
    }
  }

  emu::Machine machine(schedule, std::move(ranges));
  std::string failure = machine.Run(std::move(streams));
  for (int rank = 0; rank < test.ranks && failure.empty(); ++rank) {
    const ErrorRecord& error = errors[rank];
    if (error.written != 0) {
      std::printf("rank %d: phase %d rank %d peer %d behind %d%s\n", rank, error.phase,
                  error.rank, error.peer, error.behind,
                  schedule.hasty ? ", hasty" : "");
      if (!test.fails)
        failure = "an error record, in phase " + std::to_string(error.phase);
    }
  }
  if (failure.empty()) failure = Compare(test);
  for (uint8_t* workspace : workspaces) munmap(workspace, workspace_bytes);
  return failure;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const bool independent = std::string(argv[1]) == "independent";
  const uint64_t first = std::strtoull(argv[2], nullptr, 10);
  const uint64_t last = std::strtoull(argv[3], nullptr, 10);
  for (int i = 4; i < argc; ++i) {
    Case test = ReadCase(argv[i]);
    for (uint64_t seed = first; seed <= last; ++seed) {
      const std::string failure = RunSeed(test, seed, independent);
      if (failure.empty()) continue;
      std::printf("%s, seed %llu: %s\n", argv[i], static_cast<unsigned long long>(seed),
                  failure.c_str());
      return 1;
    }
  }
  return 0;
}
