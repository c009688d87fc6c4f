// What one XLA executable costs as a step of the engine, through the PJRT C API of a CPU plugin.
// Prints JSON: for each case the time of every round, in ns a call, and how often a call waited for
// another thread (voluntary context switches of the process). Arguments: rounds, calls a round.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pjrt_client.h"

namespace {

using dfx::Buffer;
using dfx::BufferKind;
using dfx::Engine;
using dfx::LaunchDesc;
using dfx::Program;
using dfx::Step;

struct alignas(64) Tensor {
  float at[16];
};

int NoOp(void*, const Buffer*, int, Buffer*, int, dfx::Lane*) { return 0; }

std::shared_ptr<Program> OneStep(std::unique_ptr<Step> step) {
  auto p = std::make_shared<Program>(1, 0, 1, 1, 0, "bench");
  const int a = p->AddBuffer({BufferKind::kArg, 0, 0, sizeof(Tensor)});
  const int r = p->AddBuffer({BufferKind::kResult, 0, 0, sizeof(Tensor)});
  p->AddLaunch(0, LaunchDesc{std::move(step), {a}, {r}});
  p->Finish();
  return p;
}

std::unique_ptr<Step> Xla(bool in_place) {
  const std::string text =
      dfx::test::StableHlo("16xf32", 1, 1, in_place, "%r = stablehlo.add %0, %0 : tensor<16xf32>");
  return dfx::MakePjrtStep("xla",
                           dfx::test::MakeStep(text, {dfx::test::kF32, {16}}, 1, 1, in_place));
}

int64_t Switches() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nvcsw;
}

double NsPerCall(const std::shared_ptr<Program>& program, int calls) {
  Tensor in{}, out{};
  void* args[] = {&in};
  void* results[] = {&out};
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) {
    Engine::Get().Run(program, args, results);
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / calls;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  const int calls = argc > 2 ? std::atoi(argv[2]) : 2000;
  struct Case {
    const char* name;
    std::shared_ptr<Program> program;
    std::vector<double> ns;
    int64_t switches = 0;
  };
  std::vector<Case> cases = {{"no_op_step", OneStep(dfx::MakeFunctionStep("no-op", &NoOp)), {}, 0},
                             {"xla_output_in_place", OneStep(Xla(true)), {}, 0},
                             {"xla_output_copied", OneStep(Xla(false)), {}, 0}};
  for (Case& c : cases) NsPerCall(c.program, calls / 10 + 1);  // warm
  for (int round = 0; round < rounds; ++round) {
    for (Case& c : cases) {
      const int64_t before = Switches();
      c.ns.push_back(NsPerCall(c.program, calls));
      c.switches += Switches() - before;
    }
  }
  std::printf("{\"calls_a_round\": %d", calls);
  for (const Case& c : cases) {
    std::printf(", \"%s\": [", c.name);
    for (size_t i = 0; i < c.ns.size(); ++i) std::printf("%s%.1f", i ? ", " : "", c.ns[i]);
    std::printf("]");
  }
  std::printf(", \"switches_a_call\": {");
  for (const Case& c : cases) {
    std::printf("%s\"%s\": %.4f", &c == cases.data() ? "" : ", ", c.name,
                static_cast<double>(c.switches) / (static_cast<double>(rounds) * calls));
  }
  std::printf("}}\n");
}
