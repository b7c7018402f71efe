// Which encoder outputs exist, by the identity of their input; bounded in bytes. Ids only; the tensors are the
// executor's.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "parvl/sched/request.h"

namespace parvl {

// Each entry is pending (being encoded) or ready, and pinned by the sequences that still need it. An entry without pins
// stays for others until its bytes are needed, the longest unused first. Not thread-safe.
class EncoderCache {
 public:
  explicit EncoderCache(int64_t capacity_bytes) : capacity_(capacity_bytes) {}

  struct Entry {
    SlotId slot;
    bool ready = false;
  };
  std::optional<Entry> find(const MediaKey& key) const;

  bool pending(SlotId slot) const;

  int64_t capacity_bytes() const { return capacity_; }
  int64_t used_bytes() const { return used_; }
  int64_t held_bytes() const { return held_; }  // of these, of entries that are pinned or pending

  // A new pending entry with one pin. Entries without pins make room; their slots are added to `evicted`. False, and
  // nothing changed, when that is not enough. The key must be absent.
  bool reserve(const MediaKey& key, int64_t bytes, std::vector<SlotId>& evicted);
  void pin(const MediaKey& key);
  void unpin(const MediaKey& key);
  // The encoder's answer for a pending entry. A failed one, which nobody may pin any more, is gone.
  void complete(SlotId slot, bool ok);
  // For tests: the pins are these, and the bytes add up.
  void check(const absl::flat_hash_map<MediaKey, int64_t>& pins) const;

 private:
  struct Item {
    MediaKey key;
    SlotId slot;
    int64_t bytes = 0;
    int64_t pins = 0;
    bool ready = false;
  };
  using Items = std::list<Item>;
  Items::iterator get(const MediaKey& key);
  bool evictable(const Item& item) const { return item.pins == 0 && item.ready; }

  int64_t capacity_;
  int64_t used_ = 0, held_ = 0;
  int64_t next_slot_ = 1;
  Items items_;  // the longest unused first
  absl::flat_hash_map<MediaKey, Items::iterator> by_key_;
  absl::flat_hash_map<SlotId, Items::iterator> by_slot_;
};

}  // namespace parvl
