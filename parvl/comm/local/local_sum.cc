#include "parvl/comm/local/local_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "parvl/base/check.h"

namespace parvl::local {
namespace {

float widen(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// To the nearest, ties to even.
uint16_t narrow(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename Wide, typename Read>
std::vector<Wide> reduce(size_t inputs, int64_t count, ReduceOp op, Read read) {
  std::vector<Wide> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    Wide value = read(0, i);
    for (size_t r = 1; r < inputs; ++r) value = op == ReduceOp::kSum ? value + read(r, i) : std::max(value, read(r, i));
    out[static_cast<size_t>(i)] = value;
  }
  return out;
}

}  // namespace

Reduced::Reduced(const std::vector<const void*>& inputs, int64_t first, int64_t count, DType dtype, ReduceOp op)
    : dtype_(dtype) {
  switch (dtype) {
    case DType::kFloat64:
      wide64_ = reduce<double>(inputs.size(), count, op,
                               [&](size_t r, int64_t i) { return static_cast<const double*>(inputs[r])[first + i]; });
      break;
    case DType::kFloat32:
      wide32_ = reduce<float>(inputs.size(), count, op,
                              [&](size_t r, int64_t i) { return static_cast<const float*>(inputs[r])[first + i]; });
      break;
    case DType::kBFloat16:
      wide32_ = reduce<float>(inputs.size(), count, op, [&](size_t r, int64_t i) {
        return widen(static_cast<const uint16_t*>(inputs[r])[first + i]);
      });
      break;
    case DType::kFloat16:
      PARVL_CHECK(false, "float16 values have no sum here");
  }
}

void Reduced::put(void* out) const {
  if (dtype_ == DType::kFloat64) {
    std::copy(wide64_.begin(), wide64_.end(), static_cast<double*>(out));
  } else if (dtype_ == DType::kFloat32) {
    std::copy(wide32_.begin(), wide32_.end(), static_cast<float*>(out));
  } else {
    std::transform(wide32_.begin(), wide32_.end(), static_cast<uint16_t*>(out), narrow);
  }
}

}  // namespace parvl::local
