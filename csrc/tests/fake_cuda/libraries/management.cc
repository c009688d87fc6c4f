// libnvidia-ml.so.1: a driver's version and devices; of what a device does, "not supported".
#include <cstdio>

#define DFX_EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kNotSupported = 3;  // NVML_ERROR_NOT_SUPPORTED
void* const kDevice = reinterpret_cast<void*>(8);
}  // namespace

DFX_EXPORT int nvmlInit_v2() { return 0; }
DFX_EXPORT int nvmlInit() { return 0; }
DFX_EXPORT int nvmlInitWithFlags(unsigned) { return 0; }
DFX_EXPORT int nvmlShutdown() { return 0; }
DFX_EXPORT const char* nvmlErrorString(int) { return "not supported by a stand-in"; }
DFX_EXPORT int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "580.95.05");
  return 0;
}
DFX_EXPORT int nvmlSystemGetCudaDriverVersion(int* version) {
  *version = 13000;
  return 0;
}
DFX_EXPORT int nvmlDeviceGetCount_v2(unsigned* n) {
  *n = 1;
  return 0;
}
DFX_EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = kDevice;
  return 0;
}
DFX_EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) {
  *device = kDevice;
  return 0;
}
DFX_EXPORT int nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return kNotSupported; }
DFX_EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return kNotSupported; }
DFX_EXPORT int nvmlSystemGetConfComputeState(void*) { return kNotSupported; }
DFX_EXPORT int nvmlDeviceGetNvLinkState(void*, unsigned, unsigned*) { return kNotSupported; }
DFX_EXPORT int nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned*) { return kNotSupported; }
DFX_EXPORT int nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned*) { return kNotSupported; }
DFX_EXPORT int nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned*) { return kNotSupported; }
DFX_EXPORT int nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned*) { return kNotSupported; }
DFX_EXPORT int nvmlDeviceGetFieldValues(void*, int, void*) { return kNotSupported; }
