#include "engine_error.h"

#include <nanobind/nanobind.h>

#include <stdexcept>

namespace dfx::ffi {

PyObject* EngineErrorType() {
  PyObject* module = PyImport_ImportModule("dynaflow_xla.errors");
  PyObject* type = module != nullptr ? PyObject_GetAttrString(module, "EngineError") : nullptr;
  Py_XDECREF(module);
  if (type == nullptr) PyErr_Clear();
  return type;
}

void ThrowEngineError(const std::string& text) {
  PyObject* type = EngineErrorType();
  if (type == nullptr) throw std::runtime_error(text);
  PyErr_SetString(type, text.c_str());
  Py_DECREF(type);
  throw nanobind::python_error();
}

}  // namespace dfx::ffi
