// A step that runs an XLA executable through the PJRT C API: no Python, no GIL.
//
// Inputs are views of the step's memory. An output is written where it belongs if the executable
// was compiled to alias it with a donated argument: the step passes a view of the output's memory
// there, XLA writes into it. Any other output is allocated by XLA and copied; so is one that XLA
// did not put where it was told. On the host XLA uses memory in place only at multiples of 64
// bytes: inputs elsewhere are copied, too. Copies are counted.
//
// Who owns what: memory is the caller's; views of inputs are kept from call to call (they say where
// memory is, not what is in it); everything else is dropped before the step returns. On a host lane
// the step returns when the outputs are there. On a CUDA lane it returns when they are enqueued,
// and the lane's stream must be the one that the client computes on; an execution that fails after
// that is a late error of the engine (src/cuda/late_errors.h).
//
// The client must serve this engine's lanes alone: on the client of a program that waits for the
// step, the step would wait behind its own caller.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dfx/step.h"

namespace dfx {

// Shape and PJRT_Buffer_Type of one tensor.
struct PjrtTensor {
  int type;
  std::vector<int64_t> dims;
};

struct PjrtCounters {
  std::atomic<int64_t> executions{0};
  std::atomic<int64_t> copied_inputs{0};
  std::atomic<int64_t> copied_outputs{0};
  std::atomic<int64_t> views{0};
};

struct PjrtSpec {
  const void* api = nullptr;    // what GetPjrtApi() returned
  void* client = nullptr;       // PJRT_Client
  void* executable = nullptr;   // PJRT_LoadedExecutable
  std::shared_ptr<void> owner;  // of the client and the executable
  // The executable's arguments: all constants, all inputs, then one for each output that is
  // `in_place`. Constants stay where they are for good, and `owner` keeps them, too.
  std::vector<PjrtTensor> constants;
  std::vector<void*> constant_data;
  std::vector<PjrtTensor> ins, outs;
  std::vector<bool> in_place;
  std::shared_ptr<PjrtCounters> counters;  // may be null
};

// Throws Error: a plugin of another version, an executable with another number of outputs.
std::unique_ptr<Step> MakePjrtStep(std::string name, PjrtSpec spec);

}  // namespace dfx
