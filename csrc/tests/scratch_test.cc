// Scratch is shared by programs: as much is held as the largest of those needs that run at a time.
#include <doctest/doctest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "dfx/scratch.h"
#include "support.h"

using namespace dfx_test;  // NOLINT
using dfx::Scratch;

namespace {

std::shared_ptr<Program> Fills(int64_t bytes, char with) {
  auto p = std::make_shared<Program>(1, 0, 0, 0, bytes, "fills");
  const int32_t all = p->AddBuffer({BufferKind::kScratch, -1, 0, bytes});
  p->AddLaunch(0, MakeLaunch("fill",
                             [bytes, with](const Buffer*, int, Buffer* outs, int, Lane*) {
                               auto* data = static_cast<char*>(outs[0].data);
                               std::memset(data, with, static_cast<size_t>(bytes));
                               for (int64_t i = 0; i < bytes; i += 997) {
                                 if (data[i] != with) return 1;
                               }
                               return 0;
                             },
                             {}, {all}));
  p->Finish();
  return p;
}

}  // namespace

TEST_CASE("plans side by side hold as much scratch as the largest of them") {
  const int64_t before = Scratch::Held();
  {
    std::vector<std::shared_ptr<Program>> plans;
    for (int64_t kib : {8192, 16384, 12288}) plans.push_back(Fills(kib << 10, 'a'));
    for (int round = 0; round < 3; ++round) {
      for (const auto& p : plans) Engine::Get().Run(p, {}, {});
    }
    CHECK(Scratch::Held() - before <= int64_t{16384} << 10);
    CHECK(Scratch::Held() >= int64_t{16384} << 10);
  }
  CHECK(Scratch::Held() <= before);
}

TEST_CASE("what a large program needed goes when only small ones are called") {
  auto small = Fills(4096, 's');
  auto large = Fills(8 << 20, 'l');
  Engine::Get().Run(large, {}, {});
  CHECK(Scratch::Held() >= 8 << 20);
  for (int call = 0; call < 200; ++call) Engine::Get().Run(small, {}, {});
  CHECK(Scratch::Held() >= 8 << 20);  // a turn may come again
  for (int call = 0; call < 100; ++call) Engine::Get().Run(small, {}, {});
  CHECK(Scratch::Held() < 1 << 20);
  Engine::Get().Run(large, {}, {});
  CHECK(Scratch::Held() >= 8 << 20);
}

TEST_CASE("calls without scratch count, too") {
  auto none = std::make_shared<Program>(1, 0, 0, 0, 0, "none");
  none->AddLaunch(
      0, MakeLaunch("nothing", [](const Buffer*, int, Buffer*, int, Lane*) { return 0; }, {}, {}));
  none->Finish();
  auto large = Fills(8 << 20, 'l');
  Engine::Get().Run(large, {}, {});
  for (int call = 0; call < 200; ++call) Engine::Get().Run(none, {}, {});
  CHECK(Scratch::Held() >= 8 << 20);
  for (int call = 0; call < 100; ++call) Engine::Get().Run(none, {}, {});
  CHECK(Scratch::Held() < 1 << 20);
}

TEST_CASE("a block stays that a long call needed while many short ones ran") {
  auto small = Fills(4096, 's');
  auto large = Fills(8 << 20, 'l');
  {
    Scratch held(8 << 20);
    for (int call = 0; call < 300; ++call) Engine::Get().Run(small, {}, {});
  }
  CHECK(Scratch::Held() >= 8 << 20);
  // Nobody needs it after that.
  for (int call = 0; call < 300; ++call) Engine::Get().Run(small, {}, {});
  CHECK(Scratch::Held() < 1 << 20);
}

TEST_CASE("what many calls at once needed goes when they come one by one") {
  auto program = Fills(1 << 20, 'm');
  {
    std::vector<Scratch> at_once;
    for (int k = 0; k < 6; ++k) at_once.emplace_back(1 << 20);
    CHECK(Scratch::Held() >= 6 << 20);
  }
  CHECK(Scratch::Held() >= 6 << 20);
  for (int call = 0; call < 300; ++call) Engine::Get().Run(program, {}, {});
  CHECK(Scratch::Held() < 2 << 20);
}

TEST_CASE("calls at the same time do not share scratch") {
  auto small = Fills(4096, 's');
  auto large = Fills(1 << 16, 'l');
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int k = 0; k < 200; ++k) {
        try {
          Engine::Get().Run((t + k) % 2 != 0 ? small : large, {}, {});
        } catch (const std::exception&) {
          ++failed;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(failed == 0);
}

TEST_CASE("a block of scratch is as large as asked for, or larger") {
  Scratch none(0);
  CHECK(none.data() == nullptr);
  Scratch one(100), two(100);
  CHECK(one.data() != two.data());
  CHECK(reinterpret_cast<uintptr_t>(one.data()) % 64 == 0);
  one = Scratch(1 << 20);
  std::memset(one.data(), 1, 1 << 20);
}
