#pragma once
#include <cstdint>

namespace dfx {
// Version of the layout that plans are encoded in for the engine. Checked when Python loads it.
constexpr int32_t kPlanAbiVersion = 1;
}  // namespace dfx
