#include "parvl/train/tensor_slice.h"

#include <algorithm>

namespace parvl {
namespace {

// A slice's values from `at` on that lie side by side in the tensor.
struct Run {
  int64_t first = 0, count = 0;  // in the tensor
};

Run run_at(const TensorSlice& slice, int64_t at) {
  const int64_t inside = at % slice.length;
  return {at / slice.length * slice.period + slice.offset + inside, std::min(slice.length - inside, slice.end - at)};
}

}  // namespace

int64_t for_common_runs(const TensorSlice& a, const TensorSlice& b, const CopyRun& copy) {
  int64_t total = 0;
  for (int64_t in_a = a.begin, in_b = b.begin; in_a < a.end && in_b < b.end;) {
    const Run of_a = run_at(a, in_a), of_b = run_at(b, in_b);
    const int64_t first = std::max(of_a.first, of_b.first);
    const int64_t end = std::min(of_a.first + of_a.count, of_b.first + of_b.count);
    if (first < end) {
      copy(in_a + first - of_a.first - a.begin, in_b + first - of_b.first - b.begin, end - first);
      total += end - first;
    }
    in_a += std::clamp(end - of_a.first, int64_t{0}, of_a.count);
    in_b += std::clamp(end - of_b.first, int64_t{0}, of_b.count);
  }
  return total;
}

Json to_json(const TensorSlice& slice) {
  return Json::array({slice.period, slice.offset, slice.length, slice.begin, slice.end});
}

absl::StatusOr<TensorSlice> slice_from_json(const Json& json, int64_t numel) {
  std::vector<int64_t> numbers;
  for (const Json& number : json) {
    if (number.is_number_integer()) numbers.push_back(number.get<int64_t>());
  }
  if (!json.is_array() || json.size() != 5 || numbers.size() != 5) return invalid("a slice is five numbers");
  const TensorSlice out{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
  const bool sound = out.period > 0 && out.period <= numel && numel % out.period == 0 && out.offset >= 0 &&
                     out.length > 0 && out.offset <= out.period - out.length && out.begin >= 0 && out.begin < out.end &&
                     out.end <= numel / out.period * out.length;
  if (!sound) return invalid("no slice of a tensor of ", numel, " values: ", json.dump());
  return out;
}

}  // namespace parvl
