#include "parvl/media/jinja_limits.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace parvl {
namespace {

constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 2;
constexpr TemplateLimits kNoLimits = {kUnbounded, kUnbounded, kUnbounded, kUnbounded};
constinit thread_local TemplateLimits g_limits = kNoLimits;

void start(const TemplateLimits& limits) {
  g_limits = limits;
  template_budget::steps_left = limits.steps;
  template_budget::bytes_left = limits.bytes;
  template_budget::nesting_left = limits.nesting;
}

}  // namespace

TemplateBudget::TemplateBudget(const TemplateLimits& limits) { start(limits); }
TemplateBudget::~TemplateBudget() { start(kNoLimits); }

namespace template_budget {

constinit thread_local int64_t steps_left = kUnbounded, bytes_left = kUnbounded, nesting_left = kUnbounded;

const TemplateLimits& limits() { return g_limits; }

void no_steps_left() {
  steps_left = -1;  // it cannot wrap around, however often it is caught
  throw std::runtime_error("the template takes more than the limit of " + std::to_string(g_limits.steps) +
                           " steps; look for a loop that is too long");
}

void no_bytes_left() {
  bytes_left = -1;
  throw std::runtime_error("the template handles more than the limit of " + std::to_string(g_limits.bytes) +
                           " bytes of text; look for a text that grows in a loop");
}

void no_nesting_left() {
  throw std::runtime_error("the template goes deeper than the limit of " + std::to_string(g_limits.nesting) +
                           " levels; look for a macro that calls itself or a list that holds itself");
}

}  // namespace template_budget
}  // namespace parvl
