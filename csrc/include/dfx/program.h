// A program: the executable form of a plan (or of one stage of it).
//
// Built by one thread; immutable once Finish returned, and then shared by any number of threads
// (only the pool of calls changes, under its mutex). A program that was not finished does not run:
// Engine::Run says so.
//
// On failure everything here throws std::invalid_argument, and leaves the program as it was.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "dfx/scratch.h"
#include "dfx/step.h"

namespace dfx {

class Call;

// Version of the layout that plans are encoded in for the engine. Checked when Python loads it.
inline constexpr int kPlanAbiVersion = 1;

inline constexpr int kMaxLanes = 256;

// Scratch, and every buffer in it, begins at a multiple of so many bytes; XLA:CPU uses memory in
// place only there. The planner places buffers by the same number (dynaflow_xla.machine).
inline constexpr int64_t kAlignment = 64;

enum class BufferKind : uint8_t { kArg, kResult, kScratch };

struct BufferDesc {
  BufferKind kind;
  int32_t index;   // argument or result number
  int64_t offset;  // bytes into scratch, or into the argument or result
  int64_t bytes;
};

struct Instr {
  enum Kind : uint8_t { kLaunch, kRecord, kWait } kind;
  int32_t a;  // launch index or event id
};

struct LaneInstr {
  int32_t lane;
  Instr instr;
};

struct LaunchDesc {
  std::unique_ptr<Step> step;
  std::vector<int32_t> ins, outs;  // buffers
};

class Program {
 public:
  Program(int n_lanes, int n_events, int n_args, int n_results, int64_t scratch_bytes,
          std::string name);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // These return the number of what they added.
  int AddBuffer(const BufferDesc& buffer);
  int AddLaunch(int lane, LaunchDesc launch);
  void AddRecord(int lane, int event) { OpenLane(lane).push_back({Instr::kRecord, event}); }
  void AddWait(int lane, int event) { OpenLane(lane).push_back({Instr::kWait, event}); }

  // Steps of a lane that signal or await events themselves (gates) must say so if a thread that
  // waits for such an event is to run a lane that has not begun in its stead.
  void AddStepRecord(int lane, int event);
  void AddStepWait(int lane, int event);
  // The lane that signals an event, or -1 if nobody said so.
  int RecordingLane(int event) const { return recording_lane_[static_cast<size_t>(event)]; }
  // All events that a lane waits for, in its instructions and in its steps.
  const std::vector<int>& WaitsOf(int lane) const { return waits_of_[static_cast<size_t>(lane)]; }

  // For people: what an event says, and what a lane that waits for it is about to do.
  void NameEvent(int event, std::string text);
  void NameWait(int lane, int event, std::string text);
  // "" if nobody gave one.
  const std::string& EventName(int event) const;
  const std::string& WaitName(int lane, int event) const;

  // Throws for an id out of range, an event recorded twice, an event waited for and never recorded,
  // an order of lanes and events that can never finish. An event that no instruction names is
  // allowed: steps signal and await it themselves (gates).
  void Finish();
  bool finished() const { return finished_; }

  // The lanes and what each does, for people.
  std::string Describe() const;

  const std::string& name() const { return name_; }
  int n_lanes() const { return n_lanes_; }
  int n_events() const { return n_events_; }
  int n_args() const { return n_args_; }
  int n_results() const { return n_results_; }
  int64_t scratch_bytes() const { return scratch_bytes_; }
  const std::vector<BufferDesc>& buffers() const { return buffers_; }
  const std::vector<LaunchDesc>& launches() const { return launches_; }
  const std::vector<Instr>& lane(int index) const { return lanes_[static_cast<size_t>(index)]; }
  const std::vector<int>& used_lanes() const { return used_lanes_; }
  // All instructions in an order in which one thread can issue them: each lane's own order, and no
  // wait before its record.
  const std::vector<LaneInstr>& issue_order() const { return issue_order_; }

  // Calls are pooled; their scratch, which is large, is shared with other programs (scratch.h). A
  // call comes back once no lane can touch it any more. TakeCall throws std::bad_alloc.
  std::unique_ptr<Call> TakeCall() const;
  void GiveCall(std::unique_ptr<Call> call) const noexcept;

 private:
  void CheckOpen() const;
  std::vector<Instr>& OpenLane(int lane);
  void CheckBuffers() const;
  void CheckEvent(int event) const;
  // An order in which the instructions can be issued.
  std::vector<LaneInstr> IssueOrder() const;
  [[noreturn]] void Refuse(const std::string& why) const;

  int n_lanes_, n_events_, n_args_, n_results_;
  int64_t scratch_bytes_;
  std::string name_;
  bool finished_ = false;
  std::vector<int> recording_lane_;
  std::vector<std::vector<int>> waits_of_;
  std::map<int, std::string> event_names_;
  std::map<std::pair<int, int>, std::string> wait_names_;
  std::vector<BufferDesc> buffers_;
  std::vector<LaunchDesc> launches_;
  std::vector<std::vector<Instr>> lanes_;
  std::vector<int> used_lanes_;
  std::vector<LaneInstr> issue_order_;
  ScratchNeed need_;
  mutable std::mutex pool_mutex_;
  mutable std::vector<std::unique_ptr<Call>> pool_;
};

}  // namespace dfx
