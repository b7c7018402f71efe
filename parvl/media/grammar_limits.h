// What compiling one grammar, or one step of following it, may cost. xgrammar has no bound of its own:
// cmake/xgrammar.cmake puts calls to these functions into it, which throw once the bound is passed or nobody
// wants the result any more.
#pragma once

#include <cstdint>
#include <stop_token>

namespace parvl {

// While it lives, what this thread does with grammars counts against `steps` and ends when `stop` is asked for; without
// one nothing is bounded. One at a time on a thread.
class GrammarBudget {
 public:
  explicit GrammarBudget(int64_t steps, std::stop_token stop = {});
  ~GrammarBudget();
  GrammarBudget(const GrammarBudget&) = delete;
  GrammarBudget& operator=(const GrammarBudget&) = delete;
  int64_t spent() const;

 private:
  const int64_t steps_;
};

namespace grammar_budget {
extern constinit thread_local int64_t steps_left;  // until more_steps() looks at the bound and the stop again
void more_steps();
}  // namespace grammar_budget

// A step: a parser state, an expression or automaton state that is made or visited.
inline void spend_grammar_steps(int64_t count) {
  if ((grammar_budget::steps_left -= count) < 0) grammar_budget::more_steps();
}

}  // namespace parvl
