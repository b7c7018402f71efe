// What one run of a chat template may cost. The Jinja engine has no bound of its own: cmake/jinja.cmake puts calls to
// these functions into it, which throw once a bound is passed.
#pragma once

#include <cstdint>

namespace parvl {

// Far more than a conversation of thousands of turns needs; a run at a bound has taken about half a second.
struct TemplateLimits {
  int64_t steps = 20'000'000;        // see cmake/jinja.cmake
  int64_t bytes = int64_t{1} << 28;  // of text written, copied or searched
  int64_t range = 1'000'000;         // elements of one range()
  int64_t nesting = 500;             // statements, or values, one in another
};

// Of each of the short conversations that the engine tries a template with when it compiles it.
inline constexpr TemplateLimits kTrialLimits = {1'000'000, int64_t{1} << 25, 100'000, 500};

// While it lives, what this thread's templates do counts against `limits`; without one nothing is bounded. Once passed,
// a bound stays passed, whatever the engine catches.
class TemplateBudget {
 public:
  explicit TemplateBudget(const TemplateLimits& limits = {});
  ~TemplateBudget();
  TemplateBudget(const TemplateBudget&) = delete;
  TemplateBudget& operator=(const TemplateBudget&) = delete;
};

// Lists and objects that hold themselves keep their memory when nothing else holds them. Made before the variables of a
// template are, and destroyed after them, it frees what of them this thread's template has left. Not one in another.
class TemplateLeftovers {
 public:
  TemplateLeftovers() = default;
  ~TemplateLeftovers();
  TemplateLeftovers(const TemplateLeftovers&) = delete;
  TemplateLeftovers& operator=(const TemplateLeftovers&) = delete;
};

namespace template_budget {
extern constinit thread_local int64_t steps_left, bytes_left, nesting_left;
[[noreturn]] void no_steps_left();
[[noreturn]] void no_bytes_left();
[[noreturn]] void no_nesting_left();
const TemplateLimits& limits();  // of this thread
}  // namespace template_budget

inline void spend_template_steps(int64_t count) {
  if ((template_budget::steps_left -= count) < 0) template_budget::no_steps_left();
}

inline void spend_template_bytes(int64_t count) {
  if ((template_budget::bytes_left -= count) < 0) template_budget::no_bytes_left();
}

// One level of a recursion.
class TemplateNesting {
 public:
  TemplateNesting() {
    if (--template_budget::nesting_left < 0) {
      ++template_budget::nesting_left;
      template_budget::no_nesting_left();
    }
  }
  ~TemplateNesting() { ++template_budget::nesting_left; }
  TemplateNesting(const TemplateNesting&) = delete;
  TemplateNesting& operator=(const TemplateNesting&) = delete;
};

}  // namespace parvl
