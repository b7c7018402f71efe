#include "parvl/elastic/modality_queue.h"

#include <algorithm>
#include <iterator>
#include <tuple>

namespace parvl {

ModalityQueue::Key ModalityQueue::push(const Entry& entry) {
  const size_t kind = index_of(entry.kind);
  if (weight_[kind] == 0) served_[kind] = std::max(served_[kind], now_);
  weight_[kind] += entry.weight;
  line_.push_back({next_key_++, entry});
  places_.emplace(line_.back().key, std::prev(line_.end()));
  return line_.back().key;
}

void ModalityQueue::set_ready(Key key) { places_.at(key)->entry.ready = true; }

void ModalityQueue::erase(Key key) { remove(places_.at(key)); }

void ModalityQueue::remove(Place place) {
  weight_[index_of(place->entry.kind)] -= place->entry.weight;
  places_.erase(place->key);
  line_.erase(place);
}

bool ModalityQueue::goes_before(const Waiting& a, const Waiting& b) const {
  const auto rank = [this](const Waiting& w) { return std::tuple(w.entry.priority, served_[index_of(w.entry.kind)]); };
  if (rank(a) != rank(b)) return rank(a) < rank(b);
  if (a.entry.kind != b.entry.kind) return false;  // classes that had as much: the first to come
  return a.entry.deadline_s < b.entry.deadline_s;
}

ModalityQueue::Place ModalityQueue::next_turn() {
  auto best = line_.end();
  for (auto it = line_.begin(); it != line_.end(); ++it) {
    if (!it->entry.ready) continue;
    if (it->passed >= max_passed_) return it;
    if (best == line_.end() || goes_before(*it, *best)) best = it;
  }
  return best;
}

std::optional<ModalityQueue::Key> ModalityQueue::pop() {
  const Place next = next_turn();
  if (next == line_.end()) return std::nullopt;
  for (auto earlier = line_.begin(); earlier != next; ++earlier) ++earlier->passed;
  const size_t kind = index_of(next->entry.kind);
  now_ = std::max(now_, served_[kind]);
  served_[kind] += static_cast<double>(next->entry.weight) / shares_[kind];
  const Key key = next->key;
  remove(next);
  return key;
}

}  // namespace parvl
