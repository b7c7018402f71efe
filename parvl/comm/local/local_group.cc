#include "parvl/comm/local/local_group.h"

#include <absl/strings/str_join.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/comm/local/local_store.h"
#include "parvl/comm/local/local_sum.h"

namespace parvl {
namespace {

enum class Kind { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kAllToAll, kBarrier };
constexpr const char* kKindNames[] = {"all_reduce", "all_gather", "reduce_scatter",
                                      "broadcast",  "all_to_all", "barrier"};

// What a rank called.
struct Call {
  Kind kind = Kind::kBarrier;
  ConstBuffer in;
  Buffer out;
  ReduceOp op = ReduceOp::kSum;
  int64_t root = 0;
  std::vector<int64_t> in_counts, out_counts;

  std::string text() const {
    if (kind == Kind::kBarrier) return kKindNames[static_cast<size_t>(kind)];
    return absl::StrCat(kKindNames[static_cast<size_t>(kind)], " of ", in.count, " ", to_string(in.dtype),
                        kind == Kind::kBroadcast ? absl::StrCat(" from rank ", root) : "");
  }
  bool fits(const Call& other) const {
    const bool same_size = kind == Kind::kAllToAll || in.count == other.in.count;
    return kind == other.kind && in.dtype == other.in.dtype && same_size && op == other.op && root == other.root;
  }
};

// A collective call of all ranks, or a message of two.
struct Rendezvous {
  virtual ~Rendezvous() = default;
  bool done = false;
  absl::Status status;
};

struct Collective : Rendezvous {
  std::vector<std::optional<Call>> calls;  // by rank
  size_t arrived = 0;
};

struct Message : Rendezvous {
  std::optional<ConstBuffer> from;
  std::optional<Buffer> to;
};

char* bytes(const Buffer& buffer, int64_t value) {
  return static_cast<char*>(buffer.data) + value * dtype_bytes(buffer.dtype);
}
const char* bytes(const ConstBuffer& buffer, int64_t value) {
  return static_cast<const char*>(buffer.data) + value * dtype_bytes(buffer.dtype);
}
void copy(const ConstBuffer& from, int64_t first, const Buffer& to, int64_t at, int64_t count) {
  // memmove: an all_gather in place.
  if (count > 0) std::memmove(bytes(to, at), bytes(from, first), static_cast<size_t>(count * dtype_bytes(to.dtype)));
}

// Carries out what all ranks have called.
void run(const std::vector<std::optional<Call>>& calls) {
  const size_t ranks = calls.size();
  const Call& first = *calls[0];
  std::vector<const void*> inputs;
  for (const auto& call : calls) inputs.push_back(call->in.data);
  switch (first.kind) {
    case Kind::kAllReduce: {
      const local::Reduced reduced(inputs, 0, first.in.count, first.in.dtype, first.op);
      for (const auto& call : calls) reduced.put(call->out.data);
      break;
    }
    case Kind::kReduceScatter: {
      // All are made before one is written: an output may lie in an input.
      std::vector<local::Reduced> parts;
      for (size_t r = 0; r < ranks; ++r) {
        const int64_t count = calls[r]->out.count;
        parts.emplace_back(inputs, static_cast<int64_t>(r) * count, count, first.in.dtype, ReduceOp::kSum);
      }
      for (size_t r = 0; r < ranks; ++r) parts[r].put(calls[r]->out.data);
      break;
    }
    case Kind::kAllGather:
      for (const auto& to : calls) {
        for (size_t r = 0; r < ranks; ++r) {
          copy(calls[r]->in, 0, to->out, static_cast<int64_t>(r) * first.in.count, first.in.count);
        }
      }
      break;
    case Kind::kBroadcast: {
      const Call& root = *calls[static_cast<size_t>(first.root)];
      for (const auto& call : calls) copy(root.in, 0, call->out, 0, first.in.count);
      break;
    }
    case Kind::kAllToAll:
      for (size_t to = 0; to < ranks; ++to) {
        int64_t at = 0;
        for (size_t from = 0; from < ranks; ++from) {
          const Call& source = *calls[from];
          int64_t begin = 0;
          for (size_t r = 0; r < to; ++r) begin += source.in_counts[r];
          copy(source.in, begin, calls[to]->out, at, source.in_counts[to]);
          at += source.in_counts[to];
        }
      }
      break;
    case Kind::kBarrier:
      break;
  }
}

// Counts of an all_to_all that do not fit each other.
std::string unequal_counts(const std::vector<std::optional<Call>>& calls) {
  for (size_t from = 0; from < calls.size(); ++from) {
    for (size_t to = 0; to < calls.size(); ++to) {
      const int64_t sent = calls[from]->in_counts[to], awaited = calls[to]->out_counts[from];
      if (sent == awaited) continue;
      return absl::StrCat("rank ", from, " sends ", sent, " values to rank ", to, ", which awaits ", awaited);
    }
  }
  return "";
}

class Shared {
 public:
  Shared(GroupSpec group, double deadline_s)
      : group(std::move(group)), size(static_cast<int64_t>(this->group.ranks.size())), deadline_s_(deadline_s) {}

  // After an abort others may have given up their buffers: nothing is carried out any more.
  std::shared_ptr<Rendezvous> join(int64_t rank, int64_t sequence, Call call) {
    std::lock_guard lock(mutex_);
    if (!aborted_.empty()) return std::make_shared<Collective>();
    std::shared_ptr<Collective>& slot = collectives_[sequence];
    if (slot == nullptr) {
      slot = std::make_shared<Collective>();
      slot->calls.resize(static_cast<size_t>(size));
    }
    const std::shared_ptr<Collective> collective = slot;
    collective->calls[static_cast<size_t>(rank)] = std::move(call);
    if (++collective->arrived == collective->calls.size()) {
      collective->status = check(*collective, sequence);
      if (collective->status.ok()) run(collective->calls);
      collective->done = true;
      collectives_.erase(sequence);
      changed_.notify_all();
    }
    return collective;
  }

  // One side of the next message from one rank to another.
  std::shared_ptr<Rendezvous> meet(int64_t from, int64_t to, std::optional<ConstBuffer> source,
                                   std::optional<Buffer> target) {
    std::lock_guard lock(mutex_);
    if (!aborted_.empty()) return std::make_shared<Message>();
    auto& queue = messages_[{from, to}];
    // The first message in the queue that lacks this side.
    auto found = std::find_if(queue.begin(), queue.end(), [&](const auto& m) {
      return source.has_value() ? !m->from.has_value() : !m->to.has_value();
    });
    if (found == queue.end()) found = queue.insert(queue.end(), std::make_shared<Message>());
    const std::shared_ptr<Message> message = *found;
    if (source.has_value()) message->from = source;
    if (target.has_value()) message->to = target;
    if (message->from.has_value() && message->to.has_value()) {
      if (message->from->count != message->to->count || message->from->dtype != message->to->dtype) {
        message->status = invalid("group ", group.name, ": rank ", from, " sends ", message->from->count, " ",
                                  to_string(message->from->dtype), " to rank ", to, ", which awaits ",
                                  message->to->count, " ", to_string(message->to->dtype));
      } else {
        copy(*message->from, 0, *message->to, 0, message->to->count);
      }
      message->done = true;
      queue.erase(found);
      changed_.notify_all();
    }
    return message;
  }

  absl::Status wait(const Rendezvous& call, const std::string& what) {
    std::unique_lock lock(mutex_);
    const auto over = [&] { return call.done || !aborted_.empty(); };
    if (!changed_.wait_for(lock, std::chrono::duration<double>(deadline_s_), over)) {
      aborted_ =
          absl::StrCat("group ", group.name, ": ", what, " was not done within ", deadline_s_, " s", missing(call));
      changed_.notify_all();
      return absl::DeadlineExceededError(aborted_);
    }
    // A copy for each thread: the counter of those that share one is inside a library that ThreadSanitizer does not
    // see.
    return call.done ? absl::Status(call.status.code(), call.status.message()) : absl::AbortedError(aborted_);
  }

  void abort(const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = absl::StrCat("group ", group.name, " was ended: ", reason);
    changed_.notify_all();
  }

  const GroupSpec group;
  const int64_t size;

 private:
  absl::Status check(const Collective& collective, int64_t sequence) const {
    const Call& first = *collective.calls[0];
    for (size_t r = 1; r < collective.calls.size(); ++r) {
      const Call& other = *collective.calls[r];
      if (other.fits(first)) continue;
      return invalid("group ", group.name, ", call ", sequence, ": rank 0 called ", first.text(), ", rank ", r, " ",
                     other.text());
    }
    if (first.kind != Kind::kAllToAll) return absl::OkStatus();
    const std::string unequal = unequal_counts(collective.calls);
    return unequal.empty() ? absl::OkStatus()
                           : invalid("group ", group.name, ", call ", sequence, ": all_to_all: ", unequal);
  }

  // Which ranks have not joined.
  static std::string missing(const Rendezvous& call) {
    const auto* collective = dynamic_cast<const Collective*>(&call);
    if (collective == nullptr) return "";
    std::vector<size_t> ranks;
    for (size_t r = 0; r < collective->calls.size(); ++r) {
      if (!collective->calls[r].has_value()) ranks.push_back(r);
    }
    return absl::StrCat("; missing: rank ", absl::StrJoin(ranks, ", "));
  }

  const double deadline_s_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::shared_ptr<Collective>> collectives_;  // under way, by their place in the order of calls
  std::map<std::pair<int64_t, int64_t>, std::deque<std::shared_ptr<Message>>> messages_;  // likewise
  std::string aborted_;
};

class LocalWork : public Work {
 public:
  LocalWork(std::shared_ptr<Shared> shared, std::shared_ptr<Rendezvous> call, std::string what)
      : shared_(std::move(shared)), call_(std::move(call)), what_(std::move(what)) {}
  ~LocalWork() override {
    if (!waited_) shared_->abort(what_ + " was abandoned");  // its buffers may be gone
  }
  absl::Status wait() override {
    waited_ = true;
    return shared_->wait(*call_, what_);
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Rendezvous> call_;
  std::string what_;
  bool waited_ = false;
};

class LocalGroup : public ProcessGroup {
 public:
  LocalGroup(std::shared_ptr<Shared> shared, int64_t rank) : shared_(std::move(shared)), rank_(rank) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return shared_->size; }
  const std::string& name() const override { return shared_->group.name; }

  std::unique_ptr<Work> all_reduce(Buffer values, ReduceOp op) override {
    return join({.kind = Kind::kAllReduce, .in = values, .out = values, .op = op});
  }
  std::unique_ptr<Work> all_gather(ConstBuffer in, Buffer out) override {
    PARVL_CHECK(out.count == in.count * size() && in.dtype == out.dtype, "all_gather: out does not fit in");
    return join({.kind = Kind::kAllGather, .in = in, .out = out});
  }
  std::unique_ptr<Work> reduce_scatter(ConstBuffer in, Buffer out) override {
    PARVL_CHECK(in.count == out.count * size() && in.dtype == out.dtype, "reduce_scatter: in does not fit out");
    return join({.kind = Kind::kReduceScatter, .in = in, .out = out});
  }
  std::unique_ptr<Work> broadcast(Buffer values, int64_t root) override {
    return join({.kind = Kind::kBroadcast, .in = values, .out = values, .root = root});
  }
  std::unique_ptr<Work> all_to_all(ConstBuffer in, absl::Span<const int64_t> in_counts, Buffer out,
                                   absl::Span<const int64_t> out_counts) override {
    return join({.kind = Kind::kAllToAll,
                 .in = in,
                 .out = out,
                 .in_counts = {in_counts.begin(), in_counts.end()},
                 .out_counts = {out_counts.begin(), out_counts.end()}});
  }
  std::unique_ptr<Work> send(ConstBuffer values, int64_t to) override {
    return std::make_unique<LocalWork>(shared_, shared_->meet(rank_, to, values, std::nullopt),
                                       absl::StrCat("a message from rank ", rank_, " to rank ", to));
  }
  std::unique_ptr<Work> receive(Buffer values, int64_t from) override {
    return std::make_unique<LocalWork>(shared_, shared_->meet(from, rank_, std::nullopt, values),
                                       absl::StrCat("a message from rank ", from, " to rank ", rank_));
  }
  std::unique_ptr<Work> barrier() override { return join({}); }
  void abort(const std::string& reason) override { shared_->abort(reason); }

 private:
  std::unique_ptr<Work> join(Call call) {
    std::string what = absl::StrCat("call ", next_, " (", call.text(), ") of rank ", rank_);
    return std::make_unique<LocalWork>(shared_, shared_->join(rank_, next_++, std::move(call)), std::move(what));
  }

  std::shared_ptr<Shared> shared_;
  const int64_t rank_;
  int64_t next_ = 0;  // the place of the next collective in the order of calls
};

// The groups of one world, each made by the first rank that joins it.
struct World {
  int64_t size = 0;
  LocalOptions options;
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Shared>> groups;
  std::map<int64_t, std::shared_ptr<LocalStoreState>> stores;  // by the order in which each rank makes them
};

class LocalCommunicator : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<World> world, int64_t rank) : world_(std::move(world)), rank_(rank) {}

  int64_t rank() const override { return rank_; }
  int64_t world() const override { return world_->size; }

  absl::StatusOr<std::unique_ptr<ProcessGroup>> join(const GroupSpec& group) override {
    const auto me = std::find(group.ranks.begin(), group.ranks.end(), rank_);
    PARVL_CHECK(me != group.ranks.end(), "a rank joins a group that it is not in");
    std::lock_guard lock(world_->mutex);
    std::shared_ptr<Shared>& shared = world_->groups[group.name];
    if (shared == nullptr) shared = std::make_shared<Shared>(group, world_->options.deadline_s);
    if (shared->group.ranks != group.ranks) {
      return invalid("group ", group.name, ": rank ", rank_, " says it has the ranks ",
                     absl::StrJoin(group.ranks, ", "), ", another says ", absl::StrJoin(shared->group.ranks, ", "));
    }
    return std::make_unique<LocalGroup>(shared, me - group.ranks.begin());
  }
  std::unique_ptr<Store> make_store() override {
    std::lock_guard lock(world_->mutex);
    std::shared_ptr<LocalStoreState>& state = world_->stores[stores_made_++];
    if (state == nullptr) state = make_local_store_state();
    return make_local_store(state);
  }

 private:
  std::shared_ptr<World> world_;
  const int64_t rank_;
  int64_t stores_made_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_local_communicators(int64_t world, const LocalOptions& options) {
  const auto shared = std::make_shared<World>();
  shared->size = world;
  shared->options = options;
  std::vector<std::unique_ptr<Communicator>> out;
  for (int64_t rank = 0; rank < world; ++rank) out.push_back(std::make_unique<LocalCommunicator>(shared, rank));
  return out;
}

void run_local_world(int64_t world, const LocalOptions& options, const std::function<void(Communicator&)>& body) {
  const auto ranks = make_local_communicators(world, options);
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) threads.emplace_back([&body, &rank] { body(*rank); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace parvl
