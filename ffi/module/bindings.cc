// Python bindings of the engine: module dynaflow_xla.ffi._engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "blas_limit.h"
#include "custom_calls/handlers.h"
#include "custom_calls/registry.h"
#include "dfx/engine.h"
#include "dfx/host/openmp_team.h"
#include "dfx/host/round_trip.h"
#include "dfx/program.h"
#include "engine_error.h"
#include "python_step.h"

namespace nb = nanobind;

namespace dfx::ffi {
namespace {

// A C step that does nothing, for measuring the engine itself.
int NoOp(void*, const Buffer*, int, Buffer*, int, Lane*) { return 0; }

BufferKind ToKind(const std::string& kind) {
  if (kind == "arg") return BufferKind::kArg;
  if (kind == "result") return BufferKind::kResult;
  if (kind == "scratch") return BufferKind::kScratch;
  throw nb::value_error("kind must be arg, result or scratch");
}

nb::list RunProgram(const ProgramHandle& handle, const std::vector<uintptr_t>& args,
                    const std::vector<uintptr_t>& results, bool profile, uint64_t disturb,
                    OpenMpTeam* team, bool stay) {
  std::vector<TraceRecord> records;
  const std::vector<int>& lanes = handle.program->used_lanes();
  std::optional<FirstTurn> first;
  if (lanes.size() > 1 && lanes.front() == 0) first.emplace();
  {
    nb::gil_scoped_release release;
    BlasLimit limit(handle.limit_blas);
    records = Engine::Get().Run(handle.program, Pointers(args), Pointers(results), profile, stay,
                                disturb, team);
  }
  ReleasePending();
  nb::list trace;
  for (const TraceRecord& r : records) {
    trace.append(nb::make_tuple(r.id, r.lane, r.t0_ns, r.t1_ns));
  }
  return trace;
}

}  // namespace

void BindPrograms(nb::module_& m) {
  nb::class_<OpenMpTeam>(m, "OpenMpTeam", "The OpenMP threads of whoever runs a program with it.")
      .def(
          "__init__",
          [](OpenMpTeam* self, uintptr_t parallel, uintptr_t thread_num, uintptr_t num_threads,
             unsigned threads) {
            const OpenMp library{reinterpret_cast<decltype(OpenMp::parallel)>(parallel),
                                 reinterpret_cast<decltype(OpenMp::thread_num)>(thread_num),
                                 reinterpret_cast<decltype(OpenMp::num_threads)>(num_threads)};
            new (self) OpenMpTeam(library, threads);
          },
          nb::arg("parallel"), nb::arg("thread_num"), nb::arg("num_threads"), nb::arg("threads"),
          "Addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads of one library.");
  nb::class_<ProgramHandle>(m, "Program", "An executable form of one stage of a plan.")
      .def(
          "__init__",
          [](ProgramHandle* self, int lanes, int events, int args, int results,
             int64_t scratch_bytes, const std::string& name) {
            new (self) ProgramHandle{
                std::make_shared<Program>(lanes, events, args, results, scratch_bytes, name)};
          },
          nb::arg("lanes"), nb::arg("events"), nb::arg("args"), nb::arg("results"),
          nb::arg("scratch_bytes"), nb::arg("name"))
      .def("__repr__", [](const ProgramHandle& self) { return self.program->Describe(); })
      .def(
          "add_buffer",
          [](ProgramHandle& self, const std::string& kind, int index, int64_t offset,
             int64_t bytes) {
            return self.program->AddBuffer({ToKind(kind), index, offset, bytes});
          },
          nb::arg("kind"), nb::arg("index"), nb::arg("offset"), nb::arg("bytes"))
      .def(
          "add_python_launch",
          [](ProgramHandle& self, int lane, const std::string& name, nb::object callable,
             std::vector<int32_t> ins, std::vector<int32_t> outs) {
            return self.program->AddLaunch(
                lane, {MakePythonStep(name, callable.ptr()), std::move(ins), std::move(outs)});
          },
          nb::arg("lane"), nb::arg("name"), nb::arg("callable"), nb::arg("ins"), nb::arg("outs"))
      .def(
          "add_c_launch",
          [](ProgramHandle& self, int lane, const std::string& name, uintptr_t function,
             uintptr_t user, std::vector<int32_t> ins, std::vector<int32_t> outs) {
            auto step = MakeFunctionStep(
                name, function == 0 ? &NoOp : reinterpret_cast<StepFunction>(function),
                std::shared_ptr<void>(Pointer<void>(user), [](void*) {}));
            return self.program->AddLaunch(lane,
                                           {std::move(step), std::move(ins), std::move(outs)});
          },
          nb::arg("lane"), nb::arg("name"), nb::arg("function"), nb::arg("user"), nb::arg("ins"),
          nb::arg("outs"), "A step that is a C function of the step ABI (0: does nothing).")
      .def(
          "add_record",
          [](ProgramHandle& self, int lane, int event) { self.program->AddRecord(lane, event); },
          nb::arg("lane"), nb::arg("event"))
      .def(
          "add_wait",
          [](ProgramHandle& self, int lane, int event) { self.program->AddWait(lane, event); },
          nb::arg("lane"), nb::arg("event"))
      .def_rw("limit_blas", &ProgramHandle::limit_blas,
              "Hold BLAS to one thread while this runs; set it before register().")
      .def(
          "finish", [](ProgramHandle& self) { self.program->Finish(); },
          "Checks the program; raises ValueError saying what is wrong.")
      .def(
          "register",
          [](ProgramHandle& self, const std::string& hash, const CudaEngineHandle* cuda) {
            if (!self.program->finished()) {
              throw nb::value_error("call finish() before register()");
            }
            RegisterProgram(
                hash, {self.program, self.limit_blas, cuda == nullptr ? nullptr : cuda->engine});
          },
          nb::arg("hash"), nb::arg("cuda").none() = nb::none(),
          "Makes the program known to the custom call under `hash`, on host lanes or those of a "
          "CudaEngine, for as long as somebody owns it. Programs of one hash do the same: any of "
          "them may serve.")
      .def(
          "run", &RunProgram, nb::arg("args"), nb::arg("results"), nb::arg("profile") = false,
          nb::arg("disturb") = 0, nb::arg("team").none() = nb::none(), nb::arg("stay") = true,
          "Runs once over raw addresses; returns trace records (id, lane, start_ns, end_ns). "
          "With `disturb`, a seed: scratch filled with NaN first, lanes that pause at random. "
          "Members of `team` run the lanes in place of these' threads. With `stay` the caller "
          "keeps "
          "to its core while it runs lane 0, whose steps sleep for the interpreter lock; for steps "
          "that start no threads, which would inherit that.")
      .def(
          "add_step_record",
          [](ProgramHandle& self, int lane, int event) {
            self.program->AddStepRecord(lane, event);
          },
          nb::arg("lane"), nb::arg("event"),
          "A step of this lane signals the event itself. Said of all events that a program's steps "
          "signal or await, others may run the lane when its thread is late.")
      .def(
          "add_step_wait",
          [](ProgramHandle& self, int lane, int event) { self.program->AddStepWait(lane, event); },
          nb::arg("lane"), nb::arg("event"), "A step of this lane awaits the event itself.")
      .def(
          "name_event",
          [](ProgramHandle& self, int event, std::string text) {
            self.program->NameEvent(event, std::move(text));
          },
          nb::arg("event"), nb::arg("text"), "What an event says, for the watchdog's reports.")
      .def(
          "name_wait",
          [](ProgramHandle& self, int lane, int event, std::string text) {
            self.program->NameWait(lane, event, std::move(text));
          },
          nb::arg("lane"), nb::arg("event"), nb::arg("text"),
          "What a lane that waits for an event does next, for the same.");
}

}  // namespace dfx::ffi

NB_MODULE(_engine, m) {
  using namespace dfx;
  using namespace dfx::ffi;
  // Engine threads and XLA executables may own objects at interpreter exit; that is no leak of
  // ours.
  nb::set_leak_warnings(false);
  TranslateErrors();
  Engine::SetThreadHooks(&OnLaneStart, &OnLaneExit);

  m.doc() = "C++ engine of dynaflow_xla: programs over lanes, and the XLA custom calls.";
  m.attr("PLAN_ABI_VERSION") = kPlanAbiVersion;
  m.attr("ALIGNMENT") = kAlignment;
  m.attr("TRACE_WAIT") = kWaitTraceId;
  m.attr("TRACE_COPY") = kCopyTraceId;
  m.attr("ENGINE_ERROR_MARK") = kEngineErrorMark;

  BindPrograms(m);
  BindAoti(m);
  BindFastCall(m);
  BindCallMatch(m);
  BindCuda(m);
  m.def("is_registered",
        [](const std::string& hash) { return FindProgram(hash).program != nullptr; });
  m.def("release_pending", &ReleasePending);
  m.def("add_blas", &AddBlas, nb::arg("get_threads"), nb::arg("set_threads"),
        "A BLAS to hold to one thread while several lanes run, by its functions' addresses.");
  m.def("take_lane_stream", &TakeLaneStream,
        "The CUstream of the last dfx_lane_stream call, 0 if there was none since the last time.");
  m.def(
      "shutdown",
      []() {
        nb::gil_scoped_release release;
        Engine::Get().Shutdown();
      },
      "Waits for calls in flight, stops the lanes; later calls fail.");
  m.def(
      "stats",
      []() {
        const Engine::Stats stats = Engine::Get().stats();
        nb::dict found;
        found["live"] = stats.live;
        found["calls"] = stats.calls;
        found["failures"] = stats.failures;
        found["threads"] = stats.threads;
        found["copied_bytes"] = stats.copied_bytes;
        found["reports"] = stats.reports;
        found["scratch_bytes"] = stats.scratch_bytes;
        return found;
      },
      "What the engine counted since the process began.");
  m.def(
      "watch",
      [](double seconds) {
        Engine::Get().SetWatchdog(static_cast<int64_t>(seconds * 1e9), [](const std::string& text) {
          // One write, so that lines of several processes do not mix. Nobody can be told of
          // failure.
          if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;
        });
      },
      nb::arg("seconds"), "Calls that take longer are reported to stderr once; 0: none.");
  m.def(
      "round_trip_ns",
      []() {
        nb::gil_scoped_release release;
        return RoundTripNs();
      },
      "Nanoseconds for which a cache line goes to another core and back; 0: not known, or one "
      "core.");
  m.def("handlers", []() {
    Handlers handlers;
    AddRunHandlers(handlers);
    AddGateHandlers(handlers);
    AddCumulativeHandler(handlers);
    nb::dict capsules;
    for (const auto& [name, address] : handlers) capsules[name.c_str()] = nb::capsule(address);
    return capsules;
  });
}
