#include "python_step.h"

#include <nanobind/nanobind.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dfx/call.h"
#include "dfx/lane.h"
#include "engine_error.h"

namespace dfx::ffi {
namespace {

// References that became garbage on a thread that may not take the GIL (an XLA thread that destroys
// an executable while the GIL's holder waits for it would deadlock). The interpreter's main thread
// drops them between two bytecodes; ReleasePending does it at once.
struct Pending {
  std::mutex mutex;
  std::vector<PyObject*> objects;
  bool asked = false;            // the interpreter knows that there are some
  std::deque<PyObject*> raised;  // exceptions that the main thread raises when it can
};
Pending& GetPending() {
  static Pending* pending = new Pending;
  return *pending;
}

std::atomic<int64_t> gil_max_ns{0};
std::atomic<int> steps_in_python{0};

// Lanes of a call want the GIL at one moment. Who finds it taken sleeps, and is awake again some
// tens of us after it is free; but a lane program gives it up when it runs, after some us, and so
// does a stretch of PyTorch's operators, after some more. So such steps come one after another:
// each spins until the one before it has had the GIL for so long. How long that is each learns for
// itself: longer where it still had to wait, a little shorter where it had not.
class Start {
 public:
  explicit Start(int64_t most_ns) : most_ns_(most_ns) {}

  // Spins until it is this step's turn; whether another was before it.
  bool WaitForTurn() {
    // On one core it would be in the other's way.
    static const bool alone = std::thread::hardware_concurrency() < 2;
    if (alone) return false;
    if (std::exchange(is_first, false)) {
      last_ns.store(NowNs(), std::memory_order_relaxed);
      first_since_ns.store(0, std::memory_order_release);
      return false;
    }
    int64_t now = NowNs(), mine;
    for (int64_t since; (since = first_since_ns.load(std::memory_order_acquire)) != 0;
         now = NowNs()) {
      if (now - since > most_ns_) break;  // it waits for another call's turn, say
    }
    int64_t last = last_ns.load(std::memory_order_relaxed);
    do {
      mine = std::max(now, last + after_ns_.load(std::memory_order_relaxed));
    } while (!last_ns.compare_exchange_weak(last, mine, std::memory_order_relaxed));
    const bool waits = now < mine;
    while (now < mine) now = NowNs();
    return waits;
  }

  // This thread's next step is the first of a call: others let it begin.
  static void Reserve() {
    first_since_ns.store(NowNs(), std::memory_order_release);
    is_first = true;
  }
  static void Release() {
    if (std::exchange(is_first, false)) first_since_ns.store(0, std::memory_order_release);
  }

  // How long it waited for the GIL after that.
  void Waited(int64_t ns) {
    const int64_t after = after_ns_.load(std::memory_order_relaxed);
    after_ns_.store(
        ns > kLeastNs ? std::min(after + 1'000, most_ns_) : std::max(after - 20, kLeastNs),
        std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t kLeastNs = 4'000;
  static inline std::atomic<int64_t> last_ns{0}, first_since_ns{0};
  static inline thread_local bool is_first = false;

  const int64_t most_ns_;
  std::atomic<int64_t> after_ns_{9'000};
};

// At most so long is one step before another that takes turns.
constexpr int64_t kProgramNs = 16'000, kOperatorsNs = 64'000;

thread_local PyThreadState* lane_state = nullptr;

// A thread that Python does not know, of OpenMP's say, would get a state of Python's at each step
// and delete it afterwards, which took 100 us. It keeps the first one. Nobody deletes that when the
// thread ends: it would have to wait for the GIL, and its holder may wait for the thread. So few
// are kept.
void KeepThreadState() {
  constexpr int kMostKept = 256;  // some 17 KB each
  static std::atomic<int> kept{0};
  static thread_local bool known = false;
  if (std::exchange(known, true) || PyGILState_GetThisThreadState() != nullptr) return;
  if (kept.fetch_add(1, std::memory_order_relaxed) >= kMostKept) return;
  PyGILState_Ensure();
  PyEval_SaveThread();
}

// How often this thread gave up its core to wait for something.
int64_t TimesBlocked() {
  rusage usage;
  return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nvcsw : 0;
}

bool InterpreterGone() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

int DropPending(void*) {
  ReleasePending();
  return 0;
}

void DropLater(PyObject* object) noexcept {
  Pending& pending = GetPending();
  std::lock_guard<std::mutex> lock(pending.mutex);
  try {
    pending.objects.push_back(object);
  } catch (const std::bad_alloc&) {
    return;  // it stays alive: nobody here may throw
  }
  // Needs no GIL. It fails when the interpreter's short queue is full: the next object asks again.
  if (!pending.asked && !InterpreterGone()) {
    pending.asked = Py_AddPendingCall(&DropPending, nullptr) == 0;
  }
}

// Makes an exception the current one, and takes it.
void Raise(PyObject* error) {
  PyObject* type = Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(error)));
  PyErr_Restore(type, error, PyException_GetTraceback(error));
}

// On the main thread, between two bytecodes: raises what a signal handler raised inside of a step.
int RaiseLater(void*) {
  PyObject* error = nullptr;
  {
    Pending& pending = GetPending();
    std::lock_guard<std::mutex> lock(pending.mutex);
    if (pending.raised.empty()) return 0;
    error = pending.raised.front();
    pending.raised.pop_front();
  }
  Raise(error);
  return -1;
}

// Takes the current exception.
PyObject* TakeError() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value != nullptr && trace != nullptr) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  PyErr_Clear();
  return value;
}

// Has the main thread raise an exception, and takes it; false if the interpreter's short queue is
// full. Not inside of a step: it would be raised there.
bool PutOff(PyObject* error) {
  Pending& pending = GetPending();
  std::lock_guard<std::mutex> lock(pending.mutex);
  try {
    pending.raised.push_back(error);
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (Py_AddPendingCall(&RaiseLater, nullptr) == 0) return true;
  pending.raised.pop_back();
  return false;
}

// Which thread runs the handlers of signals; 0 if Python does not say.
unsigned long MainThread() {
  unsigned long found = 0;
  PyObject* threading = PyImport_ImportModule("threading");
  PyObject* thread =
      threading != nullptr ? PyObject_CallMethod(threading, "main_thread", nullptr) : nullptr;
  PyObject* ident = thread != nullptr ? PyObject_GetAttrString(thread, "ident") : nullptr;
  if (ident != nullptr) found = PyLong_AsUnsignedLong(ident);
  Py_XDECREF(ident);
  Py_XDECREF(thread);
  Py_XDECREF(threading);
  if (PyErr_Occurred() == nullptr) return found;
  PyErr_Clear();
  return 0;
}

// Whether an exception is not one of ours: in a lane program, whose own errors all are, a signal
// handler raised it. Handlers run on one thread; what came out of a step on another is the step's.
bool IsOfAHandler(PyObject* error, unsigned long main_thread) {
  if (PyThread_get_thread_ident() != main_thread) return false;
  PyObject* known = EngineErrorType();
  const bool ours = known == nullptr || PyErr_GivenExceptionMatches(error, known) != 0;
  Py_XDECREF(known);
  return !ours && PyErr_GivenExceptionMatches(error, PyExc_MemoryError) == 0;
}

// Text of the current Python exception, which is cleared; with its type's name unless that says no
// more than that the engine failed.
std::string TakeErrorText() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  std::string text = "unknown Python exception";
  if (value != nullptr) {
    text = Py_TYPE(value)->tp_name;
    PyObject* words = PyObject_Str(value);
    PyErr_Clear();
    PyObject* bytes =
        words != nullptr ? PyUnicode_AsEncodedString(words, "utf-8", "backslashreplace") : nullptr;
    PyErr_Clear();
    if (bytes != nullptr) {
      const std::string said(PyBytes_AS_STRING(bytes),
                             static_cast<size_t>(PyBytes_GET_SIZE(bytes)));
      PyObject* known = EngineErrorType();
      const bool ours = known != nullptr && PyErr_GivenExceptionMatches(value, known) != 0;
      Py_XDECREF(known);
      text = ours ? said : text + ": " + said;
    }
    Py_XDECREF(bytes);
    Py_XDECREF(words);
    PyErr_Clear();
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return text;
}

// The addresses of all buffers as a Python tuple; nullptr, and a Python exception, without memory.
PyObject* Addresses(std::span<const Buffer> ins, std::span<const Buffer> outs) {
  PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(ins.size() + outs.size()));
  Py_ssize_t at = 0;
  for (auto list : {ins, outs}) {
    for (const Buffer& buffer : list) {
      PyObject* number = made != nullptr ? PyLong_FromVoidPtr(buffer.data) : nullptr;
      if (number == nullptr) {
        Py_XDECREF(made);
        return nullptr;
      }
      PyTuple_SET_ITEM(made, at++, number);
    }
  }
  return made;
}

// Whether the callable's attribute of this name is true.
bool Says(PyObject* callable, const char* name) {
  PyObject* said = PyObject_GetAttrString(callable, name);
  const bool yes = said == Py_True;
  Py_XDECREF(said);
  PyErr_Clear();
  return yes;
}

class PythonStep : public Step {
 public:
  PythonStep(std::string name, PyObject* callable)
      : Step(std::move(name)),
        callable_(KeepAlive(callable)),
        main_thread_(MainThread()),
        repeatable_(Says(callable, "repeatable")),
        takes_turns_(repeatable_ || Says(callable, "takes_turns")),
        start_(repeatable_ ? kProgramNs : kOperatorsNs) {}
  std::string Describe() const override { return "Python callable"; }
  void Launch(std::span<const Buffer> ins, std::span<Buffer> outs, Lane& lane) override;

 private:
  const std::shared_ptr<void> callable_;
  const unsigned long main_thread_;
  const bool repeatable_;
  const bool takes_turns_;
  Start start_;
};

void PythonStep::Launch(std::span<const Buffer> ins, std::span<Buffer> outs, Lane& lane) {
  Call* call = lane.current();
  if (InterpreterGone()) {
    call->Fail("the Python interpreter is shutting down");
    return;
  }
  KeepThreadState();
  // On a loaded machine the kernel takes this thread's core, or that of another lane which has the
  // GIL: such waits are long, too, but say nothing about other Python threads.
  const bool first = steps_in_python.fetch_add(1, std::memory_order_relaxed) == 0;
  const bool behind = takes_turns_ && start_.WaitForTurn();
  const int64_t blocked = TimesBlocked();
  const int64_t before = NowNs();
  nanobind::gil_scoped_acquire gil;
  const int64_t waited = NowNs() - before;
  if (behind) start_.Waited(waited);
  if (first && waited > gil_max_ns.load(std::memory_order_relaxed) && TimesBlocked() != blocked) {
    gil_max_ns.store(waited, std::memory_order_relaxed);
  }
  PyObject* pointers = Addresses(ins, outs);
  PyObject* result = nullptr;
  bool interrupted = false;
  bool again = false;
  bool done = false;
  PyObject* handlers = nullptr;  // what a handler raised
  while (pointers != nullptr && !done) {
    result = PyObject_CallOneArg(static_cast<PyObject*>(callable_.get()), pointers);
    // Interrupted again, or by the step itself, the call fails: nobody waits for what never ends.
    if (result != nullptr || again) break;
    // On the main thread handlers of signals run between bytecodes: before the lane program started
    // or after it ended, never inside. So run it if it has not run, and raise later what the
    // handler raised, where the caller was.
    PyObject* error = TakeError();
    if (PyErr_GivenExceptionMatches(error, PyExc_KeyboardInterrupt) != 0) {
      Py_DECREF(error);
      interrupted = true;
    } else if (repeatable_ && IsOfAHandler(error, main_thread_)) {
      handlers = error;
    } else {
      Raise(error);
      break;
    }
    again = true;
    done = call->IsLaneDone(lane.index());
  }
  if (interrupted) PyErr_SetInterrupt();
  if (result == nullptr && !done) call->Fail(TakeErrorText());
  if (handlers != nullptr && !PutOff(handlers)) {
    call->Fail("a signal's handler raised inside of a step, and its exception cannot be kept");
    Py_DECREF(handlers);
  }
  Py_XDECREF(result);
  Py_XDECREF(pointers);
  steps_in_python.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace

std::shared_ptr<void> KeepAlive(PyObject* object) {
  return {Py_NewRef(object), [](void* kept) { DropLater(static_cast<PyObject*>(kept)); }};
}

std::unique_ptr<Step> MakePythonStep(std::string name, PyObject* callable) {
  return std::make_unique<PythonStep>(std::move(name), callable);
}

void ReleasePending() {
  std::vector<PyObject*> objects;
  {
    Pending& pending = GetPending();
    std::lock_guard<std::mutex> lock(pending.mutex);
    objects.swap(pending.objects);
    pending.asked = false;
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

FirstTurn::FirstTurn() { Start::Reserve(); }

FirstTurn::~FirstTurn() { Start::Release(); }

int64_t TakeGilWait() { return gil_max_ns.exchange(0, std::memory_order_relaxed); }

void OnLaneStart(int) {
  if (InterpreterGone()) return;
  PyGILState_Ensure();  // creates this thread's state; balanced in OnLaneExit
  lane_state = PyEval_SaveThread();
}

void OnLaneExit(int) {
  if (lane_state == nullptr || InterpreterGone()) return;
  PyEval_RestoreThread(lane_state);
  lane_state = nullptr;
  PyGILState_Release(PyGILState_UNLOCKED);
}

}  // namespace dfx::ffi
