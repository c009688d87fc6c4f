// Programs whose lanes are CUDA streams.
//
// Run only enqueues, on the calling thread, and returns while the device works: it never waits for
// the device (see failure for the exception). Lane 0 is the caller's stream; lanes 1 and up are
// streams of the engine. What comes before Run on the caller's stream happens before every step,
// and every step before what comes after Run on the caller's stream.
//
// What orders accesses: a lane's steps run in the order of its stream. A fork event, recorded on
// the caller's stream, is awaited by every other lane first; a Record is an event on the lane's
// stream and a Wait makes the stream wait for it; at the end the caller's stream waits for every
// lane.
//
// Why it cannot deadlock: a wait is enqueued after the record it names, so the order of enqueueing
// is an order in which the device can do the work.
//
// Who owns what: arguments, results and a scratch given by the caller belong to the caller, who
// keeps them until its stream has passed the call, as for any asynchronous work. Scratch that the
// caller does not give is allocated and freed in the order of the caller's stream. Streams and
// events belong to a lane set. A set serves one Run at a time, and the next one as soon as that has
// enqueued: a wait for an event means the record before it, so recording it again does no harm.
// The Program may go when Run returned; steps must have copied what the device still needs.
//
// Capture: if the caller's stream is in capture, the call becomes part of the graph. The set's
// streams stay in that capture until it ends, so until then the set serves that capture only.
// Replays of one graph must not overlap if the engine allocated the scratch (CUDA sees to that).
//
// On failure (of a step, of the driver) nothing more is enqueued, and the caller's stream is made
// to wait for what was, so that the caller may free its memory in stream order; if not even that
// works, the host waits for the lanes. Run throws the first error, and the next call works. A lost
// context (a kernel faulted, a device fell off) is for ever: this and every later Run says so. Work
// that fails after Run returned shows up where the caller synchronises, as for any CUDA work; an
// XLA executable whose error only XLA knows fails the engine's next Run (src/cuda/late_errors.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dfx/lane.h"
#include "dfx/program.h"

struct CUctx_st;
struct CUmod_st;
struct CUstream_st;

namespace dfx {

struct CudaDriver;
class LateErrors;

// A lane as steps see it. They enqueue on its stream, and never wait for it (unless all steps are
// to be checked).
class CudaLane : public Lane {
 public:
  CudaLane(int index, const CudaDriver& driver, std::shared_ptr<LateErrors> late, bool check_steps)
      : Lane(index), driver_(driver), late_(std::move(late)), check_steps_(check_steps) {}
  CudaLane* cuda() override { return this; }
  CUstream_st* stream() const { return stream_; }
  void SetStream(CUstream_st* stream) { stream_ = stream; }
  const CudaDriver& driver() const { return driver_; }
  // Where an error goes that is found when the step has returned.
  const std::shared_ptr<LateErrors>& late() const { return late_; }
  bool check_steps() const { return check_steps_; }

 private:
  const CudaDriver& driver_;
  const std::shared_ptr<LateErrors> late_;
  const bool check_steps_;
  CUstream_st* stream_ = nullptr;
};

class CudaEngine {
 public:
  struct Options {
    int device = 0;
    // Stream priority of each lane, lower runs first; lanes beyond the list have 0. Lane 0 is the
    // caller's stream, so its entry must be 0.
    std::vector<int> priorities;
    // At least so many multiprocessors are each lane's own (a green context); 0, and lanes beyond
    // the list: all that the device has. Lane 0 is the caller's stream, so its entry must be 0.
    std::vector<int> sms;
    // After each step the host waits for its lane, so that a fault is reported with the step's
    // name. For finding errors: lanes do not overlap. No effect in a capture.
    bool check_steps = false;
    // Streams of somebody else to use as lanes 0, 1, ...; they outlive the engine. Then there is
    // one lane set, lane 0 is no longer the caller's stream, and callers take turns.
    std::vector<CUstream_st*> streams;
  };

  // On the real driver, or on a table of it. Throws Error (no driver, no such device, a priority
  // out of range, more multiprocessors than there are, no memory).
  explicit CudaEngine(Options options);
  CudaEngine(const CudaDriver& driver, Options options);
  // Waits for the device to finish what was enqueued. No Run may be under way.
  ~CudaEngine();
  CudaEngine(const CudaEngine&) = delete;
  CudaEngine& operator=(const CudaEngine&) = delete;

  // Enqueues a finished program. `scratch` is device memory of program->scratch_bytes() bytes, or
  // nullptr. `caller_device` is where the caller's memory lies, if that is known: another device
  // than the lanes' is refused. Any number of threads may call it.
  void Run(const std::shared_ptr<const Program>& program, std::span<void* const> args,
           std::span<void* const> results, CUstream_st* caller, void* scratch = nullptr,
           int caller_device = -1);

  int device() const;
  const CudaDriver& driver() const;
  CUctx_st* context() const;
  // Multiprocessors of each lane that has some of its own (the driver rounds up), else 0.
  std::vector<int> sms() const;
  // The module of an image (see kernel.h), loaded once. The context must be current.
  CUmod_st* LoadModule(const std::string& image);
  struct Stats {
    int64_t calls = 0;      // ever started
    int64_t failures = 0;   // of those, how many ended with an error
    int64_t lane_sets = 0;  // made so far: as many as there were Runs (or captures) at one time
  };
  Stats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Enqueues a copy between device addresses of the engine's device.
void CopyOnStream(const CudaEngine& engine, void* to, const void* from, size_t bytes,
                  CUstream_st* stream);

// Number of CUDA devices. Throws Error saying why CUDA cannot be used.
int CudaDeviceCount();

}  // namespace dfx
