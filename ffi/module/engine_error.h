// How an error of the engine is known outside of it: in Python a dfx::Error is an EngineError (and
// std::invalid_argument a ValueError), in XLA a text with a mark in front (see
// custom_calls/handlers.h).
#pragma once

#include <Python.h>

namespace dfx::ffi {

// XLA carries an error of a custom call as text only, so the text begins with this. Python asks for
// it in one place (ffi/xla.py). An error that a user's code raises has no reason to hold these
// words.
inline constexpr char kEngineErrorMark[] = "dynaflow_xla.EngineError: ";

// Python's dynaflow_xla.errors.EngineError, a new reference; nullptr if it cannot be imported.
// Needs the GIL, and leaves no exception behind.
PyObject* EngineErrorType();

// From now on nanobind raises it where a binding throws dfx::Error.
void TranslateErrors();

}  // namespace dfx::ffi
