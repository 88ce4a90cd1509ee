// Starts and done: what waits for what, and which buffers they refuse.
#include <cstdint>
#include <string>
#include <vector>

#include "tests/cuda/harness.h"

namespace jax_ep::cuda {
namespace {

std::vector<StandinWait> NewWaits() {
  static int seen = 0;
  std::vector<StandinWait> found(64);
  const int all = Standin<int(int, int, StandinWait*)>(cuda_library, "standin_waits")(
      seen, static_cast<int>(found.size()), found.data());
  found.resize(all - seen);
  seen = all;
  return found;
}

Attrs DoneAttrs(const std::string& stage) {
  Attrs attrs;  // which points into itself: moved, never copied
  attrs.Int("abi_version", kAbiVersion).String("op", stage);
  attrs.Int("num_pending", stage == "dispatch" ? 2 : 1);
  return attrs;
}

// A start of one rank and its done, as one program has them.
class Pair {
 public:
  explicit Pair(const std::string& stage)
      : target_("jax_ep_" + stage),
        start_(target_ + "_start", For(target_, 1)),
        done_("jax_ep_done", DoneAttrs(stage)) {
    CHECK_EQ(start_.Instantiate(), std::string());
    AddBuffers(target_, 1, in, out);
    in.Add(kF32, {1});
    out.Add(kF32, {1});
  }

  std::string Start(CUstream stream) {
    const XLA_FFI_InvokeContext context = start_.On(0, stream, nullptr);
    std::string error = start_.Prepare(context);
    if (error.empty()) error = start_.Initialize(context);
    return error.empty() ? start_.Execute(context, in, out) : error;
  }

  // `moved` is an operand, and `copied` a result, that XLA put elsewhere.
  std::string Done(CUstream stream, int moved = -1, int copied = -1) {
    Buffers operands, results;
    const auto add = [](Buffers& to, const XLA_FFI_Buffer& buffer, bool elsewhere) {
      to.Add(buffer.dtype,
             std::vector<int64_t>(buffer.dims, buffer.dims + buffer.rank));
      if (!elsewhere) to[to.size() - 1].data = buffer.data;
    };
    for (size_t i = 1; i + 1 < in.size(); ++i) {
      add(operands, in[i], static_cast<int>(i) == moved);
    }
    for (size_t i = 0; i + 1 < out.size(); ++i) {
      add(operands, out[i], false);
      add(results, out[i], static_cast<int>(i) == copied);
    }
    add(operands, out[out.size() - 1], false);
    return done_.Execute(done_.On(0, stream, nullptr), operands, results);
  }

  Buffers in, out;

 private:
  const std::string target_;
  CallSite start_, done_;
};

TEST(start_and_done) {
  Open();
  OnLaunch(Record);
  const CUstream stream = Stream(0);
  Pair pair("dispatch");
  unsigned blocks = 0;
  for (int run = 0; run < 3; ++run) {
    CHECK_EQ(pair.Start(stream), std::string());
    std::vector<StandinWait> waits = NewWaits();
    CHECK_EQ(waits.size(), size_t{2});
    const CUstream side = waits[0].stream;
    CHECK(side != stream && waits[0].of == stream && !waits[0].external);
    CHECK(launches[stream].empty());
    CHECK_EQ(launches[side].size(), size_t(run + 1));
    const Launch& launch = launches[side].back();
    CHECK(launch.common.rank_operand == nullptr && launch.common.resident != nullptr);
    // The gate: until all blocks so far have begun.
    blocks += launch.config.grid[0];
    CHECK(waits[1].stream == stream && waits[1].of == nullptr);
    CHECK_EQ(waits[1].value, blocks);
    CHECK_EQ(pair.Done(stream), std::string());
    waits = NewWaits();
    CHECK_EQ(waits.size(), size_t{1});
    CHECK(waits[0].stream == stream && waits[0].of == side && !waits[0].external);
  }
}

TEST(plain_calls_wait_for_starts) {
  Open();
  OnLaunch(Record);
  const CUstream stream = Stream(0);
  CallSite layout("jax_ep_layout", For("jax_ep_layout", 1));
  CHECK_EQ(layout.Instantiate(), std::string());
  const XLA_FFI_InvokeContext context = layout.On(0, stream, nullptr);
  CHECK_EQ(layout.Prepare(context), std::string());
  CHECK_EQ(layout.Initialize(context), std::string());
  Buffers in, out;
  AddBuffers("jax_ep_layout", 1, in, out);
  CHECK_EQ(layout.Execute(context, in, out), std::string());
  CHECK(NewWaits().empty());
  CHECK(launches[stream].back().common.resident == nullptr);

  Pair dispatch("dispatch"), combine("combine");
  CHECK_EQ(dispatch.Start(stream), std::string());
  CHECK_EQ(combine.Start(stream), std::string());
  const CUstream side = NewWaits()[0].stream;
  CHECK_EQ(launches[side].size(), size_t{2});
  CHECK_EQ(layout.Execute(context, in, out), std::string());
  std::vector<StandinWait> waits = NewWaits();
  CHECK_EQ(waits.size(), size_t{1});
  CHECK(waits[0].stream == stream && waits[0].of == side && !waits[0].external);

  // In any order; then nothing is left to wait for.
  CHECK_EQ(combine.Done(stream), std::string());
  CHECK_EQ(dispatch.Done(stream), std::string());
  NewWaits();
  CHECK_EQ(layout.Execute(context, in, out), std::string());
  CHECK(NewWaits().empty());

  // But a graph may be captured before the starts that will run in front of it.
  Standin<void(CUstream)>(cuda_library, "standin_capture")(stream);
  CHECK_EQ(layout.Execute(context, in, out), std::string());
  waits = NewWaits();
  CHECK_EQ(waits.size(), size_t{1});
  CHECK(waits[0].stream == stream && waits[0].of == side && waits[0].external);
}

TEST(what_done_refuses) {
  Open();
  OnLaunch(Record);
  const CUstream stream = Stream(0);
  Pair dispatch("dispatch");
  CHECK_EQ(dispatch.Done(stream),
           std::string("jax_ep.dispatch_done: nothing was started on this device."));
  CHECK_EQ(dispatch.Start(stream), std::string());
  CHECK_EQ(dispatch.Done(stream, 2),
           std::string("jax_ep.dispatch_done: operand 1 is not the buffer that start "
                       "had, so it was not kept until done: the InFlight was copied "
                       "(it must not cross a scan, cond or jit)."));
  const std::string again =
      "jax_ep.dispatch_done: no start writes where this done reads: the InFlight was "
      "copied (it must not cross a scan, cond or jit), or it is done already.";
  CHECK_EQ(dispatch.Done(stream), again);
  CHECK_EQ(dispatch.Start(stream), std::string());
  CHECK_EQ(
      dispatch.Done(stream, -1, 1),
      std::string("jax_ep.dispatch_done: XLA copied what is under way: a result is "
                  "not where its operand is."));
  CHECK_EQ(dispatch.Done(stream), std::string());
}

TEST(a_start_that_is_never_done) {
  Open();
  OnLaunch(Record);
  const CUstream stream = Stream(0);
  Pair combine("combine");
  CHECK_EQ(combine.Start(stream), std::string());
  CHECK_EQ(
      combine.Start(stream),
      std::string("jax_ep.combine_start: its results would be where those of an "
                  "earlier combine_start are, which combine_done never took: every "
                  "InFlight must be done, in the function that started it (or an "
                  "earlier execution failed in between)."));
  CHECK_EQ(combine.Start(stream), std::string());
  CHECK_EQ(combine.Done(stream), std::string());
}

TEST(failed_waits) {
  Open();
  OnLaunch(Record);
  const CUstream stream = Stream(0);
  const auto fail = Standin<void(const char*, int)>(cuda_library, "standin_fail");
  Pair dispatch("dispatch");
  for (const std::string call :
       {"cuEventRecord", "cuStreamWaitEvent", "cuStreamWaitValue32"}) {
    fail(call.c_str(), 999);
    Contains(dispatch.Start(stream), "jax_ep.dispatch_start: " + call + ": CUDA_ERROR");
    fail(call.c_str(), 0);
  }
  CHECK_EQ(dispatch.Start(stream), std::string());
  CHECK_EQ(dispatch.Done(stream), std::string());
}

}  // namespace
}  // namespace jax_ep::cuda
