// Devices, contexts, and what is asked of a driver as a whole. The device is an H100 by its
// numbers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "exports.h"

using dfx::fake::S;
namespace fake = dfx::fake;

namespace dfx::fake {

int Setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

namespace {
std::vector<std::string>& MissingNames() {
  static auto* names = new std::vector<std::string>;
  return *names;
}
std::mutex& MissingMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
}  // namespace

CudaStatus Missing(const std::string& name) {
  std::lock_guard<std::mutex> lock(MissingMutex());
  std::vector<std::string>& names = MissingNames();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    names.push_back(name);
    std::fprintf(stderr, "the stand-in driver has no %s\n", name.c_str());
  }
  return kNotSupported;
}

}  // namespace dfx::fake

DFX_EXPORT int fake_missing(const char* name) { return fake::Missing(name); }

DFX_EXPORT void fake_forget_missing() {
  std::lock_guard<std::mutex> lock(fake::MissingMutex());
  fake::MissingNames().clear();
}

// The names of the functions that were called and are missing, one a line.
DFX_EXPORT const char* fake_missing_names() {
  std::lock_guard<std::mutex> lock(fake::MissingMutex());
  static thread_local std::string text;
  text.clear();
  for (const std::string& name : fake::MissingNames()) text += name + "\n";
  return text.c_str();
}

DFX_EXPORT CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  BEGIN("cuDeviceGetName", fake::kNothing);
  std::snprintf(name, static_cast<size_t>(size), "stand-in for an NVIDIA H100 (no GPU)");
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  BEGIN("cuDeviceGetUuid", fake::kNothing);
  std::memset(uuid, 0x5a, sizeof *uuid);
  uuid->bytes[15] = static_cast<char>(device);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
  BEGIN("cuDeviceTotalMem", fake::kNothing);
  *bytes = size_t{80} << 30;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuDeviceGetPCIBusId(char* id, int size, CUdevice device) {
  BEGIN("cuDeviceGetPCIBusId", fake::kNothing);
  std::snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", 4 + device);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuDeviceCanAccessPeer(int* can, CUdevice a, CUdevice b) {
  BEGIN("cuDeviceCanAccessPeer", fake::kNothing);
  *can = a != b;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute, CUdevice, CUdevice) {
  BEGIN("cuDeviceGetP2PAttribute", fake::kNothing);
  *value = 0;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                         CUdevice device) {
  BEGIN("cuDeviceGetAttribute", fake::kNothing);
  if (device < 0 || device >= S().devices) return CUDA_ERROR_INVALID_DEVICE;
  static const std::map<int, int> values = {
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
      {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 52428800},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
      {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
  };
  const auto found = values.find(attribute);
  *value = found != values.end() ? found->second : 0;
  if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) *value = 4 + device;
  return CUDA_SUCCESS;
}

// ---- contexts: a device has its primary one, and no other can be made. To change the current one
// touches no device: that works after a device is lost, too. ----

DFX_EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice, unsigned) {
  BEGIN("cuDevicePrimaryCtxSetFlags", fake::kNothing);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  BEGIN("cuDevicePrimaryCtxGetState", fake::kNothing);
  if (device < 0 || device >= S().devices) return CUDA_ERROR_INVALID_DEVICE;
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = S().contexts[device].retained > 0;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  LOCK;
  ++S().calls["cuCtxGetCurrent"];
  *context = fake::CurrentContext();
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  LOCK;
  ++S().calls["cuCtxSetCurrent"];
  if (context != nullptr && context->retained <= 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (!fake::contexts.empty()) fake::contexts.pop_back();
  if (context != nullptr) fake::contexts.push_back(context);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  BEGIN("cuCtxGetDevice");
  *device = fake::CurrentDevice();
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext, unsigned) {
  BEGIN("cuCtxEnablePeerAccess");
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuCtxSynchronize() {
  std::vector<std::pair<std::shared_ptr<fake::Ticket>, fake::Order>> waits;
  {
    BEGIN("cuCtxSynchronize");
    if (dfx::CudaStatus status = fake::NotWhileCapturing(); status != 0) RETURN(status);
    ++S().blocking;
    for (CUstream_st* stream : S().streams) {
      if (stream->device != fake::CurrentDevice() || stream->capture != nullptr) continue;
      auto ticket = std::make_shared<fake::Ticket>();
      waits.emplace_back(ticket, stream->order);
      stream->Push([ticket] { ticket->Set(); });
    }
  }
  for (const auto& [ticket, order] : waits) ticket->Wait();
  LOCK;
  for (const auto& [ticket, order] : waits) fake::HostKnows(order);
  RETURN(S().sticky.load());
}

DFX_EXPORT CUresult cuProfilerStart() { return CUDA_SUCCESS; }
DFX_EXPORT CUresult cuProfilerStop() { return CUDA_SUCCESS; }

// ---- for tests ----

DFX_EXPORT void fake_lose_device(int status) { fake::LoseDevice(status); }
DFX_EXPORT void fake_delay(int us) { fake::SetMaxDelayUs(us); }
DFX_EXPORT void fake_ignore_waits(int on) { fake::IgnoreWaits(on != 0); }
DFX_EXPORT void fake_values(fake::KernelValues function) { fake::SetKernelValues(function); }
DFX_EXPORT void fake_begin_trace() { fake::BeginTrace(); }
DFX_EXPORT const char* fake_end_trace() {
  static thread_local std::string text;
  text = fake::EndTrace();
  return text.c_str();
}
DFX_EXPORT const char* fake_misuse() {
  LOCK;
  static thread_local std::string text;
  text = S().misuse;
  S().misuse.clear();
  return text.c_str();
}
// Functions that were called on threads without a context, and need one, one a line.
DFX_EXPORT const char* fake_without_context() {
  LOCK;
  static thread_local std::string text;
  text.clear();
  for (const auto& [name, count] : S().without_context) text += name + "\n";
  S().without_context.clear();
  return text.c_str();
}
DFX_EXPORT void fake_mark(const char* text) {
  LOCK;
  fake::TraceText("{\"mark\":\"" + std::string(text) + "\"}");
}
