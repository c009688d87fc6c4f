#include "custom_calls/registry.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dfx::ffi {
namespace {

struct Entry {
  std::weak_ptr<const Program> program;
  bool limit_blas;
  std::shared_ptr<CudaEngine> cuda;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, std::vector<Entry>> programs;  // the latest last
};

// Leaked on purpose: executables may be destroyed after static destructors have run.
Registry& GetRegistry() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

void RegisterProgram(const std::string& hash, const Registered& registered) {
  // What is dropped may be the last owner of an engine, which waits for its device: not under the
  // mutex.
  std::vector<Entry> dropped;
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  // Entries of dead programs are dropped here, so that the map does not grow for ever.
  for (auto it = registry.programs.begin(); it != registry.programs.end();) {
    auto dead = std::stable_partition(it->second.begin(), it->second.end(),
                                      [](const Entry& e) { return !e.program.expired(); });
    std::move(dead, it->second.end(), std::back_inserter(dropped));
    it->second.erase(dead, it->second.end());
    it = it->second.empty() ? registry.programs.erase(it) : std::next(it);
  }
  std::vector<Entry>& same = registry.programs[hash];
  Entry made{registered.program, registered.limit_blas, registered.cuda};
  for (Entry& entry : same) {
    if (!entry.program.owner_before(made.program) && !made.program.owner_before(entry.program)) {
      std::swap(entry, made);
      dropped.push_back(std::move(made));
      return;
    }
  }
  same.push_back(std::move(made));
}

Registered FindProgram(const std::string& hash) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto it = registry.programs.find(hash);
  if (it == registry.programs.end()) return {};
  for (auto entry = it->second.rbegin(); entry != it->second.rend(); ++entry) {
    if (auto program = entry->program.lock()) {
      return {std::move(program), entry->limit_blas, entry->cuda};
    }
  }
  return {};
}

}  // namespace dfx::ffi
