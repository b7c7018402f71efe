#include "parvl/elastic/prefix_index.h"

namespace parvl {

size_t PrefixIndex::match(std::span<const uint64_t> chain) const {
  size_t matched = 0;
  while (matched < chain.size() && places_.contains(chain[matched])) ++matched;
  return matched;
}

// From the end, so that the beginning of a chain, without which the rest is of no use, goes last.
void PrefixIndex::add(std::span<const uint64_t> chain) {
  for (auto hash = chain.rbegin(); hash != chain.rend(); ++hash) {
    if (const auto found = places_.find(*hash); found != places_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second);
      continue;
    }
    recent_.push_front(*hash);
    places_.emplace(*hash, recent_.begin());
    if (places_.size() <= limit_) continue;
    places_.erase(recent_.back());
    recent_.pop_back();
  }
}

void PrefixIndex::clear() {
  recent_.clear();
  places_.clear();
}

}  // namespace parvl
