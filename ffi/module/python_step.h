// Steps that run a Python callable: a lane program compiled by JAX, or a user's function.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>

#include "dfx/step.h"

namespace dfx::ffi {

// A step that calls `callable(pointers)` with the GIL held, where `pointers` is a tuple of the
// addresses of its input buffers followed by those of its output buffers. A Python exception fails
// the call with its text alone: callables say who they are. Takes a new reference. The GIL must be
// held.
// A callable whose attribute `takes_turns` is True gives the GIL up soon after it has begun: such
// steps of several lanes begin some us apart, so that none waits asleep for the GIL.
// One whose attribute `repeatable` is True takes turns, too, and raises EngineErrors only. What
// else comes out of it on the main thread, where handlers of signals run, is of a handler: the step
// is run again if it has not run, and the exception raised in the main thread after it. Of other
// steps that holds for KeyboardInterrupt alone.
std::unique_ptr<Step> MakePythonStep(std::string name, PyObject* callable);

// As long as it lives, a step of this thread that takes turns is the first. For a caller that runs
// a lane itself: it has the GIL anyway, and what it runs of Python is in its core's caches.
class FirstTurn {
 public:
  FirstTurn();
  ~FirstTurn();
  FirstTurn(const FirstTurn&) = delete;
  FirstTurn& operator=(const FirstTurn&) = delete;
};

// Keeps a Python object alive for C++. Whoever lets go of it last needs no GIL and never waits for
// it: the interpreter drops the object soon after (ReleasePending does it at once). Takes a new
// reference. The GIL must be held.
std::shared_ptr<void> KeepAlive(PyObject* object);

// Drops references that were given up by threads without the GIL. The GIL must be held.
void ReleasePending();

// The most nanoseconds that a Python step waited for the GIL since the last time, as far as other
// Python threads were the cause.
int64_t TakeGilWait();

// Attach and detach a Python thread state on an engine lane thread, so that a step does not pay for
// creating one.
void OnLaneStart(int lane);
void OnLaneExit(int lane);

}  // namespace dfx::ffi
