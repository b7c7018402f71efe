#include "parvl/serve/admission.h"

#include <utility>

namespace parvl {

Admission::Ticket::~Ticket() {
  line_.line_.erase(place_);
  --line_.size_;
  line_.grant();
}

std::unique_ptr<Admission::Ticket> Admission::enter(std::function<void()> on_credit) {
  if (line_.size() >= capacity_) return nullptr;
  std::unique_ptr<Ticket> ticket(new Ticket(*this, std::move(on_credit)));
  ticket->place_ = line_.insert(line_.end(), ticket.get());
  ++size_;
  grant();
  return ticket;
}

void Admission::set_limits(size_t capacity, size_t credits) {
  capacity_ = capacity;
  credits_ = credits;
  grant();
}

void Admission::grant() {
  size_t left = credits_;
  for (Ticket* ticket : line_) {
    if (left-- == 0) break;
    if (!std::exchange(ticket->credit_, true)) ticket->on_credit_();
  }
}

}  // namespace parvl
