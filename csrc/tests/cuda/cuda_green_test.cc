// Lanes that are confined to parts of the device, on the fake driver.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_support.h"
#include "dfx/cuda/cuda_streams.h"

namespace {

using dfx::Buffer;
using dfx::CudaDriver;
using dfx::CudaEngine;
using dfx::CudaStreams;
using dfx::Lane;
using dfx::Program;
using dfx::test::CleanDriver;
using dfx::test::IsRight;
using dfx::test::MakeLaunch;
using dfx::test::Memory;
using dfx::test::RunOnDevice;
using dfx::test::RunsRight;
using dfx::test::Squares;
using dfx_test::Problem;
namespace fake = dfx::fake;

CudaEngine::Options Confined(std::vector<int> sms) {
  CudaEngine::Options options;
  options.sms = std::move(sms);
  return options;
}

std::string Error(const CudaDriver& driver, std::vector<int> sms) {
  try {
    CudaEngine engine(driver, Confined(std::move(sms)));
  } catch (const dfx::Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a lane's stream has the multiprocessors that it asked for, rounded up") {
  CleanDriver clean;
  CudaEngine engine(fake::Driver(), Confined({0, 20, 0, 8}));
  CHECK(engine.sms() == std::vector<int>{0, 24, 0, 8});
  std::vector<unsigned> seen(5);
  auto p = std::make_shared<Program>(5, 0, 0, 0, 0, "sms");
  for (int lane = 0; lane < 5; ++lane) {
    p->AddLaunch(lane, MakeLaunch("look", [&seen, lane](const Buffer*, int, Buffer*, int, Lane* l) {
                   seen[static_cast<size_t>(lane)] = fake::SmsOf(l->cuda()->stream());
                   return 0;
                 }));
  }
  REQUIRE(Problem(*p) == "");
  fake::Stream caller;
  REQUIRE(RunOnDevice(engine, p, {}, {}, caller.get()).ok);
  CHECK(seen == std::vector<unsigned>{132, 24, 132, 8, 132});
}

TEST_CASE("several lanes have parts of different sizes, out of one split") {
  CleanDriver clean;
  for (const auto& [asked, got] : std::vector<std::pair<std::vector<int>, std::vector<int>>>{
           {{0, 32, 16}, {0, 32, 16}},
           {{0, 1, 0, 9, 100}, {0, 8, 0, 16, 104}},
           {{0, 64, 64}, {0, 64, 64}},
           {{0, 128}, {0, 128}}}) {
    CAPTURE(asked.size());
    CudaEngine engine(fake::Driver(), Confined(asked));
    CHECK(engine.sms() == got);
    CHECK(RunsRight(engine, Squares()));
  }
  CHECK(Error(fake::Driver(), {0, 129}).find("lane 1 asks for 129 multiprocessors; 128 of") == 0);
  CHECK(Error(fake::Driver(), {0, 128, 1}).find("lane 2 asks for 1 multiprocessors; 0 of") == 0);
  CHECK(Error(fake::Driver(), {0, 500}).find("lane 1 asks for 500 multiprocessors; 128 of") == 0);
  CudaDriver whole = fake::Driver();  // a device that can set nothing apart
  whole.DevSmResourceSplitByCount = [](dfx::CudaResource*, unsigned* groups,
                                       const dfx::CudaResource*, dfx::CudaResource*, unsigned,
                                       unsigned) {
    *groups = 0;
    return 0;
  };
  CHECK(Error(whole, {0, 8}).find("lane 1 asks for 8 multiprocessors; 0 of") == 0);
}

TEST_CASE("the fake driver refuses parts that the real one refuses") {
  constexpr int kWrongConfiguration = 915, kWrongType = 914;
  CleanDriver clean;
  const CudaDriver& driver = fake::Driver();
  dfx::CudaResource whole{}, none{}, parts[4], rest, other[2];
  REQUIRE(driver.DeviceGetDevResource(0, &whole, dfx::kSmResource) == 0);
  unsigned n = 0;
  CHECK(driver.DevSmResourceSplitByCount(nullptr, &n, &whole, nullptr, 0, 9) == 0);
  CHECK(n == 8);
  n = 4;
  REQUIRE(driver.DevSmResourceSplitByCount(parts, &n, &whole, &rest, 0, 9) == 0);
  CHECK(n == 4);
  CHECK(parts[3].sm_count == 16);
  CHECK(rest.sm_count == 132 - 64);
  unsigned two = 2;
  for (const dfx::CudaResource& used : {parts[0], rest}) {
    CHECK(driver.DevSmResourceSplitByCount(other, &two, &used, nullptr, 0, 8) ==
          kWrongConfiguration);
  }
  CHECK(driver.DevSmResourceSplitByCount(other, &two, &none, nullptr, 0, 8) == kWrongType);
  REQUIRE(driver.DevSmResourceSplitByCount(other, &two, &whole, nullptr, 0, 8) == 0);
  CUdevResourceDesc_st* descriptor = nullptr;
  dfx::CudaResource mixed[] = {parts[0], other[1]}, twice[] = {parts[1], parts[1]},
                    with_rest[] = {parts[2], rest}, with_whole[] = {parts[0], whole};
  CHECK(driver.DevResourceGenerateDesc(&descriptor, mixed, 2) == kWrongConfiguration);
  CHECK(driver.DevResourceGenerateDesc(&descriptor, twice, 2) == kWrongConfiguration);
  CHECK(driver.DevResourceGenerateDesc(&descriptor, with_whole, 2) == kWrongConfiguration);
  CHECK(driver.DevResourceGenerateDesc(&descriptor, with_rest, 2) == 0);
  CHECK(driver.DevResourceGenerateDesc(&descriptor, &whole, 1) == 0);
}

TEST_CASE("confined lanes give the same values, captured ones too") {
  CleanDriver clean;
  fake::SetMaxDelayUs(100);
  CudaEngine engine(fake::Driver(), Confined({0, 64, 16}));
  auto program = Squares();
  for (int i = 0; i < 20; ++i) REQUIRE(RunsRight(engine, program));
  fake::Stream caller;
  Memory memory(3);
  REQUIRE(fake::BeginCapture(caller.get()) == 0);
  REQUIRE(RunOnDevice(engine, program, memory.arg_list, memory.result_list, caller.get()).ok);
  std::shared_ptr<fake::Graph> graph;
  REQUIRE(fake::EndCapture(caller.get(), &graph) == 0);
  REQUIRE(fake::LaunchGraph(graph, caller.get()) == 0);
  REQUIRE(caller.Synchronize() == 0);
  CHECK(IsRight(memory));
}

TEST_CASE("what cannot be confined is refused, and nothing is left behind") {
  CleanDriver clean;
  CHECK(
      Error(fake::Driver(), {8}).find("lane 0 cannot have 8 multiprocessors: it is the caller's") ==
      0);
  CHECK(Error(fake::Driver(), {0, -1}).find("lane 1 cannot have -1") == 0);
  CHECK(Error(fake::Driver(), {0, 100, 40})
            .find("lane 2 asks for 40 multiprocessors; 24 of the device's 132 are left (it sets "
                  "them apart in groups of 8") == 0);
  CHECK(Error(fake::Driver(), {0, 131}).find("lane 1 asks for 131") == 0);
  for (const char* symbol : {"cuDeviceGetDevResource", "cuDevSmResourceSplitByCount",
                             "cuDevResourceGenerateDesc", "cuGreenCtxCreate"}) {
    for (int skip = 0; skip < 2; ++skip) {
      CAPTURE(symbol);
      fake::FailCall(symbol, dfx::kCudaOutOfMemory, skip);
      const bool fails =
          Error(fake::Driver(), {0, 8, 8}).find("OUT_OF_MEMORY") != std::string::npos;
      CHECK(fake::FailureTaken() == fails);
      CHECK((fails || skip == 1));
    }
  }
  CudaDriver old = fake::Driver();
  old.GreenCtxStreamCreate = nullptr;
  CHECK(Error(old, {0, 8}).find("the CUDA driver has no green contexts") != std::string::npos);
  CHECK(Error(old, {0, 0}) == "");
  fake::Stream stream;
  auto given = Confined({0, 8});
  given.streams = {stream.get()};
  CHECK_THROWS_WITH_AS(CudaEngine(fake::Driver(), given),
                       doctest::Contains("lanes on given streams cannot be confined"), dfx::Error);
}

TEST_CASE("a confined stream that cannot be made fails the call, and the next one works") {
  CleanDriver clean;
  auto program = Squares();
  for (int skip = 0; skip < 2; ++skip) {
    CudaEngine engine(fake::Driver(), Confined({0, 8, 8}));
    fake::FailCall("cuGreenCtxStreamCreate", dfx::kCudaOutOfMemory, skip);
    CHECK_FALSE(RunsRight(engine, program));
    CHECK(fake::FailureTaken());
    CHECK(RunsRight(engine, program));
  }
}

TEST_CASE("streams for somebody else's lanes") {
  CleanDriver clean;
  {
    CudaStreams streams(fake::Driver(), 0, 3, {0, -5}, {0, 0, 16});
    REQUIRE(streams.streams().size() == 2);
    CHECK(fake::SmsOf(streams.streams()[0]) == 132);
    CHECK(fake::SmsOf(streams.streams()[1]) == 16);
    CHECK(streams.sms() == std::vector<int>{0, 0, 16});
  }
  CHECK_THROWS_AS(CudaStreams(fake::Driver(), 3, 2, {}, {}), dfx::Error);
  CHECK_THROWS_AS(CudaStreams(fake::Driver(), 0, 2, {0, 7}, {}), dfx::Error);
  CHECK_THROWS_AS(CudaStreams(fake::Driver(), 0, 2, {}, {0, 200}), dfx::Error);
  for (int skip = 0; skip < 2; ++skip) {
    fake::FailCall("cuGreenCtxStreamCreate", dfx::kCudaOutOfMemory, skip);
    CHECK_THROWS_AS(CudaStreams(fake::Driver(), 0, 3, {}, {0, 8, 8}), dfx::Error);
  }
}
