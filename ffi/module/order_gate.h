// The custom call that carries a plan's order into an XLA GPU program.
#pragma once

namespace dfx::ffi {

void* OrderGateHandler();

}  // namespace dfx::ffi
