// Which encoder outputs lie in an encode instance's shared memory: one for equal images, used by any number of
// requests, and kept after that for as long as there is room.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>

#include "parvl/comm/transfer/transfer_handle.h"

namespace parvl {

// Not thread-safe.
class OutputCache {
 public:
  using Key = std::array<uint8_t, 32>;  // ProcessedImage::key

  // The handle, encoded, of an output that is there, which gets one more user; null: it is not.
  const std::string* use(const Key& key);
  // A new one with one user. Of a key that is there already: false, and nothing is changed.
  bool add(const Key& key, TransferId item, std::string handle);
  // One user less.
  void let_go(const Key& key);
  // Takes out the one that nobody uses for the longest time; nullopt when all are used.
  std::optional<TransferId> evict();
  size_t size() const { return outputs_.size(); }

 private:
  struct Output {
    TransferId item;
    std::string handle;
    int64_t users = 1;
    std::list<Key>::iterator idle;  // while it has no user
  };
  std::map<Key, Output> outputs_;
  std::list<Key> idle_;  // the least recently used first
};

}  // namespace parvl
