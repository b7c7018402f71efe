// How many tokens of prompts fit into a step that answers wait for.
#pragma once

#include <cstdint>

namespace parvl {

// Pure: it is told how long steps took. A step of n tokens of prompts takes about base + n · rate; scaling n by aim /
// time comes to what takes `aim` without knowing either, and monotonically: its slope there is base / aim < 1. Where
// even the base takes longer, it stays at the least number, so that prompts go on.
class StepPace {
 public:
  static constexpr double kAim = 0.8;  // of the limit: steps of equal size differ in time, and few should be beyond it
  // `limit_s`: of such a step; 0: whatever it takes. `most`: tokens, at least 1.
  StepPace(double limit_s, int64_t most);

  int64_t tokens() const { return tokens_; }
  // A step with that many tokens of prompts beside answers, at least 1, took so long: more than 0.
  void took(int64_t tokens, double seconds);

 private:
  double aim_s_;  // 0: none
  int64_t most_, tokens_;
};

}  // namespace parvl
