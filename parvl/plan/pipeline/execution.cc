#include "parvl/plan/pipeline/execution.h"

#include <absl/strings/str_join.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

namespace parvl {
namespace {

class Execution {
 public:
  Execution(const PipelineSchedule& schedule, const ActionSeconds& seconds, Sends sends)
      : schedule_(schedule), seconds_(seconds), rendezvous_(sends == Sends::kRendezvous) {
    ranks_.resize(schedule.ranks.size());
    times_.busy.resize(schedule.ranks.size());
    for (const RankSchedule& rank : schedule.ranks) {
      times_.actions.emplace_back(rank.actions.size());
      done_.emplace_back(rank.actions.size());
      place_.emplace_back(rank.actions.size());
    }
  }

  absl::StatusOr<PipelineTimes> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < ranks_.size(); ++r) {
        while (mismatch_.ok() && step(r)) moved = true;
      }
    }
    PARVL_RETURN_IF_ERROR(mismatch_);
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (!finished(r)) return stuck(r);
      times_.makespan = std::max(times_.makespan, ranks_[r].now);
    }
    for (const auto& [ends, channel] : channels_) {
      if (channel.paired == channel.sends.size()) continue;
      const Post& post = channel.sends[channel.paired];
      return failed(name(post.rank), " waits to ", describe(action(post.rank, post.index)), ", which has finished");
    }
    return std::move(times_);
  }

 private:
  struct Rank {
    size_t next = 0;
    size_t posted = 0;  // actions before this one are posted; ≤ next: none is waited for
    double now = 0;
  };
  struct Post {
    size_t rank = 0, index = 0;
  };
  struct Channel {
    std::vector<Post> sends, receives;
    size_t paired = 0;  // the first so many of both
    double free_at = 0;
  };

  const Action& action(size_t rank, size_t index) const { return schedule_.ranks[rank].actions[index]; }
  bool finished(size_t r) const { return ranks_[r].next == schedule_.ranks[r].actions.size(); }

  bool step(size_t r) {
    Rank& rank = ranks_[r];
    if (finished(r)) return false;
    if (rank.posted > rank.next) return end_of_wait(r);
    const Action& next = action(r, rank.next);
    if (next.is_message() || next.is_collective()) {
      post(r);
      return true;
    }
    const double seconds = seconds_(static_cast<int64_t>(r), next);
    times_.actions[r][rank.next] = {rank.now, rank.now + seconds};
    times_.busy[r] += seconds;
    rank.now += seconds;
    ++rank.next;
    return true;
  }

  void post(size_t r) {
    Rank& rank = ranks_[r];
    const std::vector<Action>& actions = schedule_.ranks[r].actions;
    rank.posted = rank.next + 1;
    while (!rendezvous_ && actions[rank.next].is_message() && rank.posted < actions.size() &&
           actions[rank.posted].is_message()) {
      ++rank.posted;
    }
    for (size_t i = rank.next; i < rank.posted; ++i) {
      times_.actions[r][i] = {rank.now, rank.now};
      if (actions[i].is_collective()) {
        meet(r);
        continue;
      }
      const bool sends = actions[i].kind == ActionKind::kSend;
      const auto peer = static_cast<size_t>(actions[i].peer);
      Channel& channel = channels_[sends ? std::pair(r, peer) : std::pair(peer, r)];
      std::vector<Post>& posts = sends ? channel.sends : channel.receives;
      place_[r][i] = posts.size();
      posts.push_back({r, i});
      deliver(channel);
    }
  }

  // Whether a receive means what a send sends.
  static bool same(const Action& send, const Action& receive) {
    const int64_t to = send.stage + (send.payload == Payload::kOutput ? 1 : -1);
    return send.microbatch == receive.microbatch && send.payload == receive.payload && receive.stage == to;
  }

  void deliver(Channel& channel) {
    if (channel.paired == std::min(channel.sends.size(), channel.receives.size())) return;
    const Post send = channel.sends[channel.paired], receive = channel.receives[channel.paired];
    ++channel.paired;
    const Action &sent = action(send.rank, send.index), &received = action(receive.rank, receive.index);
    if (!same(sent, received)) {
      mismatch_ = failed(name(receive.rank), " is to ", describe(received), ", but ", name(send.rank), " is to ",
                         describe(sent));
      return;
    }
    ActionTime &from = times_.actions[send.rank][send.index], &to = times_.actions[receive.rank][receive.index];
    const double begin = std::max({from.begin, to.begin, channel.free_at});
    channel.free_at = from.end = to.end = begin + seconds_(static_cast<int64_t>(send.rank), sent);
    done_[send.rank][send.index] = done_[receive.rank][receive.index] = true;
  }

  // Whether `member` waits in the collective that `r` waits in.
  bool is_there(size_t member, const Action& here) const {
    const Rank& rank = ranks_[member];
    if (rank.posted <= rank.next || done_[member][rank.next]) return false;  // done: it only has not gone on yet
    const Action& there = action(member, rank.next);
    return there.kind == here.kind && there.payload == here.payload && there.microbatch == here.microbatch;
  }

  void meet(size_t r) {
    const Action& here = action(r, ranks_[r].next);
    const std::vector<int64_t> members = schedule_.members(static_cast<int64_t>(r), here);
    double begin = 0, seconds = 0;
    for (const int64_t member : members) {
      const auto m = static_cast<size_t>(member);
      if (!is_there(m, here)) return;
      begin = std::max(begin, ranks_[m].now);
      seconds = std::max(seconds, seconds_(member, action(m, ranks_[m].next)));
    }
    for (const int64_t member : members) {
      const auto m = static_cast<size_t>(member);
      times_.actions[m][ranks_[m].next].end = begin + seconds;
      done_[m][ranks_[m].next] = true;
    }
  }

  // The post whose end lets a rank go on from an action: of a posted send, the send before it in its channel.
  std::optional<Post> wanted(size_t r, size_t index) const {
    const Action& here = action(r, index);
    if (rendezvous_ || here.kind != ActionKind::kSend) return Post{r, index};
    if (place_[r][index] == 0) return std::nullopt;
    return channels_.at({r, static_cast<size_t>(here.peer)}).sends[place_[r][index] - 1];
  }

  bool waits(size_t r, size_t index) const {
    const std::optional<Post> post = wanted(r, index);
    return post.has_value() && !done_[post->rank][post->index];
  }

  bool end_of_wait(size_t r) {
    Rank& rank = ranks_[r];
    double end = rank.now;
    for (size_t i = rank.next; i < rank.posted; ++i) {
      if (waits(r, i)) return false;
      if (const std::optional<Post> post = wanted(r, i))
        end = std::max(end, times_.actions[post->rank][post->index].end);
    }
    rank.now = end;
    rank.next = rank.posted;
    return true;
  }

  std::string name(size_t r) const {
    const RankSchedule& rank = schedule_.ranks[r];
    if (rank.stage == kEncoderStage) return absl::StrCat("rank ", r, " (encoder ", rank.encoder, ")");
    const std::string replica = schedule_.shape.replicas > 1 ? absl::StrCat("replica ", rank.replica, ", ") : "";
    return absl::StrCat("rank ", r, " (", replica, "stage ", rank.stage, ")");
  }

  // Which action of a stuck rank waits, and for whom.
  std::pair<size_t, size_t> wait_of(size_t r) const {
    size_t index = ranks_[r].next;
    while (!waits(r, index)) ++index;
    const Action& here = action(r, index);
    if (here.is_message()) return {index, static_cast<size_t>(here.peer)};
    for (const int64_t member : schedule_.members(static_cast<int64_t>(r), here)) {
      if (!is_there(static_cast<size_t>(member), here)) return {index, static_cast<size_t>(member)};
    }
    return {index, r};
  }

  absl::Status stuck(size_t r) const {
    std::vector<size_t> path;
    while (!finished(r) && std::find(path.begin(), path.end(), r) == path.end()) {
      path.push_back(r);
      r = wait_of(r).second;
    }
    std::vector<std::string> waits;
    // A circle begins where the path came back to; what led to it waits for it.
    const auto begin = finished(r) ? path.begin() : std::find(path.begin(), path.end(), r);
    for (auto at = begin; at != path.end(); ++at) {
      const auto [index, peer] = wait_of(*at);
      const Action& here = action(*at, index);
      waits.push_back(absl::StrCat(name(*at), " waits to ", describe(here),
                                   here.is_collective() ? absl::StrCat(", for rank ", peer) : ""));
    }
    if (!finished(r)) return failed("a circle of waits: ", absl::StrJoin(waits, "; "));
    return failed(absl::StrJoin(waits, "; "), ", which has finished");
  }

  const PipelineSchedule& schedule_;
  const ActionSeconds& seconds_;
  const bool rendezvous_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<bool>> done_;
  std::vector<std::vector<size_t>> place_;                 // of a message among its channel's
  std::map<std::pair<size_t, size_t>, Channel> channels_;  // from, to
  PipelineTimes times_;
  absl::Status mismatch_;
};

}  // namespace

double PipelineTimes::bubble_share() const {
  if (makespan <= 0 || busy.empty()) return 0;
  return 1 - std::accumulate(busy.begin(), busy.end(), 0.0) / (makespan * static_cast<double>(busy.size()));
}

absl::StatusOr<PipelineTimes> predict(const PipelineSchedule& schedule, const ActionSeconds& seconds, Sends sends) {
  return Execution(schedule, seconds, sends).run();
}

}  // namespace parvl
