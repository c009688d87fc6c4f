#include "registry.h"

#include <mutex>
#include <unordered_map>

namespace dfx::ffi {
namespace {

struct Entry {
  std::weak_ptr<const Program> program;
  bool limit_blas;
  std::shared_ptr<CudaEngine> cuda;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, Entry> programs;
};

// Leaked on purpose: executables may be destroyed after static destructors have run.
Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

void RegisterProgram(const std::string& hash, const Registered& registered) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  // Entries of dead programs are dropped here, so that the map does not grow for ever.
  std::erase_if(registry.programs,
                [](const auto& entry) { return entry.second.program.expired(); });
  registry.programs[hash] = Entry{registered.program, registered.limit_blas, registered.cuda};
}

Registered FindProgram(const std::string& hash) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.programs.find(hash);
  if (it == registry.programs.end()) return {};
  return {it->second.program.lock(), it->second.limit_blas, it->second.cuda};
}

}  // namespace dfx::ffi
