// A communicator that counts what its rank calls, for tests of formulas and of what is never sent.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "tests/unit/comm_around.h"

namespace parvl {

struct CallCount {
  int64_t calls = 0, bytes = 0;  // of a gather or scatter the whole tensor
  friend bool operator==(const CallCount&, const CallCount&) = default;
};
// By the group's name and the call's. Of one rank, on its thread.
struct CallCounts {
  std::map<std::pair<std::string, std::string>, CallCount> of;
  int64_t largest = 0;  // values of one buffer
};

class CountingGroup : public GroupAround {
 public:
  CountingGroup(std::unique_ptr<ProcessGroup> inner, CallCounts& counts)
      : GroupAround(std::move(inner)), counts_(counts) {}

  std::unique_ptr<Work> all_reduce(Buffer values, ReduceOp op) override {
    count("all_reduce", values);
    return GroupAround::all_reduce(values, op);
  }
  std::unique_ptr<Work> all_gather(ConstBuffer in, Buffer out) override {
    count("all_gather", out);
    return GroupAround::all_gather(in, out);
  }
  std::unique_ptr<Work> reduce_scatter(ConstBuffer in, Buffer out) override {
    count("reduce_scatter", in);
    return GroupAround::reduce_scatter(in, out);
  }
  std::unique_ptr<Work> broadcast(Buffer values, int64_t root) override {
    count("broadcast", values);
    return GroupAround::broadcast(values, root);
  }
  std::unique_ptr<Work> all_to_all(ConstBuffer in, absl::Span<const int64_t> in_counts, Buffer out,
                                   absl::Span<const int64_t> out_counts) override {
    count("all_to_all", in);
    return GroupAround::all_to_all(in, in_counts, out, out_counts);
  }
  std::unique_ptr<Work> send(ConstBuffer values, int64_t to) override {
    count("send", values);
    return GroupAround::send(values, to);
  }

 private:
  void count(const char* call, ConstBuffer buffer) {
    CallCount& of = counts_.of[{name(), call}];
    ++of.calls;
    of.bytes += buffer.count * dtype_bytes(buffer.dtype);
    counts_.largest = std::max(counts_.largest, buffer.count);
  }

  CallCounts& counts_;
};

class CountingCommunicator : public Communicator {
 public:
  explicit CountingCommunicator(Communicator& inner) : inner_(inner) {}  // borrowed
  int64_t rank() const override { return inner_.rank(); }
  int64_t world() const override { return inner_.world(); }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> join(const GroupSpec& group) override {
    PARVL_ASSIGN_OR_RETURN(std::unique_ptr<ProcessGroup> out, inner_.join(group));
    return std::make_unique<CountingGroup>(std::move(out), counts_);
  }
  std::unique_ptr<Store> make_store() override { return inner_.make_store(); }

  CallCounts take() { return std::exchange(counts_, {}); }  // since the last time

 private:
  Communicator& inner_;
  CallCounts counts_;
};

}  // namespace parvl
