#include "run_step.h"

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

namespace dfx {

void CheckCallable(const Program* program, std::span<void* const> args,
                   std::span<void* const> results) {
  if (program == nullptr) throw std::invalid_argument("there is no program to run");
  if (!program->finished()) {
    throw std::invalid_argument("program '" + program->name() +
                                "' was not finished: call finish() before run()");
  }
  if (args.size() != static_cast<size_t>(program->n_args()) ||
      results.size() != static_cast<size_t>(program->n_results())) {
    throw std::invalid_argument(
        "program '" + program->name() + "' takes " + std::to_string(program->n_args()) +
        " arguments and " + std::to_string(program->n_results()) + " results; got " +
        std::to_string(args.size()) + " and " + std::to_string(results.size()));
  }
}

namespace {

void FailStep(Call& call, const Step& step, std::string_view how, std::string_view why) noexcept {
  try {
    std::string text = "step '" + step.name() + "'";
    call.Fail(text.append(how).append(why));
  } catch (const std::bad_alloc&) {
    call.Fail(kOutOfMemory);
  }
}

}  // namespace

void RunStep(Lane& lane, Call& call, const LaunchDesc& launch, BufferList& ins,
             BufferList& outs) noexcept {
  Step& step = *launch.step;
  if (call.IsLaneDone(lane.index())) {
    // The caller may have its buffers back already: this step must not see them.
    FailStep(call, step, " comes after its lane was said to be done", "");
    return;
  }
  try {
    step.Launch(ins.Resolve(call, launch.ins), outs.Resolve(call, launch.outs), lane);
  } catch (const std::exception& e) {
    FailStep(call, step, ": ", e.what());
  } catch (...) {
    FailStep(call, step, " threw something that is no std::exception", "");
  }
}

}  // namespace dfx
