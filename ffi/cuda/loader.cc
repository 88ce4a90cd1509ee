#include "ffi/cuda/loader.h"

#include <map>
#include <mutex>
#include <utility>

#include "ffi/cuda/sha256.h"

namespace jax_ep::cuda {
namespace {

// Without opt-in a block has at most this much dynamic shared memory.
constexpr int kDefaultSharedBytes = 48 * 1024;

struct Entry {
  CUfunction function = nullptr;
  int shared_bytes = kDefaultSharedBytes;
};

}  // namespace

struct Image {
  explicit Image(std::string_view image) : bytes(image) {}

  const std::string bytes;  // the driver may read them for as long as the library lives
  std::mutex mutex;
  CUlibrary library = nullptr;
  std::map<std::pair<std::string, CUdevice>, Entry> entries;
};

Status InternImage(std::string_view name, std::string_view sha256,
                   std::string_view bytes, Image** image) {
  static std::mutex& mutex = *new std::mutex;  // both live until exit
  static auto& images = *new std::map<std::string, Image, std::less<>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = images.find(sha256);
  // What is there was verified; its own bytes again need no digest.
  if (it == images.end() || it->second.bytes != bytes) {
    const std::string digest = Sha256(bytes);
    if (digest != sha256) {
      // What is no digest may be anything, a book or a null character.
      const bool is_digest =
          sha256.size() == digest.size() &&
          sha256.find_first_not_of("0123456789abcdef") == std::string_view::npos;
      return InvalidArgument("attribute ", name, " has the sha256 ", digest, ", and ",
                             name, "_sha256 says ", is_digest ? sha256 : "another",
                             "; the program is damaged, compile or export it again.");
    }
    it = images.try_emplace(digest, bytes).first;
  }
  *image = &it->second;
  return Status();
}

Status LoadKernel(const Driver& driver, Image* image, const std::string& entry,
                  CUdevice device, int shared_bytes, CUfunction* function) {
  std::lock_guard<std::mutex> lock(image->mutex);
  if (image->library == nullptr) {
    CUlibrary library = nullptr;
    const CUresult result = driver.cuLibraryLoadData(
        &library, image->bytes.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result != 0) return driver.Failure("cuLibraryLoadData", result);
    image->library = library;
  }
  Entry& found = image->entries[{entry, device}];
  if (found.function == nullptr) {
    CUkernel kernel = nullptr;
    CUresult result = driver.cuLibraryGetKernel(&kernel, image->library, entry.c_str());
    if (result != 0) {
      return driver.Failure("cuLibraryGetKernel of " + entry, result);
    }
    CUfunction in_context = nullptr;
    result = driver.cuKernelGetFunction(&in_context, kernel);
    if (result == 0 && driver.cuFuncLoad != nullptr) {
      result = driver.cuFuncLoad(in_context);
    }
    if (result != 0) return driver.Failure("loading " + entry, result);
    found.function = in_context;
  }
  if (shared_bytes > found.shared_bytes) {
    const CUresult result = driver.cuFuncSetAttribute(
        found.function, kFunctionMaxDynamicShared, shared_bytes);
    if (result != 0) {
      return driver.Failure(
          Concat("cuFuncSetAttribute of ", shared_bytes, " bytes of shared memory"),
          result);
    }
    found.shared_bytes = shared_bytes;
  }
  *function = found.function;
  return Status();
}

}  // namespace jax_ep::cuda
