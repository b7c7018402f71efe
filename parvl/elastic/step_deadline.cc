#include "parvl/elastic/step_deadline.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>

namespace parvl {

int StepDeadline::bucket_of(int64_t size) {
  return static_cast<int>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(size, 1))));
}

void StepDeadline::took(int64_t size, double seconds) {
  Window& window = windows_[bucket_of(size)];
  if (window.seconds.size() < rule_.window) {
    window.seconds.push_back(seconds);
    return;
  }
  window.seconds[window.next] = seconds;
  window.next = (window.next + 1) % rule_.window;
}

// Of few, the largest.
double StepDeadline::p99(const Window& window) {
  std::vector<double> sorted = window.seconds;
  const auto rank = static_cast<size_t>(std::ceil(0.99 * static_cast<double>(sorted.size()))) - 1;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(rank), sorted.end());
  return sorted[rank];
}

double StepDeadline::limit_s(int64_t size) const {
  const int bucket = bucket_of(size);
  const auto after = windows_.upper_bound(bucket);
  if (after == windows_.begin()) return std::max(rule_.least_s, first_s_);
  const auto& [known, window] = *std::prev(after);
  return std::max(rule_.least_s, rule_.times_p99 * std::ldexp(p99(window), bucket - known));
}

}  // namespace parvl
