// What an instance is likely to have in its prefix cache: a guess from what was sent there, so that nobody has to ask.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>

namespace parvl {

// Remembers hashes, the least recently used going first. Not thread-safe.
class PrefixIndex {
 public:
  // `limit`: hashes that it holds; at least 1.
  explicit PrefixIndex(size_t limit) : limit_(limit) {}

  // `chain`: a hash for each block of a prompt, of all that stands up to the block's end. How many of them, from the
  // first on, are there.
  size_t match(std::span<const uint64_t> chain) const;
  void add(std::span<const uint64_t> chain);
  void clear();
  size_t size() const { return places_.size(); }

 private:
  const size_t limit_;
  std::list<uint64_t> recent_;  // the most recently used first
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> places_;
};

}  // namespace parvl
