// dfx_cumulative: a cumulative operator of a lane program (cumulative.h).
//
// Its result is XLA's, or, with a `buffer` of the plan, written where the outer program wants it: a
// result that nothing else on the lane reads is then not copied by the lane's last gate. Results
// belong to the call until it returns, each is written by one lane, and the last gate, which tells
// that the lane is done, reads the value that this call returns instead.
#include <cstddef>
#include <string>

#include "custom_calls/cumulative.h"
#include "custom_calls/handlers.h"
#include "dfx/engine.h"
#include "dfx/error.h"
#include "dfx/lane.h"

namespace dfx::ffi {
namespace {

struct Places {
  const void* x;
  void* y;
  int64_t outer, count, inner;
  bool reverse;
};

template <template <typename> class Op, typename T>
void Run(const Places& at) {
  Accumulate<Op<T>>(static_cast<const T*>(at.x), static_cast<T*>(at.y), at.outer, at.count,
                    at.inner, at.reverse);
}

template <typename T>
using Maximum = Extreme<T, true>;
template <typename T>
using Minimum = Extreme<T, false>;

template <typename T>
void RunKind(int64_t kind, const Places& at) {
  switch (kind) {
    case 0:
      return Run<Sum, T>(at);
    case 1:
      if constexpr (!std::is_same_v<T, double>) return Run<Product, T>(at);
      break;
    case 2:
      return Run<Maximum, T>(at);
    case 3:
      return Run<Minimum, T>(at);
  }
  throw Error("dfx_cumulative has no operation " + std::to_string(kind) + " of this type");
}

void RunType(xf::DataType type, int64_t kind, const Places& at) {
  switch (type) {
    case xf::DataType::S8:
      return RunKind<int8_t>(kind, at);
    case xf::DataType::S16:
      return RunKind<int16_t>(kind, at);
    case xf::DataType::S32:
      return RunKind<int32_t>(kind, at);
    case xf::DataType::S64:
      return RunKind<int64_t>(kind, at);
    case xf::DataType::U8:
      return RunKind<uint8_t>(kind, at);
    case xf::DataType::U16:
      return RunKind<uint16_t>(kind, at);
    case xf::DataType::U32:
      return RunKind<uint32_t>(kind, at);
    case xf::DataType::U64:
      return RunKind<uint64_t>(kind, at);
    case xf::DataType::F16:
      return RunKind<Half>(kind, at);
    case xf::DataType::BF16:
      return RunKind<BFloat16>(kind, at);
    case xf::DataType::F32:
      return RunKind<float>(kind, at);
    case xf::DataType::F64:
      return RunKind<double>(kind, at);
    default:
      throw Error("dfx_cumulative does not know elements of type " +
                  std::to_string(static_cast<int>(type)));
  }
}

xf::Error Cumulative(xf::AnyBuffer x, xf::Result<xf::AnyBuffer> out, int64_t kind, int64_t axis,
                     bool reverse, int64_t lane_index, int64_t buffer) {
  return Guarded(xf::ErrorCode::kInternal, "", [&] {
    Places at{x.untyped_data(), out->untyped_data(), 1, 1, 1, reverse};
    const auto shape = x.dimensions();
    for (size_t d = 0; d < shape.size(); ++d) {
      const auto along = static_cast<size_t>(axis);
      (d < along ? at.outer : d == along ? at.count : at.inner) *= shape[d];
    }
    if (buffer >= 0) {
      Call* call = Engine::Get().lane(static_cast<int>(lane_index)).current();
      if (call == nullptr) throw Error("a lane program ran outside the engine");
      at.y = call->BufferData(static_cast<int>(buffer));
    }
    if (at.outer * at.count * at.inner != 0) RunType(x.element_type(), kind, at);
    return xf::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER(kCumulative, Cumulative,
                       xf::Ffi::Bind()
                           .Arg<xf::AnyBuffer>()
                           .Ret<xf::AnyBuffer>()
                           .Attr<int64_t>("kind")
                           .Attr<int64_t>("axis")
                           .Attr<bool>("reverse")
                           .Attr<int64_t>("lane")
                           .Attr<int64_t>("buffer"));

}  // namespace

void AddCumulativeHandler(Handlers& handlers) {
  handlers["cumulative"] = reinterpret_cast<void*>(kCumulative);
}

}  // namespace dfx::ffi
