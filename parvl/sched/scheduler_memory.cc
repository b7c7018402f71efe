// What sequences hold: blocks of KV memory and pins of encoder outputs.
#include <algorithm>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/sched/scheduler.h"

namespace parvl {
namespace {

template <typename T>
void append_bytes(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

// Everything that a block's keys and values depend on, literally, so that different content never shares a block: the
// content before it (by its number), the tokens, which item's which part its placeholders stand for, and the salt.
std::string Scheduler::block_key(const Sequence& sequence, int64_t index, uint64_t parent) const {
  const int64_t begin = index * config_.block_size, end = begin + config_.block_size;
  std::string key;
  append_bytes(key, parent);
  for (int64_t i = begin; i < end; ++i) append_bytes(key, sequence.tokens[static_cast<size_t>(i)]);
  for (const MediaItem& item : sequence.request.media) {
    if (item.end() <= begin || item.begin >= end) continue;
    key.append(reinterpret_cast<const char*>(item.key.bytes.data()), item.key.bytes.size());
    append_bytes(key, item.begin - begin);
    append_bytes(key, item.length);
  }
  if (index == 0) key += sequence.request.cache_salt;
  return key;
}

// The last of the running ones that can give what is wanted, must give way to `sequence` and is not in this step yet.
// One that has run before takes from all behind it; one that has not, only from a lower priority: its turn will come.
Sequence* Scheduler::victim_for(const Sequence& sequence, Wanted wanted) const {
  const auto has = [wanted](const Sequence& other) {
    switch (wanted) {
      case Wanted::kPlace:
        return true;
      case Wanted::kBlocks:
        return !other.blocks.empty();
      case Wanted::kEncoderBytes:
        return std::find(other.pinned.begin(), other.pinned.end(), true) != other.pinned.end();
    }
    return false;
  };
  for (auto candidate = running_.rbegin(); candidate != running_.rend(); ++candidate) {
    const Sequence& other = **candidate;
    if (!goes_before(sequence, other)) return nullptr;
    if (other.in_flight > 0 || other.fetching || !has(other)) continue;
    if (sequence.admitted || other.request.priority > sequence.request.priority) return *candidate;
  }
  return nullptr;
}

// Whether starting it would fail for the same reason as the last time, at a cost that does not depend on its length.
// Both what it finds and what it needs may have changed a little meanwhile; then it is told so with the next free
// block.
bool Scheduler::lacks_memory_still(const Sequence& sequence) {
  if (!sequence.lack.has_value()) return false;
  const LackOfMemory& lack = *sequence.lack;
  const int64_t left = sequence.length() - lack.prefix_blocks * config_.block_size;
  const int64_t next = sequence.request.given > 0 ? left : std::min(left, tokens_left_);  // what is given comes at once
  const int64_t wanted = (next + config_.block_size - 1) / config_.block_size;
  if (blocks_.num_free() - lack.free_in_prefix >= std::min(wanted, lack.missing)) return false;
  if (!lack.next_key.empty()) {
    ++counts_.block_lookups;
    if (blocks_.find(lack.next_key).has_value()) return false;
  }
  return victim_for(sequence, Wanted::kBlocks) == nullptr;
}

// Takes the blocks of the longest known prefix. At least one token is left to compute: its output chooses the next.
// Tells what it will have lacked if there is no memory for the rest.
LackOfMemory Scheduler::start_from_prefix_cache(Sequence& sequence) {
  PARVL_CHECK(sequence.blocks.empty() && sequence.computed == 0, "a sequence that waited held blocks");
  LackOfMemory lack;
  if (!config_.prefix_caching) return lack;
  const int64_t full = (sequence.length() - 1) / config_.block_size;
  for (int64_t i = 0; i < full; ++i) {
    std::string key = block_key(sequence, i, sequence.last_content);
    ++counts_.block_lookups;
    const auto block = blocks_.find(key);
    if (!block.has_value()) {
      lack.next_key = std::move(key);
      break;
    }
    lack.free_in_prefix += blocks_.references(*block) == 0;
    blocks_.retain(*block);
    sequence.blocks.push_back(*block);
    sequence.last_content = blocks_.content(*block);
  }
  lack.prefix_blocks = sequence.published = sequence.num_blocks();
  sequence.computed = sequence.published * config_.block_size;
  return lack;
}

// Blocks for the first `tokens` tokens. Others give way; false, and nothing allocated, when that is not enough.
bool Scheduler::grow(Sequence& sequence, int64_t tokens, SchedulerOutput& output) {
  const int64_t missing = (tokens + config_.block_size - 1) / config_.block_size - sequence.num_blocks();
  while (blocks_.num_free() < missing) {
    Sequence* victim = victim_for(sequence, Wanted::kBlocks);
    if (victim == nullptr) {
      if (sequence.lack.has_value()) sequence.lack->missing = missing;
      return false;
    }
    preempt(*victim, output);
  }
  for (int64_t i = 0; i < missing; ++i) sequence.blocks.push_back(*blocks_.allocate());
  if (!std::exchange(sequence.admitted, true)) {
    counts_.prefix_queries += sequence.length();
    counts_.prefix_hits += sequence.computed;
  }
  return true;
}

void Scheduler::publish_full_blocks(Sequence& sequence) {
  if (!config_.prefix_caching) return;
  for (; (sequence.published + 1) * config_.block_size <= sequence.computed; ++sequence.published) {
    const BlockId block = sequence.blocks[static_cast<size_t>(sequence.published)];
    sequence.last_content = blocks_.publish(block, block_key(sequence, sequence.published, sequence.last_content));
  }
}

void Scheduler::unpin_computed(Sequence& sequence) {
  for (size_t i = 0; i < sequence.pinned.size(); ++i) {
    if (!sequence.pinned[i] || sequence.request.media[i].end() > sequence.computed) continue;
    encoder_cache_.unpin(sequence.request.media[i].key);
    sequence.pinned[i] = false;
  }
}

void Scheduler::release_all(Sequence& sequence) {
  for (auto block = sequence.blocks.rbegin(); block != sequence.blocks.rend(); ++block) blocks_.release(*block);
  for (size_t i = 0; i < sequence.pinned.size(); ++i) {
    if (sequence.pinned[i]) encoder_cache_.unpin(sequence.request.media[i].key);
    sequence.pinned[i] = false;
  }
  sequence.blocks.clear();
  sequence.computed = sequence.published = 0;
  sequence.last_content = 0;
}

void Scheduler::erase(Sequence& sequence) {
  release_all(sequence);
  Sequences& line = sequence.running ? running_ : waiting_;
  line.erase(std::find(line.begin(), line.end(), &sequence));
  by_id_.erase(sequence.request.id);
}

std::vector<RequestId> Scheduler::commit_encode(SlotId slot, bool ok) {
  std::vector<RequestId> lost;
  const Sequences running = ok ? Sequences{} : running_;  // a copy: sequences are erased on the way
  for (Sequence* sequence : running) {
    bool needs = false;
    for (size_t i = 0; i < sequence->pinned.size(); ++i) {
      const MediaKey& key = sequence->request.media[i].key;
      if (!sequence->pinned[i] || encoder_cache_.find(key)->slot != slot) continue;
      encoder_cache_.unpin(key);
      sequence->pinned[i] = false;
      needs = true;
    }
    if (!needs) continue;
    lost.push_back(sequence->request.id);
    finish(sequence->request.id);
  }
  encoder_cache_.complete(slot, ok);
  return lost;
}

void Scheduler::check_invariants() const {
  std::vector<int64_t> references(static_cast<size_t>(blocks_.num_blocks()));
  absl::flat_hash_map<MediaKey, int64_t> pins;
  for (const Sequence* sequence : waiting_) {
    PARVL_CHECK(!sequence->running && sequence->blocks.empty() && sequence->computed == 0, "a waiting request holds");
    PARVL_CHECK(!sequence->fetching, "a waiting request fetches");
    for (const bool pinned : sequence->pinned) PARVL_CHECK(!pinned, "a waiting request pins an encoder output");
  }
  for (const Sequence* sequence : running_) {
    PARVL_CHECK(sequence->running, "a running sequence does not know it");
    PARVL_CHECK(sequence->computed + sequence->in_flight <= sequence->num_blocks() * config_.block_size,
                "tokens without a block");
    PARVL_CHECK(!sequence->fetching || sequence->in_flight == 0, "a sequence is in a step and fetches");
    for (const BlockId block : sequence->blocks) ++references[static_cast<size_t>(block.value)];
    for (size_t i = 0; i < sequence->pinned.size(); ++i) {
      if (sequence->pinned[i]) ++pins[sequence->request.media[i].key];
    }
  }
  int64_t free = 0;
  for (int32_t i = 0; i < blocks_.num_blocks(); ++i) {
    PARVL_CHECK(blocks_.references(BlockId{i}) == references[static_cast<size_t>(i)],
                "a block's holders do not add up");
    free += references[static_cast<size_t>(i)] == 0;
  }
  PARVL_CHECK(free == blocks_.num_free(), "the free blocks do not add up");
  PARVL_CHECK(by_id_.size() == waiting_.size() + running_.size(), "a sequence is in no line, or in two");
  encoder_cache_.check(pins);
}

}  // namespace parvl
