#include <dlfcn.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings.h"
#include "dfx/error.h"

namespace nb = nanobind;

namespace dfx::ffi {
namespace {

// Of torch/csrc/inductor/aoti_runtime/interface.h, which is a stable C interface: handles are
// pointers, errors are numbers.
using Handle = void*;
using CreateFn = int32_t (*)(Handle*, size_t models, const char* device, const char* cubin_dir);
using DeleteFn = int32_t (*)(Handle);
using CountFn = int32_t (*)(Handle, size_t*);
using RunFn = int32_t (*)(Handle, Handle* ins, size_t n_ins, Handle* outs, size_t n_outs,
                          void* stream, void* proxy_executor);

class Model {
 public:
  Model(const std::string& path, size_t models) {
    library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw Error(dlerror());
    auto create = Find<CreateFn>("AOTInductorModelContainerCreateWithDevice");
    delete_ = Find<DeleteFn>("AOTInductorModelContainerDelete");
    run_ = Find<RunFn>("AOTInductorModelContainerRun");
    Check(create(&container_, models, "cpu", nullptr), "could not be created");
    Check(Find<CountFn>("AOTInductorModelContainerGetNumInputs")(container_, &n_ins_), "is broken");
    Check(Find<CountFn>("AOTInductorModelContainerGetNumOutputs")(container_, &n_outs_),
          "is broken");
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  // The library stays loaded: tensors it made may still be alive and have its code as deleter.
  ~Model() {
    if (container_ != nullptr) delete_(container_);
  }

  // Takes ownership of the input handles; the caller owns those returned.
  nb::list Run(const nb::list& inputs) {
    std::vector<Handle> ins, outs(n_outs_, nullptr);
    for (nb::handle item : inputs) {
      ins.push_back(PyCapsule_GetPointer(item.ptr(), PyCapsule_GetName(item.ptr())));
      if (ins.back() == nullptr) throw nb::python_error();
    }
    if (ins.size() != n_ins_) {
      throw nb::value_error(("the compiled region takes " + std::to_string(n_ins_) +
                             " tensors; got " + std::to_string(ins.size()))
                                .c_str());
    }
    int32_t status = 0;
    {
      nb::gil_scoped_release release;
      status = run_(container_, ins.data(), ins.size(), outs.data(), outs.size(), nullptr, nullptr);
    }
    Check(status, "failed; AOTInductor wrote the reason to the standard error stream");
    nb::list made;
    for (Handle handle : outs) {
      made.append(nb::steal<nb::object>(PyCapsule_New(handle, nullptr, nullptr)));
    }
    return made;
  }

 private:
  template <class Fn>
  Fn Find(const char* name) {
    void* found = dlsym(library_, name);
    if (found == nullptr) throw Error(std::string("the library has no ") + name);
    return reinterpret_cast<Fn>(found);
  }
  static void Check(int32_t status, const char* what) {
    if (status != 0) throw Error(std::string("the compiled region ") + what);
  }

  void* library_ = nullptr;
  Handle container_ = nullptr;
  size_t n_ins_ = 0, n_outs_ = 0;
  DeleteFn delete_ = nullptr;
  RunFn run_ = nullptr;
};

}  // namespace

void BindAoti(nb::module_& m) {
  nb::class_<Model>(m, "AotiModel", "A library that AOTInductor compiled for the CPU.")
      .def(nb::init<const std::string&, size_t>(), nb::arg("path"), nb::arg("models"),
           "Loads it; up to `models` threads run it at a time.")
      .def("run", &Model::Run, nb::arg("inputs"),
           "Tensor handles (capsules) to tensor handles, without the interpreter lock.");
}

}  // namespace dfx::ffi
