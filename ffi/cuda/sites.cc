#include "ffi/cuda/sites.h"

#include <map>
#include <mutex>

#include "ffi/cuda/workspace.h"

namespace jax_ep::cuda {
namespace {

struct Sites {
  std::mutex mutex;
  std::map<uint64_t, std::string> texts;
};

Sites& AllSites() {
  static Sites& sites = *new Sites;  // lives until exit
  return sites;
}

}  // namespace

uint64_t NumberSite(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  const uint64_t number = (hash ^ hash >> 32) & ((uint64_t{1} << kSiteBits) - 1);
  Sites& sites = AllSites();
  std::lock_guard<std::mutex> lock(sites.mutex);
  sites.texts.emplace(number, text);
  return number;
}

std::string DescribeSite(uint64_t number) {
  Sites& sites = AllSites();
  std::lock_guard<std::mutex> lock(sites.mutex);
  const auto found = sites.texts.find(number);
  return found != sites.texts.end() ? found->second
                                    : "a call that this process has not made";
}

}  // namespace jax_ep::cuda
