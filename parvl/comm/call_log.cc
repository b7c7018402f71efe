#include "parvl/comm/call_log.h"

#include <algorithm>

#include "parvl/base/check.h"
#include "parvl/base/hash.h"

namespace parvl {
namespace {

constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                  "all_to_all", "barrier",    "send",           "receive"};

uint64_t word(int64_t value) { return static_cast<uint64_t>(value); }

uint64_t fingerprint(const CallRecord& call) {
  const uint64_t kinds = word(static_cast<int64_t>(call.kind)) << 32 | word(static_cast<int64_t>(call.dtype)) << 16 |
                         word(static_cast<int64_t>(call.reduce));
  const uint64_t sizes = mix64(call.kind == CallKind::kAllToAll ? 0 : word(call.count), word(call.peer));
  return mix64(mix64(kinds, sizes), hash64(call.site));
}

}  // namespace

std::string CallRecord::text() const {
  std::string out = kNames[static_cast<size_t>(kind)];
  if (kind == CallKind::kAllReduce) out += reduce == ReduceOp::kSum ? " (sum)" : " (max)";
  if (kind != CallKind::kBarrier) absl::StrAppend(&out, " of ", count, " ", to_string(dtype));
  if (kind == CallKind::kBroadcast || kind == CallKind::kReceive) absl::StrAppend(&out, " from rank ", peer);
  if (kind == CallKind::kSend) absl::StrAppend(&out, " to rank ", peer);
  if (!site.empty()) absl::StrAppend(&out, " at ", site);
  return out;
}

std::string CallRecord::name() const { return absl::StrCat(is_message() ? "message " : "call ", index); }

bool same_call(const CallRecord& a, const CallRecord& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.reduce == b.reduce && a.peer == b.peer && a.site == b.site &&
         (a.kind == CallKind::kAllToAll || a.count == b.count);
}

CallLog::CallLog(GroupSpec group, int64_t me, size_t remembered)
    : group_(std::move(group)), me_(me), remembered_(std::max<size_t>(remembered, 1)) {
  id_ = hash64(group_.name);
  hash_ = hash64_bytes(group_.ranks.data(), group_.ranks.size() * sizeof(int64_t));
  sent_.resize(group_.ranks.size());
  received_.resize(group_.ranks.size());
  // The members' weights add up to 0, so equal hashes vanish in the sum; all but the last are odd.
  for (size_t i = 0; i < group_.ranks.size(); ++i) {
    const bool last = i + 1 == group_.ranks.size();
    const uint64_t weight = mix64(id_, i) | 1;
    if (group_.ranks[i] == me_ && !last) weight_ = weight;
    if (group_.ranks.back() == me_ && !last) weight_ -= weight;
  }
}

size_t CallLog::member(int64_t rank) const {
  const auto found = std::find(group_.ranks.begin(), group_.ranks.end(), rank);
  PARVL_CHECK(found != group_.ranks.end(), "a message to a rank outside of the group");
  return static_cast<size_t>(found - group_.ranks.begin());
}

uint64_t CallLog::message_word(int64_t from, int64_t to, int64_t index, uint64_t what) const {
  return mix64(mix64(mix64(id_, word(from)), word(to)), mix64(word(index), what));
}

// A message's place in the code is each side's own.
void CallLog::count_message(CallRecord& record) {
  const bool sends = record.kind == CallKind::kSend;
  record.index = (sends ? sent_ : received_)[member(record.peer)]++;
  const uint64_t what = mix64(word(record.count), word(static_cast<int64_t>(record.dtype)));
  const uint64_t added =
      sends ? message_word(me_, record.peer, record.index, what) : message_word(record.peer, me_, record.index, what);
  messages_ += sends ? added : -added;
}

// The parts of an all_to_all are like messages. 2^62: no message has such a place.
void CallLog::count_parts(const CallRecord& record) {
  constexpr int64_t kParts = int64_t{1} << 62;
  for (size_t i = 0; i < group_.ranks.size(); ++i) {
    const int64_t peer = group_.ranks[i];
    messages_ += message_word(me_, peer, kParts + record.index, word(record.sent[i]));
    messages_ -= message_word(peer, me_, kParts + record.index, word(record.awaited[i]));
  }
}

int64_t CallLog::begin(const Call& call, std::string_view site, int64_t now_ns) {
  const size_t slot = static_cast<size_t>(calls_) % remembered_;
  if (slot == ring_.size()) ring_.emplace_back();
  CallRecord& record = ring_[slot];
  static_cast<Call&>(record) = call;
  record.site.assign(site);
  record.begun_ns = now_ns;
  record.ended_ns = -1;
  record.before = hash_;
  if (call.is_message()) {
    count_message(record);
  } else {
    record.index = collectives_++;
    hash_ = mix64(hash_, fingerprint(record));
    if (call.kind == CallKind::kAllToAll) count_parts(record);
  }
  return calls_++;
}

void CallLog::end(int64_t number, int64_t now_ns) {
  if (number + static_cast<int64_t>(remembered_) < calls_) return;  // forgotten
  ring_[static_cast<size_t>(number) % remembered_].ended_ns = now_ns;
}

const CallRecord* CallLog::find(int64_t number) const {
  if (number >= calls_ || number + static_cast<int64_t>(remembered_) < calls_) return nullptr;
  return &ring_[static_cast<size_t>(number) % remembered_];
}

std::vector<CallRecord> CallLog::tail(size_t most) const {
  std::vector<CallRecord> out;
  const int64_t count = static_cast<int64_t>(std::min(most, ring_.size()));
  for (int64_t number = calls_ - count; number < calls_; ++number) out.push_back(*find(number));
  return out;
}

}  // namespace parvl
