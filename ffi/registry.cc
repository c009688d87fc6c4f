#include "registry.h"

#include <mutex>
#include <unordered_map>

namespace dfx::ffi {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, std::weak_ptr<const Program>> programs;
};

// Leaked on purpose: executables may be destroyed after static destructors have run.
Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

void RegisterProgram(const std::string& hash, const std::shared_ptr<const Program>& program) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  // Entries of dead programs are dropped here, so that the map does not grow for ever.
  std::erase_if(registry.programs, [](const auto& entry) { return entry.second.expired(); });
  registry.programs[hash] = program;
}

std::shared_ptr<const Program> FindProgram(const std::string& hash) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.programs.find(hash);
  return it == registry.programs.end() ? nullptr : it->second.lock();
}

}  // namespace dfx::ffi
