#include "ffi/cuda/done.h"

#include <cstdint>
#include <string>
#include <string_view>

#include "ffi/attributes.h"
#include "ffi/cuda/driver.h"
#include "ffi/cuda/frame.h"
#include "ffi/cuda/in_flight.h"
#include "ffi/status.h"

namespace jax_ep::cuda {
namespace {

// What the start with these operands writes is the result, from here on.
Status Join(CUstream stream, const ffi::RemainingArgs& args,
            const ffi::RemainingRets& rets, const std::string& op,
            int64_t num_pending) {
  const size_t num_results = rets.size();
  if (num_pending < 1 || static_cast<size_t>(num_pending) != num_results ||
      args.size() < num_results + 1) {
    return InvalidArgument("num_pending (=", num_pending, ") must be the ", num_results,
                           " results, and at most the ", args.size(),
                           " operands but one.");
  }
  const size_t num_operands = args.size() - num_results - 1;
  const Flight flight{op, Addresses(args, 0, num_operands),
                      Addresses(rets, 0, num_results)};
  if (flight.results != Addresses(args, num_operands, args.size() - 1)) {
    return FailedPrecondition(
        "XLA copied what is under way: a result is not where its operand is.");
  }
  const Driver& driver = Driver::Get();
  if (!driver.status.ok()) return driver.status;
  CUcontext context = nullptr;
  if (CUresult result = driver.cuStreamGetCtx(stream, &context)) {
    return driver.Failure("cuStreamGetCtx", result);
  }
  SideStream* side = SideStream::Find(context);
  if (side == nullptr) {
    return FailedPrecondition("nothing was started on this device.");
  }
  ScopedContext current(driver, context);
  return side->Join(driver, stream, flight);
}

ffi::Error ExecuteDone(CUstream stream, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, ffi::Dictionary dictionary) {
  Attributes attrs(dictionary);
  Status status = CheckVersion(attrs);
  const std::string op(attrs.Get<std::string_view>("op"));
  const int64_t num_pending = attrs.Get<int64_t>("num_pending");
  if (status.ok()) status = attrs.status();
  if (status.ok()) status = Join(stream, args, rets, op, num_pending);
  if (status.ok()) return ffi::Error::Success();
  return ToFfi(status.Within(OpName(op.empty() ? "done" : op + "_done")));
}

}  // namespace

XLA_FFI_Error* DoneHandler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, ExecuteDone,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<CUstream>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs());
  return Guarded(frame, handler);
}

}  // namespace jax_ep::cuda
