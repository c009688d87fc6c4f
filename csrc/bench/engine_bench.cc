// What the engine costs without Python: steps, hand-overs between lanes, whole calls. Prints JSON:
// name -> samples in nanoseconds. `dfx_engine_bench [ROUNDS]`; benchmarks/engine/native.py adds the
// statistics and the stamp. `dfx_engine_bench --count STEPS CALLS` makes so many calls of a program
// of one lane, for a tool that counts instructions (benchmarks/engine/instructions.py).
//
// The variants take turns in every round, so that what disturbs the machine disturbs all alike.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dfx/engine.h"
#include "dfx/observer.h"
#include "dfx/program.h"

namespace {

using dfx::Buffer;
using dfx::Engine;
using dfx::Lane;
using dfx::NowNs;
using dfx::Program;
using dfx::StepFunction;

constexpr int kSteps = 1000;
constexpr int kCalls = 200;  // calls in one sample of a short program

int Nothing(void*, const Buffer*, int, Buffer*, int, Lane*) { return 0; }

// Writes the time, which the next step, on the other lane, subtracts from its own.
int Stamp(void*, const Buffer* ins, int, Buffer* outs, int, Lane*) {
  const int64_t now = NowNs();
  auto* sent = static_cast<int64_t*>(ins[0].data);
  *static_cast<int64_t*>(outs[0].data) = now - *sent;
  *sent = NowNs();
  return 0;
}

// `steps` steps that go round the lanes, each waiting for the last one if that ran elsewhere. A
// step has one operand and one result: the program's argument, and one of `results` in turn.
std::shared_ptr<Program> Chain(int lanes, int steps, StepFunction fn, int results) {
  const int edges = lanes > 1 ? steps - 1 : 0;
  auto program = std::make_shared<Program>(lanes, edges, 1, results, 0, "chain");
  const int arg = program->AddBuffer({dfx::BufferKind::kArg, 0, 0, 8});
  std::vector<int> outs;
  for (int i = 0; i < results; ++i) {
    outs.push_back(program->AddBuffer({dfx::BufferKind::kResult, i, 0, 8}));
  }
  for (int step = 0; step < steps; ++step) {
    const int lane = step % lanes;
    if (edges > 0 && step > 0) program->AddWait(lane, step - 1);
    program->AddLaunch(lane, {dfx::MakeFunctionStep("step", fn), {arg}, {outs[step % results]}});
    if (step < edges) program->AddRecord(lane, step);
  }
  program->Finish();
  return program;
}

struct Variant {
  std::string name;
  std::function<void(std::vector<int64_t>*)> sample;  // appends one sample or more
  std::vector<int64_t> samples;
};

// A sample is the mean over `calls` calls in a row.
Variant Calls(std::string name, std::shared_ptr<Program> program, int calls) {
  return {std::move(name),
          [program, calls](std::vector<int64_t>* samples) {
            int64_t in = 0, out = 0;
            void* args[] = {&in};
            void* results[] = {&out};
            const int64_t start = NowNs();
            for (int i = 0; i < calls; ++i) Engine::Get().Run(program, args, results);
            samples->push_back((NowNs() - start) / calls);
          },
          {}};
}

// One call after a rest in which the lane went to sleep.
Variant CallAfterRest(std::string name, std::shared_ptr<Program> program) {
  return {std::move(name),
          [program](std::vector<int64_t>* samples) {
            int64_t in = 0, out = 0;
            void* args[] = {&in};
            void* results[] = {&out};
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            const int64_t start = NowNs();
            Engine::Get().Run(program, args, results);
            samples->push_back(NowNs() - start);
          },
          {}};
}

// Every single hand-over of a program whose steps alternate between two lanes: from the end of a
// step on one to the start of the next on the other, the reading of two clocks included. Those of
// the first steps are left out: the lanes may still be waking.
Variant HandOvers(std::string name) {
  constexpr int kKept = 25;
  auto program = Chain(2, kSteps, Stamp, kSteps);
  return {std::move(name),
          [program](std::vector<int64_t>* samples) {
            int64_t sent = 0;
            std::vector<int64_t> deltas(kSteps, 0);
            void* args[] = {&sent};
            std::vector<void*> results;
            for (int64_t& delta : deltas) results.push_back(&delta);
            Engine::Get().Run(program, args, results);
            samples->insert(samples->end(), deltas.end() - kKept, deltas.end());
          },
          {}};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--count") {
    std::vector<int64_t> unused;
    Calls("count", Chain(1, std::atoi(argv[2]), Nothing, 1), std::atoi(argv[3])).sample(&unused);
    Engine::Get().Shutdown();
    return 0;
  }
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  if (argc > 2 || rounds < 1) {
    std::fprintf(stderr, "usage: %s [ROUNDS] | --count STEPS CALLS\n", argv[0]);
    return 2;
  }
  std::vector<Variant> variants;
  variants.push_back(Calls("1_lane_1_step", Chain(1, 1, Nothing, 1), kCalls));
  variants.push_back(Calls("1_lane_2_steps", Chain(1, 2, Nothing, 1), kCalls));
  variants.push_back(Calls("1_lane_1000_steps", Chain(1, kSteps, Nothing, 1), 1));
  variants.push_back(Calls("2_lanes_2_steps", Chain(2, 2, Nothing, 1), kCalls));
  variants.push_back(Calls("2_lanes_1000_steps", Chain(2, kSteps, Nothing, 1), 1));
  variants.push_back(HandOvers("hand_over"));
  variants.push_back(CallAfterRest("2_lanes_2_steps_after_rest", Chain(2, 2, Nothing, 1)));
  const auto warm_up = static_cast<size_t>(std::min(rounds, 10));
  for (size_t round = 0; round < warm_up + static_cast<size_t>(rounds); ++round) {
    for (size_t i = 0; i < variants.size(); ++i) {
      Variant& variant = variants[(i + round) % variants.size()];
      variant.sample(&variant.samples);
      if (round < warm_up) variant.samples.clear();
    }
  }
  std::printf("{");
  for (const Variant& variant : variants) {
    std::printf("%s\n\"%s\": [", &variant == &variants.front() ? "" : ",", variant.name.c_str());
    for (size_t i = 0; i < variant.samples.size(); ++i) {
      std::printf("%s%lld", i == 0 ? "" : ",", static_cast<long long>(variant.samples[i]));
    }
    std::printf("]");
  }
  std::printf("\n}\n");
  Engine::Get().Shutdown();
  return 0;
}
