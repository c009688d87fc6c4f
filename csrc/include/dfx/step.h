// A step: what a lane runs at one place of a program.
//
// Who owns what: a Program owns its steps, and a step whatever it runs; memory is the caller's and
// lasts for the Launch only. A step on a CUDA lane has copied what the device still needs when it
// returns.
//
// What orders accesses: the Program. Several threads may be in one step's Launch at a time, each
// for a call of its own.
//
// On failure a step throws, and the call fails with "step '<name>': <what it says>". A step that
// has better words, or a C function, fails the call itself: lane.current()->Fail("why").
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace dfx {

class Lane;

// A place in memory that is handed to a step.
struct Buffer {
  void* data;
  int64_t bytes;
};

class Step {
 public:
  explicit Step(std::string name) : name_(std::move(name)) {}
  virtual ~Step() = default;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  const std::string& name() const { return name_; }
  // What kind of step it is, for people.
  virtual std::string Describe() const = 0;
  virtual void Launch(std::span<const Buffer> ins, std::span<Buffer> outs, Lane& lane) = 0;

 private:
  const std::string name_;
};

// The C ABI for steps. Returns 0 on success; on failure another number, perhaps after
// lane->current()->Fail("why").
using StepFunction = int (*)(void* user, const Buffer* ins, int n_ins, Buffer* outs, int n_outs,
                             Lane* lane);

// A step that calls such a function, and keeps `user` alive.
std::unique_ptr<Step> MakeFunctionStep(std::string name, StepFunction function,
                                       std::shared_ptr<void> user = nullptr);

}  // namespace dfx
