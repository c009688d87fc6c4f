// Green contexts: parts of a device's multiprocessors, in groups of 8.
#include <algorithm>

#include "state.h"

namespace dfx::fake {
namespace {

constexpr unsigned kSms = 132, kGroup = 8;
constexpr int kSmResource = 1;

CudaStatus DeviceGetDevResource(CudaDevice, CudaResource* resource, int type) {
  ENTER("cuDeviceGetDevResource", kNothing);
  if (type != kSmResource) return kInvalidResource;
  *resource = CudaResource{};
  resource->type = type;
  resource->sm_count = kSms;
  return 0;
}

CudaStatus Split(CudaResource* result, unsigned* groups, const CudaResource* input,
                 CudaResource* remaining, unsigned, unsigned min_count) {
  ENTER("cuDevSmResourceSplitByCount", kNothing);
  if (input->type != kSmResource || min_count > input->sm_count) return kInvalidResource;
  const unsigned size = std::max(1u, (min_count + kGroup - 1) / kGroup) * kGroup;
  *groups = std::min(*groups, input->sm_count / size);
  const CudaResource given = *input;  // `remaining` may be the same
  for (unsigned i = 0; i < *groups; ++i) {
    result[i] = given;
    result[i].sm_count = size;
  }
  if (remaining != nullptr) {
    *remaining = given;
    remaining->sm_count = given.sm_count - *groups * size;
  }
  return 0;
}

CudaStatus GenerateDesc(CUdevResourceDesc_st** descriptor, CudaResource* resources, unsigned n) {
  ENTER("cuDevResourceGenerateDesc", kNothing);
  if (n != 1 || resources->sm_count == 0) return kInvalidResource;
  *descriptor = new CUdevResourceDesc_st{resources->sm_count};
  S().descriptors.insert(*descriptor);  // the real driver never frees them, either
  return 0;
}

CudaStatus Create(CUgreenCtx_st** context, CUdevResourceDesc_st* descriptor, CudaDevice,
                  unsigned flags) {
  ENTER("cuGreenCtxCreate");
  if (flags != 1 || S().descriptors.count(descriptor) == 0) return kInvalidValue;
  *context = new CUgreenCtx_st{descriptor->sms};
  S().greens.insert(*context);
  return 0;
}

CudaStatus Destroy(CUgreenCtx_st* context) {
  LOCK;
  if (S().greens.erase(context) == 0) return Misuse("a green context destroyed twice");
  for (CUstream_st* stream : S().streams) {
    if (stream->green == context) return Misuse("a green context destroyed before its stream");
  }
  delete context;
  return S().sticky;
}

CudaStatus CreateStream(CUstream_st** stream, CUgreenCtx_st* context, unsigned flags,
                        int priority) {
  ENTER("cuGreenCtxStreamCreate");
  if (S().greens.count(context) == 0) return Misuse("a stream of a green context that is gone");
  if (flags != kStreamNonBlocking || priority > 0 || priority < -5) return kInvalidValue;
  *stream = NewStream(CurrentDevice(), flags, priority);
  (*stream)->green = context;
  return 0;
}

}  // namespace

void AddGreenContexts(CudaDriver& driver) {
  driver.DeviceGetDevResource = DeviceGetDevResource;
  driver.DevSmResourceSplitByCount = Split;
  driver.DevResourceGenerateDesc = GenerateDesc;
  driver.GreenCtxCreate = Create;
  driver.GreenCtxDestroy = Destroy;
  driver.GreenCtxStreamCreate = CreateStream;
}

unsigned SmsOf(CUstream_st* stream) {
  LOCK;
  return stream->green == nullptr ? kSms : stream->green->sms;
}

}  // namespace dfx::fake
