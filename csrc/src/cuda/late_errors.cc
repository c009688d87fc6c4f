#include "cuda/late_errors.h"

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <new>
#include <vector>

namespace dfx {
namespace {

// Those of the process's engines.
struct Made {
  std::mutex mutex;
  std::vector<std::weak_ptr<LateErrors>> all;
};

// Leaked on purpose: engines may be made and go while static destructors run.
Made& AllMade() {
  static Made* made = new Made;
  return *made;
}

// Engines may live as long as the process, and nobody destroys them then.
struct AtExit {
  const pid_t pid = getpid();
  ~AtExit() {
    if (getpid() != pid) return;  // in a forked child they are its parent's
    std::vector<std::shared_ptr<LateErrors>> left;
    try {
      Made& made = AllMade();
      std::lock_guard<std::mutex> lock(made.mutex);
      for (auto& weak : made.all) left.push_back(weak.lock());
    } catch (const std::exception&) {
      // Without memory: those found so far.
    }
    for (auto& errors : left) {
      if (errors != nullptr) errors->Tell();
    }
  }
} at_exit;

}  // namespace

std::shared_ptr<LateErrors> LateErrors::Make() {
  std::shared_ptr<LateErrors> errors(new LateErrors);
  Made& made = AllMade();
  std::lock_guard<std::mutex> lock(made.mutex);
  std::erase_if(made.all, [](const auto& weak) { return weak.expired(); });
  made.all.push_back(errors);
  return errors;
}

void LateErrors::Add(const std::string& program, const std::string& step,
                     const std::string& what) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (count_++ == 0) {
    try {
      first_ =
          "step '" + step + "' of program '" + program + "' failed after it was enqueued: " + what;
    } catch (const std::bad_alloc&) {
      first_ = "a step failed";  // short enough to need no memory
    }
  }
  any_.store(true, std::memory_order_release);
}

std::string LateErrors::Take() {
  if (!any_.load(std::memory_order_acquire)) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text = first_;
  if (count_ > 1) text += " (the first of " + std::to_string(count_) + " such errors)";
  first_.clear();
  count_ = 0;
  any_.store(false, std::memory_order_release);
  return text;
}

void LateErrors::Tell() noexcept {
  try {
    const std::string text = Take();
    if (text.empty()) return;
    std::fprintf(stderr, "dynaflow_xla: %s; what its call made is not valid\n", text.c_str());
  } catch (const std::exception&) {
    std::fputs("dynaflow_xla: a step failed after its call had returned\n", stderr);
  }
}

}  // namespace dfx
