// How the engine says that something went wrong: it throws, everywhere.
//
// Why exceptions: most of what fails is made in constructors, or fails inside a step of somebody
// else, far from who can tell the user; nothing in between can forget to look; and the languages on
// both sides translate them once each. (Python's binding does it by itself, XLA's handlers in one
// function of ffi/module.) A call that works pays nothing for it.
//
//   std::invalid_argument  what was given can never work: a program, a kernel, lists of a call
//   Error                  it could have worked and did not: a step, a driver, a plugin, a thread
//   std::bad_alloc         no memory, not even for the words of another error
//
// Where nothing may be thrown, on the threads of lanes, the error is kept in the Call (see call.h),
// and thrown to whoever waits for it.
#pragma once
#include <stdexcept>

namespace dfx {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace dfx
