// What a call has to look like to be the same as an earlier one for a schedule: read at every call
// of a model whose original is kept, where Python would take longer for it than for all else.
//
// A match remembers structure, shapes, dtypes, layouts, whether tensors are on a CPU and plain
// values, never an argument itself. It may say no to a call that is the same; then Python looks.
// All state is touched with the GIL held.
#include <nanobind/stl/optional.h>

#include <array>
#include <optional>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;

namespace dfx::ffi {
namespace {

// Of so many tensors only the first is read, and those that are other objects than at the last
// call. One may have got other sizes by then, and another one the address of one that is gone: the
// answer has to do no more harm then than to have the original run as it is (`exact`: it would do
// more).
constexpr size_t kMany = 32;

enum class Kind { kTensor, kEqual, kSame, kOfType, kSequence, kDict };

// Names, interned: a tensor's attributes are looked up by them at each call.
constexpr size_t kAttributes = 5;

const std::array<PyObject*, kAttributes>& TensorAttributes() {
  static const std::array<PyObject*, kAttributes> names = {
      PyUnicode_InternFromString("shape"), PyUnicode_InternFromString("dtype"),
      PyUnicode_InternFromString("requires_grad"), PyUnicode_InternFromString("is_cpu"),
      PyUnicode_InternFromString("layout")};
  return names;
}

struct Part {
  Kind kind = Kind::kSame;
  PyTypeObject* type = nullptr;  // of the argument; owned by `value` where it is no builtin
  nb::object value;              // its number, text, or itself
  std::array<nb::object, kAttributes> tensor;
  PyObject* seen = nullptr;  // the last tensor that matched: an address, not a reference
  bool first = false;        // of all tensors
  std::vector<nb::object> keys;
  std::vector<Part> members;
};

bool Equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) PyErr_Clear();  // Python looks, and says what is wrong
  return equal > 0;
}

class CallMatch {
 public:
  // Without a value where an argument is none of what matches are about.
  static std::optional<CallMatch> Of(nb::handle args, nb::handle kwargs, nb::tuple tensor_types,
                                     nb::tuple plain_types, bool exact) {
    CallMatch made(std::move(tensor_types), std::move(plain_types), exact);
    if (!made.Read(args.ptr(), &made.args_) || !made.Read(kwargs.ptr(), &made.kwargs_)) {
      return std::nullopt;
    }
    return made;
  }

  bool Matches(nb::handle args, nb::handle kwargs) {
    return Same(&args_, args.ptr()) && Same(&kwargs_, kwargs.ptr());
  }

 private:
  CallMatch(nb::tuple tensor_types, nb::tuple plain_types, bool exact)
      : tensor_types_(std::move(tensor_types)),
        plain_types_(std::move(plain_types)),
        exact_(exact) {}

  static bool Holds(const nb::tuple& types, PyTypeObject* type) {
    for (nb::handle each : types) {
      if (each.ptr() == reinterpret_cast<PyObject*>(type)) return true;
    }
    return false;
  }

  bool Read(PyObject* value, Part* part) {
    part->type = Py_TYPE(value);
    if (Holds(tensor_types_, part->type)) return ReadTensor(value, part);
    if (PyLong_CheckExact(value) || PyUnicode_CheckExact(value)) {
      part->kind = Kind::kEqual;
      part->value = nb::borrow(value);
      return true;
    }
    if (PyFloat_CheckExact(value) || PyComplex_CheckExact(value)) {
      part->kind = Kind::kOfType;  // data, as for Dynamo
      return true;
    }
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
      part->kind = Kind::kSequence;
      // Reading a tensor may run Python code, and that may change a list.
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
        const nb::object member = nb::borrow(PySequence_Fast_GET_ITEM(value, i));
        if (!Read(member.ptr(), &part->members.emplace_back())) return false;
      }
      return true;
    }
    if (PyDict_CheckExact(value)) return ReadDict(value, part);
    part->value = nb::borrow(value);
    return Holds(plain_types_, part->type);
  }

  bool ReadTensor(PyObject* value, Part* part) {
    part->kind = Kind::kTensor;
    part->first = tensors_++ == 0;
    for (size_t i = 0; i < part->tensor.size(); ++i) {
      part->tensor[i] = nb::steal(PyObject_GetAttr(value, TensorAttributes()[i]));
      if (!part->tensor[i].is_valid()) {
        PyErr_Clear();
        return false;
      }
    }
    part->seen = value;
    return true;
  }

  bool ReadDict(PyObject* value, Part* part) {
    part->kind = Kind::kDict;
    PyObject *key = nullptr, *member = nullptr;
    for (Py_ssize_t place = 0; PyDict_Next(value, &place, &key, &member) != 0;) {
      if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return false;
      part->keys.push_back(nb::borrow(key));
      const nb::object held = nb::borrow(member);
      if (!Read(held.ptr(), &part->members.emplace_back())) return false;
    }
    return true;
  }

  bool Same(Part* part, PyObject* value) {
    if (Py_TYPE(value) != part->type) return false;
    switch (part->kind) {
      case Kind::kTensor:
        return SameTensor(part, value);
      case Kind::kEqual:
        return Equal(value, part->value.ptr());
      case Kind::kSame:
        return value == part->value.ptr();
      case Kind::kOfType:
        return true;
      case Kind::kSequence:
        return SameSequence(part, value);
      case Kind::kDict:
        return SameDict(part, value);
    }
    return false;
  }

  bool SameTensor(Part* part, PyObject* value) const {
    if (tensors_ >= kMany && !exact_ && !part->first && value == part->seen) return true;
    for (size_t i = 0; i < part->tensor.size(); ++i) {
      const nb::object now = nb::steal(PyObject_GetAttr(value, TensorAttributes()[i]));
      if (!now.is_valid()) {
        PyErr_Clear();
        return false;
      }
      if (!Equal(now.ptr(), part->tensor[i].ptr())) return false;
    }
    part->seen = value;
    return true;
  }

  bool SameSequence(Part* part, PyObject* value) {
    if (static_cast<size_t>(PySequence_Fast_GET_SIZE(value)) != part->members.size()) return false;
    // A list may change while a member is compared: its size is asked for each time.
    for (size_t i = 0; i < part->members.size(); ++i) {
      const auto place = static_cast<Py_ssize_t>(i);
      if (place >= PySequence_Fast_GET_SIZE(value)) return false;
      const nb::object member = nb::borrow(PySequence_Fast_GET_ITEM(value, place));
      if (!Same(&part->members[i], member.ptr())) return false;
    }
    return true;
  }

  bool SameDict(Part* part, PyObject* value) {
    if (static_cast<size_t>(PyDict_GET_SIZE(value)) != part->keys.size()) return false;
    PyObject *key = nullptr, *member = nullptr;
    size_t i = 0;
    for (Py_ssize_t place = 0; PyDict_Next(value, &place, &key, &member) != 0; ++i) {
      if (i >= part->keys.size()) return false;
      const nb::object held = nb::borrow(member);
      if (Py_TYPE(key) != Py_TYPE(part->keys[i].ptr()) || !Equal(key, part->keys[i].ptr()) ||
          !Same(&part->members[i], held.ptr())) {
        return false;
      }
    }
    return i == part->keys.size();
  }

  nb::tuple tensor_types_, plain_types_;
  Part args_, kwargs_;
  size_t tensors_ = 0;
  bool exact_ = false;
};

}  // namespace

void BindCallMatch(nb::module_& m) {
  nb::class_<CallMatch>(m, "CallMatch", "What a call looks like, to be compared with later ones.")
      .def_static("of", &CallMatch::Of, nb::arg("args"), nb::arg("kwargs"), nb::arg("tensor_types"),
                  nb::arg("plain_types"), nb::arg("exact"),
                  "What this call looks like; None where it holds other objects than tensors, "
                  "containers, numbers, texts and values of `plain_types`.")
      .def("matches", &CallMatch::Matches, nb::arg("args"), nb::arg("kwargs"),
           "Whether a call looks like that: structure, shapes, dtypes, plain values.");
}

}  // namespace dfx::ffi
