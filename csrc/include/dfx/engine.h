// The engine: lanes shared by all programs of the process.
//
// Why it cannot deadlock: every call enters the queues of all its lanes under one mutex, so all
// lanes see all calls in one order; the oldest unfinished call is at the front of each of its
// lanes, and its own order was proved free of cycles; so it finishes, and so does the next.
// A step must not call Run: it would wait for lanes behind itself. That is refused.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dfx/observer.h"
#include "dfx/program.h"

namespace dfx {

class Lane;

class Engine {
 public:
  struct Result {
    bool ok = true;
    std::string error;
    std::vector<TraceRecord> trace;
  };

  // Process-wide; never destroyed, because lanes may outlive static destructors.
  static Engine& Get();

  // The lane (its thread starts with the first call that uses it).
  Lane* lane(int index);

  // Runs a finished program to completion on the caller's thread (lane 0) and the lane threads.
  Result Run(const std::shared_ptr<const Program>& program, void* const* args, void* const* results,
             bool profile = false);

  // Waits for calls in flight, joins the lane threads; later calls fail. Idempotent.
  void Shutdown();

  int64_t live_calls() const;
  int n_threads() const;

  // Called on every lane thread at its start and end. Set before the first Run.
  static void SetThreadHooks(void (*on_start)(int lane), void (*on_exit)(int lane));

 private:
  Engine();
  struct Impl;
  Impl* impl_;
};

}  // namespace dfx
