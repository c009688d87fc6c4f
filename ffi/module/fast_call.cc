// The base class of scheduled functions: a call goes straight to a compiled JAX function, without a
// line of Python in between, which would cost more than a small program.
//
// clang-format off
//   call(*args) ->  target(*args)        the usual way
//                   self._call(*args)    the one of so many calls that is to be looked at
//                   self._call(*args)    `alone` says no: the target would be a part of something
//                   fallback(*args)      for some calls after two that waited long for the GIL
//                   self._call(*args)    nothing is settled yet, or inside a capture or a fork
//                   self._recover(e, args, kwargs)   the target raised e
// clang-format on
//
// All state belongs to the object and is touched with the GIL held.
#include <pthread.h>

#include <atomic>

#include "bindings.h"
#include "dfx/error.h"
#include "python_step.h"

namespace dfx::ffi {
namespace {

// Lanes wait for the GIL up to a switch interval (5 ms) each while another Python thread is busy.
constexpr int64_t kGilBusyNs = 1'000'000;
constexpr int kStepBackCalls = 50;

thread_local int capture_depth = 0;
std::atomic<bool> forked{false};

struct FastCall {
  PyObject_HEAD PyObject* target;
  PyObject* fallback;
  PyObject* alone;
  int step_back;
  int64_t look_every;  // one of so many calls goes to self._call; 0: none does
  int64_t look_in;     // it is the so many-th from now
  bool waited;         // the last call of the target waited long; one such call may be chance
};

FastCall* Self(PyObject* object) { return reinterpret_cast<FastCall*>(object); }

PyObject* CallMethod(PyObject* self, const char* name, PyObject* args, PyObject* kwargs) {
  PyObject* method = PyObject_GetAttrString(self, name);
  if (method == nullptr) return nullptr;
  PyObject* result = PyObject_Call(method, args, kwargs);
  Py_DECREF(method);
  return result;
}

// Hands the current exception to `_recover`, which returns a result or raises.
PyObject* Recover(PyObject* self, PyObject* args, PyObject* kwargs) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  PyObject* result = nullptr;
  PyObject* keywords = kwargs != nullptr ? Py_NewRef(kwargs) : PyDict_New();
  PyObject* method = PyObject_GetAttrString(self, "_recover");
  if (keywords != nullptr && method != nullptr) {
    result = PyObject_CallFunctionObjArgs(method, value, args, keywords, nullptr);
  }
  Py_XDECREF(method);
  Py_XDECREF(keywords);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return result;
}

PyObject* Call(PyObject* object, PyObject* args, PyObject* kwargs) {
  FastCall* self = Self(object);
  if (self->target == nullptr || capture_depth > 0 || forked.load(std::memory_order_relaxed)) {
    return CallMethod(object, "_call", args, kwargs);
  }
  if (self->alone != nullptr) {
    PyObject* alone = Py_NewRef(self->alone);
    PyObject* answer = PyObject_CallNoArgs(alone);
    Py_DECREF(alone);
    const int yes = answer == nullptr ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (yes < 0) return nullptr;
    if (yes == 0 || self->target == nullptr) return CallMethod(object, "_call", args, kwargs);
  }
  if (self->look_in > 0 && --self->look_in == 0) {
    self->look_in = self->look_every;
    return CallMethod(object, "_call", args, kwargs);
  }
  const bool watch = self->fallback != nullptr;
  const bool back = watch && self->step_back > 0;
  if (back) --self->step_back;
  // The call may settle something else and drop our references.
  PyObject* target = Py_NewRef(back ? self->fallback : self->target);
  if (watch && !back) TakeGilWait();  // waits of other functions' calls say nothing about this one
  PyObject* result = PyObject_Call(target, args, kwargs);
  Py_DECREF(target);
  if (result == nullptr) return Recover(object, args, kwargs);
  if (watch && !back) {
    const bool waited = TakeGilWait() > kGilBusyNs;
    if (waited && self->waited) self->step_back = kStepBackCalls;
    self->waited = waited && !self->waited;
  }
  return result;
}

PyObject* Settle(PyObject* object, PyObject* const* args, Py_ssize_t n) {
  if (n < 2 || n > 3) {
    PyErr_SetString(PyExc_TypeError, "_settle takes a target and a fallback, and perhaps `alone`");
    return nullptr;
  }
  FastCall* self = Self(object);
  PyObject* old[] = {self->target, self->fallback, self->alone};
  auto given = [&](Py_ssize_t i) {
    return i >= n || args[i] == Py_None ? nullptr : Py_NewRef(args[i]);
  };
  self->target = given(0);
  self->fallback = given(1);
  self->alone = given(2);
  self->waited = false;
  if (self->fallback == nullptr) self->step_back = 0;
  for (PyObject* each : old) Py_XDECREF(each);
  Py_RETURN_NONE;
}

PyObject* LookEvery(PyObject* object, PyObject* calls) {
  const int64_t given = PyLong_AsLongLong(calls);
  if (given == -1 && PyErr_Occurred() != nullptr) return nullptr;
  Self(object)->look_every = Self(object)->look_in = given;
  Py_RETURN_NONE;
}

PyObject* StepBack(PyObject* object, void*) { return PyLong_FromLong(Self(object)->step_back); }

int SetStepBack(PyObject* object, PyObject* value, void*) {
  const long calls = value == nullptr ? 0 : PyLong_AsLong(value);
  if (calls == -1 && PyErr_Occurred() != nullptr) return -1;
  Self(object)->step_back = static_cast<int>(calls);
  return 0;
}

int Traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(Self(object)->target);
  Py_VISIT(Self(object)->fallback);
  Py_VISIT(Self(object)->alone);
  return 0;
}

int Clear(PyObject* object) {
  Py_CLEAR(Self(object)->target);
  Py_CLEAR(Self(object)->fallback);
  Py_CLEAR(Self(object)->alone);
  return 0;
}

void Dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  Clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"_settle", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&Settle)), METH_FASTCALL,
     "_settle(target, fallback, alone=None): calls go to target; None: to self._call. With a "
     "fallback, calls step back to it while another thread is busy with Python. Where alone() is "
     "false, they go to self._call."},
    {"_look_every", &LookEvery, METH_O, "_look_every(calls): one of so many goes to self._call."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef properties[] = {
    {"_step_back", &StepBack, &SetStepBack, "How many calls still go to the fallback.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("A callable that forwards to a compiled function.")},
    {Py_tp_call, reinterpret_cast<void*>(&Call)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_traverse, reinterpret_cast<void*>(&Traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&Clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&Dealloc)},
    {0, nullptr}};

PyType_Spec spec = {"dynaflow_xla.ffi._engine.FastCall", sizeof(FastCall), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

void BindFastCall(nanobind::module_& m) {
  m.attr("FastCall") = nanobind::steal(PyType_FromSpec(&spec));
  m.def(
      "enter_capture", []() { ++capture_depth; },
      "In this thread scheduled functions are their originals, until leave_capture().");
  m.def("leave_capture", []() { --capture_depth; });
  m.def("capturing", []() { return capture_depth > 0; });
  m.def("capture_depth", []() { return capture_depth; });
  m.def(
      "watch_fork",
      []() {
        static const int failed =
            pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
        if (failed != 0) throw Error("pthread_atfork: out of memory");
      },
      "From now on forked() is true in children of this process.");
  m.def("forked", []() { return forked.load(std::memory_order_relaxed); });
}

}  // namespace dfx::ffi
