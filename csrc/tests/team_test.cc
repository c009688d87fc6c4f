// A team of the caller's runs the lanes of its call, and lanes' threads what it does not.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "dfx/host/openmp_team.h"
#include "steps.h"

using namespace dfx_test;  // NOLINT
using dfx::Team;
using dfx::test::TestTeam;

namespace {

constexpr int kLanes = 3;

// A program whose lanes wait until all of them run, and which thread ran each.
struct Together {
  std::vector<std::thread::id> ran{kLanes};
  std::atomic<int> here{0};
  std::shared_ptr<Program> program = std::make_shared<Program>(kLanes, 0, 0, 0, 0, "together");

  Together() {
    for (int lane = 0; lane < kLanes; ++lane) {
      program->AddLaunch(lane, MakeStep("meet", [this, lane](Lane*) {
                           ran[static_cast<size_t>(lane)] = std::this_thread::get_id();
                           ++here;
                           while (here % kLanes != 0) std::this_thread::yield();
                         }));
    }
    REQUIRE(Problem(*program) == "");
  }
};

// Tells on which threads it called its members.
class SeenTeam : public Team {
 public:
  explicit SeenTeam(int members) : members_(members) {}
  void Run(Body body, void* state) noexcept override {
    std::vector<std::thread> others;
    for (int member = 1; member < members_; ++member) {
      others.emplace_back([this, body, state, member] { body(state, member, members_); });
      seen.insert(others.back().get_id());
    }
    body(state, 0, members_);
    for (auto& other : others) other.join();
  }
  bool Ran(const Together& together, int lane) const {
    return seen.count(together.ran[static_cast<size_t>(lane)]) == 1;
  }
  std::set<std::thread::id> seen;

 private:
  const int members_;
};

// A lane's own thread that still spins after an earlier call may be faster than a member, and has
// the lane then. It sleeps soon, but how soon is for the system to say.
template <typename Round>
bool AtLeastOnce(Round round) {
  for (int turn = 0; turn < 200; ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (round()) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("each lane has a member") {
  CHECK(AtLeastOnce([] {
    Together together;
    SeenTeam team(kLanes + 1);
    Engine::Get().Run(together.program, {}, {}, false, false, 0, &team);
    CHECK(together.ran[0] == std::this_thread::get_id());
    CHECK(together.ran[1] != together.ran[2]);
    return team.Ran(together, 1) && team.Ran(together, 2);
  }));
}

TEST_CASE("lanes without a member have their threads") {
  for (int members = 1; members < kLanes; ++members) {
    CHECK(AtLeastOnce([members] {
      Together together;
      SeenTeam team(members);
      Engine::Get().Run(together.program, {}, {}, false, false, 0, &team);
      CHECK(together.here == kLanes);
      CHECK(!team.Ran(together, 2));
      return team.Ran(together, 1) == (members == 2);
    }));
  }
}

TEST_CASE("calls with a team, and calls without one, on the same lanes") {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([caller, &wrong] {
      auto program = TwoLanes([] {}, 1 + caller % 2);
      if (!Problem(*program).empty()) ++wrong;
      for (int64_t i = 0; i < 200; ++i) {
        int64_t in = i, out = -1;
        void* args[] = {&in};
        void* results[] = {&out};
        TestTeam team(1 + static_cast<int>(i % 4), static_cast<int>(i % 2) * 50);
        const auto done = Try([&] {
          return Engine::Get().Run(program, args, results, false, false, 0,
                                   (caller + i) % 3 == 0 ? nullptr : &team);
        });
        if (!done.ok || out != 2 * i + 1) ++wrong;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(wrong == 0);
  CHECK(Engine::Get().stats().live == 0);
}

TEST_CASE("a member that comes when all is done does nothing") {
  for (int turn = 0; turn < 20; ++turn) {
    auto program = TwoLanes();
    REQUIRE(Problem(*program) == "");
    int64_t in = turn, out = 0;
    void* args[] = {&in};
    void* results[] = {&out};
    TestTeam team(2, 5'000);
    Engine::Get().Run(program, args, results, false, false, 0, &team);
    CHECK(out == 2 * turn + 1);
    CHECK(Works());
  }
}

TEST_CASE("a program of which the caller runs no lane needs no team") {
  std::thread::id ran;
  auto program = std::make_shared<Program>(2, 0, 0, 0, 0, "aside");
  program->AddLaunch(1, MakeStep("aside", [&](Lane*) { ran = std::this_thread::get_id(); }));
  REQUIRE(Problem(*program) == "");
  SeenTeam team(2);
  Engine::Get().Run(program, {}, {}, false, false, 0, &team);
  CHECK(team.seen.empty());
  CHECK(ran != std::thread::id());
  CHECK(ran != std::this_thread::get_id());
}

TEST_CASE("an OpenMP region is a team of as many threads as it has") {
  // A library of which only the interface is like OpenMP's: two threads, whatever is asked for.
  static thread_local int number = 0;
  const dfx::OpenMp library{[](void (*body)(void*), void* data, unsigned, unsigned) {
                              std::thread other([&] {
                                number = 1;
                                body(data);
                              });
                              body(data);
                              other.join();
                            },
                            [] { return number; }, [] { return 2; }};
  Together together;
  dfx::OpenMpTeam team(library, 16);
  Engine::Get().Run(together.program, {}, {}, false, false, 0, &team);
  CHECK(together.here == kLanes);
  CHECK(together.ran[0] == std::this_thread::get_id());
}
