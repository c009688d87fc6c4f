// dfx_run and dfx_run_graph, on a CPU and on CUDA.
//
// The `plan` attribute is a content hash, resolved when XLA builds the executable; the program then
// lives as long as that executable. On a CPU the call returns when every lane is done. On CUDA it
// enqueues the stage between a fork from XLA's stream and a join with it, and nothing waits; the
// last result is the stage's scratch, so that XLA plans its memory, and it outlives the call in a
// recorded graph. dfx_run_graph declares itself fit for XLA's command buffers: for plans of kernels
// only, since XLA executables cannot be captured.
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "blas_limit.h"
#include "custom_calls/handlers.h"
#include "custom_calls/registry.h"
#include "dfx/cuda/cuda_engine.h"
#include "dfx/engine.h"
#include "dfx/error.h"

namespace dfx::ffi {
namespace {

enum class Platform { kCpu, kCuda };

// What XLA keeps for an executable. A type for each platform, whose runtime numbers it.
template <Platform kPlatform>
struct RunState {
  static xf::TypeId id;
  static xf::TypeInfo info;
  Registered registered;
};
template <Platform kPlatform>
xf::TypeId RunState<kPlatform>::id = {};
template <Platform kPlatform>
xf::TypeInfo RunState<kPlatform>::info = xf::MakeTypeInfo<RunState>();

template <Platform kPlatform>
xf::ErrorOr<std::unique_ptr<RunState<kPlatform>>> Instantiate(std::string_view plan) {
  constexpr bool kCuda = kPlatform == Platform::kCuda;
  auto state = std::make_unique<RunState<kPlatform>>();
  xf::Error error = Guarded(xf::ErrorCode::kFailedPrecondition, kEngineErrorMark, [&] {
    state->registered = FindProgram(std::string(plan));
    if (state->registered.program == nullptr || (kCuda && state->registered.cuda == nullptr)) {
      throw Error("no plan " + std::string(plan) + (kCuda ? " for CUDA" : "") +
                  " is known to this process. A compiled program that holds a schedule cannot be "
                  "loaded from a cache or another process: schedule the function again, or compile "
                  "the original, fast.original.");
    }
    return xf::Error::Success();
  });
  if (error.failure()) return xf::Unexpected(std::move(error));
  return state;
}

// The addresses of a call's arguments and results.
struct Memory {
  std::vector<void*> args, results;
  Memory(const xf::RemainingArgs& given, const xf::RemainingRets& wanted)
      : args(given.size()), results(wanted.size()) {
    for (size_t i = 0; i < args.size(); ++i) {
      args[i] = given.get<xf::AnyBuffer>(i).value().untyped_data();
    }
    for (size_t i = 0; i < results.size(); ++i) {
      results[i] = wanted.get<xf::AnyBuffer>(i).value()->untyped_data();
    }
  }
};

xf::Error RunOnHost(RunState<Platform::kCpu>* state, xf::RemainingArgs args, xf::RemainingRets rets,
                    std::string_view /*plan*/) {
  return Guarded(xf::ErrorCode::kInternal, kEngineErrorMark, [&] {
    const Registered& registered = state->registered;
    const Memory memory(args, rets);
    BlasLimit limit(registered.limit_blas);
    Engine::Get().Run(registered.program, memory.args, memory.results);
    return xf::Error::Success();
  });
}

xf::Error RunOnCuda(void* stream, int32_t device, RunState<Platform::kCuda>* state,
                    xf::RemainingArgs args, xf::RemainingRets rets, std::string_view /*plan*/) {
  return Guarded(xf::ErrorCode::kInternal, kEngineErrorMark, [&] {
    const Registered& registered = state->registered;
    const Memory memory(args, rets);
    std::span<void* const> results = memory.results;
    if (results.empty()) throw Error("the custom call has no result for the stage's scratch");
    registered.cuda->Run(registered.program, memory.args, results.first(results.size() - 1),
                         static_cast<CUstream_st*>(stream), results.back(), device);
    return xf::Error::Success();
  });
}

std::atomic<uintptr_t> lane_stream{0};

xf::Error LaneStream(void* stream, xf::AnyBuffer, xf::Result<xf::AnyBuffer>) {
  lane_stream.store(reinterpret_cast<uintptr_t>(stream));
  return xf::Error::Success();
}

auto BindOnCuda() {
  return xf::Ffi::Bind()
      .Ctx<xf::PlatformStream<void*>>()
      .Ctx<xf::DeviceOrdinal>()
      .Ctx<xf::State<RunState<Platform::kCuda>>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<std::string_view>("plan");
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate<Platform::kCpu>,
                       xf::Ffi::BindInstantiate().Attr<std::string_view>("plan"));
XLA_FFI_DEFINE_HANDLER(kExecute, RunOnHost,
                       xf::Ffi::Bind()
                           .Ctx<xf::State<RunState<Platform::kCpu>>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("plan"));
XLA_FFI_DEFINE_HANDLER(kCudaInstantiate, Instantiate<Platform::kCuda>,
                       xf::Ffi::BindInstantiate().Attr<std::string_view>("plan"));
XLA_FFI_DEFINE_HANDLER(kCudaExecute, RunOnCuda, BindOnCuda());
XLA_FFI_DEFINE_HANDLER(kCudaExecuteGraph, RunOnCuda, BindOnCuda(),
                       {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kLaneStream, LaneStream,
    xf::Ffi::Bind().Ctx<xf::PlatformStream<void*>>().Arg<xf::AnyBuffer>().Ret<xf::AnyBuffer>());

}  // namespace

void AddRunHandlers(Handlers& handlers) {
  handlers["run_instantiate"] = reinterpret_cast<void*>(kInstantiate);
  handlers["run_execute"] = reinterpret_cast<void*>(kExecute);
  handlers["state_type_id"] = &RunState<Platform::kCpu>::id;
  handlers["state_type_info"] = &RunState<Platform::kCpu>::info;
  handlers["cuda_run_instantiate"] = reinterpret_cast<void*>(kCudaInstantiate);
  handlers["cuda_run_execute"] = reinterpret_cast<void*>(kCudaExecute);
  handlers["cuda_run_graph"] = reinterpret_cast<void*>(kCudaExecuteGraph);
  handlers["cuda_state_type_id"] = &RunState<Platform::kCuda>::id;
  handlers["cuda_state_type_info"] = &RunState<Platform::kCuda>::info;
  handlers["lane_stream"] = reinterpret_cast<void*>(kLaneStream);
}

uintptr_t TakeLaneStream() { return lane_stream.exchange(0); }

}  // namespace dfx::ffi
