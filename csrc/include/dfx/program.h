// A program: the executable form of a plan (or of one stage of it).
//
// Built by one thread; immutable once Finish returned "", and then shared by any number of threads
// (only the pool of calls changes, under its mutex). A program that was not finished, or that was
// changed after that, does not run: Engine::Run says so.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dfx/launcher.h"

namespace dfx {

class Call;

enum class BufferKind : uint8_t { kArg, kResult, kScratch };

struct BufferDesc {
  BufferKind kind;
  int32_t index;   // argument or result number
  int64_t offset;  // bytes into scratch, or into the argument or result
  int64_t bytes;
  int32_t dtype;
  std::vector<int64_t> dims;
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
  std::string name;
  Launcher launcher;
  std::vector<int32_t> ins, outs;
};

class Program {
 public:
  Program(int n_lanes, int n_events, int n_args, int n_results, int64_t scratch_bytes,
          std::string name);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  int AddBuffer(BufferDesc buffer);
  int AddLaunch(int lane, LaunchDesc launch);
  void AddRecord(int lane, int event);
  void AddWait(int lane, int event);

  // "" or what is wrong: an id out of range, an event recorded twice, an event waited for and never
  // recorded, an order of lanes and events that can never finish. An event that no instruction
  // names is allowed: steps signal and await it themselves (gates).
  std::string Finish();
  bool finished() const { return finished_; }

  // "" or why lists of so many arguments and results do not fit.
  std::string CheckCounts(size_t args, size_t results) const;

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

  // Calls are pooled, because their scratch is large and first use of memory is slow. A call comes
  // back once no lane can touch it any more. TakeCall throws std::bad_alloc.
  std::unique_ptr<Call> TakeCall() const;
  void GiveCall(std::unique_ptr<Call> call) const noexcept;

 private:
  // Also works out the issue order.
  std::string CheckOrder();
  // Notes the first misuse of the builder, for Finish to report.
  void Misuse(std::string what);
  bool CheckOpen();

  int n_lanes_, n_events_, n_args_, n_results_;
  int64_t scratch_bytes_;
  std::string name_;
  std::string bad_;  // first misuse of the builder
  bool finished_ = false;
  std::vector<BufferDesc> buffers_;
  std::vector<LaunchDesc> launches_;
  std::vector<std::vector<Instr>> lanes_;
  std::vector<int> used_lanes_;
  std::vector<LaneInstr> issue_order_;
  mutable std::mutex pool_mutex_;
  mutable std::vector<std::unique_ptr<Call>> pool_;
};

}  // namespace dfx
