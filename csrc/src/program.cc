#include "dfx/program.h"

#include <stdexcept>
#include <utility>

#include "dfx/call.h"

namespace dfx {
namespace {
constexpr size_t kPooledCalls = 4;
}

Program::Program(int n_lanes, int n_events, int n_args, int n_results, int64_t scratch_bytes,
                 std::string name)
    : n_lanes_(n_lanes),
      n_events_(n_events),
      n_args_(n_args),
      n_results_(n_results),
      scratch_bytes_(scratch_bytes),
      name_(std::move(name)) {
  if (n_lanes < 0 || n_lanes > kMaxLanes || n_events < 0 || n_args < 0 || n_results < 0 ||
      scratch_bytes < 0) {
    Refuse("counts must not be negative, and lanes at most " + std::to_string(kMaxLanes));
  }
  lanes_.resize(static_cast<size_t>(n_lanes_));
  waits_of_.resize(static_cast<size_t>(n_lanes_));
  recording_lane_.assign(static_cast<size_t>(n_events_), -1);
  pool_.reserve(kPooledCalls);
}

Program::~Program() = default;

void Program::Refuse(const std::string& why) const {
  throw std::invalid_argument(name_ + ": " + why);
}

void Program::CheckOpen() const {
  if (finished_) Refuse("the program is finished and can no longer change");
}

int Program::AddBuffer(const BufferDesc& buffer) {
  CheckOpen();
  buffers_.push_back(buffer);
  return static_cast<int>(buffers_.size()) - 1;
}

std::vector<Instr>& Program::OpenLane(int lane) {
  CheckOpen();
  if (lane < 0 || lane >= n_lanes_) {
    Refuse("lane " + std::to_string(lane) + " of " + std::to_string(n_lanes_) + " lanes");
  }
  return lanes_[static_cast<size_t>(lane)];
}

int Program::AddLaunch(int lane, LaunchDesc launch) {
  std::vector<Instr>& instructions = OpenLane(lane);
  const int index = static_cast<int>(launches_.size());
  launches_.push_back(std::move(launch));
  instructions.push_back({Instr::kLaunch, index});
  return index;
}

void Program::CheckEvent(int event) const {
  if (event >= 0 && event < n_events_) return;
  Refuse("event " + std::to_string(event) + " of " + std::to_string(n_events_));
}

void Program::AddStepRecord(int lane, int event) {
  OpenLane(lane);
  CheckEvent(event);
  recording_lane_[static_cast<size_t>(event)] = lane;
}

void Program::AddStepWait(int lane, int event) {
  OpenLane(lane);
  CheckEvent(event);
  waits_of_[static_cast<size_t>(lane)].push_back(event);
}

void Program::NameEvent(int event, std::string text) {
  CheckOpen();
  event_names_[event] = std::move(text);
}

void Program::NameWait(int lane, int event, std::string text) {
  CheckOpen();
  wait_names_[{lane, event}] = std::move(text);
}

namespace {
const std::string kNoName;

template <typename Names, typename Key>
const std::string& Named(const Names& names, const Key& key) {
  const auto found = names.find(key);
  return found == names.end() ? kNoName : found->second;
}
}  // namespace

const std::string& Program::EventName(int event) const { return Named(event_names_, event); }

const std::string& Program::WaitName(int lane, int event) const {
  return Named(wait_names_, std::pair(lane, event));
}

void Program::Finish() {
  CheckOpen();
  CheckBuffers();
  issue_order_ = IssueOrder();
  for (int lane = 0; lane < n_lanes_; ++lane) {
    if (!lanes_[static_cast<size_t>(lane)].empty()) used_lanes_.push_back(lane);
    for (const Instr& instr : lanes_[static_cast<size_t>(lane)]) {
      if (instr.kind == Instr::kWait) AddStepWait(lane, instr.a);
      if (instr.kind == Instr::kRecord) AddStepRecord(lane, instr.a);
    }
  }
  // Nobody can run a lane that does nothing.
  for (int& lane : recording_lane_) {
    if (lane >= 0 && lanes_[static_cast<size_t>(lane)].empty()) lane = -1;
  }
  need_ = ScratchNeed(scratch_bytes_);
  finished_ = true;
}

void Program::CheckBuffers() const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const BufferDesc& b = buffers_[i];
    bool ok = b.bytes >= 0 && b.offset >= 0;
    if (b.kind == BufferKind::kArg) ok = ok && b.index >= 0 && b.index < n_args_;
    if (b.kind == BufferKind::kResult) ok = ok && b.index >= 0 && b.index < n_results_;
    if (b.kind == BufferKind::kScratch) {
      ok = ok && b.offset % kAlignment == 0 && b.bytes <= scratch_bytes_ - b.offset;
    }
    if (!ok) Refuse("buffer " + std::to_string(i) + " is out of range");
  }
  for (const LaunchDesc& launch : launches_) {
    for (const auto* ids : {&launch.ins, &launch.outs}) {
      for (int32_t id : *ids) {
        if (id >= 0 && static_cast<size_t>(id) < buffers_.size()) continue;
        Refuse("'" + launch.step->name() + "' names buffer " + std::to_string(id) + " of " +
               std::to_string(buffers_.size()));
      }
    }
  }
}

std::vector<LaneInstr> Program::IssueOrder() const {
  std::vector<int> recorded(static_cast<size_t>(n_events_), 0);
  std::vector<int> waited(static_cast<size_t>(n_events_), 0);
  for (const auto& lane : lanes_) {
    for (const Instr& instr : lane) {
      if (instr.kind == Instr::kLaunch) continue;
      CheckEvent(instr.a);
      ++(instr.kind == Instr::kRecord ? recorded : waited)[static_cast<size_t>(instr.a)];
    }
  }
  for (int e = 0; e < n_events_; ++e) {
    const auto i = static_cast<size_t>(e);
    if (recorded[i] > 1) Refuse("event " + std::to_string(e) + " is recorded more than once");
    if (waited[i] > 0 && recorded[i] == 0) {
      Refuse("event " + std::to_string(e) + " is waited for and never recorded");
    }
  }
  std::vector<LaneInstr> order;
  // Run the lanes symbolically: if none can go on and some is not done, they never will. A turn
  // takes each lane to its next launch, so that a thread that issues for all lanes feeds them
  // evenly.
  std::vector<size_t> at(lanes_.size(), 0);
  std::vector<bool> done(static_cast<size_t>(n_events_), false);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      for (bool launched = false; !launched && at[lane] < lanes_[lane].size(); ++at[lane]) {
        const Instr& instr = lanes_[lane][at[lane]];
        if (instr.kind == Instr::kWait && !done[static_cast<size_t>(instr.a)]) break;
        if (instr.kind == Instr::kRecord) done[static_cast<size_t>(instr.a)] = true;
        launched = instr.kind == Instr::kLaunch;
        order.push_back({static_cast<int32_t>(lane), instr});
        moved = true;
      }
    }
  }
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (at[lane] < lanes_[lane].size()) {
      Refuse("deadlock: lane " + std::to_string(lane) + " waits for event " +
             std::to_string(lanes_[lane][at[lane]].a) + ", which waits for it");
    }
  }
  return order;
}

std::string Program::Describe() const {
  std::string text = "program '" + name_ + "': " + std::to_string(n_args_) + " arguments, " +
                     std::to_string(n_results_) + " results, " + std::to_string(scratch_bytes_) +
                     " bytes of scratch";
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    text += "\n  lane " + std::to_string(lane) + ":";
    const char* comma = " ";
    for (const Instr& instr : lanes_[lane]) {
      text += std::exchange(comma, ", ");
      if (instr.kind == Instr::kLaunch) {
        const Step& step = *launches_[static_cast<size_t>(instr.a)].step;
        text += "launch '" + step.name() + "' (" + step.Describe() + ")";
      } else {
        text += (instr.kind == Instr::kWait ? "wait " : "record ") + std::to_string(instr.a);
      }
    }
  }
  return text;
}

std::unique_ptr<Call> Program::TakeCall() const {
  std::unique_ptr<Call> call;
  {
    std::lock_guard<std::mutex> lock(pool_mutex_);
    if (!pool_.empty()) {
      call = std::move(pool_.back());
      pool_.pop_back();
    }
  }
  if (call == nullptr) call = std::make_unique<Call>(*this);
  call->TakeScratch();
  return call;
}

void Program::GiveCall(std::unique_ptr<Call> call) const noexcept {
  if (call == nullptr) return;
  call->GiveScratch();
  std::lock_guard<std::mutex> lock(pool_mutex_);
  if (pool_.size() < kPooledCalls) pool_.push_back(std::move(call));  // room was reserved
}

}  // namespace dfx
