// The layouts and recipes that tests of parallel training go through: every pair of choices of two axes comes up.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace parvl {

// An axis of the covering array and its choices.
struct CoverAxis {
  std::string name;
  std::vector<std::string> choices;
};
using CoverRow = std::vector<size_t>;  // the choice of each axis

struct Cover {
  std::vector<CoverRow> rows;
  size_t pairs = 0, possible = 0;  // covered, and that any allowed row has
};

// Rows in which every pair of choices occurs that any row with `allowed` has: greedy, the best of some random rows at a
// time (Cohen et al., "The AETG system", 1997). The same for the same seed.
inline Cover cover_pairs(const std::vector<CoverAxis>& axes, const std::function<bool(const CoverRow&)>& allowed,
                         uint64_t seed) {
  using Pair = std::pair<std::pair<size_t, size_t>, std::pair<size_t, size_t>>;  // axis and choice, twice
  std::mt19937_64 random(seed);
  const auto pairs_of = [&](const CoverRow& row) {
    std::vector<Pair> out;
    for (size_t a = 0; a < row.size(); ++a) {
      for (size_t b = a + 1; b < row.size(); ++b) out.push_back({{a, row[a]}, {b, row[b]}});
    }
    return out;
  };
  const auto random_row = [&] {
    CoverRow row(axes.size());
    do {
      for (size_t a = 0; a < axes.size(); ++a) row[a] = random() % axes[a].choices.size();
    } while (!allowed(row));
    return row;
  };
  std::set<Pair> open;  // what any of many rows has
  for (int i = 0; i < 20000; ++i) {
    for (const Pair& pair : pairs_of(random_row())) open.insert(pair);
  }
  Cover out;
  out.possible = open.size();
  while (!open.empty()) {
    CoverRow best;
    size_t most = 0;
    for (int i = 0; i < 200 || most == 0; ++i) {
      const CoverRow row = random_row();
      size_t fresh = 0;
      for (const Pair& pair : pairs_of(row)) fresh += open.count(pair);
      if (fresh > most) {
        most = fresh;
        best = row;
      }
    }
    for (const Pair& pair : pairs_of(best)) out.pairs += open.erase(pair);
    out.rows.push_back(best);
  }
  return out;
}

}  // namespace parvl
