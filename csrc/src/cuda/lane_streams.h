// Streams of lanes: their priorities, and the parts of the device that they are confined to.
#pragma once
#include <vector>

#include "cuda/cuda_driver.h"

namespace dfx {

// Parts of a device's multiprocessors, one a lane that asks for some: green contexts. No two parts
// share a multiprocessor; lanes without a part use all, so they share with everybody.
class SmParts {
 public:
  // `sms[lane]` or more multiprocessors; 0: no part. The device's context must be current. Throws
  // Error: a driver without green contexts, a part for lane 0 (the caller's stream), more than
  // there is.
  SmParts(const CudaDriver& driver, CudaDevice device, const std::vector<int>& sms);
  ~SmParts();
  SmParts(const SmParts&) = delete;
  SmParts& operator=(const SmParts&) = delete;

  CUgreenCtx_st* context(int lane) const;
  const std::vector<int>& sms() const { return sms_; }

 private:
  void Make(CudaDevice device, const std::vector<int>& sms);
  void Destroy();

  const CudaDriver& driver_;
  std::vector<int> sms_;
  std::vector<CUgreenCtx_st*> contexts_;
};

// Throws Error for a priority that the device has not; lane 0 must have 0.
void CheckPriorities(const CudaDriver& driver, const std::vector<int>& priorities);

// A stream in the lane's part. Throws CudaError.
CUstream_st* MakeLaneStream(const CudaDriver& driver, const SmParts& parts, int lane, int priority);

}  // namespace dfx
