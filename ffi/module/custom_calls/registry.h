// Programs known to this process, by plan hash. The custom call carries the hash; its instantiate
// stage looks the program up here and keeps it alive from then on.
#pragma once

#include <memory>
#include <string>

#include "dfx/program.h"

namespace dfx {
class CudaEngine;
}

namespace dfx::ffi {

// Programs of one hash do the same, so any of them may serve; a living one is never lost to another
// that goes. Keeps only a weak reference: the owner is whoever holds the Python handle or an XLA
// executable whose custom call was instantiated with it.
struct Registered {
  std::shared_ptr<const Program> program;
  bool limit_blas = false;           // it calls LAPACK, which is to have one thread
  std::shared_ptr<CudaEngine> cuda;  // the device lanes it runs on; none: host lanes
};
void RegisterProgram(const std::string& hash, const Registered& registered);

// Its program is nullptr if the hash is unknown or nobody owns the program any more.
Registered FindProgram(const std::string& hash);

}  // namespace dfx::ffi
