#include "dfx/program.h"

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
  if (n_lanes < 0 || n_lanes > 256 || n_events < 0 || n_args < 0 || n_results < 0 ||
      scratch_bytes < 0) {
    Misuse("counts must not be negative, and lanes at most 256");
    n_lanes_ = 0;
  }
  lanes_.resize(static_cast<size_t>(n_lanes_));
  pool_.reserve(kPooledCalls);
}

Program::~Program() = default;

void Program::Misuse(std::string what) {
  if (bad_.empty()) bad_ = std::move(what);
}

bool Program::CheckOpen() {
  if (!finished_) return true;
  finished_ = false;
  Misuse("it was changed after Finish");
  return false;
}

int Program::AddBuffer(BufferDesc buffer) {
  if (!CheckOpen()) return -1;
  buffers_.push_back(std::move(buffer));
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::AddLaunch(int lane, LaunchDesc launch) {
  if (!CheckOpen()) return -1;
  const int index = static_cast<int>(launches_.size());
  if (lane < 0 || lane >= n_lanes_) {
    Misuse("launch '" + launch.name + "' is on lane " + std::to_string(lane) + " of " +
           std::to_string(n_lanes_) + " lanes");
    return -1;
  }
  launches_.push_back(std::move(launch));
  lanes_[static_cast<size_t>(lane)].push_back({Instr::kLaunch, index});
  return index;
}

void Program::AddRecord(int lane, int event) {
  if (!CheckOpen()) return;
  if (lane < 0 || lane >= n_lanes_) {
    Misuse("the record of event " + std::to_string(event) + " is on lane " + std::to_string(lane) +
           " of " + std::to_string(n_lanes_) + " lanes");
    return;
  }
  lanes_[static_cast<size_t>(lane)].push_back({Instr::kRecord, event});
}

void Program::AddWait(int lane, int event) {
  if (!CheckOpen()) return;
  if (lane < 0 || lane >= n_lanes_) {
    Misuse("the wait for event " + std::to_string(event) + " is on lane " + std::to_string(lane) +
           " of " + std::to_string(n_lanes_) + " lanes");
    return;
  }
  lanes_[static_cast<size_t>(lane)].push_back({Instr::kWait, event});
}

std::string Program::Finish() {
  if (!bad_.empty()) return name_ + ": " + bad_;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const BufferDesc& b = buffers_[i];
    bool ok = b.bytes >= 0;
    ok = ok && b.offset >= 0;
    if (b.kind == BufferKind::kArg) ok = ok && b.index >= 0 && b.index < n_args_;
    if (b.kind == BufferKind::kResult) ok = ok && b.index >= 0 && b.index < n_results_;
    if (b.kind == BufferKind::kScratch) {
      ok = ok && b.offset % 64 == 0 && b.bytes <= scratch_bytes_ - b.offset;
    }
    if (!ok) return name_ + ": buffer " + std::to_string(i) + " is out of range";
  }
  for (const LaunchDesc& launch : launches_) {
    if (launch.launcher.fn == nullptr) return name_ + ": '" + launch.name + "' has no function";
    for (const auto* ids : {&launch.ins, &launch.outs}) {
      for (int32_t id : *ids) {
        if (id < 0 || static_cast<size_t>(id) >= buffers_.size()) {
          return name_ + ": '" + launch.name + "' names buffer " + std::to_string(id) + " of " +
                 std::to_string(buffers_.size());
        }
      }
    }
  }
  std::string order = CheckOrder();
  if (!order.empty()) return name_ + ": " + order;
  used_lanes_.clear();
  for (int lane = 0; lane < n_lanes_; ++lane) {
    if (!lanes_[static_cast<size_t>(lane)].empty()) used_lanes_.push_back(lane);
  }
  finished_ = true;
  return "";
}

std::string Program::CheckOrder() {
  std::vector<int> recorded(static_cast<size_t>(n_events_), 0);
  std::vector<int> waited(static_cast<size_t>(n_events_), 0);
  for (const auto& lane : lanes_) {
    for (const Instr& instr : lane) {
      if (instr.kind == Instr::kLaunch) continue;
      if (instr.a < 0 || instr.a >= n_events_) {
        return "event " + std::to_string(instr.a) + " of " + std::to_string(n_events_);
      }
      ++(instr.kind == Instr::kRecord ? recorded : waited)[static_cast<size_t>(instr.a)];
    }
  }
  for (int e = 0; e < n_events_; ++e) {
    const auto i = static_cast<size_t>(e);
    if (recorded[i] > 1) return "event " + std::to_string(e) + " is recorded more than once";
    if (waited[i] > 0 && recorded[i] == 0) {
      return "event " + std::to_string(e) + " is waited for and never recorded";
    }
  }
  issue_order_.clear();
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
        issue_order_.push_back({static_cast<int32_t>(lane), instr});
        moved = true;
      }
    }
  }
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (at[lane] < lanes_[lane].size()) {
      return "deadlock: lane " + std::to_string(lane) + " waits for event " +
             std::to_string(lanes_[lane][at[lane]].a) + ", which waits for it";
    }
  }
  return "";
}

std::string Program::CheckCounts(size_t args, size_t results) const {
  if (args == static_cast<size_t>(n_args_) && results == static_cast<size_t>(n_results_)) return "";
  return "program '" + name_ + "' takes " + std::to_string(n_args_) + " arguments and " +
         std::to_string(n_results_) + " results; got " + std::to_string(args) + " and " +
         std::to_string(results);
}

std::unique_ptr<Call> Program::TakeCall() const {
  {
    std::lock_guard<std::mutex> lock(pool_mutex_);
    if (!pool_.empty()) {
      std::unique_ptr<Call> call = std::move(pool_.back());
      pool_.pop_back();
      return call;
    }
  }
  return std::make_unique<Call>(*this);
}

void Program::GiveCall(std::unique_ptr<Call> call) const noexcept {
  if (call == nullptr) return;
  std::lock_guard<std::mutex> lock(pool_mutex_);
  if (pool_.size() < kPooledCalls) pool_.push_back(std::move(call));  // room was reserved
}

}  // namespace dfx
