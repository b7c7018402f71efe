#include "parvl/comm/checked_group.h"

#include <utility>

#include "parvl/comm/call_judge.h"
#include "parvl/comm/comm_site.h"

namespace parvl {
namespace {

constexpr double kSlice_s = 0.05;           // between two looks whether the groups have ended
constexpr double kExchange_s = 5;           // for the others' logs, once all know that calls differ
constexpr int64_t kComparedTogether = 256;  // calls of a group under way in a full check

// Records of calls, told to the other members before their result is waited for.
class FullCheck {
 public:
  FullCheck(Store& store, CallWatch& watch, GroupSpec group, int64_t me)
      : store_(store), watch_(watch), group_(std::move(group)), me_(me) {}

  absl::Status tell(const CallRecord& call) {
    const std::string mine = key(call, me_);
    PARVL_RETURN_IF_ERROR(store_.set(mine, to_text(alone(me_, call))));
    CallRecord old = call;
    old.index -= kComparedTogether;
    return old.index < 0 ? absl::OkStatus() : store_.erase(key(old, me_));
  }

  // Waits for the others to tell theirs. A sender does not wait for the receiver.
  absl::Status compare(const CallRecord& call) {
    RankReports reports = {{me_, alone(me_, call)}};
    for (const int64_t rank : group_.ranks) {
      if (rank == me_ || call.kind == CallKind::kSend || (call.is_message() && rank != call.peer)) continue;
      absl::StatusOr<std::string> text = absl::DeadlineExceededError("");
      while (absl::IsDeadlineExceeded(text.status())) {
        PARVL_RETURN_IF_ERROR(watch_.ended());
        text = store_.get(key(call, rank), kSlice_s);
      }
      PARVL_RETURN_IF_ERROR(text.status());
      PARVL_ASSIGN_OR_RETURN(reports[rank], parse_report(*text));
    }
    return find_mismatch(reports);
  }

 private:
  std::string key(const CallRecord& call, int64_t rank) const {
    if (!call.is_message()) return absl::StrCat(group_.name, "/", call.index, "/", rank);
    const bool sends = call.kind == CallKind::kSend;
    const int64_t from = sends ? me_ : call.peer, to = sends ? call.peer : me_;
    return absl::StrCat(group_.name, "/", from, ">", to, "/", call.index, "/", rank);
  }
  RankReport alone(int64_t rank, const CallRecord& call) const {
    RankReport out;
    out.rank = rank;
    out.groups.push_back({.group = group_, .calls = {call}});
    return out;
  }

  Store& store_;
  CallWatch& watch_;
  const GroupSpec group_;
  const int64_t me_;
};

class FailedWork : public Work {
 public:
  explicit FailedWork(absl::Status status) : status_(std::move(status)) {}
  absl::Status wait() override { return status_; }

 private:
  absl::Status status_;
};

class CheckedGroup : public ProcessGroup {
 public:
  CheckedGroup(std::unique_ptr<ProcessGroup> inner, GroupSpec group, CallWatch& watch, Store* full_check)
      : inner_(std::move(inner)), ranks_(group.ranks), watch_(watch) {
    const int64_t me = ranks_[static_cast<size_t>(inner_->rank())];
    if (full_check != nullptr) full_check_ = std::make_unique<FullCheck>(*full_check, watch, group, me);
    id_ = watch_.add(group, [this](const std::string& reason) { inner_->abort(reason); });
  }
  ~CheckedGroup() override { watch_.remove(id_); }

  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }

  std::unique_ptr<Work> all_reduce(Buffer values, ReduceOp op) override {
    return make({.kind = CallKind::kAllReduce, .dtype = values.dtype, .reduce = op, .count = values.count},
                [&] { return inner_->all_reduce(values, op); });
  }
  std::unique_ptr<Work> all_gather(ConstBuffer in, Buffer out) override {
    return make({.kind = CallKind::kAllGather, .dtype = in.dtype, .count = in.count},
                [&] { return inner_->all_gather(in, out); });
  }
  std::unique_ptr<Work> reduce_scatter(ConstBuffer in, Buffer out) override {
    return make({.kind = CallKind::kReduceScatter, .dtype = in.dtype, .count = in.count},
                [&] { return inner_->reduce_scatter(in, out); });
  }
  std::unique_ptr<Work> broadcast(Buffer values, int64_t root) override {
    const int64_t world_root = ranks_[static_cast<size_t>(root)];
    return make({.kind = CallKind::kBroadcast, .dtype = values.dtype, .count = values.count, .peer = world_root},
                [&] { return inner_->broadcast(values, root); });
  }
  std::unique_ptr<Work> all_to_all(ConstBuffer in, absl::Span<const int64_t> in_counts, Buffer out,
                                   absl::Span<const int64_t> out_counts) override {
    return make({.kind = CallKind::kAllToAll,
                 .dtype = in.dtype,
                 .count = in.count,
                 .sent = {in_counts.begin(), in_counts.end()},
                 .awaited = {out_counts.begin(), out_counts.end()}},
                [&] { return inner_->all_to_all(in, in_counts, out, out_counts); });
  }
  std::unique_ptr<Work> send(ConstBuffer values, int64_t to) override {
    const int64_t peer = ranks_[static_cast<size_t>(to)];
    return make({.kind = CallKind::kSend, .dtype = values.dtype, .count = values.count, .peer = peer},
                [&] { return inner_->send(values, to); });
  }
  std::unique_ptr<Work> receive(Buffer values, int64_t from) override {
    const int64_t peer = ranks_[static_cast<size_t>(from)];
    return make({.kind = CallKind::kReceive, .dtype = values.dtype, .count = values.count, .peer = peer},
                [&] { return inner_->receive(values, from); });
  }
  std::unique_ptr<Work> barrier() override {
    return make({.kind = CallKind::kBarrier}, [&] { return inner_->barrier(); });
  }
  void abort(const std::string& reason) override {
    watch_.abort(absl::AbortedError(absl::StrCat("group ", name(), " was ended: ", reason)));
  }

  absl::Status wait(int64_t number, Work& work) {
    watch_.wait_begins(id_, number);
    absl::Status status;
    if (full_check_ != nullptr) {
      status = full_check_->compare(watch_.record(id_, number));
      if (absl::IsInvalidArgument(status)) status = watch_.find(status);
    }
    if (status.ok()) status = work.wait();
    watch_.end(id_, number);
    return status.ok() ? status : watch_.explain(status);
  }

 private:
  class CheckedWork : public Work {
   public:
    CheckedWork(CheckedGroup& group, int64_t number, std::unique_ptr<Work> inner)
        : group_(group), number_(number), inner_(std::move(inner)) {}
    absl::Status wait() override { return group_.wait(number_, *inner_); }

   private:
    CheckedGroup& group_;
    const int64_t number_;
    std::unique_ptr<Work> inner_;
  };

  template <typename Start>
  std::unique_ptr<Work> make(const Call& call, const Start& start) {
    const absl::StatusOr<int64_t> number = watch_.begin(id_, call);
    if (!number.ok()) return std::make_unique<FailedWork>(number.status());
    if (full_check_ != nullptr) {
      const absl::Status told = full_check_->tell(watch_.record(id_, *number));
      if (!told.ok()) return std::make_unique<FailedWork>(told);
    }
    return std::make_unique<CheckedWork>(*this, *number, start());
  }

  std::unique_ptr<ProcessGroup> inner_;
  const std::vector<int64_t> ranks_;  // of the members, in the world
  CallWatch& watch_;
  std::unique_ptr<FullCheck> full_check_;  // null: off
  size_t id_ = 0;
};

}  // namespace

// All ranks make their stores in this order.
CheckedCommunicator::CheckedCommunicator(Communicator& inner, const CheckOptions& options)
    : inner_(inner),
      options_(options),
      store_(inner.make_store()),
      watch_(inner.rank(), inner.world(), inner.make_store(), options) {}

absl::StatusOr<std::unique_ptr<ProcessGroup>> CheckedCommunicator::join(const GroupSpec& group) {
  PARVL_ASSIGN_OR_RETURN(auto inner, inner_.join(group));
  Store* const full_check = options_.full ? store_.get() : nullptr;
  return std::make_unique<CheckedGroup>(std::move(inner), group, watch_, full_check);
}

absl::Status CheckedCommunicator::compare(ProcessGroup& world) {
  const CommSite site("compare");
  const uint64_t mine = watch_.digest();
  std::vector<uint64_t> all(static_cast<size_t>(world.size()));
  // float64 in name alone: nobody counts with values that are gathered.
  PARVL_RETURN_IF_ERROR(
      world.all_gather({&mine, 1, DType::kFloat64}, {all.data(), world.size(), DType::kFloat64})->wait());
  ++compared_;
  uint64_t sum = 0;
  for (const uint64_t word : all) sum += word;
  if (sum == 0) return absl::OkStatus();
  const auto key = [&](int64_t rank) { return absl::StrCat("compare/", compared_, "/", rank); };
  RankReports reports;
  reports[rank()] = watch_.report(options_.remembered);
  PARVL_RETURN_IF_ERROR(store_->set(key(rank()), to_text(reports[rank()])));
  for (int64_t other = 0; other < inner_.world(); ++other) {
    if (other == rank()) continue;
    const absl::StatusOr<std::string> text = store_->get(key(other), kExchange_s);
    if (!text.ok()) continue;
    PARVL_ASSIGN_OR_RETURN(reports[other], parse_report(*text));
  }
  return watch_.find(find_difference(reports));
}

}  // namespace parvl
