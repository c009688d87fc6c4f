// The part of the PJRT C API that the engine calls. XLA's header ships in no JAX wheel, so the
// structs are declared here, as of API 0.81; a test compares them with that header where it is
// installed. Later versions only append: plugins that speak up to 0.115 take these sizes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

struct PJRT_Buffer;
struct PJRT_Client;
struct PJRT_Device;
struct PJRT_Error;
struct PJRT_Event;
struct PJRT_Executable;
struct PJRT_LoadedExecutable;
struct PJRT_Memory;

namespace dfx::pjrt {

constexpr int kMajor = 0;
constexpr int kMinMinor = 81;

// Every struct begins with its own size and a chain of extensions, which is not used here.
struct Header {
  size_t struct_size;
  void* extension_start;
};

struct ErrorDestroyArgs : Header {
  PJRT_Error* error;
};
struct ErrorMessageArgs : Header {
  const PJRT_Error* error;
  const char* message;  // out
  size_t message_size;  // out
};
struct EventArgs : Header {
  PJRT_Event* event;
};
struct EventIsReadyArgs : Header {
  PJRT_Event* event;
  bool is_ready;  // out
};
struct EventOnReadyArgs : Header {
  PJRT_Event* event;
  void (*callback)(PJRT_Error* error, void* user);
  void* user;
};
struct BufferDestroyArgs : Header {
  PJRT_Buffer* buffer;
};
struct BufferPointerArgs : Header {
  PJRT_Buffer* buffer;
  void* pointer;  // out
};
struct BufferSizeArgs : Header {
  PJRT_Buffer* buffer;
  size_t bytes;  // out
};
struct AddressableDevicesArgs : Header {
  PJRT_Client* client;
  PJRT_Device* const* devices;  // out
  size_t n_devices;             // out
};
struct CreateViewArgs : Header {
  PJRT_Client* client;
  void* device_buffer_ptr;
  const int64_t* dims;
  size_t num_dims;
  int element_type;
  void* layout;
  PJRT_Device* device;
  void (*on_delete_callback)(void* device_buffer_ptr, void* user);
  void* on_delete_callback_arg;
  intptr_t stream;
  PJRT_Buffer* buffer;  // out
  PJRT_Memory* memory;
};
// Ways to import host memory (PJRT_HostBufferSemantics).
constexpr int kCopyDuringCall = 0;
constexpr int kMutableZeroCopy = 3;
struct FromHostBufferArgs : Header {
  PJRT_Client* client;
  const void* data;
  int type;
  const int64_t* dims;
  size_t num_dims;
  const int64_t* byte_strides;
  size_t num_byte_strides;
  int semantics;
  PJRT_Device* device;
  PJRT_Memory* memory;
  void* device_layout;
  PJRT_Event* done_with_host_buffer;  // out
  PJRT_Buffer* buffer;                // out
};
struct GetExecutableArgs : Header {
  PJRT_LoadedExecutable* loaded_executable;
  PJRT_Executable* executable;  // out
};
struct ExecutableDestroyArgs : Header {
  PJRT_Executable* executable;
};
struct NumOutputsArgs : Header {
  PJRT_Executable* executable;
  size_t num_outputs;  // out
};
struct ExecuteOptions : Header {
  void* send_callbacks;
  void* recv_callbacks;
  size_t num_send_ops;
  size_t num_recv_ops;
  int launch_id;
  const int64_t* non_donatable_input_indices;
  size_t num_non_donatable_input_indices;
  void* context;
  const char* call_location;
  size_t num_tasks;
  int* task_ids;
  int64_t* incarnation_ids;
};
struct ExecuteArgs : Header {
  PJRT_LoadedExecutable* executable;
  ExecuteOptions* options;
  PJRT_Buffer* const* const* argument_lists;
  size_t num_devices;
  size_t num_args;
  PJRT_Buffer** const* output_lists;    // out
  PJRT_Event** device_complete_events;  // out
  PJRT_Device* execute_device;
};

// What GetPjrtApi() returns: a head, then function pointers in a fixed order.
struct Table {
  Header head;
  Header version;
  int major;
  int minor;
  void* functions[1];
};

// Places in that order.
enum Function : int {
  kErrorDestroy = 0,
  kErrorMessage = 1,
  kEventDestroy = 5,
  kEventIsReady = 6,
  kEventAwait = 8,
  kEventOnReady = 9,
  kClientAddressableDevices = 16,
  kClientBufferFromHostBuffer = 22,
  kExecutableDestroy = 40,
  kExecutableNumOutputs = 44,
  kLoadedExecutableGetExecutable = 51,
  kLoadedExecutableExecute = 55,
  kBufferDestroy = 58,
  kBufferOnDeviceSize = 64,
  kBufferOpaquePointer = 76,
  kClientCreateViewOfDeviceBuffer = 93,
};

// A checked table.
class Api {
 public:
  // Throws Error if the plugin speaks another version of the API, or an older one.
  explicit Api(const void* table);

  // A struct ready to be filled in.
  template <typename Args>
  static Args Make() {
    Args args{};
    args.struct_size = sizeof(Args);
    return args;
  }
  // Calls a function; throws Error with what the plugin says.
  template <typename Args>
  void Call(Function function, Args& args) const {
    PJRT_Error* error =
        reinterpret_cast<PJRT_Error* (*)(Args*)>(table_->functions[function])(&args);
    if (error != nullptr) Throw(error);
  }

  // What an error says; it is gone then. Throws std::bad_alloc.
  std::string Take(PJRT_Error* error) const;

  // For objects that go, where an error helps nobody.
  void Destroy(PJRT_Buffer* buffer) const noexcept;
  void Destroy(PJRT_Event* event) const noexcept;
  void Destroy(PJRT_Executable* executable) const noexcept;

 private:
  [[noreturn]] void Throw(PJRT_Error* error) const;
  void Drop(PJRT_Error* error) const noexcept;
  const Table* table_;
};

// A buffer, event or executable that is destroyed at the end of its scope.
template <typename Object>
class Owned {
 public:
  Owned() = default;
  Owned(const Api& api, Object* object) : api_(&api), object_(object) {}
  Owned(Owned&& other) noexcept
      : api_(other.api_), object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() {
    if (object_ != nullptr) api_->Destroy(object_);
  }
  Object* get() const { return object_; }

 private:
  const Api* api_ = nullptr;
  Object* object_ = nullptr;
};

}  // namespace dfx::pjrt
