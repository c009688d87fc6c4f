#include "engine_error.h"

#include <nanobind/nanobind.h>

#include <exception>

#include "dfx/error.h"

namespace dfx::ffi {

PyObject* EngineErrorType() {
  PyObject* module = PyImport_ImportModule("dynaflow_xla.errors");
  PyObject* type = module != nullptr ? PyObject_GetAttrString(module, "EngineError") : nullptr;
  Py_XDECREF(module);
  if (type == nullptr) PyErr_Clear();
  return type;
}

void TranslateErrors() {
  nanobind::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      PyObject* type = EngineErrorType();
      PyErr_SetString(type != nullptr ? type : PyExc_RuntimeError, error.what());
      Py_XDECREF(type);
    }
  });
}

}  // namespace dfx::ffi
