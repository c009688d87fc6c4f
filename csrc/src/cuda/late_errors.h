// Errors of what a step enqueued, found when its Launch had long returned.
//
// Invariant: each is told once. The call whose step it was fails, if the error is there before that
// call returns (with `check_steps` it always is) and no other call of the engine ends just then,
// which would be told instead; otherwise the engine's next call fails, of whatever program, before
// anything of it is enqueued, as CUDA tells errors of earlier work. If no call comes any more, it
// stands on stderr when the engine goes, or the process exits.
//
// Who owns what: the engine, and each watcher of work that is under way. Any thread may call
// anything.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

namespace dfx {

class LateErrors {
 public:
  // Throws std::bad_alloc.
  static std::shared_ptr<LateErrors> Make();
  ~LateErrors() { Tell(); }
  LateErrors(const LateErrors&) = delete;
  LateErrors& operator=(const LateErrors&) = delete;

  // Without memory for the words, it is still known that there was one.
  void Add(const std::string& program, const std::string& step, const std::string& what) noexcept;
  // In words, what nobody was told yet, and is told now; "" if there is nothing. Throws
  // std::bad_alloc.
  std::string Take();
  // Puts them on stderr.
  void Tell() noexcept;

 private:
  LateErrors() = default;

  std::atomic<bool> any_{false};  // so that a call without errors takes no lock
  std::mutex mutex_;              // guards everything below
  std::string first_;
  int count_ = 0;
};

}  // namespace dfx
