#include "parvl/plan/balance.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace parvl {
namespace {

using Bins = std::vector<std::vector<int64_t>>;

std::vector<int64_t> first_numbers(size_t count) {
  std::vector<int64_t> out(count);
  std::iota(out.begin(), out.end(), int64_t{0});
  return out;
}

// The costliest first; equal ones in their order.
void sort_descending(std::vector<int64_t>& items, absl::Span<const double> costs) {
  std::stable_sort(items.begin(), items.end(),
                   [&](int64_t a, int64_t b) { return costs[static_cast<size_t>(a)] > costs[static_cast<size_t>(b)]; });
}

std::vector<double> loads(const Bins& bins, absl::Span<const double> costs) {
  std::vector<double> out;
  for (const auto& bin : bins) {
    out.push_back(0);
    for (const int64_t item : bin) out.back() += costs[static_cast<size_t>(item)];
  }
  return out;
}

double costliest(const Bins& bins, absl::Span<const double> costs) {
  const std::vector<double> all = loads(bins, costs);
  return *std::max_element(all.begin(), all.end());
}

// Two items that change places.
struct Swap {
  size_t bin = 0, mine = 0, other = 0;  // the costliest bin's item `mine` for item `other` of `bin`
  double most = 0;                      // the costlier of the two bins after it
};

// The swap of the costliest bin with another that leaves the two lowest.
Swap best_swap(const Bins& bins, const std::vector<double>& load, size_t top, absl::Span<const double> costs) {
  Swap best;
  best.most = load[top];
  for (size_t bin = 0; bin < bins.size(); ++bin) {
    if (bin == top) continue;
    for (size_t mine = 0; mine < bins[top].size(); ++mine) {
      for (size_t other = 0; other < bins[bin].size(); ++other) {
        const double less = costs[static_cast<size_t>(bins[top][mine])] - costs[static_cast<size_t>(bins[bin][other])];
        const double most = std::max(load[top] - less, load[bin] + less);
        if (less > 0 && most < best.most) best = {bin, mine, other, most};
      }
    }
  }
  return best;
}

// Swaps items of the costliest bin as long as that lowers it; at most one swap an item, which is rarely reached.
void level(Bins& bins, absl::Span<const double> costs) {
  for (size_t swaps = 0; swaps < costs.size(); ++swaps) {
    const std::vector<double> load = loads(bins, costs);
    const size_t top = static_cast<size_t>(std::max_element(load.begin(), load.end()) - load.begin());
    const Swap swap = best_swap(bins, load, top, costs);
    if (swap.most >= load[top]) return;
    std::swap(bins[top][swap.mine], bins[swap.bin][swap.other]);
  }
}

// `items` over bins, equally many each, a round at a time: the bin with the least so far gets the costliest of the
// round. Then swaps, for what rounds cannot make up for: an item that outweighs all that come after it.
Bins in_rounds(std::vector<int64_t> items, int64_t count, absl::Span<const double> costs) {
  sort_descending(items, costs);
  Bins bins(static_cast<size_t>(count));
  std::vector<double> load(bins.size(), 0);
  std::vector<int64_t> order = first_numbers(bins.size());
  for (size_t begin = 0; begin < items.size(); begin += bins.size()) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return load[static_cast<size_t>(a)] < load[static_cast<size_t>(b)]; });
    for (size_t i = 0; i < bins.size(); ++i) {
      const auto bin = static_cast<size_t>(order[i]);
      bins[bin].push_back(items[begin + i]);
      load[bin] += costs[static_cast<size_t>(items[begin + i])];
    }
  }
  level(bins, costs);
  return bins;
}

// Runs of `size` items as they stand, dealt out to the bins in turn.
Bins dealt(const std::vector<int64_t>& items, int64_t size, int64_t count) {
  Bins bins(static_cast<size_t>(count));
  for (size_t i = 0; i < items.size(); ++i) bins[i / static_cast<size_t>(size) % bins.size()].push_back(items[i]);
  return bins;
}

// One replica's micro batches: in rounds, or as its samples stand where that is better; the costliest first.
Bins microbatches(std::vector<int64_t> samples, int64_t micro_batch, absl::Span<const double> costs) {
  std::sort(samples.begin(), samples.end());
  const int64_t count = static_cast<int64_t>(samples.size()) / micro_batch;
  const Bins plain = dealt(samples, micro_batch, count);
  Bins bins = in_rounds(samples, count, costs);
  if (costliest(bins, costs) > costliest(plain, costs)) bins = plain;
  std::vector<int64_t> order = first_numbers(bins.size());
  sort_descending(order, loads(bins, costs));
  Bins out;
  for (const int64_t bin : order) {
    out.push_back(std::move(bins[static_cast<size_t>(bin)]));
    std::sort(out.back().begin(), out.back().end());
  }
  return out;
}

// A way to pack: each replica's micro batches.
struct Packing {
  std::vector<Bins> replicas;
  double replica = 0, microbatch = 0;  // the costliest

  Packing(const Bins& samples, int64_t micro_batch, absl::Span<const double> costs)
      : replica(costliest(samples, costs)) {
    for (const auto& mine : samples) {
      replicas.push_back(microbatches(mine, micro_batch, costs));
      microbatch = std::max(microbatch, costliest(replicas.back(), costs));
    }
  }
};

}  // namespace

absl::StatusOr<std::vector<int64_t>> balanced_order(absl::Span<const double> costs, int64_t micro_batch,
                                                    int64_t replicas) {
  const auto samples = static_cast<int64_t>(costs.size());
  if (micro_batch < 1 || replicas < 1 || samples % (micro_batch * replicas) != 0) {
    return invalid("a global batch of ", samples, " samples is no multiple of micro_batch · replicas (", micro_batch,
                   " · ", replicas, ")");
  }
  std::vector<int64_t> order = first_numbers(costs.size());
  if (samples == 0) return order;
  const Packing level(in_rounds(order, replicas, costs), micro_batch, costs);
  const Packing plain(dealt(order, micro_batch, replicas), micro_batch, costs);
  const bool stays = std::tie(plain.replica, plain.microbatch) < std::tie(level.replica, level.microbatch);
  const std::vector<Bins>& best = stays ? plain.replicas : level.replicas;
  size_t place = 0;
  for (size_t turn = 0; turn < best[0].size(); ++turn) {
    for (const Bins& mine : best) {
      for (const int64_t sample : mine[turn]) order[place++] = sample;
    }
  }
  return order;
}

std::vector<int64_t> spread(absl::Span<const double> costs, int64_t parts) {
  std::vector<double> load(static_cast<size_t>(parts), 0);
  return spread_onto(costs, load);
}

std::vector<int64_t> spread_onto(absl::Span<const double> costs, std::vector<double>& load) {
  std::vector<int64_t> out(costs.size());
  std::vector<int64_t> items = first_numbers(costs.size());
  sort_descending(items, costs);
  for (const int64_t item : items) {
    const auto least = std::min_element(load.begin(), load.end());
    out[static_cast<size_t>(item)] = least - load.begin();
    *least += costs[static_cast<size_t>(item)];
  }
  return out;
}

}  // namespace parvl
