// XLA executables on CUDA lanes whose error comes when their Launch has returned: a PJRT C API of
// this file's own, on the fake driver.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/cuda_support.h"
#include "dfx/pjrt.h"
#include "pjrt/pjrt_api.h"

struct PJRT_Error {
  std::string text;
};

namespace {

using dfx::Buffer;
using dfx::CudaEngine;
using dfx::Lane;
using dfx::Program;
using dfx::test::CleanDriver;
using dfx::test::Device;
using dfx::test::MakeLaunch;
using dfx::test::RunOnDevice;
using dfx::test::RunsRight;
using dfx::test::Squares;
using dfx_test::Outcome;
using dfx_test::Problem;
namespace fake = dfx::fake;
namespace pjrt = dfx::pjrt;

// An execution: over when the test says so.
struct Event {
  std::mutex mutex;
  bool over = false;
  std::string error;
  void (*callback)(PJRT_Error*, void*) = nullptr;
  void* user = nullptr;

  PJRT_Error* Error() const { return error.empty() ? nullptr : new PJRT_Error{error}; }
  void End(std::string why) {
    std::lock_guard<std::mutex> lock(mutex);
    error = std::move(why);
    over = true;
    if (callback != nullptr) callback(Error(), user);
  }
};

// What the plugin has: the last execution's event, and what is done in an Execute.
struct Plugin {
  std::shared_ptr<Event> last;
  std::function<void(Event&)> in_execute;
  std::function<void(Event&)> in_await;
  int executions = 0;
};
Plugin plugin;

// A PJRT_Event* is a shared_ptr on the heap: the step destroys its own, the test keeps the other.
std::shared_ptr<Event>& Of(PJRT_Event* event) {
  return *reinterpret_cast<std::shared_ptr<Event>*>(event);
}

template <typename Args>
void Put(std::vector<void*>& functions, pjrt::Function place, PJRT_Error* (*function)(Args*)) {
  functions[place] = reinterpret_cast<void*>(function);
}

// A buffer is its address.
const void* Api() {
  static std::vector<char>* table = [] {
    std::vector<void*> functions(pjrt::kClientCreateViewOfDeviceBuffer + 1, nullptr);
    functions[pjrt::kErrorDestroy] =
        reinterpret_cast<void*>(+[](pjrt::ErrorDestroyArgs* args) { delete args->error; });
    functions[pjrt::kErrorMessage] = reinterpret_cast<void*>(+[](pjrt::ErrorMessageArgs* args) {
      args->message = args->error->text.data();
      args->message_size = args->error->text.size();
    });
    Put<pjrt::EventArgs>(functions, pjrt::kEventDestroy, [](auto* args) -> PJRT_Error* {
      delete &Of(args->event);
      return nullptr;
    });
    Put<pjrt::EventIsReadyArgs>(functions, pjrt::kEventIsReady, [](auto* args) -> PJRT_Error* {
      std::lock_guard<std::mutex> lock(Of(args->event)->mutex);
      args->is_ready = Of(args->event)->over;
      return nullptr;
    });
    Put<pjrt::EventArgs>(functions, pjrt::kEventAwait, [](auto* args) -> PJRT_Error* {
      Event& event = *Of(args->event);
      if (plugin.in_await) plugin.in_await(event);
      std::lock_guard<std::mutex> lock(event.mutex);
      REQUIRE(event.over);
      return event.Error();
    });
    Put<pjrt::EventOnReadyArgs>(functions, pjrt::kEventOnReady, [](auto* args) -> PJRT_Error* {
      Event& event = *Of(args->event);
      std::lock_guard<std::mutex> lock(event.mutex);
      event.callback = args->callback;
      event.user = args->user;
      if (event.over) event.callback(event.Error(), event.user);
      return nullptr;
    });
    Put<pjrt::AddressableDevicesArgs>(functions, pjrt::kClientAddressableDevices,
                                      [](auto* args) -> PJRT_Error* {
                                        static PJRT_Device* device = nullptr;
                                        args->devices = &device;
                                        args->n_devices = 1;
                                        return nullptr;
                                      });
    Put<pjrt::GetExecutableArgs>(functions, pjrt::kLoadedExecutableGetExecutable,
                                 [](auto*) -> PJRT_Error* { return nullptr; });
    Put<pjrt::NumOutputsArgs>(functions, pjrt::kExecutableNumOutputs,
                              [](auto* args) -> PJRT_Error* {
                                args->num_outputs = 1;
                                return nullptr;
                              });
    Put<pjrt::CreateViewArgs>(functions, pjrt::kClientCreateViewOfDeviceBuffer,
                              [](auto* args) -> PJRT_Error* {
                                args->buffer = static_cast<PJRT_Buffer*>(args->device_buffer_ptr);
                                return nullptr;
                              });
    Put<pjrt::BufferDestroyArgs>(functions, pjrt::kBufferDestroy,
                                 [](auto*) -> PJRT_Error* { return nullptr; });
    Put<pjrt::BufferPointerArgs>(functions, pjrt::kBufferOpaquePointer,
                                 [](auto* args) -> PJRT_Error* {
                                   args->pointer = args->buffer;
                                   return nullptr;
                                 });
    Put<pjrt::ExecuteArgs>(
        functions, pjrt::kLoadedExecutableExecute, [](auto* args) -> PJRT_Error* {
          ++plugin.executions;
          args->output_lists[0][0] =
              args->argument_lists[0][args->num_args - 1];  // the donated one
          plugin.last = std::make_shared<Event>();
          args->device_complete_events[0] =
              reinterpret_cast<PJRT_Event*>(new std::shared_ptr<Event>(plugin.last));
          if (plugin.in_execute) plugin.in_execute(*plugin.last);
          return nullptr;
        });
    pjrt::Table head{};
    const size_t bytes = offsetof(pjrt::Table, functions) + functions.size() * sizeof(void*);
    head.head.struct_size = bytes;
    head.major = pjrt::kMajor;
    head.minor = pjrt::kMinMinor;
    auto* made = new std::vector<char>(bytes);
    std::memcpy(made->data(), &head, offsetof(pjrt::Table, functions));
    std::memcpy(made->data() + offsetof(pjrt::Table, functions), functions.data(),
                functions.size() * sizeof(void*));
    return made;
  }();
  return table->data();
}

// One executable on lane 1, and after it a step on lane 0 of the test's.
std::shared_ptr<Program> OneExecutable(const std::string& name,
                                       const std::function<void()>& after = nullptr) {
  dfx::PjrtSpec spec;
  spec.api = Api();
  static char client, executable;
  spec.client = &client;
  spec.executable = &executable;
  spec.outs = {{11, {2}}};
  spec.in_place = {true};
  auto p = std::make_shared<Program>(2, 1, 0, 1, 0, name);
  const int result = p->AddBuffer({dfx::BufferKind::kResult, 0, 0, 8});
  p->AddLaunch(1, {dfx::MakePjrtStep("xla", std::move(spec)), {}, {result}});
  p->AddRecord(1, 0);
  p->AddWait(0, 0);
  if (after) {
    p->AddLaunch(0, MakeLaunch("after", [after](const Buffer*, int, Buffer*, int, Lane*) {
                   after();
                   return 0;
                 }));
  }
  REQUIRE(Problem(*p) == "");
  return p;
}

struct Fixture {
  CleanDriver clean;
  CudaEngine::Options options;
  std::unique_ptr<Device> device;
  std::unique_ptr<fake::Stream> caller;
  explicit Fixture(bool check_steps = false) {
    plugin = {};
    options.check_steps = check_steps;
    device = std::make_unique<Device>(options);
    caller = std::make_unique<fake::Stream>();
  }
  Outcome Run(const std::shared_ptr<Program>& program) {
    static int64_t memory = 0;
    void* results[] = {&memory};
    return RunOnDevice(*device->engine, program, {}, results, caller->get());
  }
};

// What stands on stderr afterwards.
std::string Said(const std::function<void()>& action) {
  std::fflush(stderr);
  const int kept = dup(2);
  std::FILE* file = std::tmpfile();
  dup2(fileno(file), 2);
  action();
  std::fflush(stderr);
  dup2(kept, 2);
  close(kept);
  std::array<char, 4096> text{};
  std::rewind(file);
  const size_t n = std::fread(text.data(), 1, text.size(), file);
  std::fclose(file);
  return {text.data(), n};
}

constexpr char kWhat[] =
    "step 'xla' of program 'first' failed after it was enqueued: the link fell off";

// How many late errors a text tells.
int ErrorsIn(const std::string& text) {
  if (text.find(kWhat) == std::string::npos) return 0;
  const std::string more = "(the first of ";
  const size_t at = text.find(more);
  return at == std::string::npos ? 1 : std::stoi(text.substr(at + more.size()));
}

}  // namespace

TEST_CASE("an error that is there when Execute returns fails the call") {
  Fixture f;
  auto program = OneExecutable("first");
  plugin.in_execute = [](Event& event) { event.End("no memory"); };
  auto result = f.Run(program);
  CHECK(result.error == "step 'xla': no memory");
  plugin.in_execute = [](Event& event) { event.End(""); };
  CHECK(f.Run(program).ok);
}

TEST_CASE("an error that comes while its call is enqueued fails that call") {
  Fixture f;
  auto program = OneExecutable("first", [] { plugin.last->End("the link fell off"); });
  auto result = f.Run(program);
  CHECK(result.error == kWhat);
  CHECK(f.device->engine->stats().failures == 1);
  auto good = OneExecutable("first", [] { plugin.last->End(""); });
  CHECK(f.Run(good).ok);
}

TEST_CASE(
    "an error that comes after its call fails the engine's next call, once, before it begins") {
  for (const bool same : {true, false}) {
    CAPTURE(same);
    Fixture f;
    auto first = OneExecutable("first");
    auto next = same ? first : OneExecutable("second");
    CHECK(f.Run(first).ok);
    auto event = plugin.last;
    if (!same) first.reset();  // the step that failed, and its program, are gone
    std::thread([event] { event->End("the link fell off"); }).join();
    auto result = f.Run(next);
    const std::string name = same ? "first" : "second";
    CHECK(result.error ==
          "program '" + name +
              "' was not started, for what an earlier call made is not valid: " + kWhat);
    CHECK(plugin.executions == 1);
    CHECK(f.device->engine->stats().failures == 1);
    plugin.in_execute = [](Event& e) { e.End(""); };
    CHECK(f.Run(next).ok);
    CHECK(plugin.executions == 2);
    CHECK(RunsRight(*f.device->engine, Squares()));
  }
}

TEST_CASE("several late errors are told as one, with their number") {
  Fixture f;
  auto first = OneExecutable("first");
  std::vector<std::shared_ptr<Event>> events;
  for (int i = 0; i < 3; ++i) {
    CHECK(f.Run(first).ok);
    events.push_back(plugin.last);
  }
  for (auto& event : events) event->End("the link fell off");
  CHECK(f.Run(first).error.find(std::string(kWhat) + " (the first of 3 such errors)") !=
        std::string::npos);
  plugin.in_execute = [](Event& event) { event.End(""); };
  CHECK(f.Run(first).ok);
}

TEST_CASE("with a check after each step, the call waits for its executions and is told") {
  Fixture f(true);
  auto program = OneExecutable("first");
  plugin.in_await = [](Event& event) { event.End("the link fell off"); };
  CHECK(f.Run(program).error == "step 'xla': the link fell off");
}

TEST_CASE("an error that no call is told stands on stderr when the engine is gone") {
  for (const bool engine_first : {true, false}) {
    CAPTURE(engine_first);
    const std::string said = Said([&] {
      Fixture f;
      auto program = OneExecutable("first");
      CHECK(f.Run(program).ok);
      auto event = plugin.last;
      if (engine_first) f.device.reset();
      event->End("the link fell off");
    });
    CHECK(said == "dynaflow_xla: " + std::string(kWhat) + "; what its call made is not valid\n");
  }
  const std::string told = Said([&] {
    Fixture f;
    auto program = OneExecutable("first");
    CHECK(f.Run(program).ok);
    plugin.last->End("the link fell off");
    CHECK_FALSE(f.Run(program).ok);
  });
  CHECK(told == "");
}

TEST_CASE("executions that end on other threads while calls go on lose no error") {
  Fixture f;
  auto program = OneExecutable("first");
  std::vector<std::thread> threads;
  int failed = 0, told = 0;
  for (int i = 0; i < 300; ++i) {
    told += ErrorsIn(f.Run(program).error);
    auto event = std::exchange(plugin.last, nullptr);
    if (event == nullptr) continue;  // the call was not started
    const bool fail = i % 3 == 0;
    failed += fail;
    threads.emplace_back([event, fail] { event->End(fail ? "the link fell off" : ""); });
  }
  for (auto& thread : threads) thread.join();
  told += ErrorsIn(Said([&] { f.device.reset(); }));
  CHECK(failed > 0);
  CHECK(told == failed);
}

#if !defined(__SANITIZE_THREAD__)
TEST_CASE("leaves a late error to the process's exit" * doctest::skip()) {
  static Fixture* f = new Fixture;  // as an interpreter does
  CHECK(f->Run(OneExecutable("first")).ok);
  plugin.last->End("the link fell off");
}

TEST_CASE("an engine that lives as long as the process tells at its exit") {
  const std::string said = Said([] {
    const pid_t child = fork();
    if (child == 0) {
      const int nowhere = open("/dev/null", O_WRONLY);
      dup2(nowhere, 1);
      execl("/proc/self/exe", "tests", "-ns", "-tc=leaves a late error*", nullptr);
      _exit(1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  });
  CHECK(said == "dynaflow_xla: " + std::string(kWhat) + "; what its call made is not valid\n");
}
#endif
