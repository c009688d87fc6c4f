// What the tests share: steps from lambdas, and a program of two lanes.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dfx/call.h"
#include "dfx/engine.h"
#include "dfx/lane.h"
#include "dfx/program.h"

namespace dfx_test {

using dfx::Buffer;
using dfx::BufferDesc;
using dfx::BufferKind;
using dfx::Engine;
using dfx::Lane;
using dfx::LaunchDesc;
using dfx::Program;

using Function = std::function<int(const Buffer*, int, Buffer*, int, Lane*)>;

inline int CallStep(void* user, const Buffer* ins, int n_ins, Buffer* outs, int n_outs,
                    Lane* lane) {
  return (*static_cast<Function*>(user))(ins, n_ins, outs, n_outs, lane);
}

inline LaunchDesc MakeLaunch(const std::string& name, Function step, std::vector<int32_t> ins = {},
                             std::vector<int32_t> outs = {}) {
  return LaunchDesc{
      dfx::MakeFunctionStep(name, &CallStep, std::make_shared<Function>(std::move(step))),
      std::move(ins), std::move(outs)};
}

// How something went that may throw.
struct Outcome {
  bool ok = true;
  std::string error;
  std::vector<dfx::TraceRecord> trace;
};

template <typename Run>
Outcome Try(Run run) {
  try {
    return {true, "", run()};
  } catch (const std::bad_alloc&) {
    return {false, dfx::kOutOfMemory, {}};
  } catch (const std::exception& error) {
    return {false, error.what(), {}};
  }
}

// A step without operands.
inline LaunchDesc MakeStep(const std::string& name, std::function<void(Lane*)> step) {
  return MakeLaunch(name, [step = std::move(step)](const Buffer*, int, Buffer*, int, Lane* lane) {
    step(lane);
    return 0;
  });
}

inline int64_t& At(const Buffer& buffer) { return *static_cast<int64_t*>(buffer.data); }

inline int Nothing(const Buffer*, int, Buffer*, int, Lane*) { return 0; }

// arg a, result r: the aside lane doubles a into scratch, lane 0 waits for it and adds one.
inline std::shared_ptr<Program> TwoLanes(
    const std::function<void()>& in_first = [] {}, int aside = 1,
    const std::function<void()>& before_wait = nullptr) {
  auto p = std::make_shared<Program>(aside + 1, 1, 1, 1, 64, "two lanes");
  const int a = p->AddBuffer({BufferKind::kArg, 0, 0, 8});
  const int r = p->AddBuffer({BufferKind::kResult, 0, 0, 8});
  const int s = p->AddBuffer({BufferKind::kScratch, -1, 0, 8});
  p->AddLaunch(aside, MakeLaunch("double",
                                 [in_first](const Buffer* in, int, Buffer* out, int, Lane*) {
                                   in_first();
                                   At(out[0]) = 2 * At(in[0]);
                                   return 0;
                                 },
                                 {a}, {s}));
  p->AddRecord(aside, 0);
  if (before_wait) p->AddLaunch(0, MakeStep("before", [before_wait](Lane*) { before_wait(); }));
  p->AddWait(0, 0);
  p->AddLaunch(0, MakeLaunch("increment",
                             [](const Buffer* in, int, Buffer* out, int, Lane*) {
                               At(out[0]) = At(in[0]) + 1;
                               return 0;
                             },
                             {s}, {r}));
  return p;
}

// "" or why the program cannot be finished.
inline std::string Problem(Program& program) {
  return Try([&] {
           program.Finish();
           return std::vector<dfx::TraceRecord>();
         })
      .error;
}

inline Outcome RunOnHost(const std::shared_ptr<Program>& program, std::span<void* const> args,
                         std::span<void* const> results, bool profile = false, bool stay = false) {
  return Try([&] { return Engine::Get().Run(program, args, results, profile, stay); });
}

inline Outcome RunOne(const std::shared_ptr<Program>& program, int64_t in, int64_t* out,
                      bool profile = false) {
  void* args[] = {&in};
  void* results[] = {out};
  return RunOnHost(program, args, results, profile);
}

// Whether the engine still computes what it should.
inline bool Works() {
  auto program = TwoLanes();
  int64_t out = 0;
  return Problem(*program).empty() && RunOne(program, 20, &out).ok && out == 41;
}

}  // namespace dfx_test
