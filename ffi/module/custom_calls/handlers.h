// The custom calls that dynaflow_xla installs into XLA, as addresses for PyCapsules.
//
//   dfx_run        in the outer program: runs one stage of a plan (run_handlers.cc)
//   dfx_run_graph  the same, fit for XLA's command buffers
//   dfx_gate       inside a lane program: its waits, copies and signals (gate_handlers.cc)
//   dfx_cumulative  inside a lane program: cumulative sums and the like (cumulative_handler.cc)
//   dfx_order      an order edge inside an XLA GPU program
//   dfx_fail       fault injection for tests
//   dfx_lane_stream  inside a lane's client: notes which stream that client computes on
//
// On failure a handler's function throws like everything else; Guarded makes that XLA's error.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <new>
#include <string>
#include <utility>

#include "dfx/call.h"
#include "engine_error.h"
#include "xla/ffi/api/ffi.h"

namespace dfx::ffi {

namespace xf = ::xla::ffi;

using Handlers = std::map<std::string, void*>;
void AddRunHandlers(Handlers& handlers);
void AddGateHandlers(Handlers& handlers);
void AddCumulativeHandler(Handlers& handlers);

// The stream of the last dfx_lane_stream since the last time, or 0.
uintptr_t TakeLaneStream();

// Runs the body of a handler; what it throws becomes XLA's error, with `mark` in front: the
// engine's in the outer program, none where a lane's step tells the engine about it.
template <typename Body>
xf::Error Guarded(xf::ErrorCode code, std::string mark, Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return xf::Error(code, mark + kOutOfMemory);
  } catch (const std::exception& error) {
    return xf::Error(code, mark + error.what());
  }
}

}  // namespace dfx::ffi
