// Who holds which block of KV memory, and which blocks' content can be found again. Ids only; no memory.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parvl/base/ids.h"

namespace parvl {

// A fixed number of blocks with reference counts. A block that nobody holds is free; it keeps its published content
// until it is allocated again, the longest free first. Not thread-safe.
class BlockManager {
 public:
  explicit BlockManager(int64_t num_blocks);

  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t num_free() const { return num_free_; }

  // A block held once, its old content forgotten; nullopt when none is free.
  std::optional<BlockId> allocate();
  // One more holder; takes the block off the free list if it was there.
  void retain(BlockId id);
  // One holder less. Whoever releases a sequence's blocks goes from its last to its first, so that a prefix outlives
  // what follows it.
  void release(BlockId id);

  // Makes a held block's content findable under `key`; where the key has a block already, that one stays. Gives the
  // content's number, which is never used for another.
  uint64_t publish(BlockId id, std::string key);
  // The block with this content, held or free.
  std::optional<BlockId> find(const std::string& key) const;
  uint64_t content(BlockId id) const { return at(id).content; }
  int64_t references(BlockId id) const { return at(id).references; }

 private:
  static constexpr int32_t kNone = -1;
  struct Block {
    int64_t references = 0;
    uint64_t content = 0;
    std::string key;                         // "" when nothing is published
    int32_t previous = kNone, next = kNone;  // in the free list
  };
  Block& at(BlockId id) { return blocks_[static_cast<size_t>(id.value)]; }
  const Block& at(BlockId id) const { return blocks_[static_cast<size_t>(id.value)]; }
  void push_free(int32_t index);
  void remove_free(int32_t index);

  std::vector<Block> blocks_;
  absl::flat_hash_map<std::string, int32_t> by_key_;
  int32_t first_free_ = kNone, last_free_ = kNone;
  int64_t num_free_ = 0;
  uint64_t next_content_ = 1;
};

}  // namespace parvl
