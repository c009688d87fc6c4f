#include <stdexcept>

#include "dfx/call.h"
#include "dfx/lane.h"
#include "dfx/step.h"

namespace dfx {
namespace {

class FunctionStep : public Step {
 public:
  FunctionStep(std::string name, StepFunction function, std::shared_ptr<void> user)
      : Step(std::move(name)), function_(function), user_(std::move(user)) {
    if (function_ == nullptr) throw std::invalid_argument("'" + this->name() + "' has no function");
  }
  std::string Describe() const override { return "C function"; }
  void Launch(std::span<const Buffer> ins, std::span<Buffer> outs, Lane& lane) override {
    const int status = function_(user_.get(), ins.data(), static_cast<int>(ins.size()), outs.data(),
                                 static_cast<int>(outs.size()), &lane);
    if (status != 0 && !lane.current()->failed()) {
      lane.current()->Fail("step '" + name() + "' failed with status " + std::to_string(status));
    }
  }

 private:
  const StepFunction function_;
  const std::shared_ptr<void> user_;
};

}  // namespace

std::unique_ptr<Step> MakeFunctionStep(std::string name, StepFunction function,
                                       std::shared_ptr<void> user) {
  return std::make_unique<FunctionStep>(std::move(name), function, std::move(user));
}

}  // namespace dfx
