// Properties of the block manager and the encoder cache: whatever is asked of them, in whatever order, they agree with
// a plain model of what their headers promise. rapidcheck chooses what is asked and shrinks what fails;
// RC_PARAMS="reproduce=..." (as a failure prints it) runs that case again.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <ostream>
#include <set>

#include "parvl/sched/block_manager.h"
#include "parvl/sched/encoder_cache.h"
#include "tests/unit/sched_fixture.h"

namespace parvl {

// One call: what, and two numbers that choose among what is possible then.
struct Call {
  int what = 0, a = 0, b = 0;
};
std::ostream& operator<<(std::ostream& out, const Call& c) { return out << c.what << "(" << c.a << "," << c.b << ")"; }

namespace {

using rc::gen::inRange;

rc::Gen<std::vector<Call>> calls(int kinds) {
  return rc::gen::container<std::vector<Call>>(rc::gen::build<Call>(rc::gen::set(&Call::what, inRange(0, kinds)),
                                                                    rc::gen::set(&Call::a, inRange(0, 1000)),
                                                                    rc::gen::set(&Call::b, inRange(0, 1000))));
}

struct BlockModel {
  struct Block {
    int64_t references = 0;
    uint64_t content = 0;
    std::string key;
  };
  std::vector<Block> blocks;
  std::deque<int32_t> free;  // the longest free first
  uint64_t last_content = 0;

  std::optional<BlockId> find(const std::string& key) const {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (blocks[i].key == key) return BlockId{static_cast<int32_t>(i)};
    }
    return std::nullopt;
  }
};

std::string content_key(int n) { return "content " + std::to_string(n); }

void call_both(const Call& call, BlockManager& blocks, BlockModel& model) {
  const int32_t index = call.a % static_cast<int32_t>(model.blocks.size());
  BlockModel::Block& block = model.blocks[static_cast<size_t>(index)];
  if (call.what == 0) {
    const auto id = blocks.allocate();
    RC_ASSERT(id.has_value() == !model.free.empty());
    if (!id.has_value()) return;
    RC_ASSERT(id->value == model.free.front());  // so never one that somebody holds
    model.free.pop_front();
    model.blocks[static_cast<size_t>(id->value)] = {1, 0, ""};
  } else if (call.what == 1) {
    blocks.retain(BlockId{index});
    if (block.references++ == 0) model.free.erase(std::find(model.free.begin(), model.free.end(), index));
  } else if (call.what == 2 && block.references > 0) {
    blocks.release(BlockId{index});
    if (--block.references == 0) model.free.push_back(index);
  } else if (call.what == 3 && block.references > 0 && block.key.empty()) {
    const std::string key = content_key(call.b % 6);
    const auto there = model.find(key);
    const uint64_t content = blocks.publish(BlockId{index}, key);
    if (there.has_value()) {
      RC_ASSERT(content == model.blocks[static_cast<size_t>(there->value)].content);
    } else {
      RC_ASSERT(content > model.last_content);
      model.last_content = content;
      block.key = key;
      block.content = content;
    }
  }
}

RC_GTEST_PROP(BlockManagerProperty, HoldersAndContentsAreThoseOfAPlainModel, ()) {
  const int count = *inRange(1, 9);
  BlockManager blocks(count);
  BlockModel model;
  model.blocks.resize(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) model.free.push_back(i);
  for (const Call& call : *calls(4)) {
    call_both(call, blocks, model);
    RC_ASSERT(blocks.num_free() == static_cast<int64_t>(model.free.size()));
    for (int32_t i = 0; i < count; ++i) {
      RC_ASSERT(blocks.references(BlockId{i}) == model.blocks[static_cast<size_t>(i)].references);
      RC_ASSERT(blocks.content(BlockId{i}) == model.blocks[static_cast<size_t>(i)].content);
    }
    for (int key = 0; key < 6; ++key) RC_ASSERT(blocks.find(content_key(key)) == model.find(content_key(key)));
  }
  for (int32_t i = 0; i < count; ++i) {  // given back, all of it is there again
    for (auto& left = model.blocks[static_cast<size_t>(i)].references; left > 0; --left) blocks.release(BlockId{i});
  }
  std::set<int32_t> all;
  while (const auto id = blocks.allocate()) RC_ASSERT(all.insert(id->value).second);
  RC_ASSERT(static_cast<int>(all.size()) == count);
}

// ---- the encoder cache

struct CacheModel {
  struct Item {
    SlotId slot;
    int64_t bytes = 0, pins = 0, last_use = 0;
    bool ready = false;
  };
  int64_t capacity = 0, now = 0;
  std::map<uint8_t, Item> items;

  int64_t used() const {
    int64_t sum = 0;
    for (const auto& [key, item] : items) sum += item.bytes;
    return sum;
  }
  // The keys that must go for `bytes` more, the longest unused first; nullopt when that is not enough.
  std::optional<std::vector<uint8_t>> to_evict(int64_t bytes) const {
    std::map<int64_t, uint8_t> by_use;
    for (const auto& [key, item] : items) {
      if (item.ready && item.pins == 0) by_use[item.last_use] = key;
    }
    std::vector<uint8_t> out;
    int64_t left = used() + bytes;
    for (auto next = by_use.begin(); left > capacity; ++next) {
      if (next == by_use.end()) return std::nullopt;
      left -= items.at(next->second).bytes;
      out.push_back(next->second);
    }
    return out;
  }
};

void reserve_both(uint8_t key, int64_t bytes, EncoderCache& cache, CacheModel& model) {
  const auto victims = model.to_evict(bytes);
  std::vector<SlotId> evicted, expected;
  RC_ASSERT(cache.reserve(key_of(key), bytes, evicted) == victims.has_value());
  for (const uint8_t victim : victims.value_or(std::vector<uint8_t>())) {
    expected.push_back(model.items.at(victim).slot);
    model.items.erase(victim);
  }
  RC_ASSERT(evicted == expected);
  if (!victims.has_value()) return;
  const auto entry = cache.find(key_of(key));
  RC_ASSERT(entry.has_value());
  for (const auto& [other, item] : model.items) RC_ASSERT(item.slot != entry->slot);
  model.items[key] = {entry->slot, bytes, 1, 0, false};
}

void call_both(const Call& call, EncoderCache& cache, CacheModel& model) {
  const auto key = static_cast<uint8_t>(call.a % 6);
  const auto found = model.items.find(key);
  if (found == model.items.end()) {
    if (call.what <= 1) reserve_both(key, call.b % (model.capacity + 20), cache, model);
    return;
  }
  CacheModel::Item& item = found->second;
  if (call.what == 1) {
    cache.pin(key_of(key));
    ++item.pins;
  } else if (call.what == 2 && item.pins > 0) {
    cache.unpin(key_of(key));
    --item.pins;
    item.last_use = ++model.now;
  } else if (call.what == 3 && !item.ready) {
    const bool ok = item.pins > 0 || call.b % 2 == 0;  // one that somebody waits for fails through the scheduler only
    cache.complete(item.slot, ok);
    item.ready = ok;
    if (!ok) model.items.erase(found);
  }
}

RC_GTEST_PROP(EncoderCacheProperty, BytesAndPinsAreThoseOfAPlainModel, ()) {
  CacheModel model;
  model.capacity = *inRange(0, 200);
  EncoderCache cache(model.capacity);
  for (const Call& call : *calls(4)) {
    call_both(call, cache, model);
    RC_ASSERT(cache.used_bytes() == model.used());
    RC_ASSERT(cache.used_bytes() <= cache.capacity_bytes());
    absl::flat_hash_map<MediaKey, int64_t> pins;
    for (uint8_t key = 0; key < 6; ++key) {
      const auto entry = cache.find(key_of(key));
      const auto item = model.items.find(key);
      RC_ASSERT(entry.has_value() == (item != model.items.end()));
      if (!entry.has_value()) continue;
      RC_ASSERT(entry->slot == item->second.slot);
      RC_ASSERT(entry->ready == item->second.ready);
      RC_ASSERT(cache.pending(entry->slot) == !entry->ready);
      if (item->second.pins > 0) pins[key_of(key)] = item->second.pins;
    }
    cache.check(pins);
  }
}

}  // namespace
}  // namespace parvl
