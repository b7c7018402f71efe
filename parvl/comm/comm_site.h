// From where in the code collective calls are made, for errors that name it.
#pragma once

#include <cstddef>
#include <string_view>

namespace parvl {

// While it lives, this thread's calls are made at that place: CommSite site("llm_backbone.layers.3.attn.gather").
// Inside another: "backward/llm_backbone.layers.3.attn.gather". The place is part of a collective call: give it the
// same on all ranks. Ends in the reverse order of beginning, on one thread. Costs no allocation; over 190 characters
// the rest is dropped.
class CommSite {
 public:
  enum class Wait {
    kBounded,
    kLong  // for the work of one rank (a save, an evaluation): the calls within have no deadline
  };
  explicit CommSite(std::string_view label, Wait wait = Wait::kBounded);
  ~CommSite();
  CommSite(const CommSite&) = delete;
  CommSite& operator=(const CommSite&) = delete;

  // This thread's; "" outside of any. Valid until the next begins or ends.
  static std::string_view current();
  static bool waits_long();

 private:
  size_t length_before_;
  bool long_before_;
};

}  // namespace parvl
