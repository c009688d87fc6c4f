#include "run_step.h"

#include <exception>
#include <new>
#include <string>
#include <string_view>

namespace dfx {

std::string CheckCallable(const Program* program, void* const* args, void* const* results) {
  if (program == nullptr) return "there is no program to run";
  if (!program->finished()) {
    return "program '" + program->name() + "' was not finished: call Finish first";
  }
  if ((args == nullptr && program->n_args() > 0) ||
      (results == nullptr && program->n_results() > 0)) {
    return "program '" + program->name() + "' takes " + std::to_string(program->n_args()) +
           " arguments and " + std::to_string(program->n_results()) + " results; got a null list";
  }
  return "";
}

namespace {

void FailStep(Call& call, const LaunchDesc& launch, std::string_view how,
              std::string_view why) noexcept {
  try {
    std::string text = "step '" + launch.name + "'";
    call.Fail(text.append(how).append(why));
  } catch (const std::bad_alloc&) {
    call.Fail(kOutOfMemory);
  }
}

}  // namespace

void RunStep(Lane& lane, Call& call, const LaunchDesc& launch, BufferList& ins,
             BufferList& outs) noexcept {
  if (call.IsLaneDone(lane.index())) {
    // The caller may have its buffers back already: this step must not see them.
    FailStep(call, launch, " comes after its lane was said to be done", "");
    return;
  }
  try {
    const int status =
        launch.launcher.fn(launch.launcher.user.get(), ins.Resolve(call, launch.ins),
                           static_cast<int>(launch.ins.size()), outs.Resolve(call, launch.outs),
                           static_cast<int>(launch.outs.size()), &lane);
    if (status != 0 && !call.failed()) {
      FailStep(call, launch, " failed with status ", std::to_string(status));
    }
  } catch (const std::exception& e) {
    FailStep(call, launch, ": ", e.what());
  } catch (...) {
    FailStep(call, launch, " threw something that is no std::exception", "");
  }
}

}  // namespace dfx
