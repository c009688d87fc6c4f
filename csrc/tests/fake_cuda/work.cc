// Operations, and the streams' threads that run them.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include "state.h"

namespace dfx::fake {

void Ticket::Set() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  when = std::chrono::duration<double>(now).count();
  done.store(1, std::memory_order_release);
  done.notify_all();
}

void Delay() {
  const int max = S().max_delay_us.load(std::memory_order_relaxed);
  if (max == 0) return;
  thread_local std::mt19937 random(std::random_device{}());
  const int us = static_cast<int>(random() % static_cast<unsigned>(max + 1));
  if (us > max / 2) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void Run(const Work& work) {
  if (work.run == nullptr) return;
  const bool device =
      work.kind == Kind::kKernel || work.kind == Kind::kCopy || work.kind == Kind::kSet;
  if (device) {
    if (S().sticky != 0) return;  // the context is gone: nothing runs
    Delay();
  }
  InHostFunction() = work.kind == Kind::kHost;
  Running() = work.traced;
  const bool sound = work.run();
  Running() = 0;
  InHostFunction() = false;
  if (!sound) S().sticky = kIllegalAddress;
}

CudaStatus Enqueue(CUstream_st* stream, Work work) {
  if (!Known(stream)) return Misuse("work for a stream that does not exist");
  if (stream->capture != nullptr) {
    Capture& capture = *stream->capture;
    if (!capture.valid) return kCaptureIsInvalid;
    stream->frontier = {AddNode(capture.graph.get(), std::move(work), stream->frontier)};
    return 0;
  }
  TraceWork(stream, work);
  if (work.kind != Kind::kKernel && !stream->ignored.empty()) {
    // Kernels alone ignore waits: the host's memory is not to be lost, too.
    stream->Push([tickets = std::move(stream->ignored)] {
      for (const auto& ticket : tickets) ticket->Wait();
    });
    stream->ignored.clear();
  }
  Order reached;
  if (Tracing() && work.kind == Kind::kHost) reached = stream->order;
  stream->Push([work = std::move(work), reached = std::move(reached)] {
    if (!reached.empty()) {
      LOCK;
      HostKnows(reached);
    }
    Run(work);
  });
  return 0;
}

Work HostWork(Kind kind, std::function<void()> run) {
  Work work;
  work.kind = kind;
  work.run = [run = std::move(run)] {
    run();
    return true;
  };
  return work;
}

Work CopyWork(CudaAddress to, CudaAddress from, size_t bytes) {
  Work work;
  work.kind = Kind::kCopy;
  work.accesses = {{from, bytes, false}, {to, bytes, true}};
  work.run = [=] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    return true;
  };
  return work;
}

namespace {

std::atomic<KernelValues> kernel_values{nullptr};

}  // namespace

void SetKernelValues(KernelValues function) { kernel_values = function; }

std::vector<std::vector<char>> Arguments(const CUfunc_st& function, void** parameters,
                                         void** extra) {
  std::vector<std::vector<char>> copies;
  if (parameters != nullptr) {
    for (size_t i = 0; i < function.sizes.size(); ++i) {
      const char* from = static_cast<const char*>(parameters[i]);
      copies.emplace_back(from, from + function.sizes[i]);
    }
    return copies;
  }
  // Or a buffer that holds them one after the other, each at a multiple of its size.
  const char* buffer = nullptr;
  for (void** entry = extra; entry != nullptr && *entry != nullptr; entry += 2) {
    if (*entry == reinterpret_cast<void*>(1)) buffer = static_cast<const char*>(entry[1]);
  }
  size_t offset = 0;
  for (size_t size : function.sizes) {
    const size_t align = std::min<size_t>(size, 8);
    offset = (offset + align - 1) / align * align;
    if (buffer != nullptr) copies.emplace_back(buffer + offset, buffer + offset + size);
    offset += size;
  }
  return copies;
}

Work KernelWork(std::shared_ptr<const KernelLaunch> launch) {
  Work work;
  work.kind = Kind::kKernel;
  work.label = launch->function->name;
  work.launch = launch;
  work.run = [launch] {
    const CUfunc_st& function = *launch->function;
    std::vector<std::vector<char>> copies = launch->arguments;
    std::vector<void*> addresses;
    std::vector<size_t> sizes;
    for (std::vector<char>& copy : copies) {
      addresses.push_back(copy.data());
      sizes.push_back(copy.size());
    }
    if (function.run != nullptr) return function.run(addresses.data());
    const KernelValues values = kernel_values.load();
    return values == nullptr || values(function.name.c_str(), function.module->id, addresses.data(),
                                       sizes.data(), static_cast<int>(sizes.size())) == 0;
  };
  return work;
}

CUstream_st* NewStream(int device, unsigned flags, int priority) {
  auto* stream = new CUstream_st;
  stream->id = ++S().ids;
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  S().streams.insert(stream);
  return stream;
}

CudaStatus Launch(CUstream_st* stream, std::function<bool()> function) {
  ENTER("cuLaunchKernel", kNothing);
  Work work;
  work.kind = Kind::kKernel;
  work.label = "function";
  work.run = std::move(function);
  return Enqueue(stream, std::move(work));
}

}  // namespace dfx::fake

CUstream_st::~CUstream_st() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    stop = true;
  }
  wake.notify_all();
  thread.join();
}

void CUstream_st::Push(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(work));
  }
  wake.notify_all();
}

bool CUstream_st::Idle() {
  std::lock_guard<std::mutex> lock(mutex);
  return queue.empty() && !busy;
}

void CUstream_st::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex);
      busy = false;
      wake.wait(lock, [this] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      work = std::move(queue.front());
      queue.pop_front();
      busy = true;
    }
    work();
  }
}
