// The engine: lanes shared by all programs of the process.
//
// Why it cannot deadlock: every call enters the queues of all its lanes under one mutex, so all
// lanes see all calls in one order; the oldest unfinished call is at the front of each of its
// lanes, and its own order was proved free of cycles; so it finishes, and so does the next.
// A step must not call Run: it would wait for lanes behind itself. That is refused on the thread
// that runs the step; a step must not do it through a thread of its own either, which cannot be
// seen.
//
// A call with a team wakes no lane's thread when it enters the queues. For each lane some member
// then either takes the call over or wakes the thread: the member of that lane, or the caller where
// there is none. So whoever a lane falls to, it does not stand still.
//
// What threads do between two looks at what they share is an action of the model in
// tests/support/engine_model.py, all of whose interleavings are tried for small programs; the code
// names the actions: [Enqueue], [Take], ...
//
// Who keeps what alive: a call in flight and its program are held by the caller of Run and by each
// lane that still has to leave it. Whoever lets go last returns the call to its program's pool; if
// nobody else holds the program, that may destroy the program (and its steps) on a lane thread.
//
// On failure Run throws (see error.h): what a step failed with (the first one wins), memory or
// threads that cannot be had (then no step has run), misuse. All lanes are fit for the next call.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dfx/observer.h"
#include "dfx/program.h"
#include "dfx/team.h"

namespace dfx {

class Lane;

class Engine {
 public:
  // All are 0 in a forked child.
  struct Stats {
    int64_t live = 0;      // calls that entered Run and have not left it
    int64_t calls = 0;     // ever started
    int64_t failures = 0;  // of those, how many ended with an error
    int threads = 0;
    int64_t copied_bytes = 0;   // by gates
    int64_t reports = 0;        // of the watchdog
    int64_t scratch_bytes = 0;  // that calls on cores have, or wait for the next one
  };

  // Process-wide; never destroyed, because lanes may outlive static destructors.
  static Engine& Get();

  // The lane (its thread starts with the first call that uses it).
  Lane& lane(int index);

  // Runs a finished program to completion on the caller's thread (lane 0) and the lane threads.
  // `args` and `results` hold the program's numbers of addresses and are used until Run returns.
  // Any number of threads may call it. With `stay` the caller keeps to its core while lane 0 runs:
  // for steps that sleep now and then (see StayOnCore), and that start no threads. Members of
  // `team` run the lanes in place of these' threads; lanes for which it has no member, their
  // threads run. Returns the records of a call with `profile`. `disturb`: see Call::Reset.
  std::vector<TraceRecord> Run(const std::shared_ptr<const Program>& program,
                               std::span<void* const> args, std::span<void* const> results,
                               bool profile = false, bool stay = false, uint64_t disturb = 0,
                               Team* team = nullptr);

  // From now on a call that takes longer is reported once, and goes on: what each of its lanes does
  // or waits for. 0: none is. `report` is called on a thread of the engine's, which takes no lock
  // that a call needs; must not throw. Throws Error if the thread cannot be had.
  void SetWatchdog(int64_t after_ns, void (*report)(const std::string& text));

  // Waits for calls in flight, joins the lane threads; later calls fail. Idempotent, from any
  // thread. False, and nothing is done, inside a step (it would wait for itself) and in a forked
  // child (which has no lanes).
  bool Shutdown();

  Stats stats() const;

  // Called on every lane thread at its start and end; must not throw. Set before the first Run.
  static void SetThreadHooks(void (*on_start)(int lane), void (*on_exit)(int lane));

 private:
  Engine();
  bool forked() const;
  struct Impl;
  Impl* impl_;
};

}  // namespace dfx
