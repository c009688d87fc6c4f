// Steps that are XLA executables, driven through the C API of a CPU plugin.
#include <doctest/doctest.h>
#include <pjrt_c_api.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "pjrt/pjrt_api.h"
#include "pjrt_client.h"

namespace {

using dfx::Buffer;
using dfx::BufferKind;
using dfx::Engine;
using dfx::LaunchDesc;
using dfx::PjrtCounters;
using dfx::Program;
using dfx::test::kF32;
using dfx::test::MakeStep;
using dfx::test::PjrtClient;
using dfx::test::SharedStep;
using dfx::test::StableHlo;
using dfx_test::Outcome;
using dfx_test::Problem;
using dfx_test::RunOnHost;

// Our declarations against XLA's header.
#define SAME_SIZE(ours, theirs) static_assert(sizeof(dfx::pjrt::ours) == sizeof(theirs))
SAME_SIZE(ErrorDestroyArgs, PJRT_Error_Destroy_Args);
SAME_SIZE(ErrorMessageArgs, PJRT_Error_Message_Args);
SAME_SIZE(EventArgs, PJRT_Event_Await_Args);
SAME_SIZE(EventArgs, PJRT_Event_Destroy_Args);
SAME_SIZE(EventIsReadyArgs, PJRT_Event_IsReady_Args);
SAME_SIZE(EventOnReadyArgs, PJRT_Event_OnReady_Args);
SAME_SIZE(BufferDestroyArgs, PJRT_Buffer_Destroy_Args);
SAME_SIZE(BufferPointerArgs, PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args);
SAME_SIZE(BufferSizeArgs, PJRT_Buffer_OnDeviceSizeInBytes_Args);
SAME_SIZE(AddressableDevicesArgs, PJRT_Client_AddressableDevices_Args);
SAME_SIZE(CreateViewArgs, PJRT_Client_CreateViewOfDeviceBuffer_Args);
SAME_SIZE(FromHostBufferArgs, PJRT_Client_BufferFromHostBuffer_Args);
SAME_SIZE(GetExecutableArgs, PJRT_LoadedExecutable_GetExecutable_Args);
SAME_SIZE(ExecutableDestroyArgs, PJRT_Executable_Destroy_Args);
SAME_SIZE(NumOutputsArgs, PJRT_Executable_NumOutputs_Args);
SAME_SIZE(ExecuteOptions, PJRT_ExecuteOptions);
SAME_SIZE(ExecuteArgs, PJRT_LoadedExecutable_Execute_Args);
#undef SAME_SIZE

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#endif
#define SAME_PLACE(ours, field, theirs, their_field) \
  static_assert(offsetof(dfx::pjrt::ours, field) == offsetof(theirs, their_field))
SAME_PLACE(ErrorMessageArgs, message_size, PJRT_Error_Message_Args, message_size);
SAME_PLACE(CreateViewArgs, element_type, PJRT_Client_CreateViewOfDeviceBuffer_Args, element_type);
SAME_PLACE(CreateViewArgs, device, PJRT_Client_CreateViewOfDeviceBuffer_Args, device);
SAME_PLACE(CreateViewArgs, stream, PJRT_Client_CreateViewOfDeviceBuffer_Args, stream);
SAME_PLACE(CreateViewArgs, buffer, PJRT_Client_CreateViewOfDeviceBuffer_Args, buffer);
SAME_PLACE(FromHostBufferArgs, semantics, PJRT_Client_BufferFromHostBuffer_Args,
           host_buffer_semantics);
SAME_PLACE(FromHostBufferArgs, buffer, PJRT_Client_BufferFromHostBuffer_Args, buffer);
SAME_PLACE(ExecuteOptions, launch_id, PJRT_ExecuteOptions, launch_id);
SAME_PLACE(ExecuteOptions, call_location, PJRT_ExecuteOptions, call_location);
SAME_PLACE(ExecuteArgs, options, PJRT_LoadedExecutable_Execute_Args, options);
SAME_PLACE(ExecuteArgs, num_args, PJRT_LoadedExecutable_Execute_Args, num_args);
SAME_PLACE(ExecuteArgs, device_complete_events, PJRT_LoadedExecutable_Execute_Args,
           device_complete_events);
SAME_PLACE(Table, major, PJRT_Api, pjrt_api_version.major_version);
SAME_PLACE(Table, functions, PJRT_Api, PJRT_Error_Destroy);
#define SAME_FUNCTION(ours, theirs)                                                           \
  static_assert(offsetof(dfx::pjrt::Table, functions) + sizeof(void*) * dfx::pjrt::k##ours == \
                offsetof(PJRT_Api, PJRT_##theirs))
SAME_FUNCTION(ErrorMessage, Error_Message);
SAME_FUNCTION(EventDestroy, Event_Destroy);
SAME_FUNCTION(EventIsReady, Event_IsReady);
SAME_FUNCTION(EventAwait, Event_Await);
SAME_FUNCTION(EventOnReady, Event_OnReady);
SAME_FUNCTION(ClientAddressableDevices, Client_AddressableDevices);
SAME_FUNCTION(ClientBufferFromHostBuffer, Client_BufferFromHostBuffer);
SAME_FUNCTION(ExecutableDestroy, Executable_Destroy);
SAME_FUNCTION(ExecutableNumOutputs, Executable_NumOutputs);
SAME_FUNCTION(LoadedExecutableGetExecutable, LoadedExecutable_GetExecutable);
SAME_FUNCTION(LoadedExecutableExecute, LoadedExecutable_Execute);
SAME_FUNCTION(BufferDestroy, Buffer_Destroy);
SAME_FUNCTION(BufferOnDeviceSize, Buffer_OnDeviceSizeInBytes);
SAME_FUNCTION(BufferOpaquePointer, Buffer_OpaqueDeviceMemoryDataPointer);
SAME_FUNCTION(ClientCreateViewOfDeviceBuffer, Client_CreateViewOfDeviceBuffer);
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
static_assert(dfx::pjrt::kCopyDuringCall == PJRT_HostBufferSemantics_kImmutableOnlyDuringCall);
static_assert(dfx::pjrt::kMutableZeroCopy == PJRT_HostBufferSemantics_kMutableZeroCopy);
static_assert(kF32 == PJRT_Buffer_Type_F32 && dfx::test::kS64 == PJRT_Buffer_Type_S64);

constexpr int kN = 256;

struct alignas(64) Floats {
  float at[kN];
};

std::string TwicePlusOne(bool in_place) {
  return StableHlo("256xf32", 1, 1, in_place,
                   "%c = stablehlo.constant dense<1.0> : tensor<256xf32>\n"
                   "%t = stablehlo.add %0, %0 : tensor<256xf32>\n"
                   "%r = stablehlo.add %t, %c : tensor<256xf32>");
}

// One step on lane 1, argument to result.
std::shared_ptr<Program> OneStep(std::unique_ptr<dfx::Step> step, int64_t bytes = sizeof(Floats)) {
  auto p = std::make_shared<Program>(2, 0, 1, 1, 0, "pjrt");
  const int a = p->AddBuffer({BufferKind::kArg, 0, 0, bytes});
  const int r = p->AddBuffer({BufferKind::kResult, 0, 0, bytes});
  p->AddLaunch(1, LaunchDesc{std::move(step), {a}, {r}});
  REQUIRE(Problem(*p) == "");
  return p;
}

Outcome Run(const std::shared_ptr<Program>& program, Floats& in, Floats& out) {
  void* args[] = {&in};
  void* results[] = {&out};
  return RunOnHost(program, args, results);
}

std::string ErrorOf(dfx::PjrtSpec step) {
  try {
    dfx::MakePjrtStep("xla", std::move(step));
  } catch (const dfx::Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("an output that aliases a donated view is written in place, any other is copied") {
  for (bool in_place : {true, false}) {
    CAPTURE(in_place);
    auto counters = std::make_shared<PjrtCounters>();
    auto program = OneStep(dfx::MakePjrtStep(
        "xla", MakeStep(TwicePlusOne(in_place), {kF32, {kN}}, 1, 1, in_place, counters)));
    // The memory changes from call to call in both ways: other addresses, other values.
    std::vector<Floats> ins(3), outs(3);
    for (int call = 0; call < 50; ++call) {
      Floats& in = ins[static_cast<size_t>(call) % 3];
      Floats& out = outs[static_cast<size_t>(call / 3) % 3];
      for (int i = 0; i < kN; ++i) in.at[i] = static_cast<float>(call * i);
      REQUIRE(Run(program, in, out).ok);
      for (int i = 0; i < kN; ++i) REQUIRE(out.at[i] == 2 * in.at[i] + 1);
    }
    CHECK(counters->executions.load() == 50);
    CHECK(counters->copied_outputs.load() == (in_place ? 0 : 50));
  }
}

TEST_CASE("memory that XLA cannot use in place is copied, each call anew") {
  auto counters = std::make_shared<PjrtCounters>();
  auto program = OneStep(
      dfx::MakePjrtStep("xla", MakeStep(TwicePlusOne(true), {kF32, {kN}}, 1, 1, true, counters)));
  alignas(64) float in[kN + 1], out[kN + 1];
  for (int call = 0; call < 10; ++call) {
    for (int i = 0; i < kN; ++i) in[i + 1] = static_cast<float>(call * i);
    void* args[] = {in + 1};
    void* results[] = {out + 1};
    REQUIRE(RunOnHost(program, args, results).error == "");
    for (int i = 0; i < kN; ++i) REQUIRE(out[i + 1] == 2 * in[i + 1] + 1);
  }
  CHECK(counters->copied_inputs.load() == 10);
  CHECK(counters->copied_outputs.load() == 10);
}

TEST_CASE("views of inputs are kept while the addresses stay") {
  auto counters = std::make_shared<PjrtCounters>();
  auto program = OneStep(
      dfx::MakePjrtStep("xla", MakeStep(TwicePlusOne(false), {kF32, {kN}}, 1, 1, false, counters)));
  Floats in{}, out{};
  for (int call = 0; call < 10; ++call) REQUIRE(Run(program, in, out).ok);
  CHECK(counters->views.load() == 1);
}

TEST_CASE("10 000 calls from four threads") {
  auto counters = std::make_shared<PjrtCounters>();
  std::shared_ptr<dfx::Step> step =
      dfx::MakePjrtStep("xla", MakeStep(TwicePlusOne(true), {kF32, {kN}}, 1, 1, true, counters));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      // The same step on both lanes, of a program that each thread has for itself.
      auto p = std::make_shared<Program>(2, 1, 1, 1, sizeof(Floats), "two");
      const int a = p->AddBuffer({BufferKind::kArg, 0, 0, sizeof(Floats)});
      const int s = p->AddBuffer({BufferKind::kScratch, -1, 0, sizeof(Floats)});
      const int r = p->AddBuffer({BufferKind::kResult, 0, 0, sizeof(Floats)});
      p->AddLaunch(1, LaunchDesc{std::make_unique<SharedStep>("first", step), {a}, {s}});
      p->AddRecord(1, 0);
      p->AddWait(0, 0);
      p->AddLaunch(0, LaunchDesc{std::make_unique<SharedStep>("second", step), {s}, {r}});
      if (!Problem(*p).empty()) ++wrong;
      Floats in{}, out{};
      for (int call = 0; call < 2500; ++call) {
        in.at[7] = static_cast<float>(t + call);
        if (!Run(p, in, out).ok || out.at[7] != 4 * in.at[7] + 3) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(counters->executions.load() == 20000);
  CHECK(counters->copied_outputs.load() == 0);
}

TEST_CASE("what the plugin refuses is the call's error, and the next call works") {
  // One argument too few: the executable wants the donated one as well.
  auto step = MakeStep(TwicePlusOne(true), {kF32, {kN}}, 1, 1, true);
  auto good = OneStep(dfx::MakePjrtStep("xla", step));
  step.in_place = {false};
  auto bad = OneStep(dfx::MakePjrtStep("xla", step));
  Floats in{}, out{};
  for (int i = 0; i < 3; ++i) {
    auto result = Run(bad, in, out);
    CHECK_FALSE(result.ok);
    CHECK(result.error.find("step 'xla': ") == 0);
    CHECK(Run(good, in, out).ok);
    CHECK(out.at[0] == 1);
  }
  auto small = OneStep(
      dfx::MakePjrtStep("xla", MakeStep(TwicePlusOne(false), {kF32, {kN}}, 1, 1, false)), 64);
  auto result = Run(small, in, out);
  CHECK(result.error.find("an output has 1024 bytes, its place 64") != std::string::npos);
}

TEST_CASE("a step that cannot work is refused when it is made") {
  auto step = MakeStep(TwicePlusOne(true), {kF32, {kN}}, 1, 1, true);
  auto two = step;
  two.outs.push_back(two.outs[0]);
  CHECK(ErrorOf(two).find("needs in_place for each") != std::string::npos);
  two.in_place.push_back(true);
  CHECK(ErrorOf(two) == "the executable has 1 outputs, the step says 2");
  auto null = step;
  null.executable = nullptr;
  CHECK(ErrorOf(null).find("null pointer") != std::string::npos);
  null = step;
  null.api = nullptr;
  CHECK(ErrorOf(null).find("table is null") != std::string::npos);

  PJRT_Api table;
  std::memcpy(&table, step.api, sizeof(table));
  auto other = step;
  other.api = &table;
  CHECK(ErrorOf(other) == "");
  table.pjrt_api_version.minor_version = 40;
  CHECK(ErrorOf(other).find("speaks version 0.40") != std::string::npos);
  table.pjrt_api_version.major_version = 1;
  table.pjrt_api_version.minor_version = 200;
  CHECK(ErrorOf(other).find("speaks version 1.200") != std::string::npos);
  table.struct_size = 500;
  CHECK(ErrorOf(other).find("has 500 bytes") != std::string::npos);
}
