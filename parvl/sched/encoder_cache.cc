#include "parvl/sched/encoder_cache.h"

#include "parvl/base/check.h"

namespace parvl {

std::optional<EncoderCache::Entry> EncoderCache::find(const MediaKey& key) const {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::nullopt;
  return Entry{found->second->slot, found->second->ready};
}

bool EncoderCache::pending(SlotId slot) const {
  const auto found = by_slot_.find(slot);
  return found != by_slot_.end() && !found->second->ready;
}

bool EncoderCache::reserve(const MediaKey& key, int64_t bytes, std::vector<SlotId>& evicted) {
  PARVL_CHECK(!by_key_.contains(key), "an encoder output was reserved twice");
  int64_t gain = 0;
  for (const Item& item : items_) {
    if (used_ - gain + bytes <= capacity_) break;
    if (evictable(item)) gain += item.bytes;
  }
  if (used_ - gain + bytes > capacity_) return false;
  for (auto item = items_.begin(); used_ + bytes > capacity_;) {
    const auto here = item++;
    if (!evictable(*here)) continue;
    used_ -= here->bytes;
    evicted.push_back(here->slot);
    by_key_.erase(here->key);
    by_slot_.erase(here->slot);
    items_.erase(here);
  }
  const SlotId slot{next_slot_++};
  const auto item = items_.insert(items_.end(), Item{key, slot, bytes, 1, false});
  by_key_.emplace(key, item);
  by_slot_.emplace(slot, item);
  used_ += bytes;
  held_ += bytes;
  return true;
}

void EncoderCache::pin(const MediaKey& key) {
  const auto item = get(key);
  if (evictable(*item)) held_ += item->bytes;
  ++item->pins;
}

void EncoderCache::unpin(const MediaKey& key) {
  const auto item = get(key);
  PARVL_CHECK(item->pins > 0, "an encoder output without pins was unpinned");
  --item->pins;
  if (evictable(*item)) held_ -= item->bytes;
  items_.splice(items_.end(), items_, item);
}

void EncoderCache::complete(SlotId slot, bool ok) {
  const auto found = by_slot_.find(slot);
  PARVL_CHECK(found != by_slot_.end(), "an encoder output that nobody asked for arrived");
  const auto item = found->second;
  PARVL_CHECK(!item->ready, "an encoder output arrived twice");
  if (ok) {
    item->ready = true;
    if (evictable(*item)) held_ -= item->bytes;
    return;
  }
  PARVL_CHECK(item->pins == 0, "an encoder output that somebody waits for failed");
  used_ -= item->bytes;
  held_ -= item->bytes;
  by_key_.erase(item->key);
  by_slot_.erase(found);
  items_.erase(item);
}

void EncoderCache::check(const absl::flat_hash_map<MediaKey, int64_t>& pins) const {
  int64_t bytes = 0, held = 0, pinned = 0;
  for (const Item& item : items_) {
    bytes += item.bytes;
    held += evictable(item) ? 0 : item.bytes;
    pinned += item.pins > 0;
    const auto found = pins.find(item.key);
    PARVL_CHECK(item.pins == (found == pins.end() ? 0 : found->second), "the pins of an encoder output do not add up");
  }
  PARVL_CHECK(bytes == used_ && used_ <= capacity_ && held == held_, "the bytes of the encoder cache do not add up");
  PARVL_CHECK(pinned == static_cast<int64_t>(pins.size()), "an output is pinned that is not there");
  PARVL_CHECK(by_key_.size() == items_.size() && by_slot_.size() == items_.size(), "the encoder cache's maps differ");
}

EncoderCache::Items::iterator EncoderCache::get(const MediaKey& key) {
  const auto found = by_key_.find(key);
  PARVL_CHECK(found != by_key_.end(), "an encoder output that does not exist was used");
  return found->second;
}

}  // namespace parvl
