#include "cuda/lane_streams.h"

#include <memory>
#include <string>

#include "dfx/cuda/cuda_streams.h"

namespace dfx {

SmParts::SmParts(const CudaDriver& driver, CudaDevice device, const std::vector<int>& sms)
    : driver_(driver), sms_(sms.size(), 0), contexts_(sms.size(), nullptr) {
  try {
    Make(device, sms);
  } catch (...) {
    Destroy();
    throw;
  }
}

SmParts::~SmParts() { Destroy(); }

void SmParts::Destroy() {
  for (CUgreenCtx_st* context : contexts_) {
    if (context != nullptr) driver_.GreenCtxDestroy(context);
  }
}

void SmParts::Make(CudaDevice device, const std::vector<int>& sms) {
  bool any = false;
  for (size_t lane = 0; lane < sms.size(); ++lane) {
    if (sms[lane] < 0 || (lane == 0 && sms[lane] != 0)) {
      throw Error("lane " + std::to_string(lane) + " cannot have " + std::to_string(sms[lane]) +
                  " multiprocessors" +
                  (lane == 0 ? ": it is the caller's stream, so it must be 0"
                             : ": give a number, or 0 for all"));
    }
    any = any || sms[lane] > 0;
  }
  if (!any) return;
#define DFX_MISSING(member, symbol, parameters) || driver_.member == nullptr
  if (false DFX_CUDA_GREEN_FUNCTIONS(DFX_MISSING)) {
    throw Error(
        "lanes cannot be confined to multiprocessors: the CUDA driver has no green "
        "contexts (CUDA 12.5 brought them); update it, or leave sms out");
  }
#undef DFX_MISSING
  CudaResource whole{};
  CheckCuda(driver_, driver_.DeviceGetDevResource(device, &whole, kSmResource),
            "cuDeviceGetDevResource");
  // One split for all lanes, since what a split gave, its remainder too, cannot be split again. A
  // part may be several groups of one split, so the smallest groups (1 is rounded up) serve any
  // size. The remainder promises less than the groups do, and is not used.
  std::vector<CudaResource> groups(whole.sm_count);
  auto n_groups = static_cast<unsigned>(groups.size());
  CheckCuda(driver_,
            driver_.DevSmResourceSplitByCount(groups.data(), &n_groups, &whole, nullptr, 0, 1),
            "cuDevSmResourceSplitByCount");
  const unsigned size = n_groups == 0 ? 0 : groups[0].sm_count;  // all groups have the same
  unsigned given = 0;                                            // the first group that is free
  for (size_t lane = 0; lane < sms.size(); ++lane) {
    if (sms[lane] == 0) continue;
    const auto wanted = static_cast<unsigned>(sms[lane]);
    const unsigned left = (n_groups - given) * size;
    if (wanted > left) {
      throw Error("lane " + std::to_string(lane) + " asks for " + std::to_string(wanted) +
                  " multiprocessors; " + std::to_string(left) + " of the device's " +
                  std::to_string(whole.sm_count) + " are left (it sets them apart in groups of " +
                  std::to_string(size) + ", and a part is rounded up to whole groups)");
    }
    const unsigned n = (wanted + size - 1) / size;
    CUdevResourceDesc_st* descriptor = nullptr;
    CheckCuda(driver_, driver_.DevResourceGenerateDesc(&descriptor, &groups[given], n),
              "cuDevResourceGenerateDesc");
    CheckCuda(driver_,
              driver_.GreenCtxCreate(&contexts_[lane], descriptor, device, kGreenContextStream),
              "cuGreenCtxCreate");
    sms_[lane] = static_cast<int>(n * size);
    given += n;
  }
}

CUgreenCtx_st* SmParts::context(int lane) const {
  const auto at = static_cast<size_t>(lane);
  return at < contexts_.size() ? contexts_[at] : nullptr;
}

void CheckPriorities(const CudaDriver& driver, const std::vector<int>& priorities) {
  int least = 0, greatest = 0;
  CheckCuda(driver, driver.CtxGetStreamPriorityRange(&least, &greatest),
            "cuCtxGetStreamPriorityRange");
  for (size_t lane = 0; lane < priorities.size(); ++lane) {
    const int priority = priorities[lane];
    if (lane == 0 ? priority == 0 : priority >= greatest && priority <= least) continue;
    throw Error("lane " + std::to_string(lane) + " cannot have priority " +
                std::to_string(priority) +
                (lane == 0 ? ": it is the caller's stream, so it must be 0"
                           : ": this device has " + std::to_string(greatest) + " (first) to " +
                                 std::to_string(least) + " (last)"));
  }
}

CUstream_st* MakeLaneStream(const CudaDriver& driver, const SmParts& parts, int lane,
                            int priority) {
  CUstream_st* stream = nullptr;
  if (CUgreenCtx_st* context = parts.context(lane); context != nullptr) {
    CheckCuda(driver, driver.GreenCtxStreamCreate(&stream, context, kStreamNonBlocking, priority),
              "cuGreenCtxStreamCreate");
  } else {
    CheckCuda(driver, driver.StreamCreate(&stream, kStreamNonBlocking, priority),
              "cuStreamCreateWithPriority");
  }
  return stream;
}

struct CudaStreams::Impl {
  const CudaDriver& driver;
  CudaDevice device = 0;
  CUctx_st* context = nullptr;
  std::unique_ptr<SmParts> parts;
  std::vector<CUstream_st*> streams;

  explicit Impl(const CudaDriver& d) : driver(d) {}
  ~Impl() {
    if (context == nullptr) return;
    CUctx_st* popped = nullptr;
    const bool pushed = driver.CtxPushCurrent(context) == kCudaSuccess;
    for (CUstream_st* stream : streams) driver.StreamDestroy(stream);
    parts.reset();
    if (pushed) driver.CtxPopCurrent(&popped);
    driver.DevicePrimaryCtxRelease(device);
  }
};

CudaStreams::CudaStreams(int device, int lanes, const std::vector<int>& priorities,
                         const std::vector<int>& sms)
    : CudaStreams(LoadCudaDriver(), device, lanes, priorities, sms) {}

CudaStreams::CudaStreams(const CudaDriver& driver, int device, int lanes,
                         const std::vector<int>& priorities, const std::vector<int>& sms)
    : impl_(std::make_unique<Impl>(driver)) {
  CheckCuda(driver, driver.DeviceGet(&impl_->device, device), "cuDeviceGet");
  CheckCuda(driver, driver.DevicePrimaryCtxRetain(&impl_->context, impl_->device),
            "cuDevicePrimaryCtxRetain");
  CudaContextScope scope(driver, impl_->context);
  CheckPriorities(driver, priorities);
  impl_->parts = std::make_unique<SmParts>(driver, impl_->device, sms);
  for (int lane = 1; lane < lanes; ++lane) {
    const auto at = static_cast<size_t>(lane);
    impl_->streams.reserve(impl_->streams.size() + 1);
    impl_->streams.push_back(
        MakeLaneStream(driver, *impl_->parts, lane, at < priorities.size() ? priorities[at] : 0));
  }
}

CudaStreams::~CudaStreams() = default;

const std::vector<CUstream_st*>& CudaStreams::streams() const { return impl_->streams; }
std::vector<int> CudaStreams::sms() const { return impl_->parts->sms(); }

}  // namespace dfx
