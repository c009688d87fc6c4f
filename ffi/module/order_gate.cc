// dfx_order: an order edge inside an XLA GPU program.
//
//   ys = dfx_order(xs..., deps...)   each y is its x, in place; whoever reads a y runs after all
//   deps
//
// XLA builds a CUDA graph from what each operation reads and writes. This operation declares that
// it writes the xs and reads the deps, and does nothing: the edges are its whole effect. It is
// marked as compatible with command buffers, since one operation without that mark would split the
// graph; XLA puts an empty node where a captured call records no work. Nothing of CUDA is needed to
// build it.
#include "order_gate.h"

#include "xla/ffi/api/ffi.h"

namespace dfx::ffi {
namespace {

namespace xf = ::xla::ffi;

xf::Error OrderGate(xf::RemainingArgs /*xs and deps*/, xf::RemainingRets /*ys*/) {
  return xf::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kOrderGate, OrderGate, xf::Ffi::Bind().RemainingArgs().RemainingRets(),
                       {xf::Traits::kCmdBufferCompatible});

}  // namespace

void* OrderGateHandler() { return reinterpret_cast<void*>(kOrderGate); }

}  // namespace dfx::ffi
