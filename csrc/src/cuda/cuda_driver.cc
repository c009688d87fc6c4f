#include "cuda/cuda_driver.h"

#include "dfx/cuda/copy.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>

namespace dfx {
namespace {

constexpr int kMinDriver = 11040;  // stream-ordered memory and capture information

std::unique_ptr<CudaDriver> Load() {
  const char* named = std::getenv("DYNAFLOW_XLA_LIBCUDA");
  void* library = dlopen(named != nullptr ? named : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw Error(std::string("there is no CUDA driver on this machine (") +
                (why != nullptr ? why : "libcuda.so.1 not found") + ")");
  }
  auto driver = std::make_unique<CudaDriver>();
#define DFX_LOAD(member, symbol, parameters)                                            \
  driver->member = reinterpret_cast<CudaStatus(*) parameters>(dlsym(library, #symbol)); \
  if (driver->member == nullptr) {                                                      \
    throw Error("the CUDA driver has no " #symbol                                       \
                ": it is older than the "                                               \
                "11.4 that dynaflow_xla needs; update it");                             \
  }
  DFX_CUDA_FUNCTIONS(DFX_LOAD)
#undef DFX_LOAD
#define DFX_LOAD(member, symbol, parameters) \
  driver->member = reinterpret_cast<CudaStatus(*) parameters>(dlsym(library, #symbol));
  DFX_CUDA_GREEN_FUNCTIONS(DFX_LOAD)
#undef DFX_LOAD
  CheckCuda(*driver, driver->Init(0), "cuInit");
  int version = 0;
  CheckCuda(*driver, driver->DriverGetVersion(&version), "cuDriverGetVersion");
  if (version < kMinDriver) {
    throw Error("the CUDA driver speaks version " + std::to_string(version) +
                "; dynaflow_xla needs " + std::to_string(kMinDriver) + ": update it");
  }
  return driver;
}

}  // namespace

const CudaDriver& LoadCudaDriver() {
  static std::mutex mutex;
  static const CudaDriver* loaded = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) loaded = Load().release();
  return *loaded;
}

bool CudaError::context_lost() const {
  switch (status_) {
    case 46:   // DEVICE_UNAVAILABLE
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
    case 999:  // UNKNOWN
    case kCudaDeinitialized:
      return true;
    default:
      return false;
  }
}

void CheckCuda(const CudaDriver& driver, CudaStatus status, const char* call) {
  if (status == kCudaSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.GetErrorName(status, &name) != kCudaSuccess || name == nullptr) name = "unknown";
  if (driver.GetErrorString(status, &text) != kCudaSuccess || text == nullptr) text = "no text";
  throw CudaError(status, std::string(call) + " failed: " + name + " (" + std::to_string(status) +
                              "): " + text);
}

CudaContextScope::CudaContextScope(const CudaDriver& driver, CUctx_st* context) : driver_(driver) {
  CheckCuda(driver, driver.CtxPushCurrent(context), "cuCtxPushCurrent");
}

CudaContextScope::~CudaContextScope() {
  CUctx_st* popped = nullptr;
  driver_.CtxPopCurrent(&popped);  // can only fail if somebody emptied the stack meanwhile
}

void EnqueueCopy(const CudaDriver& driver, void* to, const void* from, size_t bytes,
                 CUstream_st* stream) {
  CheckCuda(driver,
            driver.MemcpyDtoDAsync(reinterpret_cast<CudaAddress>(to),
                                   reinterpret_cast<CudaAddress>(from), bytes, stream),
            "cuMemcpyDtoDAsync");
}

void CopyOnStream(void* to, const void* from, size_t bytes, CUstream_st* stream) {
  EnqueueCopy(LoadCudaDriver(), to, from, bytes, stream);
}

}  // namespace dfx
