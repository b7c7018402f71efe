#include "parvl/serve/admission.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace parvl {
namespace {

constexpr double kNewestShare = 0.2;  // of the last departure in the moving average
constexpr int64_t kLongestRetryAfter = 600;

}  // namespace

void Admission::Ticket::leave_line() {
  if (std::exchange(in_line_, false)) line_.in_line_ -= entry_.weight;
}

void Admission::Ticket::set_ready() {
  if (std::exchange(ready_, true)) return;
  line_.unready_ -= entry_.weight;
  line_.waiting_.set_ready(key_);
  line_.grant();
}

bool Admission::Ticket::take_tokens(size_t tokens) {
  const size_t limit = line_.limits_.tokens;
  if (limit > 0 && line_.tokens_ > 0 && line_.tokens_ + tokens > limit) return false;
  tokens_ += tokens;
  line_.tokens_ += tokens;
  return true;
}

Admission::Ticket::~Ticket() {
  leave_line();
  if (!ready_) line_.unready_ -= entry_.weight;
  if (credit_) {
    line_.credits_.erase(place_);
    line_.granted_ -= entry_.weight;
    line_.note_departure(entry_.weight);
  } else {
    line_.waiting_.erase(key_);
    line_.tickets_.erase(key_);
  }
  line_.tokens_ -= tokens_;
  line_.size_ -= entry_.weight;
  line_.grant();
}

std::unique_ptr<Admission::Ticket> Admission::enter(const Entry& entry, std::function<void()> on_credit) {
  const size_t before = granted_ + (entry.ready ? 0 : unready_);  // those not ready will run before this one
  if (before >= limits_.running && waiting(entry.kind) >= limits_.waiting[index_of(entry.kind)]) return nullptr;
  std::unique_ptr<Ticket> ticket(new Ticket(*this, entry, std::move(on_credit)));
  ticket->key_ = waiting_.push({entry.kind, entry.weight, entry.priority, entry.deadline_s, entry.ready});
  tickets_.emplace(ticket->key_, ticket.get());
  size_ += entry.weight;
  in_line_ += entry.weight;
  if (!entry.ready) unready_ += entry.weight;
  grant();
  if (waiting_.size() == 1) last_departure_s_ = clock_.now_seconds();
  return ticket;
}

size_t Admission::waiting(QueueKind kind) const {
  size_t weight = waiting_.weight(kind);
  // The last ones that got a turn are made ready, and wait as long as others run.
  size_t beyond = granted_ > limits_.running ? granted_ - limits_.running : 0;
  for (auto last = credits_.rbegin(); beyond > 0 && last != credits_.rend(); ++last) {
    const Entry& entry = (*last)->entry_;
    const size_t part = std::min(beyond, entry.weight);
    if (entry.kind == kind) weight += part;
    beyond -= part;
  }
  return weight;
}

int64_t Admission::retry_after_s() const {
  size_t weight = 0;
  for (size_t i = 0; i < kQueueNames.size(); ++i) weight += waiting(static_cast<QueueKind>(i));
  const double seconds = std::ceil(static_cast<double>(weight) * seconds_a_place_);
  return std::clamp(static_cast<int64_t>(seconds), int64_t{1}, kLongestRetryAfter);
}

void Admission::note_departure(size_t weight) {
  const double now = clock_.now_seconds();
  const double last = std::exchange(last_departure_s_, now);
  if (waiting_.empty()) return;  // nobody waited for this
  const double seconds = (now - last) / static_cast<double>(weight);
  seconds_a_place_ += (seconds_a_place_ == 0 ? 1 : kNewestShare) * (seconds - seconds_a_place_);
}

void Admission::set_limits(const Limits& limits) {
  limits_ = limits;
  grant();
}

void Admission::grant() {
  const size_t credits = limits_.running == 0 ? 0 : limits_.running + 1;  // the next one is made ready
  while (!closed_ && granted_ < credits && !waiting_.empty()) {
    const std::optional<ModalityQueue::Key> next = waiting_.pop();
    if (!next.has_value()) return;
    Ticket& ticket = *tickets_.extract(*next).mapped();
    ticket.place_ = credits_.insert(credits_.end(), &ticket);
    granted_ += ticket.entry_.weight;
    ticket.credit_ = true;
    ticket.on_credit_();
  }
}

}  // namespace parvl
