// Groups around the groups of a communicator, for tests that watch what its rank calls.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "parvl/comm/communicator.h"

namespace parvl {

// Calls the inner group's.
class GroupAround : public ProcessGroup {
 public:
  explicit GroupAround(std::unique_ptr<ProcessGroup> inner) : inner_(std::move(inner)) {}

  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  std::unique_ptr<Work> all_reduce(Buffer values, ReduceOp op) override { return inner_->all_reduce(values, op); }
  std::unique_ptr<Work> all_gather(ConstBuffer in, Buffer out) override { return inner_->all_gather(in, out); }
  std::unique_ptr<Work> reduce_scatter(ConstBuffer in, Buffer out) override { return inner_->reduce_scatter(in, out); }
  std::unique_ptr<Work> broadcast(Buffer values, int64_t root) override { return inner_->broadcast(values, root); }
  std::unique_ptr<Work> all_to_all(ConstBuffer in, absl::Span<const int64_t> in_counts, Buffer out,
                                   absl::Span<const int64_t> out_counts) override {
    return inner_->all_to_all(in, in_counts, out, out_counts);
  }
  std::unique_ptr<Work> send(ConstBuffer values, int64_t to) override { return inner_->send(values, to); }
  std::unique_ptr<Work> receive(Buffer values, int64_t from) override { return inner_->receive(values, from); }
  std::unique_ptr<Work> barrier() override { return inner_->barrier(); }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  std::unique_ptr<ProcessGroup> inner_;
};

// A call that ends with `then`, when it was right.
inline std::unique_ptr<Work> work_then(std::unique_ptr<Work> inner, std::function<void()> then) {
  class WorkThen : public Work {
   public:
    WorkThen(std::unique_ptr<Work> inner, std::function<void()> then)
        : inner_(std::move(inner)), then_(std::move(then)) {}
    absl::Status wait() override {
      PARVL_RETURN_IF_ERROR(inner_->wait());
      then_();
      return absl::OkStatus();
    }

   private:
    std::unique_ptr<Work> inner_;
    std::function<void()> then_;
  };
  return std::make_unique<WorkThen>(std::move(inner), std::move(then));
}

using AroundGroup = std::function<std::unique_ptr<ProcessGroup>(std::unique_ptr<ProcessGroup>)>;

// A communicator with `around` each of its groups.
inline std::unique_ptr<Communicator> around_groups(std::unique_ptr<Communicator> inner, AroundGroup around) {
  class Around : public Communicator {
   public:
    Around(std::unique_ptr<Communicator> inner, AroundGroup around)
        : inner_(std::move(inner)), around_(std::move(around)) {}
    int64_t rank() const override { return inner_->rank(); }
    int64_t world() const override { return inner_->world(); }
    absl::StatusOr<std::unique_ptr<ProcessGroup>> join(const GroupSpec& group) override {
      PARVL_ASSIGN_OR_RETURN(std::unique_ptr<ProcessGroup> out, inner_->join(group));
      return around_(std::move(out));
    }
    std::unique_ptr<Store> make_store() override { return inner_->make_store(); }

   private:
    std::unique_ptr<Communicator> inner_;
    AroundGroup around_;
  };
  return std::make_unique<Around>(std::move(inner), std::move(around));
}

}  // namespace parvl
