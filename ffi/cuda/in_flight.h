// Calls between their start and their done. A start's kernel runs on a stream of our
// own, one a device, in the order of the starts; done makes XLA's stream wait for it.
#ifndef JAX_EP_FFI_CUDA_IN_FLIGHT_H_
#define JAX_EP_FFI_CUDA_IN_FLIGHT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/cuda/driver.h"
#include "ffi/status.h"

namespace jax_ep::cuda {

// The buffers of a call under way. Nobody else may have them until it is done.
struct Flight {
  std::string op;
  std::vector<const void*> operands;
  std::vector<const void*> results;
};

class SideStream {
 public:
  // That of a context, made by the first call.
  static Status Obtain(const Driver& driver, CUcontext context, SideStream** side);

  // That of a context if it was made, else null.
  static SideStream* Find(CUcontext context);

  // From now on calls that are captured into graphs wait for starts, too: XLA may
  // capture them before it has run the starts of the same program.
  static void ExpectStarts();
  static bool ExpectsStarts();

  // Makes the side stream wait for what `from` holds now. The kernel is then to be
  // launched on `stream()`, with `resident()` as its parameter.
  Status Fork(const Driver& driver, CUstream from, const Flight& flight);

  // Notes a launch of `num_blocks` blocks. `from` goes on once all of them run: what it
  // launches next would take the room that they need, and keep it.
  Status Launched(const Driver& driver, CUstream from, unsigned num_blocks,
                  Flight flight);

  // Makes `to` wait for the flight with these buffers, which must be as start had them.
  Status Join(const Driver& driver, CUstream to, const Flight& found);

  // Makes `to` wait for every start so far.
  Status AwaitAll(const Driver& driver, CUstream to);

  CUstream stream() const { return stream_; }
  CUdeviceptr resident() const { return resident_; }

 private:
  struct Entry {
    Flight flight;
    CUevent landed;
  };

  SideStream() = default;
  Status Open(const Driver& driver, CUcontext context);
  Status TakeEvent(const Driver& driver, CUevent* event);

  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent forked_ = nullptr;  // what a start waits for
  CUevent landed_ = nullptr;  // the last start's end
  CUdeviceptr resident_ = 0;  // counts blocks of starts that have begun
  uint32_t blocks_ = 0;       // what it will be; wraps as it does
  std::mutex mutex_;
  std::map<const void*, Entry> flights_;  // by first result
  std::vector<CUevent> events_;           // of flights that are done
};

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_IN_FLIGHT_H_
