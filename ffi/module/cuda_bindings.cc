// Python bindings of what runs on CUDA lanes: the engine, user kernels, and XLA executables driven
// through the PJRT C API (those on host lanes as well).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "dfx/cuda/cuda_engine.h"
#include "dfx/cuda/cuda_streams.h"
#include "dfx/cuda/kernel.h"
#include "dfx/pjrt.h"
#include "python_step.h"

namespace nb = nanobind;

namespace dfx::ffi {
namespace {

using Size3 = std::tuple<unsigned, unsigned, unsigned>;

std::string CudaProblem() {
  try {
    return CudaDeviceCount() > 0 ? "" : "the CUDA driver sees no device";
  } catch (const std::exception& error) {
    return error.what();
  }
}

CudaEngineHandle* MakeEngine(int device, std::vector<int> priorities,
                             const std::vector<uintptr_t>& streams, std::vector<int> sms,
                             bool check_steps) {
  CudaEngine::Options options;
  options.device = device;
  options.priorities = std::move(priorities);
  options.sms = std::move(sms);
  options.check_steps = check_steps;
  for (uintptr_t stream : streams) options.streams.push_back(Pointer<CUstream_st>(stream));
  return new CudaEngineHandle{std::make_shared<CudaEngine>(std::move(options))};
}

void RunOnDevice(const CudaEngineHandle& engine, const ProgramHandle& handle,
                 const std::vector<uintptr_t>& args, const std::vector<uintptr_t>& results,
                 uintptr_t stream, uintptr_t scratch, int device) {
  nb::gil_scoped_release release;
  engine.engine->Run(handle.program, Pointers(args), Pointers(results),
                     Pointer<CUstream_st>(stream), Pointer<void>(scratch), device);
}

KernelParameter MakeParameter(nb::handle parameter) {
  if (nb::isinstance<nb::bytes>(parameter)) {
    const auto bytes = nb::cast<nb::bytes>(parameter);
    return {KernelParameter::kConstant, 0, {bytes.c_str(), bytes.c_str() + bytes.size()}};
  }
  std::pair<std::string, int> named;
  try {
    const auto tuple = nb::cast<nb::tuple>(parameter);
    named = {nb::cast<std::string>(tuple[0]), nb::cast<int>(tuple[1])};
  } catch (const std::exception&) {
    named.first.clear();
  }
  if (named.first == "in") return {KernelParameter::kInput, named.second, {}};
  if (named.first == "out") return {KernelParameter::kOutput, named.second, {}};
  throw nb::value_error("a kernel parameter must be ('in', i), ('out', i) or the constant's bytes");
}

int AddKernel(const CudaEngineHandle& engine, ProgramHandle& handle, int lane,
              const std::string& name, const nb::bytes& image, const std::string& kernel,
              Size3 grid, Size3 block, unsigned shared_bytes, const nb::list& parameters,
              std::vector<int32_t> ins, std::vector<int32_t> outs) {
  KernelSpec step;
  step.image.assign(image.c_str(), image.size());
  step.name = kernel;
  std::tie(step.grid[0], step.grid[1], step.grid[2]) = grid;
  std::tie(step.block[0], step.block[1], step.block[2]) = block;
  step.shared_bytes = shared_bytes;
  for (nb::handle parameter : parameters) step.parameters.push_back(MakeParameter(parameter));
  return handle.program->AddLaunch(lane, {MakeKernelStep(name, *engine.engine, std::move(step)),
                                          std::move(ins), std::move(outs)});
}

using Tensors = std::vector<std::tuple<int, std::vector<int64_t>>>;

std::vector<PjrtTensor> MakeTensors(const Tensors& tensors) {
  std::vector<PjrtTensor> made;
  for (const auto& [type, dims] : tensors) made.push_back({type, dims});
  return made;
}

std::shared_ptr<PjrtCounters> AddPjrt(ProgramHandle& handle, int lane, const std::string& name,
                                      uintptr_t api, uintptr_t client, uintptr_t executable,
                                      nb::object owner, const Tensors& constants,
                                      const std::vector<uintptr_t>& constant_data,
                                      const Tensors& in_tensors, const Tensors& out_tensors,
                                      std::vector<bool> in_place, std::vector<int32_t> ins,
                                      std::vector<int32_t> outs) {
  PjrtSpec step;
  step.api = Pointer<void>(api);
  step.client = Pointer<void>(client);
  step.executable = Pointer<void>(executable);
  step.owner = KeepAlive(owner.ptr());
  step.constants = MakeTensors(constants);
  step.constant_data = Pointers(constant_data);
  step.ins = MakeTensors(in_tensors);
  step.outs = MakeTensors(out_tensors);
  step.in_place = std::move(in_place);
  step.counters = std::make_shared<PjrtCounters>();
  auto counters = step.counters;
  handle.program->AddLaunch(lane,
                            {MakePjrtStep(name, std::move(step)), std::move(ins), std::move(outs)});
  return counters;
}

}  // namespace

void BindCuda(nb::module_& m) {
  m.def(
      "dlpack_capsule",
      [](uintptr_t address, std::vector<size_t> shape, int code, int bits, bool cuda, int device) {
        const nb::dlpack::dtype type{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
        return nb::ndarray<>(Pointer<void>(address), shape.size(), shape.data(), nb::none(),
                             nullptr, type, cuda ? nb::device::cuda::value : nb::device::cpu::value,
                             device);
      },
      nb::arg("address"), nb::arg("shape"), nb::arg("code"), nb::arg("bits"), nb::arg("cuda"),
      nb::arg("device"), "Somebody's memory for DLPack; nobody keeps it alive.");
  m.def("cuda_problem", &CudaProblem, "'' if CUDA can be used, or why not.");

  nb::class_<CudaEngineHandle>(
      m, "CudaEngine", nb::is_weak_referenceable(),
      "Lanes on a CUDA device: lane 0 is the caller's stream, or all are given.")
      .def(nb::new_(&MakeEngine), nb::arg("device") = 0, nb::arg("priorities") = std::vector<int>(),
           nb::arg("streams") = std::vector<uintptr_t>(), nb::arg("sms") = std::vector<int>(),
           nb::arg("check_steps") = false,
           "Raises RuntimeError: no driver, no such device, a priority out of range, more "
           "multiprocessors than there are.")
      .def("add_kernel_launch", &AddKernel, nb::keep_alive<2, 1>(), nb::arg("program"),
           nb::arg("lane"), nb::arg("name"), nb::arg("image"), nb::arg("kernel"), nb::arg("grid"),
           nb::arg("block"), nb::arg("shared_bytes"), nb::arg("parameters"), nb::arg("ins"),
           nb::arg("outs"),
           "A step that launches a kernel of a PTX, cubin or fatbin image. Each parameter is "
           "('in', i), ('out', i) or the bytes of a constant.")
      .def("run", &RunOnDevice, nb::arg("program"), nb::arg("args"), nb::arg("results"),
           nb::arg("stream"), nb::arg("scratch") = 0, nb::arg("device") = -1,
           "Enqueues a call over device addresses, in the order of a CUstream; does not wait. "
           "`device`, "
           "where the memory lies, is compared with the lanes'.")
      .def(
          "copy",
          [](const CudaEngineHandle& handle, uintptr_t to, uintptr_t from, size_t bytes,
             uintptr_t stream) {
            CopyOnStream(*handle.engine, Pointer<void>(to), Pointer<void>(from), bytes,
                         Pointer<CUstream_st>(stream));
          },
          nb::arg("to"), nb::arg("from"), nb::arg("bytes"), nb::arg("stream"),
          "Enqueues a copy between device addresses.")
      .def_prop_ro("device", [](const CudaEngineHandle& h) { return h.engine->device(); })
      .def_prop_ro(
          "sms", [](const CudaEngineHandle& h) { return h.engine->sms(); },
          "Multiprocessors of the lanes that have their own.")
      .def_prop_ro("failures",
                   [](const CudaEngineHandle& h) { return h.engine->stats().failures; });

  nb::class_<CudaStreams>(m, "CudaStreams",
                          "Streams of lanes 1 and up for somebody who enqueues on them himself.")
      .def(nb::init<int, int, const std::vector<int>&, const std::vector<int>&>(),
           nb::arg("device"), nb::arg("lanes"), nb::arg("priorities") = std::vector<int>(),
           nb::arg("sms") = std::vector<int>(),
           "Raises RuntimeError: no driver or green contexts, a number out of range, no memory.")
      .def_prop_ro("streams",
                   [](const CudaStreams& s) {
                     std::vector<uintptr_t> addresses;
                     for (CUstream_st* stream : s.streams()) {
                       addresses.push_back(reinterpret_cast<uintptr_t>(stream));
                     }
                     return addresses;
                   })
      .def_prop_ro("sms", &CudaStreams::sms);

  nb::class_<PjrtCounters>(m, "PjrtCounters", "What the steps of one XLA executable did.")
      .def_prop_ro("executions", [](const PjrtCounters& c) { return c.executions.load(); })
      .def_prop_ro("copied_inputs", [](const PjrtCounters& c) { return c.copied_inputs.load(); })
      .def_prop_ro("copied_outputs", [](const PjrtCounters& c) { return c.copied_outputs.load(); });
  m.def("add_pjrt_launch", &AddPjrt, nb::arg("program"), nb::arg("lane"), nb::arg("name"),
        nb::arg("api"), nb::arg("client"), nb::arg("executable"), nb::arg("owner").none(),
        nb::arg("constants"), nb::arg("constant_data"), nb::arg("in_tensors"),
        nb::arg("out_tensors"), nb::arg("in_place"), nb::arg("ins"), nb::arg("outs"),
        "A step that runs a PJRT executable without the GIL. Tensors are (PJRT_Buffer_Type, dims); "
        "`owner` keeps client, executable and constants alive. Returns the step's counters.");
}

}  // namespace dfx::ffi
