// Steps that run a Python callable: a lane program compiled by JAX, or a user's function.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>

#include "dfx/launcher.h"

namespace dfx::ffi {

// A step that calls `callable(pointers)` with the GIL held, where `pointers` is a tuple of the
// addresses of its input buffers followed by those of its output buffers. A Python exception fails
// the call with its text. Takes a new reference. The GIL must be held.
Launcher MakePythonLauncher(PyObject* callable);

// Keeps a Python object alive for C++. Whoever lets go of it last needs no GIL and never waits for
// it: the interpreter drops the object soon after (ReleasePending does it at once). Takes a new
// reference. The GIL must be held.
std::shared_ptr<void> KeepAlive(PyObject* object);

// Drops references that were given up by threads without the GIL. The GIL must be held.
void ReleasePending();

// Nanoseconds that Python steps waited for the GIL: last wait, and the largest since the last reset
// that other Python threads caused.
struct GilWait {
  int64_t last_ns;
  int64_t max_ns;
};
GilWait TakeGilWait();

// Attach and detach a Python thread state on an engine lane thread, so that a step does not pay for
// creating one.
void OnLaneStart(int lane);
void OnLaneExit(int lane);

}  // namespace dfx::ffi
