// Custom calls that dynaflow_xla installs into XLA.
//
//   dfx_run   in the outer program: runs one stage of a plan on the engine's lanes and returns when
//             every lane is done. Its `plan` attribute is a content hash, resolved when XLA builds
//             the executable; the program then lives as long as that executable.
//   dfx_gate  inside a lane program: waits for events, copies tensors in from shared memory, copies
//             tensors out to it, signals events; in that order. The gates of a lane are chained by
//             their first operand, so they run in lane order whatever XLA does around them. Shared
//             memory is touched by gates only, hence lane order plus events order every access.
//   dfx_fail  returns an error if its operand is non-zero: fault injection for tests.
#include "xla_handlers.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "blas_limit.h"
#include "dfx/call.h"
#include "dfx/engine.h"
#include "dfx/lane.h"
#include "engine_error.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace dfx::ffi {
namespace {

namespace xf = ::xla::ffi;

struct RunState {
  static xf::TypeId id;
  static xf::TypeInfo info;
  explicit RunState(Registered r) : registered(std::move(r)) {}
  Registered registered;
};
xf::TypeId RunState::id = {};
xf::TypeInfo RunState::info = xf::MakeTypeInfo<RunState>();

xf::ErrorOr<std::unique_ptr<RunState>> RunInstantiate(std::string_view plan) {
  Registered registered = FindProgram(std::string(plan));
  if (registered.program == nullptr) {
    return xf::Unexpected(
        xf::Error(xf::ErrorCode::kFailedPrecondition,
                  std::string(kEngineErrorMark) + "no plan " + std::string(plan) +
                      " is known to this process. A compiled program that holds a schedule cannot "
                      "be loaded from a cache or another process: schedule the function again, or "
                      "compile the original, fast.original."));
  }
  return std::make_unique<RunState>(std::move(registered));
}

xf::Error RunExecute(RunState* state, xf::RemainingArgs args, xf::RemainingRets rets,
                     std::string_view /*plan*/) {
  if (std::string misfit = state->registered.program->CheckCounts(args.size(), rets.size());
      !misfit.empty()) {
    return xf::Error(xf::ErrorCode::kInternal, kEngineErrorMark + misfit);
  }
  std::vector<void*> arg_data(args.size()), ret_data(rets.size());
  for (size_t i = 0; i < args.size(); ++i) {
    arg_data[i] = args.get<xf::AnyBuffer>(i).value().untyped_data();
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    ret_data[i] = rets.get<xf::AnyBuffer>(i).value()->untyped_data();
  }
  const std::shared_ptr<const Program>& program = state->registered.program;
  BlasLimit limit(state->registered.limit_blas && program->used_lanes().size() > 1);
  Engine::Result result = Engine::Get().Run(program, arg_data.data(), ret_data.data());
  if (!result.ok) {
    return xf::Error(xf::ErrorCode::kInternal, kEngineErrorMark + result.error);
  }
  return xf::Error::Success();
}

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Trace ids: the region's number, or one of these kinds with an event or region number.
constexpr int kTraceWait = 1 << 24;
constexpr int kTraceCopy = 1 << 25;

// End of the previous thing a lane did. One slot a lane is enough, because a lane runs one call at
// a time and its gates are chained.
constexpr int kMaxLanes = 256;
int64_t lane_clock[kMaxLanes];

xf::Error Gate(xf::RemainingArgs args, xf::RemainingRets rets, int64_t lane_index, int64_t deps,
               xf::Span<const int64_t> waits, xf::Span<const int64_t> ins,
               xf::Span<const int64_t> outs, xf::Span<const int64_t> records, int64_t stamp,
               int64_t done) {
  Lane* lane = Engine::Get().lane(static_cast<int>(lane_index));
  Call* call = lane->current();
  if (call == nullptr) {
    return xf::Error(xf::ErrorCode::kInternal, "a lane program ran outside the engine");
  }
  const bool profile = call->profile() && lane_index < kMaxLanes;
  int64_t now = profile ? NowNs() : 0;
  if (profile) {
    if (stamp >= 0) {
      call->Trace(static_cast<int>(stamp), static_cast<int>(lane_index), lane_clock[lane_index],
                  now);
    }
    lane_clock[lane_index] = now;
  }
  for (int64_t event : waits) {
    if (!call->WaitEvent(static_cast<int>(event))) {
      return xf::Error(xf::ErrorCode::kAborted, "another lane failed: " + call->error());
    }
    if (profile) {
      now = NowNs();
      call->Trace(kTraceWait + static_cast<int>(event), static_cast<int>(lane_index),
                  lane_clock[lane_index], now);
      lane_clock[lane_index] = now;
    }
  }
  // The chain value carries no data: its result is left as it is. Results follow it.
  for (size_t i = 0; i < ins.size(); ++i) {
    xf::Result<xf::AnyBuffer> dst = rets.get<xf::AnyBuffer>(i + 1).value();
    if (dst->size_bytes() == 0) continue;
    std::memcpy(dst->untyped_data(), call->BufferData(static_cast<int>(ins[i])), dst->size_bytes());
  }
  for (size_t i = 0; i < outs.size(); ++i) {
    xf::AnyBuffer src = args.get<xf::AnyBuffer>(1 + static_cast<size_t>(deps) + i).value();
    if (src.size_bytes() == 0) continue;
    std::memcpy(call->BufferData(static_cast<int>(outs[i])), src.untyped_data(), src.size_bytes());
  }
  if (profile && ins.size() + outs.size() > 0) {
    now = NowNs();
    call->Trace(kTraceCopy + static_cast<int>(stamp < 0 ? 0 : stamp), static_cast<int>(lane_index),
                lane_clock[lane_index], now);
    lane_clock[lane_index] = now;
  }
  for (int64_t event : records) call->RecordEvent(static_cast<int>(event));
  if (done != 0) call->LaneDone(static_cast<int>(lane_index));
  return xf::Error::Success();
}

xf::Error Fail(xf::AnyBuffer flag, xf::Result<xf::AnyBuffer> out) {
  int32_t value = 0;
  std::memcpy(&value, flag.untyped_data(), sizeof(value));
  std::memcpy(out->untyped_data(), &value, sizeof(value));
  if (value != 0)
    return xf::Error(xf::ErrorCode::kInternal, "injected fault " + std::to_string(value));
  return xf::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kRunInstantiate, RunInstantiate,
                       xf::Ffi::BindInstantiate().Attr<std::string_view>("plan"));
XLA_FFI_DEFINE_HANDLER(kRunExecute, RunExecute,
                       xf::Ffi::Bind()
                           .Ctx<xf::State<RunState>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("plan"));
XLA_FFI_DEFINE_HANDLER(kGate, Gate,
                       xf::Ffi::Bind()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("lane")
                           .Attr<int64_t>("deps")
                           .Attr<xf::Span<const int64_t>>("waits")
                           .Attr<xf::Span<const int64_t>>("ins")
                           .Attr<xf::Span<const int64_t>>("outs")
                           .Attr<xf::Span<const int64_t>>("records")
                           .Attr<int64_t>("stamp")
                           .Attr<int64_t>("done"));
XLA_FFI_DEFINE_HANDLER(kFail, Fail, xf::Ffi::Bind().Arg<xf::AnyBuffer>().Ret<xf::AnyBuffer>());

}  // namespace

void* RunInstantiateHandler() { return reinterpret_cast<void*>(kRunInstantiate); }
void* RunExecuteHandler() { return reinterpret_cast<void*>(kRunExecute); }
void* GateHandler() { return reinterpret_cast<void*>(kGate); }
void* FailHandler() { return reinterpret_cast<void*>(kFail); }
void* StateTypeId() { return &RunState::id; }
void* StateTypeInfo() { return &RunState::info; }

}  // namespace dfx::ffi
