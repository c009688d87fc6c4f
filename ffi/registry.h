// Programs known to this process, by plan hash. The custom call carries the hash; its instantiate
// stage looks the program up here and keeps it alive from then on.
#pragma once

#include <memory>
#include <string>

#include "dfx/program.h"

namespace dfx::ffi {

// Keeps only a weak reference: the owner is whoever holds the Python handle or an XLA executable
// whose custom call was instantiated with it.
void RegisterProgram(const std::string& hash, const std::shared_ptr<const Program>& program);

// nullptr if the hash is unknown or nobody owns the program any more.
std::shared_ptr<const Program> FindProgram(const std::string& hash);

}  // namespace dfx::ffi
