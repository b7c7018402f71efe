// What compiling one grammar, or one step of following it, may cost. xgrammar has no bound of its own:
// cmake/xgrammar.cmake puts calls to these functions into it, which throw once the bound is passed.
#pragma once

#include <cstdint>

namespace parvl {

// While it lives, what this thread does with grammars counts against `steps`; without one nothing is bounded.
class GrammarBudget {
 public:
  explicit GrammarBudget(int64_t steps);
  ~GrammarBudget();
  GrammarBudget(const GrammarBudget&) = delete;
  GrammarBudget& operator=(const GrammarBudget&) = delete;
};

namespace grammar_budget {
extern constinit thread_local int64_t steps_left;
[[noreturn]] void no_steps_left();
}  // namespace grammar_budget

// A step: a parser state, an expression or automaton state that is made or visited.
inline void spend_grammar_steps(int64_t count) {
  if ((grammar_budget::steps_left -= count) < 0) grammar_budget::no_steps_left();
}

}  // namespace parvl
