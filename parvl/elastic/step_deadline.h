// How long a step may take before its instance counts as hung, from how long steps of that size have taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace parvl {

struct StepDeadlineRule {
  double least_s = 3;    // never less
  double times_p99 = 5;  // of the last steps of about that size
  size_t window = 256;   // so many of them
};

// Steps are of about the same size within a factor of two. One of a size that has not been seen yet is held to the
// nearest smaller size that has, scaled up as if its time grew with its size, and to a first step's limit when there is
// none. Not thread-safe.
class StepDeadline {
 public:
  // `first_s`: for a step when nothing is known yet.
  explicit StepDeadline(double first_s, const StepDeadlineRule& rule = {}) : first_s_(first_s), rule_(rule) {}

  void took(int64_t size, double seconds);
  double limit_s(int64_t size) const;

 private:
  struct Window {
    std::vector<double> seconds;  // the oldest at `next`, once it is full
    size_t next = 0;
  };
  static int bucket_of(int64_t size);
  static double p99(const Window& window);

  const double first_s_;
  const StepDeadlineRule rule_;
  std::map<int, Window> windows_;  // by the size's number of bits
};

}  // namespace parvl
