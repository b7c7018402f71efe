#include "parvl/comm/transfer/transfer_ledger.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "parvl/base/check.h"

namespace parvl {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Items of about one size share slabs: eight sizes a doubling, whole pages.
int64_t slab_bytes(int64_t bytes) {
  const int64_t pages = std::max<int64_t>(1, (bytes + kPage - 1) / kPage);
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(pages))) / 8);
  return (pages + step - 1) / step * step * kPage;
}

}  // namespace

TransferLedger::TransferLedger(const LedgerLimits& limits, std::string label)
    : limits_(limits), label_(std::move(label)) {}
TransferLedger::~TransferLedger() = default;

// The slab that has been free for longest among the largest goes first: it makes the most room.
bool TransferLedger::evict_one() {
  if (free_.empty()) return false;
  const auto last = std::prev(free_.end());
  last->second.memory->discard();  // sinks keep mappings of it for the next item
  free_bytes_ -= last->first;
  free_.erase(last);
  return true;
}

absl::StatusOr<TransferLedger::Memory> TransferLedger::take_memory(int64_t bytes) {
  const int64_t wanted = std::min(slab_bytes(bytes), limits_.bytes);
  const auto found = free_.lower_bound(wanted);
  if (found != free_.end() && found->first <= wanted + wanted / 4) {
    Memory out = std::move(found->second);
    free_bytes_ -= found->first;
    free_.erase(found);
    return out;
  }
  while (used_bytes_ + free_bytes_ + wanted > limits_.bytes ||
         static_cast<int64_t>(items_.size() + free_.size()) >= limits_.items) {
    if (!evict_one()) {
      return absl::ResourceExhaustedError(absl::StrCat("no room for ", bytes, " bytes: items hold ", used_bytes_,
                                                       " of the ", limits_.bytes, " bytes of transfer memory"));
    }
  }
  for (;;) {
    auto memory = SharedSlab::create(wanted, label_);
    if (memory.ok()) return Memory{next_slab_++, *std::move(memory)};
    if (!absl::IsResourceExhausted(memory.status()) || !evict_one()) return memory.status();
  }
}

absl::StatusOr<TransferId> TransferLedger::reserve(int64_t bytes) {
  if (bytes > limits_.bytes) {
    return invalid("an item of ", bytes, " bytes never fits into ", limits_.bytes, " bytes of transfer memory");
  }
  if (static_cast<int64_t>(items_.size()) >= limits_.items) {
    return absl::ResourceExhaustedError(absl::StrCat("all ", limits_.items, " items of transfer memory are in use"));
  }
  PARVL_ASSIGN_OR_RETURN(Memory memory, take_memory(bytes));
  used_bytes_ += memory.memory->bytes();
  const TransferId id{next_item_++};
  items_[id].memory = std::move(memory);
  return id;
}

const TransferLedger::Memory& TransferLedger::memory(TransferId reserved) const { return items_.at(reserved).memory; }

void TransferLedger::free_memory(Item& item) {
  const int64_t bytes = item.memory.memory->bytes();
  used_bytes_ -= bytes;
  if (item.given_up) {
    counts_.given_up_bytes += bytes;
  } else {
    free_bytes_ += bytes;
    free_.emplace(bytes, std::move(item.memory));
  }
  freed_ = true;
}

void TransferLedger::cancel(TransferId reserved) {
  const auto found = items_.find(reserved);
  PARVL_CHECK(found != items_.end() && found->second.state == State::kReserved, "cancel of what is not reserved");
  free_memory(found->second);
  items_.erase(found);
}

void TransferLedger::publish(TransferId reserved, std::shared_ptr<const TransferContent> content, int64_t lease_end_ns,
                             int64_t pulls) {
  const auto found = items_.find(reserved);
  PARVL_CHECK(found != items_.end() && found->second.state == State::kReserved, "publish of what is not reserved");
  found->second.state = State::kPublished;
  found->second.lease_end_ns = lease_end_ns;
  found->second.pulls_left = pulls;
  ++counts_.published_items;
  counts_.published_bytes += content->payload_bytes;
  found->second.content = std::move(content);
}

void TransferLedger::set_dropped(Item& item, int64_t now_ns) {
  item.state = State::kDropped;
  item.dropped_ns = now_ns;
}

TransferLedger::Items::iterator TransferLedger::free_if_done(Items::iterator at) {
  if (at->second.state != State::kDropped || !at->second.holds.empty()) return std::next(at);
  free_memory(at->second);
  return items_.erase(at);
}

bool TransferLedger::drop(TransferId item, int64_t now_ns) {
  const auto found = items_.find(item);
  if (found == items_.end() || found->second.state != State::kPublished) return false;
  set_dropped(found->second, now_ns);
  free_if_done(found);
  return true;
}

absl::Status TransferLedger::admit(ReaderId id, const TransferReader& reader) {
  const auto fenced = fenced_.find(reader.name);
  if (fenced != fenced_.end() && reader.epoch <= fenced->second) {
    return absl::FailedPreconditionError(absl::StrCat("the reader ", reader.name, " was fenced in its epoch ",
                                                      fenced->second, "; this is epoch ", reader.epoch));
  }
  static_cast<TransferReader&>(readers_[id]) = reader;
  return absl::OkStatus();
}

absl::StatusOr<TransferLedger::Hold> TransferLedger::acquire(ReaderId reader, TransferId item, int64_t now_ns) {
  const auto who = readers_.find(reader);
  if (who == readers_.end() || who->second.cut_off) {
    ++counts_.stale;
    return absl::FailedPreconditionError("this reader was cut off from the source");
  }
  const auto found = items_.find(item);
  if (found == items_.end() || found->second.state != State::kPublished || found->second.lease_end_ns <= now_ns) {
    ++counts_.missing;
    return absl::NotFoundError(absl::StrCat("item ", item.value, " was dropped, or its lease is over"));
  }
  if (who->second.holds >= limits_.holds_per_reader) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the reader has not let go of ", who->second.holds, " items; the limit is that"));
  }
  ++who->second.holds;
  ++found->second.holds[reader];
  LaneCounters& lane = who->second.lane == TransferLane::kTcp ? counts_.tcp : counts_.shared_memory;
  ++lane.items;
  if (who->second.lane == TransferLane::kSharedMemory) lane.bytes += found->second.content->payload_bytes;
  return Hold{found->second.memory, found->second.content};
}

bool TransferLedger::release(ReaderId reader, TransferId item, bool good, int64_t now_ns) {
  const auto found = items_.find(item);
  if (found == items_.end()) return false;
  Item& it = found->second;
  const auto hold = it.holds.find(reader);
  if (hold == it.holds.end()) return false;
  if (--hold->second == 0) it.holds.erase(hold);
  --readers_.at(reader).holds;
  if (good && it.state == State::kPublished && it.pulls_left > 0 && --it.pulls_left == 0) set_dropped(it, now_ns);
  free_if_done(found);
  return true;
}

void TransferLedger::leave(ReaderId reader) {
  if (readers_.erase(reader) == 0) return;
  for (auto at = items_.begin(); at != items_.end();) {
    at = at->second.holds.erase(reader) > 0 ? free_if_done(at) : std::next(at);
  }
}

void TransferLedger::cut_off(ReaderId reader) {
  const auto who = readers_.find(reader);
  if (who == readers_.end() || who->second.cut_off) return;
  who->second.cut_off = true;
  if (who->second.lane == TransferLane::kTcp) return;  // what it has are copies; the sender leaves when it has stopped
  who->second.holds = 0;
  for (auto at = items_.begin(); at != items_.end();) {
    const bool had_it = at->second.holds.erase(reader) > 0;
    at->second.given_up |= had_it;
    at = had_it ? free_if_done(at) : std::next(at);
  }
}

std::vector<ReaderId> TransferLedger::fence(const std::string& name, int64_t epoch) {
  const auto [at, is_new] = fenced_.emplace(name, epoch);
  at->second = std::max(at->second, epoch);
  std::vector<ReaderId> out;
  for (const auto& [id, reader] : readers_) {
    if (reader.name == name && reader.epoch <= epoch && !reader.cut_off) out.push_back(id);
  }
  for (const ReaderId id : out) cut_off(id);
  counts_.fenced += static_cast<int64_t>(out.size());
  return out;
}

bool TransferLedger::is_overdue(const Item& item, int64_t now_ns, int64_t patience_ns) const {
  return item.state == State::kDropped && patience_ns > 0 && now_ns - item.dropped_ns >= patience_ns;
}

std::vector<ReaderId> TransferLedger::expire(int64_t now_ns, int64_t patience_ns) {
  std::vector<ReaderId> overdue;
  for (auto at = items_.begin(); at != items_.end();) {
    Item& item = at->second;
    if (item.state == State::kPublished && item.lease_end_ns <= now_ns) {
      set_dropped(item, now_ns);
      ++counts_.expired_items;
    }
    if (is_overdue(item, now_ns, patience_ns)) {
      for (const auto& [reader, count] : item.holds) overdue.push_back(reader);
    }
    at = free_if_done(at);
  }
  std::sort(overdue.begin(), overdue.end());
  overdue.erase(std::unique(overdue.begin(), overdue.end()), overdue.end());
  for (const ReaderId id : overdue) cut_off(id);
  counts_.fenced += static_cast<int64_t>(overdue.size());
  return overdue;
}

int64_t TransferLedger::next_expiry_ns(int64_t patience_ns) const {
  int64_t out = kNever;
  for (const auto& [id, item] : items_) {
    if (item.state == State::kPublished) out = std::min(out, item.lease_end_ns);
    if (item.state == State::kDropped && patience_ns > 0) out = std::min(out, item.dropped_ns + patience_ns);
  }
  return out;
}

TransferSourceCounters TransferLedger::counters() const {
  TransferSourceCounters out = counts_;
  out.items = static_cast<int64_t>(items_.size());
  out.used_bytes = used_bytes_;
  out.free_bytes = free_bytes_;
  for (const auto& [id, item] : items_) {
    if (item.state == State::kDropped) out.quarantined_bytes += item.memory.memory->bytes();
  }
  return out;
}

}  // namespace parvl
