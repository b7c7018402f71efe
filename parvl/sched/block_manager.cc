#include "parvl/sched/block_manager.h"

#include "parvl/base/check.h"

namespace parvl {

BlockManager::BlockManager(int64_t num_blocks) : blocks_(static_cast<size_t>(num_blocks)) {
  for (int32_t i = 0; i < num_blocks; ++i) push_free(i);
}

std::optional<BlockId> BlockManager::allocate() {
  if (first_free_ == kNone) return std::nullopt;
  const int32_t index = first_free_;
  remove_free(index);
  Block& block = blocks_[static_cast<size_t>(index)];
  if (!block.key.empty()) by_key_.erase(block.key);
  block.key.clear();
  block.content = 0;
  block.references = 1;
  return BlockId{index};
}

void BlockManager::retain(BlockId id) {
  if (at(id).references++ == 0) remove_free(id.value);
}

void BlockManager::release(BlockId id) {
  PARVL_CHECK(at(id).references > 0, "a block that nobody holds was released");
  if (--at(id).references == 0) push_free(id.value);
}

uint64_t BlockManager::publish(BlockId id, std::string key) {
  PARVL_CHECK(at(id).references > 0, "a block that nobody holds was published");
  PARVL_CHECK(at(id).key.empty() && !key.empty(), "a block's content was published twice");
  const auto [place, is_new] = by_key_.emplace(key, id.value);
  if (!is_new) return blocks_[static_cast<size_t>(place->second)].content;
  at(id).key = std::move(key);
  at(id).content = next_content_++;
  return at(id).content;
}

std::optional<BlockId> BlockManager::find(const std::string& key) const {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::nullopt;
  return BlockId{found->second};
}

void BlockManager::push_free(int32_t index) {
  Block& block = blocks_[static_cast<size_t>(index)];
  block.previous = last_free_;
  block.next = kNone;
  (last_free_ == kNone ? first_free_ : blocks_[static_cast<size_t>(last_free_)].next) = index;
  last_free_ = index;
  ++num_free_;
}

void BlockManager::remove_free(int32_t index) {
  Block& block = blocks_[static_cast<size_t>(index)];
  (block.previous == kNone ? first_free_ : blocks_[static_cast<size_t>(block.previous)].next) = block.next;
  (block.next == kNone ? last_free_ : blocks_[static_cast<size_t>(block.next)].previous) = block.previous;
  --num_free_;
}

}  // namespace parvl
