#pragma once

#include <nanobind/nanobind.h>

namespace dfx::ffi {

// Adds the type FastCall and what it looks at before a call: captures and forks.
void BindFastCall(nanobind::module_& m);

}  // namespace dfx::ffi
