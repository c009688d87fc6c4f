// Streams for lanes of somebody who enqueues on them himself (PyTorch): with priorities, and parts
// of the device's multiprocessors.
#pragma once
#include <memory>
#include <vector>

struct CUstream_st;

namespace dfx {

struct CudaDriver;

class CudaStreams {
 public:
  // Streams of lanes 1 to `lanes` - 1; lane 0 is the caller's. `priorities` and `sms` are by lane,
  // as in CudaEngine::Options. Throws Error.
  CudaStreams(int device, int lanes, const std::vector<int>& priorities,
              const std::vector<int>& sms);
  CudaStreams(const CudaDriver& driver, int device, int lanes, const std::vector<int>& priorities,
              const std::vector<int>& sms);
  // Their work may still be running: the driver finishes it.
  ~CudaStreams();
  CudaStreams(const CudaStreams&) = delete;
  CudaStreams& operator=(const CudaStreams&) = delete;

  const std::vector<CUstream_st*>& streams() const;
  std::vector<int> sms() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dfx
