// What a rank has called in a group: hashes of all of it, and the last calls themselves. No threads, no time of its
// own.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "parvl/comm/mesh_plan.h"
#include "parvl/comm/process_group.h"

namespace parvl {

enum class CallKind { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kAllToAll, kBarrier, kSend, kReceive };

struct Call {
  CallKind kind = CallKind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp reduce = ReduceOp::kSum;
  int64_t count = 0;                   // values that go in
  int64_t peer = -1;                   // in the world: the root of a broadcast, the other end of a message
  std::vector<int64_t> sent, awaited;  // of an all_to_all: counts by member of the group

  bool is_message() const { return kind == CallKind::kSend || kind == CallKind::kReceive; }
};

struct CallRecord : Call {
  std::string site;
  // The place among the group's collectives, or among the messages of this pair and direction; from 0.
  int64_t index = 0;
  uint64_t before = 0;  // hash of the group's collectives before it
  int64_t begun_ns = 0;
  int64_t ended_ns = -1;  // -1: under way

  std::string text() const;  // "all_reduce (sum) of 6 float32 at llm_backbone.layers.3"
  std::string name() const;  // "call 5", "message 2 from rank 0 to me"
};

// Whether a collective is the same call as another member's; the counts of an all_to_all are not looked at.
bool same_call(const CallRecord& a, const CallRecord& b);

// Not thread-safe.
class CallLog {
 public:
  // `me`: one of the group's ranks, in the world. The last `remembered` calls are kept.
  CallLog(GroupSpec group, int64_t me, size_t remembered);

  // Gives the call's number, by which to end it; numbers go up by 1 from 0.
  int64_t begin(const Call& call, std::string_view site, int64_t now_ns);
  void end(int64_t number, int64_t now_ns);

  // One word that, summed over all ranks of the world and all their groups (modulo 2^64), gives 0 when in each group
  // all members have made the same collective calls in the same order and every message that was sent was awaited as
  // what it was; else something else, but for chance. Right when no message is under way.
  uint64_t digest() const { return hash_ * weight_ + messages_; }

  const GroupSpec& group() const { return group_; }
  int64_t calls() const { return calls_; }
  int64_t collectives() const { return collectives_; }
  int64_t sent(size_t member) const { return sent_[member]; }
  int64_t received(size_t member) const { return received_[member]; }
  uint64_t hash() const { return hash_; }
  // Null when it is no longer remembered.
  const CallRecord* find(int64_t number) const;
  // At most so many of the last, oldest first.
  std::vector<CallRecord> tail(size_t most) const;

 private:
  size_t member(int64_t rank) const;
  void count_message(CallRecord& record);
  void count_parts(const CallRecord& record);
  uint64_t message_word(int64_t from, int64_t to, int64_t index, uint64_t what) const;

  const GroupSpec group_;
  const int64_t me_;
  uint64_t id_ = 0, weight_ = 0;
  std::vector<CallRecord> ring_;
  const size_t remembered_;
  int64_t calls_ = 0, collectives_ = 0;
  std::vector<int64_t> sent_, received_;  // messages, by member
  uint64_t hash_ = 0;                     // of all collectives
  uint64_t messages_ = 0;                 // a word for each message sent, less one for each awaited
};

}  // namespace parvl
