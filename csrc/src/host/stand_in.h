// Who runs a lane in place of its thread.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>

#include "dfx/call.h"
#include "dfx/event.h"
#include "dfx/observer.h"
#include "host/host_lane.h"
#include "host/spin.h"

namespace dfx {

// Runs lanes of a call whose own threads have not begun with it, on threads of the call that could
// only wait: on a busy machine a thread that was woken stands behind others for milliseconds.
//
// A thread that waits in the middle of its own lane takes a lane only if all events which that lane
// waits for are set: it never waits itself then, so that nothing stands still that the awaited lane
// needs. The caller whose own lane is done takes any: it has nothing left that others need.
class StandIn : public Helper {
 public:
  // How long after a call's start the lanes' own threads have for waking up, before others do in
  // the middle of their lanes what could still run beside these.
  static constexpr int64_t kWakingNs = kSpinNs;

  StandIn(Call& call, std::unique_ptr<HostLane>* lanes) : call_(call), lanes_(lanes) {}

  // Lane by lane until the awaited event is set, or nothing is left that helps.
  void Help(int event) noexcept override {
    while (!call_.IsEventSet(event)) {
      const int lane = LaneFor(event);
      if (lane < 0 || !WaitForBegin(lane, event) || !Run(lane)) return;  // [Help]
    }
  }

  // For the caller, whose lane is done.
  void RunTheRest() noexcept {
    for (int lane : call_.program().used_lanes()) {
      if (lane != 0) Run(lane);
    }
  }

  // For a member of the caller's team, to whom a lane falls whose thread was not woken. Where
  // earlier calls are still on the lane, or somebody was faster, its thread goes on.
  void RunOrWake(int lane) noexcept {
    if (!Run(lane)) lanes_[lane]->Wake();
  }

 private:
  bool HasBegun(int lane) const {
    return call_.state(lane).at.load(std::memory_order_acquire) >= 0;
  }

  // The lane that has not begun, and that an event that is not set needs next; or -1.
  int LaneFor(int event) const {
    const Program& program = call_.program();
    // An event needs a lane, which needs an event, ...: no longer than there are lanes.
    for (int hop = 0; hop < program.n_lanes(); ++hop) {
      const int lane = program.RecordingLane(event);
      if (lane <= 0 || HasBegun(lane)) return -1;
      const auto& waits = program.WaitsOf(lane);
      const auto open =
          std::find_if_not(waits.begin(), waits.end(), [&](int e) { return call_.IsEventSet(e); });
      if (open == waits.end()) return lane;
      event = *open;
    }
    return -1;
  }

  // Spins while the lane's thread may still be waking up; whether it is late.
  bool WaitForBegin(int lane, int event) const {
    const int64_t end = begin_ns_ + kWakingNs;
    while (NowNs() < end) {
      if (HasBegun(lane) || call_.IsEventSet(event)) return false;
      CpuRelax();
    }
    return true;
  }

  bool Run(int lane) noexcept {
    Queue taken;
    HostLane& host = *lanes_[lane];
    if (!host.TakeOver(call_, taken)) return false;
    const bool before = std::exchange(in_lane, true);
    RunLane(host, call_);
    in_lane = before;
    host.GiveBack();
    return true;
  }

  Call& call_;
  std::unique_ptr<HostLane>* const lanes_;  // those of the call do not change any more
  const int64_t begin_ns_ = NowNs();
};

}  // namespace dfx
