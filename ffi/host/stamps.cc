#include "ffi/host/stamps.h"

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace jax_ep::host {
namespace {

struct Kept {
  std::mutex mutex;
  std::map<std::pair<std::string, int>, StampRecord> records;
};

Kept& AllKept() {
  static Kept& kept = *new Kept;  // lives until exit
  return kept;
}

}  // namespace

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void KeepStamps(const char* stage, int rank, int64_t arrived, int64_t began,
                int64_t ended) {
  Kept& kept = AllKept();
  std::lock_guard<std::mutex> lock(kept.mutex);
  kept.records[{stage, rank}] = {
      stage, rank, rank, {"arrived", "began", "ended"}, {arrived, began, ended}};
}

std::vector<StampRecord> TakeStamps() {
  Kept& kept = AllKept();
  std::lock_guard<std::mutex> lock(kept.mutex);
  std::vector<StampRecord> records;
  for (auto& [key, record] : kept.records) records.push_back(std::move(record));
  kept.records.clear();
  return records;
}

}  // namespace jax_ep::host
