// What runs inside a program on behalf of a plan.
//
//   dfx_gate   inside a lane program: waits for events, copies tensors in from shared memory,
//   copies
//              tensors out to it, signals events; in that order. The gates of a lane are chained by
//              their first operand, so they run in lane order whatever XLA does around them. Shared
//              memory is touched by gates only, hence lane order plus events order every access.
//   dfx_fail   returns an error if its operand is non-zero: fault injection for tests.
//   dfx_order  ys = dfx_order(xs..., deps...): each y is its x, in place; whoever reads a y runs
//              after all deps. XLA builds a CUDA graph from what each operation reads and writes;
//              this one declares that it writes the xs and reads the deps, and does nothing: the
//              edges are its whole effect. It is marked as compatible with command buffers, since
//              one operation without that mark would split the graph; XLA puts an empty node where
//              a captured call records no work. Nothing of CUDA is needed to build it.
//              Where XLA gives a y memory of its own, the x is copied: a pass of jaxlib 0.11.2 and
//              0.12.0 puts a custom call whose operands are slices into a fusion
//              (DynamicSliceFusionRewriterV2), and forgets that the results are in place.
#include <algorithm>
#include <cstring>
#include <string>

#include "custom_calls/handlers.h"
#include "dfx/cuda/copy.h"
#include "dfx/engine.h"
#include "dfx/lane.h"

namespace dfx::ffi {
namespace {

// Notes what a lane did since the last note. One clock a lane is enough, because a lane runs one
// call at a time and its gates are chained.
void Note(Lane& lane, Call& call, int id) {
  if (!call.profile()) return;
  const int64_t now = NowNs();
  if (id >= 0) call.Trace(id, lane.index(), lane.since_ns, now);
  lane.since_ns = now;
}

xf::Error Gate(xf::RemainingArgs args, xf::RemainingRets rets, int64_t lane_index, int64_t deps,
               xf::Span<const int64_t> waits, xf::Span<const int64_t> ins,
               xf::Span<const int64_t> outs, xf::Span<const int64_t> records, int64_t stamp,
               int64_t done) {
  return Guarded(xf::ErrorCode::kInternal, "", [&] {
    Lane& lane = Engine::Get().lane(static_cast<int>(lane_index));
    Call* call = lane.current();
    if (call == nullptr) {
      return xf::Error(xf::ErrorCode::kInternal, "a lane program ran outside the engine");
    }
    const int region = static_cast<int>(stamp);
    Note(lane, *call, region);
    call->Pause(lane.index());
    for (int64_t event : waits) {
      if (!call->WaitEvent(static_cast<int>(event), lane.index())) {
        return xf::Error(xf::ErrorCode::kAborted, "another lane failed: " + call->error());
      }
      Note(lane, *call, kWaitTraceId + static_cast<int>(event));
    }
    int64_t copied = 0;
    // The chain value carries no data: its result is left as it is. Results follow it.
    for (size_t i = 0; i < ins.size(); ++i) {
      xf::Result<xf::AnyBuffer> dst = rets.get<xf::AnyBuffer>(i + 1).value();
      if (dst->size_bytes() == 0) continue;
      std::memcpy(dst->untyped_data(), call->BufferData(static_cast<int>(ins[i])),
                  dst->size_bytes());
      copied += static_cast<int64_t>(dst->size_bytes());
    }
    for (size_t i = 0; i < outs.size(); ++i) {
      xf::AnyBuffer src = args.get<xf::AnyBuffer>(1 + static_cast<size_t>(deps) + i).value();
      if (src.size_bytes() == 0) continue;
      std::memcpy(call->BufferData(static_cast<int>(outs[i])), src.untyped_data(),
                  src.size_bytes());
      copied += static_cast<int64_t>(src.size_bytes());
    }
    if (copied != 0) lane.AddCopied(copied);
    if (ins.size() + outs.size() > 0) Note(lane, *call, kCopyTraceId + std::max(region, 0));
    if (records.size() > 0) call->Pause(lane.index());
    for (int64_t event : records) call->RecordEvent(static_cast<int>(event));
    if (done != 0) call->LaneDone(lane.index());
    return xf::Error::Success();
  });
}

xf::Error Fail(xf::AnyBuffer flag, xf::Result<xf::AnyBuffer> out) {
  int32_t value = 0;
  std::memcpy(&value, flag.untyped_data(), sizeof(value));
  std::memcpy(out->untyped_data(), &value, sizeof(value));
  if (value == 0) return xf::Error::Success();
  return xf::Error(xf::ErrorCode::kInternal, "injected fault " + std::to_string(value));
}

// Result i is operand i. A result without such an operand stands for having run, and has no value.
template <typename Copy>
xf::Error Ordered(xf::RemainingArgs args, xf::RemainingRets rets, Copy copy) {
  return Guarded(xf::ErrorCode::kInternal, "", [&] {
    for (size_t i = 0; i < std::min(args.size(), rets.size()); ++i) {
      const xf::AnyBuffer x = args.get<xf::AnyBuffer>(i).value();
      xf::Result<xf::AnyBuffer> y = rets.get<xf::AnyBuffer>(i).value();
      if (x.untyped_data() != y->untyped_data() && x.size_bytes() != 0) {
        copy(y->untyped_data(), x.untyped_data(), x.size_bytes());
      }
    }
    return xf::Error::Success();
  });
}

xf::Error Order(xf::RemainingArgs args, xf::RemainingRets rets) {
  return Ordered(args, rets,
                 [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
}

xf::Error OrderOnCuda(void* stream, xf::RemainingArgs args, xf::RemainingRets rets) {
  return Ordered(args, rets, [&](void* to, const void* from, size_t bytes) {
    CopyOnStream(to, from, bytes, static_cast<CUstream_st*>(stream));
  });
}

XLA_FFI_DEFINE_HANDLER(kGate, Gate,
                       xf::Ffi::Bind()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("lane")
                           .Attr<int64_t>("deps")
                           .Attr<xf::Span<const int64_t>>("waits")
                           .Attr<xf::Span<const int64_t>>("ins")
                           .Attr<xf::Span<const int64_t>>("outs")
                           .Attr<xf::Span<const int64_t>>("records")
                           .Attr<int64_t>("stamp")
                           .Attr<int64_t>("done"));
XLA_FFI_DEFINE_HANDLER(kFail, Fail, xf::Ffi::Bind().Arg<xf::AnyBuffer>().Ret<xf::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kOrder, Order, xf::Ffi::Bind().RemainingArgs().RemainingRets(),
                       {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kOrderOnCuda, OrderOnCuda,
    xf::Ffi::Bind().Ctx<xf::PlatformStream<void*>>().RemainingArgs().RemainingRets(),
    {xf::Traits::kCmdBufferCompatible});

}  // namespace

void AddGateHandlers(Handlers& handlers) {
  handlers["gate"] = reinterpret_cast<void*>(kGate);
  handlers["fail"] = reinterpret_cast<void*>(kFail);
  handlers["order_gate"] = reinterpret_cast<void*>(kOrder);
  handlers["cuda_order_gate"] = reinterpret_cast<void*>(kOrderOnCuda);
}

}  // namespace dfx::ffi
