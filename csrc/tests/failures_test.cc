// What goes wrong reaches the caller as an error, and the next call works: misuse of programs,
// failing steps, and memory and threads that cannot be had (both injected).
#include <doctest/doctest.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <thread>

#include "allocations.h"
#include "fake_cuda.h"
#include "support.h"

using namespace dfx_test;  // NOLINT

int64_t& dfx_test::AllocationsLeft() {
  thread_local int64_t left = -1;
  return left;
}

namespace {

bool MayAllocate() {
  if (AllocationsLeft() < 0 || dfx::fake::InsideDriver::Depth() > 0) return true;
  if (AllocationsLeft() == 0) return false;
  --AllocationsLeft();
  return true;
}

void* Allocate(size_t bytes) {
  void* memory = MayAllocate() ? std::malloc(bytes == 0 ? 1 : bytes) : nullptr;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Thread stacks so large that no thread can be created.
class FailThreads {
 public:
  FailThreads() {
    REQUIRE(pthread_getattr_default_np(&before_) == 0);
    pthread_attr_t huge;
    REQUIRE(pthread_attr_init(&huge) == 0);
    REQUIRE(pthread_attr_setstacksize(&huge, size_t{1} << 47) == 0);
    REQUIRE(pthread_setattr_default_np(&huge) == 0);
    pthread_attr_destroy(&huge);
  }
  ~FailThreads() {
    CHECK(pthread_setattr_default_np(&before_) == 0);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

// Scratch that is too large is refused by malloc, not by the sanitizer's own limit.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

TEST_CASE("a program that was not finished does not run") {
  std::atomic<bool> ran{false};
  auto p = std::make_shared<Program>(2, 1, 0, 0, 0, "unfinished");
  p->AddLaunch(0, MakeStep("x", [&](Lane*) { ran = true; }));
  auto result = RunOnHost(p, {}, {});
  CHECK_FALSE(result.ok);
  CHECK(Contains(result.error, "'unfinished' was not finished"));

  SUBCASE("nor one whose Finish found an error") {
    p->AddWait(1, 0);
    CHECK(Contains(Problem(*p), "never recorded"));
    CHECK_FALSE(RunOnHost(p, {}, {}).ok);
  }
  CHECK_FALSE(ran);
  CHECK(Works());
}

TEST_CASE("a finished program cannot be changed, and still runs") {
  std::atomic<int> ran{0};
  auto p = std::make_shared<Program>(2, 1, 0, 0, 0, "finished");
  p->AddLaunch(0, MakeStep("x", [&](Lane*) { ++ran; }));
  REQUIRE(Problem(*p) == "");
  REQUIRE(RunOnHost(p, {}, {}).ok);
  std::string why;
  auto change = [&](auto how) {
    why = Try([&] {
            how();
            return std::vector<dfx::TraceRecord>();
          }).error;
  };
  SUBCASE("by a buffer") {
    change([&] { p->AddBuffer({BufferKind::kScratch, -1, 0, 0}); });
  }
  SUBCASE("by a launch") {
    change([&] { p->AddLaunch(1, MakeStep("y", [&](Lane*) { ++ran; })); });
  }
  SUBCASE("by a record") {
    change([&] { p->AddRecord(0, 0); });
  }
  SUBCASE("by a wait") {
    change([&] { p->AddWait(1, 0); });
  }
  SUBCASE("by finishing it again") { why = Problem(*p); }
  CHECK(why == "finished: the program is finished and can no longer change");
  CHECK(p->finished());
  CHECK(p->launches().size() == 1);
  CHECK(RunOnHost(p, {}, {}).ok);
  CHECK(ran == 2);
  CHECK(Works());
}

TEST_CASE("no program, or lists of another length, are refused") {
  CHECK_FALSE(RunOnHost(nullptr, {}, {}).ok);
  auto p = TwoLanes();
  REQUIRE(Problem(*p) == "");
  CHECK(Contains(RunOnHost(p, {}, {}).error, "takes 1 arguments and 1 results"));
}

TEST_CASE("scratch that cannot be had is an error with its size, and no step runs") {
  std::atomic<bool> ran{false};
  auto p = std::make_shared<Program>(1, 0, 0, 0, int64_t{1} << 60, "huge");
  p->AddLaunch(0, MakeStep("x", [&](Lane*) { ran = true; }));
  REQUIRE(Problem(*p) == "");
  auto result = RunOnHost(p, {}, {});
  CHECK_FALSE(result.ok);
  CHECK(Contains(result.error, "no memory for a call of 'huge', which needs 1152921504606846976"));
  CHECK_FALSE(ran);
  CHECK(Engine::Get().stats().live == 0);
  CHECK(Works());
}

TEST_CASE("whichever allocation of a call fails, it is an error") {
  for (const bool profile : {false, true}) {
    CAPTURE(profile);
    int errors = 0;
    bool done = false;
    for (int64_t n = 0; !done; ++n) {
      REQUIRE(n < 1000);
      auto p = TwoLanes();  // a new program: its pool of calls is empty
      REQUIRE(Problem(*p) == "");
      int64_t in = 20, out = 0;
      void* args[] = {&in};
      void* results[] = {&out};
      Outcome result;
      {
        FailAllocationsAfter fail(n);
        result = RunOnHost(p, args, results, profile);
        done = AllocationsLeft() > 0;
      }
      if (result.ok) {
        CHECK(out == 41);
      } else {
        ++errors;
        CHECK_FALSE(result.error.empty());
      }
      CHECK(Engine::Get().stats().live == 0);
      REQUIRE(Works());
    }
    CHECK(errors >= 3);
  }
}

TEST_CASE("a step that fails without memory for the words fails its call") {
  const std::string words(200, 'w');
  const std::vector<Function> ways{
      [&](const Buffer*, int, Buffer*, int, Lane*) -> int {
        std::runtime_error error(words);
        AllocationsLeft() = 0;
        throw error;
      },
      [&](const Buffer*, int, Buffer*, int, Lane* lane) {
        AllocationsLeft() = 0;
        lane->current()->Fail(words);
        return 1;
      },
      [&](const Buffer*, int, Buffer*, int, Lane*) {
        AllocationsLeft() = 0;
        return 7;
      },
  };
  for (size_t way = 0; way < ways.size(); ++way) {
    for (int lane = 0; lane < 2; ++lane) {
      CAPTURE(way);
      CAPTURE(lane);
      std::atomic<bool> ran_after{false};
      auto p = std::make_shared<Program>(2, 1, 0, 0, 0, "no words");
      p->AddLaunch(lane, MakeLaunch(words, ways[way]));
      p->AddRecord(lane, 0);
      p->AddWait(1 - lane, 0);
      p->AddLaunch(1 - lane, MakeStep("never", [&](Lane*) { ran_after = true; }));
      REQUIRE(Problem(*p) == "");
      auto result = RunOnHost(p, {}, {});
      AllocationsLeft() = -1;
      CHECK_FALSE(result.ok);
      CHECK(result.error == dfx::kOutOfMemory);
      CHECK_FALSE(ran_after);
      auto disarm = std::make_shared<Program>(2, 0, 0, 0, 0, "disarm");
      disarm->AddLaunch(1, MakeStep("x", [](Lane*) { AllocationsLeft() = -1; }));
      REQUIRE(Problem(*disarm) == "");
      REQUIRE(RunOnHost(disarm, {}, {}).ok);
      CHECK(Works());
    }
  }
}

TEST_CASE("operands that need memory which cannot be had fail the call") {
  auto p = std::make_shared<Program>(1, 0, 0, 0, 64, "many operands");
  const int s = p->AddBuffer({BufferKind::kScratch, -1, 0, 8});
  p->AddLaunch(0, MakeStep("arm", [](Lane*) { AllocationsLeft() = 0; }));
  p->AddLaunch(0, MakeLaunch("x", Nothing, std::vector<int32_t>(100, s)));
  REQUIRE(Problem(*p) == "");
  auto result = RunOnHost(p, {}, {});
  AllocationsLeft() = -1;
  CHECK_FALSE(result.ok);
  CHECK_FALSE(result.error.empty());
  CHECK(Works());
}

TEST_CASE("a thread that cannot be had is an error, and the next call may have it") {
  std::atomic<int> ran{0};
  constexpr int kLane = 40;  // no other test uses it
  auto p = std::make_shared<Program>(kLane + 1, 0, 0, 0, 0, "far lane");
  for (int lane : {0, 1, kLane}) p->AddLaunch(lane, MakeStep("x", [&](Lane*) { ++ran; }));
  REQUIRE(Problem(*p) == "");
  CHECK(Works());  // lane 1 has its thread
  const int threads = Engine::Get().stats().threads;
  const int64_t calls = Engine::Get().stats().calls;
  {
    FailThreads fail;
    auto result = RunOnHost(p, {}, {});
    CHECK_FALSE(result.ok);
    CHECK(Contains(result.error, "cannot start lane 40"));
    CHECK(Works());  // lanes that have threads go on
  }
  CHECK(ran == 0);
  CHECK(Engine::Get().stats().threads == threads);
  CHECK(Engine::Get().stats().calls == calls + 1);  // the one that worked
  CHECK(RunOnHost(p, {}, {}).ok);
  CHECK(ran == 3);
  CHECK(Engine::Get().stats().threads == threads + 1);
}

TEST_CASE("an error on any lane, then a call that works, over and over") {
  constexpr int kLanes = 4;
  auto p = std::make_shared<Program>(kLanes, kLanes, 1, 0, 0, "one fails");
  const int arg = p->AddBuffer({BufferKind::kArg, 0, 0, 8});
  for (int lane = 0; lane < kLanes; ++lane) {
    p->AddLaunch(lane, MakeLaunch("maybe",
                                  [lane](const Buffer* in, int, Buffer*, int, Lane*) {
                                    if (At(in[0]) == lane) throw std::runtime_error("chosen");
                                    return 0;
                                  },
                                  {arg}));
    p->AddRecord(lane, lane);
    p->AddWait(lane, (lane + 1) % kLanes);
  }
  REQUIRE(Problem(*p) == "");
  const int64_t failures = Engine::Get().stats().failures;
  for (int64_t i = 0; i < 400; ++i) {
    int64_t chosen = i % (kLanes + 1);  // the last value: no lane fails
    void* args[] = {&chosen};
    auto result = RunOnHost(p, args, {});
    CHECK(result.ok == (chosen == kLanes));
    CHECK(result.error == (result.ok ? "" : "step 'maybe': chosen"));
  }
  CHECK(Engine::Get().stats().failures == failures + 320);
  CHECK(Engine::Get().stats().live == 0);
}

TEST_CASE("many callers of one program: each gets its own values and its own errors") {
  auto p = std::make_shared<Program>(3, 2, 1, 1, 128, "shared");
  const int a = p->AddBuffer({BufferKind::kArg, 0, 0, 8});
  const int r = p->AddBuffer({BufferKind::kResult, 0, 0, 8});
  const int s = p->AddBuffer({BufferKind::kScratch, -1, 0, 8});
  const int t = p->AddBuffer({BufferKind::kScratch, -1, 64, 8});
  auto add = [](int64_t what) {
    return [what](const Buffer* in, int, Buffer* out, int, Lane*) {
      if (what == 2 && At(in[0]) % 7 == 0) throw std::runtime_error(std::to_string(At(in[0])));
      At(out[0]) = At(in[0]) + what;
      return 0;
    };
  };
  p->AddLaunch(1, MakeLaunch("one", add(1), {a}, {s}));
  p->AddRecord(1, 0);
  p->AddWait(2, 0);
  p->AddLaunch(2, MakeLaunch("two", add(2), {s}, {t}));
  p->AddRecord(2, 1);
  p->AddWait(0, 1);
  p->AddLaunch(0, MakeLaunch("three", add(3), {t}, {r}));
  REQUIRE(Problem(*p) == "");
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 16; ++caller) {
    threads.emplace_back([&, caller] {
      for (int64_t i = 0; i < 200; ++i) {
        const int64_t in = caller * 1000 + i;
        int64_t out = -1;
        auto result = RunOne(p, in, &out, i % 5 == 0);
        const bool fails = (in + 1) % 7 == 0;
        if (result.ok == fails) ++wrong;
        if (!fails && (out != in + 6 || (i % 5 == 0 && result.trace.size() != 5))) ++wrong;
        if (fails && result.error != "step 'two': " + std::to_string(in + 1)) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(Engine::Get().stats().live == 0);
}
