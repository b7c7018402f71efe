#include "parvl/serve/admission.h"

#include <algorithm>
#include <utility>

namespace parvl {

void Admission::Ticket::leave_line() {
  if (std::exchange(in_line_, false)) line_.in_line_ -= entry_.weight;
}

Admission::Ticket::~Ticket() {
  leave_line();
  if (credit_) {
    line_.granted_ -= entry_.weight;
  } else {
    line_.waiting_.erase(place_);
  }
  line_.size_ -= entry_.weight;
  line_.grant();
}

std::unique_ptr<Admission::Ticket> Admission::enter(const Entry& entry, std::function<void()> on_credit) {
  if (size_ >= capacity_) return nullptr;
  std::unique_ptr<Ticket> ticket(new Ticket(*this, entry, std::move(on_credit)));
  ticket->place_ = waiting_.insert(waiting_.end(), ticket.get());
  size_ += entry.weight;
  in_line_ += entry.weight;
  grant();
  return ticket;
}

void Admission::set_limits(size_t capacity, size_t credits) {
  capacity_ = capacity;
  credits_ = credits;
  grant();
}

void Admission::grant() {
  while (granted_ < credits_ && !waiting_.empty()) {
    const auto next = next_turn();
    Ticket& ticket = **next;
    for (auto earlier = waiting_.begin(); earlier != next; ++earlier) ++(*earlier)->passed_;
    waiting_.erase(next);
    granted_ += ticket.entry_.weight;
    ticket.credit_ = true;
    ticket.on_credit_();
  }
}

std::list<Admission::Ticket*>::iterator Admission::next_turn() {
  const auto starving = std::find_if(waiting_.begin(), waiting_.end(),
                                     [](const Ticket* ticket) { return ticket->passed_ >= kMaxPassed; });
  if (starving != waiting_.end()) return starving;
  return std::min_element(waiting_.begin(), waiting_.end(),
                          [](const Ticket* a, const Ticket* b) { return a->entry_.priority < b->entry_.priority; });
}

}  // namespace parvl
