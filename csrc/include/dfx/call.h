// One execution of a Program.
//
// Who owns what: arguments and results belong to the caller of Engine::Run and are used only until
// Run returns; scratch belongs to the Call until the last lane has left its last step, and that may
// be after Run returned (see LaneDone); then another call gets it (scratch.h).
//
// What orders accesses: a lane runs its instructions in order; Event::Signal happens before the
// return of Event::Wait; everything a lane did before LaneDone happens before the return of Run.
// (On device lanes: see cuda/cuda_engine.h.)
//
// On failure the first error is kept, every event that is not signalled is aborted so that no
// waiter sleeps on, and lanes skip what is left. What results hold then is not defined. The next
// call starts clean: Reset runs when no lane knows the call any more.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "dfx/event.h"
#include "dfx/observer.h"
#include "dfx/program.h"
#include "dfx/scratch.h"
#include "dfx/step.h"

namespace dfx {

// An error that itself needs no memory: short enough for a std::string's own bytes.
inline constexpr char kOutOfMemory[] = "out of memory";

class Call {
 public:
  explicit Call(const Program& program);
  // A call on device lanes: scratch is the caller's, and streams keep the order of events, so steps
  // may not touch events themselves.
  Call(const Program& program, void* device_scratch);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Memory for one use of a pooled call; TakeScratch throws std::bad_alloc.
  void TakeScratch();
  void GiveScratch() noexcept;

  // Readies a pooled call for use. Only while no lane has it.
  // `disturb` other than 0: a trial for finding errors. Scratch is filled with ones (NaN as any
  // float type), and lanes pause at random, as this seed says.
  void Reset(void* const* args, void* const* results, bool profile, uint64_t disturb = 0);

  const Program& program() const { return program_; }
  // `id` must be one of the program's buffers.
  void* BufferData(int id) const;
  Buffer GetBuffer(int id) const;

  // True: the event was signalled. False: the call failed, and the waiter must unwind. An event
  // that the program does not have fails the call.
  // With the lane that waits, it is noted what it waits for.
  bool WaitEvent(int event, int lane = -1) {
    return HasEvent(event) &&
           events_[static_cast<size_t>(event)].Wait(
               lane < 0 ? nullptr : &states_[static_cast<size_t>(lane)].waits, event, helper_);
  }
  bool IsEventSet(int event) const { return events_[static_cast<size_t>(event)].IsSet(); }
  // Who is asked before a lane sleeps; until the next Reset.
  void SetHelper(Helper* helper) { helper_ = helper; }
  void RecordEvent(int event) {
    if (HasEvent(event)) events_[static_cast<size_t>(event)].Signal();
  }

  // The first error wins; every waiter wakes. Without memory for the message the call fails too.
  void Fail(std::string_view message) noexcept;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string error() const;
  // Throws Error, for whoever waits for the call.
  void ThrowIfFailed() const;

  // A lane has touched its last buffer. May be called from inside its last step, so that Run need
  // not wait for the rest of the step (unless Run's caller itself runs the lane, because its thread
  // is late: then the rest must not wait for what comes after Run); idempotent. Steps that come
  // after it are refused. A profiled call still waits for the step's end: its trace would lack the
  // step otherwise.
  void LaneDone(int lane);
  // The same when a lane has left its last step; the engine calls it once for each lane.
  void LaneLeft(int lane);
  bool IsLaneDone(int lane) const {
    return lane_done_[static_cast<size_t>(lane)].load(std::memory_order_acquire);
  }
  // Blocks until every lane of the program is done.
  void WaitAllLanes();
  // Spins, for a short time at most, until every lane has left its last step, too. What follows in
  // a step that is done already wants what the caller wants next (an interpreter's lock): the later
  // one of both would sleep for it.
  void SpinUntilLeft() const;

  // What a lane is at: which of its instructions, -1 before the first. Written at every one of
  // them: lanes must not share a cache line.
  struct alignas(64) LaneState {
    std::atomic<int32_t> at{-1};
    Waiting waits;
  };
  LaneState& state(int lane) const { return states_[static_cast<size_t>(lane)]; }

  // In a trial, sleeps for a random time now and then; else does nothing.
  void Pause(int lane) {
    if (disturb_ != 0) PauseInTrial(lane);
  }

  bool profile() const { return profile_; }
  void Trace(int id, int lane, int64_t t0_ns, int64_t t1_ns) noexcept;
  std::vector<TraceRecord> TakeTrace();

 private:
  bool HasEvent(int event) {
    if (events_ != nullptr &&
        static_cast<uint32_t>(event) < static_cast<uint32_t>(program_.n_events())) {
      return true;
    }
    FailNoEvent(event);
    return false;
  }
  void FailNoEvent(int event);
  void CountDown();
  void PauseInTrial(int lane);

  const Program& program_;  // outlives the call: the engine holds both
  void* const* args_ = nullptr;
  void* const* results_ = nullptr;
  char* scratch_ = nullptr;
  Scratch held_;                     // none on device lanes
  std::unique_ptr<Event[]> events_;  // none on device lanes
  std::unique_ptr<std::atomic<bool>[]> lane_done_;
  std::unique_ptr<LaneState[]> states_;
  std::atomic<uint32_t> lanes_left_{0};    // that are not done
  std::atomic<uint32_t> lanes_inside_{0};  // that have not left their last step
  Event all_left_;
  Helper* helper_ = nullptr;
  uint64_t disturb_ = 0;
  std::atomic<bool> failed_{false};
  bool profile_ = false;
  mutable std::mutex mutex_;  // guards error_ and trace_
  std::string error_;
  std::vector<TraceRecord> trace_;
};

}  // namespace dfx
