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

  struct Use {
    TransferId item;
    std::string handle;  // encoded
  };
  // An output that is there, which gets one more user.
  std::optional<Use> use(const Key& key);
  // A new one with one user. Of a key that is there already: false, and nothing is changed.
  bool add(const Key& key, TransferId item, std::string handle);
  // One user less. `lost`: it is of no use to anybody, so that `use` does not find it any more. Whether it has to go
  // now, which is the caller's to do.
  bool let_go(TransferId item, bool lost);
  // Takes out the one that nobody uses for the longest time; nullopt when all are used.
  std::optional<TransferId> evict();
  size_t size() const { return outputs_.size(); }

 private:
  struct Output {
    Key key;
    std::string handle;
    int64_t users = 1;
    std::list<TransferId>::iterator idle;  // while it has no user
  };
  std::map<TransferId, Output> outputs_;
  std::map<Key, TransferId> by_key_;  // without those that are lost
  std::list<TransferId> idle_;        // the least recently used first
};

}  // namespace parvl
