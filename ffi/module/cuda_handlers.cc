// Custom calls that dynaflow_xla installs into XLA for CUDA.
//
//   dfx_run, dfx_run_graph   in the outer program: enqueue one stage of a plan on the engine's
//   lanes,
//                between a fork from XLA's stream and a join with it; nothing waits. The last
//                result is the stage's scratch, so that XLA plans its memory, and it outlives the
//                call in a recorded graph. dfx_run_graph declares itself fit for XLA's command
//                buffers: for plans of kernels only, since XLA executables cannot be captured.
//   dfx_lane_stream          inside a lane's client: notes which stream that client computes on.
#include "cuda_handlers.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dfx/cuda_engine.h"
#include "engine_error.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace dfx::ffi {
namespace {

namespace xf = ::xla::ffi;

// Apart from the CPU's state: each platform's runtime gives the type a number of its own.
struct CudaRunState {
  static xf::TypeId id;
  static xf::TypeInfo info;
  explicit CudaRunState(Registered r) : registered(std::move(r)) {}
  Registered registered;
};
xf::TypeId CudaRunState::id = {};
xf::TypeInfo CudaRunState::info = xf::MakeTypeInfo<CudaRunState>();

xf::ErrorOr<std::unique_ptr<CudaRunState>> Instantiate(std::string_view plan) {
  Registered registered = FindProgram(std::string(plan));
  if (registered.program == nullptr || registered.cuda == nullptr) {
    return xf::Unexpected(xf::Error(
        xf::ErrorCode::kFailedPrecondition,
        std::string(kEngineErrorMark) + "no plan " + std::string(plan) +
            " for CUDA is known to this process. A compiled program that holds a schedule cannot "
            "be loaded from a cache or another process: schedule the function again, or "
            "compile the original, fast.original."));
  }
  return std::make_unique<CudaRunState>(std::move(registered));
}

xf::Error Execute(void* stream, int32_t device, CudaRunState* state, xf::RemainingArgs args,
                  xf::RemainingRets rets, std::string_view /*plan*/) {
  const Registered& registered = state->registered;
  // The scratch comes last; without a result there is none.
  const size_t n_results = rets.size() == 0 ? SIZE_MAX : rets.size() - 1;
  if (std::string misfit = registered.program->CheckCounts(args.size(), n_results);
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
  void* scratch = ret_data.back();
  Engine::Result result = registered.cuda->Run(registered.program, arg_data.data(), ret_data.data(),
                                               static_cast<CUstream_st*>(stream), scratch, device);
  if (result.ok) return xf::Error::Success();
  return xf::Error(xf::ErrorCode::kInternal, kEngineErrorMark + result.error);
}

std::atomic<uintptr_t> lane_stream{0};

xf::Error LaneStream(void* stream, xf::AnyBuffer, xf::Result<xf::AnyBuffer>) {
  lane_stream.store(reinterpret_cast<uintptr_t>(stream));
  return xf::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       xf::Ffi::BindInstantiate().Attr<std::string_view>("plan"));
XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       xf::Ffi::Bind()
                           .Ctx<xf::PlatformStream<void*>>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Ctx<xf::State<CudaRunState>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("plan"));
XLA_FFI_DEFINE_HANDLER(kExecuteGraph, Execute,
                       xf::Ffi::Bind()
                           .Ctx<xf::PlatformStream<void*>>()
                           .Ctx<xf::DeviceOrdinal>()
                           .Ctx<xf::State<CudaRunState>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("plan"),
                       {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kLaneStream, LaneStream,
    xf::Ffi::Bind().Ctx<xf::PlatformStream<void*>>().Arg<xf::AnyBuffer>().Ret<xf::AnyBuffer>());

}  // namespace

void* CudaRunInstantiateHandler() { return reinterpret_cast<void*>(kInstantiate); }
void* CudaRunExecuteHandler() { return reinterpret_cast<void*>(kExecute); }
void* CudaRunGraphHandler() { return reinterpret_cast<void*>(kExecuteGraph); }
void* CudaStateTypeId() { return &CudaRunState::id; }
void* CudaStateTypeInfo() { return &CudaRunState::info; }
void* LaneStreamHandler() { return reinterpret_cast<void*>(kLaneStream); }
uintptr_t TakeLaneStream() { return lane_stream.exchange(0); }

}  // namespace dfx::ffi
