// libcudnn.so.9: a handle and a version, which is all that XLA asks of it at its start.
#include <cstddef>

#define DFX_EXPORT extern "C" __attribute__((visibility("default")))

DFX_EXPORT int cudnnCreate(void** handle) {
  *handle = new char;
  return 0;
}
DFX_EXPORT int cudnnDestroy(void* handle) {
  delete static_cast<char*>(handle);
  return 0;
}
DFX_EXPORT int cudnnSetStream(void*, void*) { return 0; }
DFX_EXPORT size_t cudnnGetVersion() { return 92000; }
DFX_EXPORT size_t cudnnGetCudartVersion() { return 13000; }
DFX_EXPORT int cudnnGetProperty(int type, int* value) {
  *value = type == 0 ? 9 : type == 1 ? 20 : 0;
  return 0;
}
DFX_EXPORT const char* cudnnGetErrorString(int) { return "not in the stand-in"; }
DFX_EXPORT void cudnnGetLastErrorString(char* text, size_t size) {
  if (size != 0) *text = 0;
}
