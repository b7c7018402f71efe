// Who may come in, and whose turn it is. One thread, but for size().
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>

namespace parvl {

// A line of requests, each as heavy as it has choices to generate. Those whose turn has come, up to a weight of
// `credits`, may be prepared and run (as many as run at once, and the next, made ready meanwhile: what is decoded in
// memory stays bounded); the rest wait with nothing but their bytes. Turns go by priority, then by arrival; a request
// that kMaxPassed later ones have passed goes before all priorities, so that none waits for ever.
class Admission {
 public:
  static constexpr int kMaxPassed = 16;

  struct Entry {
    size_t weight = 1;
    int priority = 0;  // a lower number goes first
  };

  // A place in the line, given back when destroyed. Must not outlive the Admission.
  class Ticket {
   public:
    ~Ticket();
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    bool has_credit() const { return credit_; }
    void leave_line();  // it waits no longer, but keeps its place

   private:
    friend class Admission;
    Ticket(Admission& line, const Entry& entry, std::function<void()> on_credit)
        : line_(line), entry_(entry), on_credit_(std::move(on_credit)) {}
    Admission& line_;
    const Entry entry_;
    std::function<void()> on_credit_;
    bool credit_ = false;
    bool in_line_ = true;
    int passed_ = 0;                      // by how many that came later
    std::list<Ticket*>::iterator place_;  // while it waits
  };

  Admission(size_t capacity, size_t credits) : capacity_(capacity), credits_(credits) {}

  // nullptr when the line is full; the last one to come in may be heavier than what was left. `on_credit` is called
  // when the ticket's turn comes, at once if it is there already.
  std::unique_ptr<Ticket> enter(const Entry& entry, std::function<void()> on_credit);
  size_t size() const { return size_; }        // the weight of all places; any thread
  size_t in_line() const { return in_line_; }  // of those that still wait or are made ready
  // Fewer credits take none back.
  void set_limits(size_t capacity, size_t credits);
  // Nobody's turn comes any more.
  void close() { credits_ = 0; }

 private:
  void grant();
  std::list<Ticket*>::iterator next_turn();

  size_t capacity_, credits_;
  size_t granted_ = 0;          // the weight of those whose turn has come
  std::list<Ticket*> waiting_;  // by arrival
  size_t in_line_ = 0;
  std::atomic<size_t> size_{0};
};

}  // namespace parvl
