// Memory: the device's is the host's, mapped where the driver says. Every operation checks, when it
// runs, that what it touches of the device is still there: a fault, not a crash.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "exports.h"

namespace fake = dfx::fake;
using dfx::CudaAddress;
using fake::S;

namespace dfx::fake {
namespace {

struct Physical {
  int file = -1;
  size_t bytes = 0;
  int references = 0;
  CUmemAllocationProp properties;
};

struct Books {
  std::map<CudaAddress, Block> blocks;
  std::map<CudaAddress, CUmemGenericAllocationHandle> mapped;
  std::map<CUmemGenericAllocationHandle, Physical> physical;
  std::map<CudaAddress, size_t> reserved;
  size_t used[kMaxDevices] = {};
};

Books& B() {
  static Books* books = new Books;
  return *books;
}

size_t Total() {
  static const size_t total = static_cast<size_t>(Setting("FAKE_CUDA_MEMORY_MB", 81920)) << 20;
  return total;
}

void* Pointer(CudaAddress address) { return reinterpret_cast<void*>(address); }

CudaStatus Free(CudaAddress address) {
  auto found = B().blocks.find(address);
  if (found == B().blocks.end()) return kInvalidValue;
  if (found->second.kind != Memory::kHost) B().used[found->second.device] -= found->second.bytes;
  munmap(Pointer(address), std::max<size_t>(found->second.bytes, 1));
  B().blocks.erase(found);
  return 0;
}

// Whether an operation may touch this: all of a block, or memory that the driver never heard of
// where that may be the host's.
bool Sound(CudaAddress address, size_t bytes, bool may_be_host) {
  LOCK;
  CudaAddress begin = 0;
  const Block* block = Find(address, &begin);
  if (block != nullptr) return address + bytes <= begin + block->bytes;
  for (const auto* async : {&S().memory, &S().graph_memory}) {
    auto after = async->upper_bound(address);
    if (after == async->begin()) continue;
    --after;
    if (address < after->first + after->second) {
      return address + bytes <= after->first + after->second;
    }
  }
  for (const auto& [base, size] : B().reserved) {
    if (address >= base && address < base + size) return false;  // reserved, and nothing is there
  }
  return may_be_host;
}

}  // namespace

const Block* Find(CudaAddress address, CudaAddress* begin) {
  auto found = B().blocks.upper_bound(address);
  if (found == B().blocks.begin()) return nullptr;
  --found;
  if (address >= found->first + std::max<size_t>(found->second.bytes, 1)) return nullptr;
  if (begin != nullptr) *begin = found->first;
  return &found->second;
}

CudaStatus Allocate(CudaAddress* address, size_t bytes, Memory kind, int device) {
  if (bytes == 0) return kInvalidValue;
  if (kind != Memory::kHost && B().used[device] + bytes > Total()) return kOutOfMemory;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<CudaAddress>(memory);
  B().blocks[*address] = {bytes, kind, device};
  if (kind != Memory::kHost) B().used[device] += bytes;
  return 0;
}

Work CheckedCopy(CudaAddress to, CudaAddress from, size_t bytes) {
  Work work = CopyWork(to, from, bytes);
  work.run = [run = work.run, to, from, bytes] {
    return Sound(to, bytes, true) && Sound(from, bytes, true) && run();
  };
  return work;
}

Work CheckedSet(CudaAddress to, unsigned value, size_t width, size_t count) {
  Work work;
  work.kind = Kind::kSet;
  work.accesses = {{to, width * count, true}};
  work.run = [=] {
    if (!Sound(to, width * count, false)) return false;
    char* bytes = static_cast<char*>(Pointer(to));
    for (size_t i = 0; i < count; ++i) std::memcpy(bytes + i * width, &value, width);
    return true;
  };
  return work;
}

}  // namespace dfx::fake

// Whether this is memory of a device: what computes kernels asks.
DFX_EXPORT int fake_device_memory(CudaAddress address, size_t bytes) {
  return fake::Sound(address, bytes, false) ? 1 : 0;
}

DFX_EXPORT CUresult cuMemGetInfo(size_t* free, size_t* total) {
  BEGIN("cuMemGetInfo");
  *total = fake::Total();
  *free = fake::Total() - fake::B().used[fake::CurrentDevice()];
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  BEGIN("cuMemAlloc");
  if (dfx::CudaStatus status = fake::NotWhileCapturing(); status != 0) RETURN(status);
  RETURN(fake::Allocate(address, bytes, fake::Memory::kDevice, fake::CurrentDevice()));
}

DFX_EXPORT CUresult cuMemAllocManaged(CUdeviceptr* address, size_t bytes, unsigned) {
  BEGIN("cuMemAllocManaged");
  RETURN(fake::Allocate(address, bytes, fake::Memory::kManaged, fake::CurrentDevice()));
}

DFX_EXPORT CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  BEGIN("cuMemHostAlloc");
  CudaAddress address = 0;
  const auto status = fake::Allocate(&address, bytes, fake::Memory::kHost, fake::CurrentDevice());
  *memory = fake::Pointer(address);
  RETURN(status);
}

DFX_EXPORT CUresult cuMemFree(CUdeviceptr address) {
  if (address == 0) return CUDA_SUCCESS;
  if (CUresult status = cuCtxSynchronize(); status != CUDA_SUCCESS) return status;
  BEGIN("cuMemFree");
  RETURN(fake::Free(address));
}

DFX_EXPORT CUresult cuMemFreeHost(void* memory) {
  BEGIN("cuMemFreeHost");
  RETURN(fake::Free(reinterpret_cast<CudaAddress>(memory)));
}

DFX_EXPORT CUresult cuMemHostRegister(void* memory, size_t bytes, unsigned) {
  BEGIN("cuMemHostRegister");
  fake::B().blocks[reinterpret_cast<CudaAddress>(memory)] = {bytes, fake::Memory::kHost, 0};
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemHostUnregister(void* memory) {
  BEGIN("cuMemHostUnregister");
  const bool there = fake::B().blocks.erase(reinterpret_cast<CudaAddress>(memory)) != 0;
  return there ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

DFX_EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory, unsigned) {
  BEGIN("cuMemHostGetDevicePointer");
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  BEGIN("cuMemGetAddressRange");
  CudaAddress begin = 0;
  const fake::Block* block = fake::Find(address, &begin);
  if (block == nullptr) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = begin;
  if (bytes != nullptr) *bytes = block->bytes;
  return CUDA_SUCCESS;
}

static CUresult Attribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  CudaAddress begin = 0;
  const fake::Block* block = fake::Find(address, &begin);
  if (block == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const bool host = block->kind == fake::Memory::kHost;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(value) = &S().contexts[block->device];
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *static_cast<CUdeviceptr*>(value) = address;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = block->device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(value) = begin;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<size_t*>(value) = block->bytes;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<unsigned*>(value) = block->kind == fake::Memory::kManaged;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      *static_cast<unsigned long long*>(value) = CU_MEM_HANDLE_TYPE_NONE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long*>(value) = begin;
      return CUDA_SUCCESS;
    default:
      RETURN(fake::Missing("cuPointerGetAttribute of " + std::to_string(attribute)));
  }
}

DFX_EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute,
                                          CUdeviceptr address) {
  BEGIN("cuPointerGetAttribute", fake::kNothing);
  return Attribute(value, attribute, address);
}

DFX_EXPORT CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute* attributes,
                                           void** values, CUdeviceptr address) {
  BEGIN("cuPointerGetAttributes", fake::kNothing);
  for (unsigned i = 0; i < n; ++i) Attribute(values[i], attributes[i], address);
  return CUDA_SUCCESS;
}

// ---- virtual memory: a handle is an anonymous file ----

DFX_EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                                  CUmemAllocationGranularity_flags) {
  BEGIN("cuMemGetAllocationGranularity", fake::kNothing);
  *bytes = size_t{2} << 20;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t align,
                                        CUdeviceptr, unsigned long long) {
  BEGIN("cuMemAddressReserve");
  align = std::max<size_t>(align, 4096);
  void* memory =
      mmap(nullptr, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = (reinterpret_cast<CUdeviceptr>(memory) + align - 1) / align * align;
  fake::B().reserved[*address] = bytes;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  BEGIN("cuMemAddressFree");
  auto found = fake::B().reserved.find(address);
  if (found == fake::B().reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  munmap(fake::Pointer(address), bytes);
  fake::B().reserved.erase(found);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                                const CUmemAllocationProp* properties, unsigned long long) {
  BEGIN("cuMemCreate");
  const int device = properties->location.id;
  if (device < 0 || device >= S().devices) return CUDA_ERROR_INVALID_DEVICE;
  if (fake::B().used[device] + bytes > fake::Total()) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = memfd_create("device memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = ++S().ids;
  fake::B().physical[*handle] = {file, bytes, 1, *properties};
  fake::B().used[device] += bytes;
  return CUDA_SUCCESS;
}

static CUresult Release(CUmemGenericAllocationHandle handle) {
  auto found = fake::B().physical.find(handle);
  if (found == fake::B().physical.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.references > 0) return CUDA_SUCCESS;
  close(found->second.file);
  fake::B().used[found->second.properties.location.id] -= found->second.bytes;
  fake::B().physical.erase(found);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  BEGIN("cuMemRelease", fake::kNothing);
  return Release(handle);
}

DFX_EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                             CUmemGenericAllocationHandle handle, unsigned long long) {
  BEGIN("cuMemMap");
  auto found = fake::B().physical.find(handle);
  if (found == fake::B().physical.end()) return CUDA_ERROR_INVALID_VALUE;
  void* memory = mmap(fake::Pointer(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                      found->second.file, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  ++found->second.references;
  fake::B().mapped[address] = handle;
  fake::B().blocks[address] = {bytes, fake::Memory::kDevice, found->second.properties.location.id};
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  BEGIN("cuMemUnmap", fake::kNothing);
  auto found = fake::B().mapped.find(address);
  if (found == fake::B().mapped.end()) return CUDA_ERROR_INVALID_VALUE;
  mmap(fake::Pointer(address), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  const CUmemGenericAllocationHandle handle = found->second;
  fake::B().mapped.erase(found);
  fake::B().blocks.erase(address);
  return Release(handle);
}

DFX_EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t, const CUmemAccessDesc*, size_t) {
  BEGIN("cuMemSetAccess");
  return fake::B().mapped.count(address) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

DFX_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle,
                                                void* memory) {
  BEGIN("cuMemRetainAllocationHandle");
  auto found = fake::B().mapped.upper_bound(reinterpret_cast<CudaAddress>(memory));
  if (found == fake::B().mapped.begin()) return CUDA_ERROR_INVALID_VALUE;
  *handle = (--found)->second;
  ++fake::B().physical[*handle].references;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                           CUmemGenericAllocationHandle handle) {
  BEGIN("cuMemGetAllocationPropertiesFromHandle", fake::kNothing);
  auto found = fake::B().physical.find(handle);
  if (found == fake::B().physical.end()) return CUDA_ERROR_INVALID_VALUE;
  *properties = found->second.properties;
  return CUDA_SUCCESS;
}
