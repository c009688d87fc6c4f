// Copies and fills, as operations of streams.
#include "exports.h"

namespace fake = dfx::fake;
using dfx::CudaAddress;
using fake::S;

namespace {

CudaAddress Address(const void* pointer) { return reinterpret_cast<CudaAddress>(pointer); }

// Memory that the driver did not make is pageable: it is copied away before the call returns.
fake::Work FromHost(CudaAddress to, const void* from, size_t bytes) {
  if (fake::Find(Address(from)) != nullptr) return fake::CheckedCopy(to, Address(from), bytes);
  const char* text = static_cast<const char*>(from);
  auto staged = std::make_shared<std::vector<char>>(text, text + bytes);
  fake::Work work = fake::CheckedCopy(to, Address(staged->data()), bytes);
  work.accesses = {{to, bytes, true}};
  work.run = [run = work.run, staged] { return run(); };
  return work;
}

CUresult Then(CUstream stream) { return cuStreamSynchronize(stream); }

}  // namespace

DFX_EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes,
                                      CUstream stream) {
  BEGIN("cuMemcpyHtoDAsync");
  CUstream_st* on = fake::Of(stream);
  RETURN(fake::Enqueue(on, on->capture != nullptr ? fake::CheckedCopy(to, Address(from), bytes)
                                                  : FromHost(to, from, bytes)));
}

DFX_EXPORT CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  bool pageable = false;
  {
    BEGIN("cuMemcpyDtoHAsync");
    CUstream_st* on = fake::Of(stream);
    pageable = fake::Find(Address(to)) == nullptr && on->capture == nullptr;
    const auto status = fake::Enqueue(on, fake::CheckedCopy(Address(to), from, bytes));
    if (status != 0) RETURN(status);
  }
  return pageable ? Then(stream) : CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  BEGIN("cuMemcpyAsync");
  RETURN(fake::Enqueue(fake::Of(stream), fake::CheckedCopy(to, from, bytes)));
}

DFX_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext,
                                      size_t bytes, CUstream stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}

DFX_EXPORT CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  bool pageable = false;
  {
    LOCK;
    pageable = fake::Find(Address(from)) == nullptr;
  }
  const CUresult status = cuMemcpyHtoDAsync(to, from, bytes, nullptr);
  // Of pageable memory the call returns when it was read, before the device's was written.
  return status != CUDA_SUCCESS || pageable ? status : Then(nullptr);
}

DFX_EXPORT CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  const CUresult status = cuMemcpyDtoHAsync(to, from, bytes, nullptr);
  return status != CUDA_SUCCESS ? status : Then(nullptr);
}

DFX_EXPORT CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return cuMemcpyAsync(to, from, bytes, nullptr);  // the host does not wait
}

static CUresult Set(CUdeviceptr to, unsigned value, size_t width, size_t n, CUstream stream) {
  BEGIN("cuMemsetAsync");
  RETURN(fake::Enqueue(fake::Of(stream), fake::CheckedSet(to, value, width, n)));
}

DFX_EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream s) {
  return Set(to, value, 1, n, s);
}
DFX_EXPORT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, CUstream s) {
  return Set(to, value, 2, n, s);
}
DFX_EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, CUstream s) {
  return Set(to, value, 4, n, s);
}
DFX_EXPORT CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t n) {
  return Set(to, value, 1, n, nullptr);  // as the next: the host does not wait
}
DFX_EXPORT CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t n) {
  return Set(to, value, 4, n, nullptr);
}
