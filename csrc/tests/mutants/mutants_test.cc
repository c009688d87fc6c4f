// Faults planted in the CUDA engine (src/mutants.h): each is noticed, by values or by the order
// that the driver was given. A program of its own: the engine's source is compiled into it once
// more.
#include <doctest/doctest.h>

#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/cuda_support.h"
#include "mutants.h"

namespace dfx {
Mutant planted = Mutant::kNone;
}

namespace {

using dfx::Mutant;
using dfx::test::CleanDriver;
using dfx::test::Device;
using dfx::test::IsRight;
using dfx::test::kLanes;
using dfx::test::Memory;
using dfx::test::RunOnDevice;
using dfx::test::Squares;
namespace fake = dfx::fake;

using Set = std::set<uint64_t>;

// What the trace of a call says: kernels, and the memory's beginning and end, in the order of
// calls, each with all that comes before it.
struct Trace {
  std::vector<std::string> kinds;
  std::vector<uint64_t> ids;
  std::map<uint64_t, Set> before;

  explicit Trace(const std::string& text) {
    static const std::regex line(R"re("op":(\d+).*"kind":"(\w+)".*"after":\[([\d,]*)\])re");
    std::istringstream lines(text);
    for (std::string each; std::getline(lines, each);) {
      std::smatch found;
      if (!std::regex_search(each, found, line)) continue;
      const uint64_t id = std::stoull(found[1]);
      kinds.push_back(found[2]);
      ids.push_back(id);
      std::istringstream numbers(found[3]);
      for (std::string number; std::getline(numbers, number, ',');) {
        const uint64_t one = std::stoull(number);
        before[id].insert(one);
        before[id].insert(before[one].begin(), before[one].end());
      }
    }
  }
  bool Ordered(size_t a, size_t b) { return before[ids[b]].count(ids[a]) != 0; }
};

// The order that a call of Squares was given, looked at: "" or what is missing. On the caller's
// stream a kernel stands before it and one after it.
std::string Missing() {
  Device device;
  auto program = Squares();
  fake::Stream caller;
  auto memory = std::make_unique<Memory>(3);
  fake::KeepFreed(true);
  fake::BeginTrace();
  fake::Launch(caller.get(), [] { return true; });
  RunOnDevice(*device.engine, program, memory->arg_list, memory->result_list, caller.get());
  fake::Launch(caller.get(), [] { return true; });
  Trace trace(fake::EndTrace());
  caller.Synchronize();
  device.engine.reset();
  std::vector<size_t> kernels;
  size_t begin = 0, end = 0;
  for (size_t i = 0; i < trace.kinds.size(); ++i) {
    if (trace.kinds[i] == "kernel") kernels.push_back(i);
    if (trace.kinds[i] == "alloc") begin = i;
    if (trace.kinds[i] == "free") end = i;
  }
  REQUIRE(kernels.size() == 2 * kLanes + 2);
  for (size_t at = 1; at <= 2 * kLanes; ++at) {
    const size_t kernel = kernels[at];
    if (!trace.Ordered(kernels[0], kernel)) return "what the caller's stream was given comes first";
    if (!trace.Ordered(begin, kernel)) return "the memory is there before its use";
    if (!trace.Ordered(kernel, kernels.back())) return "the caller's stream comes after";
    if (!trace.Ordered(kernel, end)) return "the memory is there until its last use";
  }
  for (size_t square = 1; square <= kLanes; ++square) {
    for (size_t sum = kLanes + 1; sum <= 2 * kLanes; ++sum) {
      if (!trace.Ordered(kernels[square], kernels[sum])) return "each sum comes after each square";
    }
  }
  return "";
}

}  // namespace

TEST_CASE("nothing is missing where nothing is planted") {
  CleanDriver clean;
  CHECK(Missing() == "");
}

TEST_CASE("each fault of the engine is seen in the order that the driver was given") {
  const std::map<Mutant, std::string> faults = {
      {Mutant::kNoWait, "each sum comes after each square"},
      {Mutant::kEarlyRecord, "each sum comes after each square"},
      {Mutant::kSharedEvent, "each sum comes after each square"},
      {Mutant::kNoFork, "what the caller's stream was given comes first"},
      {Mutant::kNoJoin, "the caller's stream comes after"},
      {Mutant::kEarlyFree, "the memory is there until its last use"},
  };
  for (const auto& [fault, what] : faults) {
    CAPTURE(static_cast<int>(fault));
    CleanDriver clean;
    dfx::planted = fault;
    CHECK(Missing() == what);
    dfx::planted = Mutant::kNone;
  }
}

TEST_CASE("a dropped wait and an early record are seen in values, too") {
  for (const Mutant fault : {Mutant::kNone, Mutant::kNoWait, Mutant::kEarlyRecord}) {
    CAPTURE(static_cast<int>(fault));
    CleanDriver clean;
    int wrong = 0;
    dfx::planted = fault;
    // As many calls as it takes: one in a few is wrong.
    for (int i = 0; wrong == 0 && i < (fault == Mutant::kNone ? 50 : 3000); ++i) {
      Device device;
      alignas(64) char scratch[64 * kLanes] = {};
      fake::Stream caller;
      Memory memory(i + 1);
      RunOnDevice(*device.engine, Squares(), memory.arg_list, memory.result_list, caller.get(),
                  scratch);
      caller.Synchronize();
      wrong += IsRight(memory) ? 0 : 1;
    }
    dfx::planted = Mutant::kNone;
    CHECK((wrong > 0) == (fault != Mutant::kNone));
  }
}
