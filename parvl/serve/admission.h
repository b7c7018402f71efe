// Who may come in, and whose turn it is. One thread, but for size().
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <unordered_map>

#include "parvl/base/clock.h"
#include "parvl/elastic/modality_queue.h"

namespace parvl {

// A line of requests, each as heavy as it has choices to generate. Up to a weight of `running` run at once; those whose
// turn has come, and the next, which is made ready meanwhile, may be prepared and run (what is decoded in memory stays
// bounded); the rest wait with nothing but their bytes. Each kind has a bound of its own, so that a burst of one kind
// leaves the others their places. Whose turn is next, elastic/modality_queue.h says.
class Admission {
 public:
  static constexpr int kMaxPassed = 16;

  struct Limits {
    std::array<size_t, kQueueNames.size()> waiting{};  // the weight that may wait, by kind
    size_t running = 0;
    size_t tokens = 0;  // prompt tokens of all that are prepared and not over; 0: no bound
  };

  struct Entry {
    size_t weight = 1;
    int priority = 0;  // a lower number goes first
    QueueKind kind = QueueKind::kText;
    bool ready = true;                                            // for its turn; else after set_ready()
    double deadline_s = std::numeric_limits<double>::infinity();  // by the clock; earlier ones of a kind go first
  };

  // A place in the line, given back when destroyed. Must not outlive the Admission.
  class Ticket {
   public:
    ~Ticket();
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    bool has_credit() const { return credit_; }
    void set_ready();   // from now on its turn may come
    void leave_line();  // it waits no longer, but keeps its place
    // Once its prompts are known: counts their tokens until the ticket is destroyed. False, and nothing counted, when
    // there are too many already; the first one always may.
    bool take_tokens(size_t tokens);

   private:
    friend class Admission;
    Ticket(Admission& line, const Entry& entry, std::function<void()> on_credit)
        : line_(line), entry_(entry), on_credit_(std::move(on_credit)), ready_(entry.ready) {}
    Admission& line_;
    const Entry entry_;
    std::function<void()> on_credit_;
    bool credit_ = false, ready_;
    bool in_line_ = true;
    size_t tokens_ = 0;
    ModalityQueue::Key key_ = 0;          // while it waits
    std::list<Ticket*>::iterator place_;  // among those that have credit
  };

  // `clock` must outlive it.
  Admission(const Limits& limits, const Clock& clock, const ModalityQueue::Shares& shares = {1, 1, 1, 1, 1})
      : limits_(limits), clock_(clock), waiting_(kMaxPassed, shares) {}

  // nullptr when the queue of its kind is full; the last one to come in may be heavier than what was left. `on_credit`
  // is called when the ticket's turn comes, at once if it is there already.
  std::unique_ptr<Ticket> enter(const Entry& entry, std::function<void()> on_credit);
  size_t size() const { return size_; }        // the weight of all places; any thread
  size_t in_line() const { return in_line_; }  // of those that still wait or are made ready
  size_t waiting(QueueKind kind) const;        // of those of a kind that are beyond what runs at once
  size_t tokens() const { return tokens_; }
  const Limits& limits() const { return limits_; }
  // In how many seconds those that wait now will have had their turn, at the pace of late; at least 1.
  int64_t retry_after_s() const;
  // Lower limits take nothing back.
  void set_limits(const Limits& limits);
  // Nobody's turn comes any more.
  void close() { closed_ = true; }

 private:
  void grant();
  void note_departure(size_t weight);

  Limits limits_;
  const Clock& clock_;
  bool closed_ = false;
  size_t granted_ = 0, unready_ = 0;  // the weight of those whose turn has come, and of those who are not ready
  ModalityQueue waiting_;
  std::unordered_map<ModalityQueue::Key, Ticket*> tickets_;  // of those that wait
  std::list<Ticket*> credits_;                               // by turn
  size_t in_line_ = 0, tokens_ = 0;
  std::atomic<size_t> size_{0};
  double last_departure_s_ = 0;  // or when somebody began to wait
  double seconds_a_place_ = 0;   // between departures while somebody waits, a moving average
};

}  // namespace parvl
