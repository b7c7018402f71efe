// How the rows of a packed batch lie on the ranks of a group: rank r holds counts[r] of them, after those of rank r
// − 1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace parvl {

struct RowSplit {
  std::vector<int64_t> counts;  // by rank in the group; empty: one rank has all

  int64_t begin(int64_t rank) const {
    int64_t out = 0;
    for (int64_t r = 0; r < rank; ++r) out += counts[static_cast<size_t>(r)];
    return out;
  }
  int64_t total() const { return begin(static_cast<int64_t>(counts.size())); }
  int64_t most() const { return counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end()); }
};

// Equal parts of a multiple of `unit` rows; the last ones have what is left, maybe nothing. `unit` divides `rows`.
inline RowSplit even_rows(int64_t rows, int64_t ranks, int64_t unit = 1) {
  RowSplit out;
  const int64_t units = rows / unit, part = (units + ranks - 1) / ranks * unit;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t begin = std::min(rank * part, rows);
    out.counts.push_back(std::min(begin + part, rows) - begin);
  }
  return out;
}

}  // namespace parvl
