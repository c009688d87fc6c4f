#include "pjrt/pjrt_api.h"

#include <string>

#include "dfx/error.h"

namespace dfx::pjrt {

Api::Api(const void* table) : table_(static_cast<const Table*>(table)) {
  if (table == nullptr) throw Error("the plugin has no PJRT C API (its table is null)");
  // The size first: a table too small has no version to read.
  constexpr size_t kNeeded =
      offsetof(Table, functions) + (kClientCreateViewOfDeviceBuffer + 1) * sizeof(void*);
  if (table_->head.struct_size < kNeeded) {
    throw Error("the plugin's PJRT table has " + std::to_string(table_->head.struct_size) +
                " bytes, " + std::to_string(kNeeded) + " are needed: it is too old");
  }
  if (table_->major != kMajor || table_->minor < kMinMinor) {
    throw Error("the plugin speaks version " + std::to_string(table_->major) + "." +
                std::to_string(table_->minor) + " of the PJRT C API; version " +
                std::to_string(kMajor) + "." + std::to_string(kMinMinor) +
                " or a later minor is needed");
  }
}

void Api::Throw(PJRT_Error* error) const { throw Error(Take(error)); }

std::string Api::Take(PJRT_Error* error) const {
  auto args = Make<ErrorMessageArgs>();
  args.error = error;
  reinterpret_cast<void (*)(ErrorMessageArgs*)>(table_->functions[kErrorMessage])(&args);
  std::string message;
  try {
    message.assign(args.message, args.message_size);
  } catch (...) {
    Drop(error);
    throw;
  }
  Drop(error);
  return message;
}

void Api::Drop(PJRT_Error* error) const noexcept {
  if (error == nullptr) return;
  auto args = Make<ErrorDestroyArgs>();
  args.error = error;
  reinterpret_cast<void (*)(ErrorDestroyArgs*)>(table_->functions[kErrorDestroy])(&args);
}

void Api::Destroy(PJRT_Buffer* buffer) const noexcept {
  auto args = Make<BufferDestroyArgs>();
  args.buffer = buffer;
  Drop(reinterpret_cast<PJRT_Error* (*)(BufferDestroyArgs*)>(table_->functions[kBufferDestroy])(
      &args));
}

void Api::Destroy(PJRT_Event* event) const noexcept {
  auto args = Make<EventArgs>();
  args.event = event;
  Drop(reinterpret_cast<PJRT_Error* (*)(EventArgs*)>(table_->functions[kEventDestroy])(&args));
}

void Api::Destroy(PJRT_Executable* executable) const noexcept {
  auto args = Make<ExecutableDestroyArgs>();
  args.executable = executable;
  Drop(reinterpret_cast<PJRT_Error* (*)(ExecutableDestroyArgs*)>(
      table_->functions[kExecutableDestroy])(&args));
}

}  // namespace dfx::pjrt
