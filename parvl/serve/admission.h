// Who may come in, and whose turn it is. One thread, but for size().
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>

namespace parvl {

// A line of requests in order of arrival. The first `credits` of them may be prepared and run (as many as run at once,
// and the next, made ready meanwhile: what is decoded in memory stays bounded); the rest wait with nothing but their
// bytes. At most `capacity` are in the line.
class Admission {
 public:
  // A place in the line, given back when destroyed. Must not outlive the Admission.
  class Ticket {
   public:
    ~Ticket();
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    bool has_credit() const { return credit_; }

   private:
    friend class Admission;
    Ticket(Admission& line, std::function<void()> on_credit) : line_(line), on_credit_(std::move(on_credit)) {}
    Admission& line_;
    std::function<void()> on_credit_;
    bool credit_ = false;
    std::list<Ticket*>::iterator place_;
  };

  Admission(size_t capacity, size_t credits) : capacity_(capacity), credits_(credits) {}

  // nullptr when the line is full. `on_credit` is called when the ticket's turn comes, at once if it is there already.
  std::unique_ptr<Ticket> enter(std::function<void()> on_credit);
  size_t size() const { return size_; }  // any thread
  // Fewer credits take none back.
  void set_limits(size_t capacity, size_t credits);
  // Nobody's turn comes any more.
  void close() { credits_ = 0; }

 private:
  void grant();

  size_t capacity_, credits_;
  std::list<Ticket*> line_;
  std::atomic<size_t> size_{0};
};

}  // namespace parvl
