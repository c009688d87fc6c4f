// Functions by their names: the newest form of each, as a driver gives to a program of CUDA 13.0.
#include <dlfcn.h>

#include <string>

#include "exports.h"

namespace {

void* Symbol(const std::string& name) {
  static void* const self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&fake_missing), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return dlsym(self, name.c_str());
}

}  // namespace

DFX_EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int, cuuint64_t,
                                        CUdriverProcAddressQueryResult* result) {
  *function = nullptr;
  for (int version = 5; version >= 2 && *function == nullptr; --version) {
    *function = Symbol(std::string(symbol) + "_v" + std::to_string(version));
  }
  if (*function == nullptr) *function = Symbol(symbol);
  if (*function == nullptr) dfx::fake::Missing(symbol);
  if (result != nullptr) {
    *result =
        *function != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress
DFX_EXPORT CUresult cuGetProcAddress(const char* symbol, void** function, int version,
                                     cuuint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}

// The tables behind this function are not documented; there are none here.
DFX_EXPORT CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}
