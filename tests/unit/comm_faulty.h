// A communicator whose groups make one kind of mistake, for tests of tests: the call is made, so that no rank waits,
// and then its result is spoiled on every rank.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "parvl/comm/communicator.h"

namespace parvl {

struct Fault {
  enum Effect {
    kOwn,     // the sum lacks the other ranks' parts; of what is gathered only this rank's own part is there
    kTwice,   // the result times two
    kMean,    // divided by the number of ranks
    kZero,    // nothing arrives
    kRotate,  // gathered parts in the order of the next rank; of a message, its halves
    kStale,   // what the last such call gave
  };
  std::string name;   // what a programmer would have done wrong
  std::string group;  // the group's name without its number: "llm_backbone.tp"
  std::string call;   // all_reduce, all_gather, reduce_scatter, receive
  Effect effect = kOwn;
  std::function<bool(int64_t count, ReduceOp op)> which;  // of these calls; empty: all
};

class FaultyCommunicator : public Communicator {
 public:
  // `applied` counts the calls that were spoiled. All are borrowed.
  FaultyCommunicator(Communicator& inner, const Fault& fault, std::atomic<int>& applied)
      : inner_(inner), fault_(fault), applied_(applied) {}
  int64_t rank() const override { return inner_.rank(); }
  int64_t world() const override { return inner_.world(); }
  std::unique_ptr<Store> make_store() override { return inner_.make_store(); }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> join(const GroupSpec& group) override;

 private:
  Communicator& inner_;
  const Fault& fault_;
  std::atomic<int>& applied_;
};

}  // namespace parvl
