#include "parvl/serve/pools/output_cache.h"

#include <utility>

#include "parvl/base/check.h"

namespace parvl {

std::optional<OutputCache::Use> OutputCache::use(const Key& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::nullopt;
  Output& output = outputs_.at(found->second);
  if (output.users++ == 0) idle_.erase(output.idle);
  return Use{found->second, output.handle};
}

bool OutputCache::add(const Key& key, TransferId item, std::string handle) {
  if (!by_key_.emplace(key, item).second) return false;
  outputs_.emplace(item, Output{key, std::move(handle), 1, {}});
  return true;
}

bool OutputCache::let_go(TransferId item, bool lost) {
  Output& output = outputs_.at(item);
  PARVL_CHECK(output.users > 0, "an encoder output that nobody uses is let go");
  const auto named = by_key_.find(output.key);
  bool known = named != by_key_.end() && named->second == item;
  if (known && lost) {
    by_key_.erase(named);
    known = false;
  }
  if (--output.users > 0) return false;
  if (known) {
    output.idle = idle_.insert(idle_.end(), item);
    return false;
  }
  outputs_.erase(item);
  return true;
}

std::optional<TransferId> OutputCache::evict() {
  if (idle_.empty()) return std::nullopt;
  const TransferId item = idle_.front();
  by_key_.erase(outputs_.at(item).key);
  outputs_.erase(item);
  idle_.pop_front();
  return item;
}

}  // namespace parvl
