// Runs what AOTInductor compiled, through its C interface, without the interpreter lock.
#pragma once

#include <nanobind/nanobind.h>

namespace dfx::ffi {

void BindAoti(nanobind::module_& m);

}  // namespace dfx::ffi
