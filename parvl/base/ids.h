// Ids that do not turn into one another: a RequestId is never taken for a BlockId.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <utility>

namespace parvl {

using TokenId = int32_t;

template <typename Tag, typename Int>
struct StrongId {
  Int value{};
  friend auto operator<=>(const StrongId&, const StrongId&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const StrongId& id) {
    return H::combine(std::move(state), id.value);
  }
};

using RequestId = StrongId<struct RequestTag, int64_t>;
using BlockId = StrongId<struct BlockTag, int32_t>;  // of KV memory
using SlotId = StrongId<struct SlotTag, int64_t>;    // of an encoder's output; never used twice
using StepId = StrongId<struct StepTag, int64_t>;    // one call of Scheduler::schedule

}  // namespace parvl
