// The line in which requests wait, in a class for each kind of content, and whose turn is next. Pure: no clock, no
// threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <optional>
#include <unordered_map>

#include "parvl/plan/queue_kind.h"

namespace parvl {

// Whose turn is next: one that `max_passed` later ones have passed goes before all, so that none waits for ever. Else
// the lowest priority number; of these, the class that has had the least for its share (start-time fair queueing, Goyal
// et al. 1996), so that a burst of one kind does not hold up the others; in the class, the earliest deadline, then the
// first to come. A class that had nothing to ask for has saved nothing up. Not thread-safe.
class ModalityQueue {
 public:
  using Key = int64_t;
  using Shares = std::array<double, kQueueNames.size()>;  // relative to each other; above 0

  struct Entry {
    QueueKind kind = QueueKind::kText;
    size_t weight = 1;
    int priority = 0;
    double deadline_s = std::numeric_limits<double>::infinity();  // on whatever clock the caller has
    bool ready = true;                                            // for its turn; else after set_ready()
  };

  explicit ModalityQueue(int max_passed, const Shares& shares = {1, 1, 1, 1, 1})
      : max_passed_(max_passed), shares_(shares) {}

  Key push(const Entry& entry);
  void set_ready(Key key);
  // One that waits no longer, without a turn.
  void erase(Key key);
  // Takes out whose turn it is; nullopt when nobody is ready.
  std::optional<Key> pop();

  bool empty() const { return line_.empty(); }
  size_t size() const { return line_.size(); }
  size_t weight(QueueKind kind) const { return weight_[index_of(kind)]; }  // of all that wait in the class

 private:
  struct Waiting {
    Key key;
    Entry entry;
    int passed = 0;  // by how many that came later
  };
  using Place = std::list<Waiting>::iterator;
  void remove(Place place);
  Place next_turn();
  bool goes_before(const Waiting& a, const Waiting& b) const;

  const int max_passed_;
  const Shares shares_;
  std::list<Waiting> line_;  // by arrival
  std::unordered_map<Key, Place> places_;
  std::array<size_t, kQueueNames.size()> weight_{};
  std::array<double, kQueueNames.size()> served_{};  // weight by share, as if every class had always been here
  double now_ = 0;                                   // what the class of the last turn had had before it
  Key next_key_ = 0;
};

}  // namespace parvl
