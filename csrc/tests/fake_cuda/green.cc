// Green contexts: parts of a device's multiprocessors, in groups of 8.
#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "state.h"

namespace dfx::fake {
namespace {

constexpr unsigned kSms = 132, kGroup = 8;
constexpr int kSmResource = 1;

// Where a resource comes from, in the bytes that cuda.h calls internal.
struct Origin {
  unsigned split;  // its number, counted from 1; 0: no split, the whole device
  unsigned group;  // of that split; the remainder is the one after the last
};

Origin OriginOf(const CudaResource& resource) {
  Origin origin{};
  std::memcpy(&origin, resource.padding, sizeof(origin));
  return origin;
}

CudaResource Part(unsigned sms, Origin origin) {
  CudaResource resource{};
  resource.type = kSmResource;
  resource.sm_count = sms;
  std::memcpy(resource.padding, &origin, sizeof(origin));
  return resource;
}

CudaStatus DeviceGetDevResource(CudaDevice, CudaResource* resource, int type) {
  ENTER("cuDeviceGetDevResource", kNothing);
  if (type != kSmResource) return kInvalidResourceType;
  *resource = Part(kSms, {0, 0});
  return 0;
}

CudaStatus Split(CudaResource* result, unsigned* groups, const CudaResource* input,
                 CudaResource* remaining, unsigned, unsigned min_count) {
  ENTER("cuDevSmResourceSplitByCount", kNothing);
  if (input->type != kSmResource) return kInvalidResourceType;
  if (min_count > input->sm_count) return kInvalidResource;
  // What a split gave cannot be split again: not a group, and not what remained.
  if (OriginOf(*input).split != 0) return kInvalidResource;
  const unsigned size = std::max(1u, (min_count + kGroup - 1) / kGroup) * kGroup;
  const unsigned all = input->sm_count;  // `remaining` may be the same as `input`
  if (result == nullptr) {               // asks how many there would be
    *groups = all / size;
    return 0;
  }
  *groups = std::min(*groups, all / size);
  const unsigned split = ++S().splits;
  for (unsigned i = 0; i < *groups; ++i) result[i] = Part(size, {split, i});
  if (remaining != nullptr) *remaining = Part(all - *groups * size, {split, *groups});
  return 0;
}

CudaStatus GenerateDesc(CUdevResourceDesc_st** descriptor, CudaResource* resources, unsigned n) {
  ENTER("cuDevResourceGenerateDesc", kNothing);
  if (n == 0) return kInvalidValue;
  unsigned sms = 0;
  std::set<std::pair<unsigned, unsigned>> seen;
  for (unsigned i = 0; i < n; ++i) {
    if (resources[i].type != kSmResource) return kInvalidResourceType;
    const Origin origin = OriginOf(resources[i]);
    // Several must be outputs of one split.
    if (n > 1 && (origin.split == 0 || origin.split != OriginOf(resources[0]).split)) {
      return kInvalidResource;
    }
    if (resources[i].sm_count == 0) return kInvalidResource;
    if (!seen.emplace(origin.split, origin.group).second) return kInvalidResource;
    sms += resources[i].sm_count;
  }
  *descriptor = new CUdevResourceDesc_st{sms};
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
