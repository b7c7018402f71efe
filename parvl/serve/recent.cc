#include "parvl/serve/recent.h"

#include <algorithm>
#include <cmath>

namespace parvl {

void RecentValues::add(double at_s, double value) {
  values_.emplace_back(at_s, value);
  if (values_.size() > kMost) values_.pop_front();
}

std::vector<double> RecentValues::since(double from_s) const {
  std::vector<double> found;
  for (auto value = values_.rbegin(); value != values_.rend() && value->first >= from_s; ++value) {
    found.push_back(value->second);
  }
  std::sort(found.begin(), found.end());
  return found;
}

double quantile(const std::vector<double>& sorted, double share) {
  const double rank = std::ceil(share * static_cast<double>(sorted.size()));
  return sorted[std::min(static_cast<size_t>(std::max(rank, 1.0)), sorted.size()) - 1];
}

void BusyShare::take(double at_s, const std::vector<Reading>& readings) {
  Sums next = sums_.empty() ? Sums{} : sums_.back();
  const double passed_s = sums_.empty() ? 0 : at_s - next.at_s;
  next.at_s = at_s;
  for (const Reading& reading : readings) {
    const auto [last, first] = last_.try_emplace(reading.instance, Last{reading.epoch, reading.busy_s});
    const bool same = last->second.epoch == reading.epoch && last->second.busy_s <= reading.busy_s;
    const double busy_s = reading.busy_s - (same ? last->second.busy_s : 0);
    last->second = {reading.epoch, reading.busy_s};
    if (!reading.serving || first) continue;
    for (Time* time : {&next.instances[reading.instance], &next.pools[reading.pool]}) {
      time->busy_s += busy_s;
      time->serving_s += passed_s;
    }
  }
  sums_.push_back(std::move(next));
  while (sums_.size() > 2 && sums_[1].at_s <= at_s - window_s_) sums_.pop_front();
}

// What encodes and what generates may do so at once; together they fill a device no more than wholly.
template <typename Key>
double BusyShare::share(std::map<Key, Time> Sums::*of, Key key) const {
  if (sums_.empty()) return 0;
  const auto at = [&](const Sums& sums) {
    const auto found = (sums.*of).find(key);
    return found == (sums.*of).end() ? Time{} : found->second;
  };
  const Time from = at(sums_.front()), to = at(sums_.back());
  const double serving_s = to.serving_s - from.serving_s;
  return serving_s <= 0 ? 0 : std::clamp((to.busy_s - from.busy_s) / serving_s, 0.0, 1.0);
}

double BusyShare::of_instance(int64_t instance) const { return share(&Sums::instances, instance); }
double BusyShare::of_pool(size_t pool) const { return share(&Sums::pools, pool); }

}  // namespace parvl
