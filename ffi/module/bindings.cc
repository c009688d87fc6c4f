// Python bindings of the engine: module dynaflow_xla.ffi._engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "aoti.h"
#include "blas_limit.h"
#include "cuda_handlers.h"
#include "dfx/cuda_engine.h"
#include "dfx/engine.h"
#include "dfx/lane.h"
#include "dfx/program.h"
#include "dfx/version.h"
#include "engine_error.h"
#include "fast_call.h"
#include "order_gate.h"
#include "program_handle.h"
#include "python_launcher.h"
#include "registry.h"
#include "xla_handlers.h"

namespace nb = nanobind;

namespace dfx::ffi {
namespace {

// A C step that does nothing, for measuring the engine itself.
int NoOp(void*, const Buffer*, int, Buffer*, int, Lane*) { return 0; }

nb::object RunProgram(const ProgramHandle& handle, const std::vector<uintptr_t>& args,
                      const std::vector<uintptr_t>& results, bool profile) {
  RequireRunnable(handle, args.size(), results.size());
  std::vector<void*> arg_data, result_data;
  for (uintptr_t p : args) arg_data.push_back(reinterpret_cast<void*>(p));
  for (uintptr_t p : results) result_data.push_back(reinterpret_cast<void*>(p));
  Engine::Result result;
  {
    nb::gil_scoped_release release;
    BlasLimit limit(handle.limit_blas && handle.program->used_lanes().size() > 1);
    // Steps run from Python are Python steps: they sleep for the interpreter lock.
    result = Engine::Get().Run(handle.program, arg_data.data(), result_data.data(), profile, true);
  }
  ReleasePending();
  if (!result.ok) ThrowEngineError(result.error);
  nb::list trace;
  for (const TraceRecord& r : result.trace) {
    trace.append(nb::make_tuple(r.id, r.lane, r.t0_ns, r.t1_ns));
  }
  return trace;
}

nb::capsule FunctionCapsule(void* address) { return nb::capsule(address); }

}  // namespace
}  // namespace dfx::ffi

NB_MODULE(_engine, m) {
  using namespace dfx;
  using namespace dfx::ffi;
  // Engine threads and XLA executables may own objects at interpreter exit; that is no leak of
  // ours.
  nb::set_leak_warnings(false);
  Engine::SetThreadHooks(&OnLaneStart, &OnLaneExit);

  m.doc() = "C++ engine of dynaflow_xla: programs over lanes, and the XLA custom calls.";
  m.attr("PLAN_ABI_VERSION") = static_cast<int>(kPlanAbiVersion);
  m.attr("ENGINE_ERROR_MARK") = kEngineErrorMark;

  nb::class_<ProgramHandle>(m, "Program", "An executable form of one stage of a plan.")
      .def(
          "__init__",
          [](ProgramHandle* self, int lanes, int events, int args, int results,
             int64_t scratch_bytes, const std::string& name) {
            new (self) ProgramHandle{
                std::make_shared<Program>(lanes, events, args, results, scratch_bytes, name), false,
                false};
          },
          nb::arg("lanes"), nb::arg("events"), nb::arg("args"), nb::arg("results"),
          nb::arg("scratch_bytes"), nb::arg("name"))
      .def(
          "add_buffer",
          [](ProgramHandle& self, const std::string& kind, int index, int64_t offset,
             int64_t bytes) {
            RequireOpen(self);
            BufferKind k;
            if (kind == "arg") {
              k = BufferKind::kArg;
            } else if (kind == "result") {
              k = BufferKind::kResult;
            } else if (kind == "scratch") {
              k = BufferKind::kScratch;
            } else {
              throw nb::value_error("kind must be arg, result or scratch");
            }
            return self.program->AddBuffer(BufferDesc{k, index, offset, bytes, 0, {}});
          },
          nb::arg("kind"), nb::arg("index"), nb::arg("offset"), nb::arg("bytes"))
      .def(
          "add_python_launch",
          [](ProgramHandle& self, int lane, const std::string& name, nb::object callable,
             std::vector<int32_t> ins, std::vector<int32_t> outs) {
            RequireOpen(self);
            return self.program->AddLaunch(
                lane, LaunchDesc{name, MakePythonLauncher(callable.ptr()), std::move(ins),
                                 std::move(outs)});
          },
          nb::arg("lane"), nb::arg("name"), nb::arg("callable"), nb::arg("ins"), nb::arg("outs"))
      .def(
          "add_c_launch",
          [](ProgramHandle& self, int lane, const std::string& name, uintptr_t function,
             uintptr_t user, std::vector<int32_t> ins, std::vector<int32_t> outs) {
            RequireOpen(self);
            Launcher launcher{function == 0 ? &NoOp : reinterpret_cast<LaunchFn>(function),
                              std::shared_ptr<void>(reinterpret_cast<void*>(user), [](void*) {})};
            return self.program->AddLaunch(
                lane, LaunchDesc{name, std::move(launcher), std::move(ins), std::move(outs)});
          },
          nb::arg("lane"), nb::arg("name"), nb::arg("function"), nb::arg("user"), nb::arg("ins"),
          nb::arg("outs"), "A step that is a C function of the step ABI (0: does nothing).")
      .def(
          "add_record",
          [](ProgramHandle& self, int lane, int event) {
            RequireOpen(self);
            self.program->AddRecord(lane, event);
          },
          nb::arg("lane"), nb::arg("event"))
      .def(
          "add_wait",
          [](ProgramHandle& self, int lane, int event) {
            RequireOpen(self);
            self.program->AddWait(lane, event);
          },
          nb::arg("lane"), nb::arg("event"))
      .def_rw("limit_blas", &ProgramHandle::limit_blas,
              "Hold BLAS to one thread while this runs on several lanes; set it before register().")
      .def(
          "finish",
          [](ProgramHandle& self) {
            RequireOpen(self);
            std::string error = self.program->Finish();
            if (!error.empty()) throw nb::value_error(error.c_str());
            self.finished = true;
          },
          "Checks the program; raises ValueError saying what is wrong.")
      .def(
          "register",
          [](ProgramHandle& self, const std::string& hash, const CudaEngineHandle* cuda) {
            if (!self.finished) throw nb::value_error("call finish() before register()");
            RegisterProgram(
                hash, {self.program, self.limit_blas, cuda == nullptr ? nullptr : cuda->engine});
          },
          nb::arg("hash"), nb::arg("cuda").none() = nb::none(),
          "Makes the program known to the custom call under `hash`, on host lanes or those of a "
          "CudaEngine, for as long as somebody owns it. Programs of one hash do the same: any of "
          "them may serve.")
      .def("run", &RunProgram, nb::arg("args"), nb::arg("results"), nb::arg("profile") = false,
           "Runs once over raw addresses; returns trace records (id, lane, start_ns, end_ns).");

  BindAoti(m);
  BindFastCall(m);
  BindCuda(m);
  m.def("is_registered",
        [](const std::string& hash) { return FindProgram(hash).program != nullptr; });
  m.def("release_pending", &ReleasePending);
  m.def("take_gil_wait", []() {
    GilWait wait = TakeGilWait();
    return nb::make_tuple(wait.last_ns, wait.max_ns);
  });
  m.def("add_blas", &AddBlas, nb::arg("get_threads"), nb::arg("set_threads"),
        "A BLAS to hold to one thread while several lanes run, by its functions' addresses.");
  m.def("take_lane_stream", &TakeLaneStream,
        "The CUstream of the last dfx_lane_stream call, 0 if there was none since the last time.");
  m.def("live_calls", []() { return Engine::Get().live_calls(); });
  m.def(
      "shutdown",
      []() {
        nb::gil_scoped_release release;
        Engine::Get().Shutdown();
      },
      "Waits for calls in flight, stops the lanes; later calls fail.");
  m.def("handlers", []() {
    nb::dict d;
    d["run_instantiate"] = FunctionCapsule(RunInstantiateHandler());
    d["run_execute"] = FunctionCapsule(RunExecuteHandler());
    d["gate"] = FunctionCapsule(GateHandler());
    d["fail"] = FunctionCapsule(FailHandler());
    d["order_gate"] = FunctionCapsule(OrderGateHandler());
    d["cuda_run_instantiate"] = FunctionCapsule(CudaRunInstantiateHandler());
    d["cuda_run_execute"] = FunctionCapsule(CudaRunExecuteHandler());
    d["cuda_run_graph"] = FunctionCapsule(CudaRunGraphHandler());
    d["cuda_state_type_id"] = FunctionCapsule(CudaStateTypeId());
    d["cuda_state_type_info"] = FunctionCapsule(CudaStateTypeInfo());
    d["lane_stream"] = FunctionCapsule(LaneStreamHandler());
    d["state_type_id"] = FunctionCapsule(StateTypeId());
    d["state_type_info"] = FunctionCapsule(StateTypeInfo());
    return d;
  });
}
