#include "parvl/serve/pools/output_cache.h"

#include <utility>

#include "parvl/base/check.h"

namespace parvl {

const std::string* OutputCache::use(const Key& key) {
  const auto found = outputs_.find(key);
  if (found == outputs_.end()) return nullptr;
  if (found->second.users++ == 0) idle_.erase(found->second.idle);
  return &found->second.handle;
}

bool OutputCache::add(const Key& key, TransferId item, std::string handle) {
  return outputs_.emplace(key, Output{item, std::move(handle), 1, {}}).second;
}

void OutputCache::let_go(const Key& key) {
  Output& output = outputs_.at(key);
  PARVL_CHECK(output.users > 0, "an encoder output that nobody uses is let go");
  if (--output.users == 0) output.idle = idle_.insert(idle_.end(), key);
}

std::optional<TransferId> OutputCache::evict() {
  if (idle_.empty()) return std::nullopt;
  const TransferId item = outputs_.at(idle_.front()).item;
  outputs_.erase(idle_.front());
  idle_.pop_front();
  return item;
}

}  // namespace parvl
