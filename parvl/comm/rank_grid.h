// Ranks as a grid with named axes. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace parvl {

struct MeshAxis {
  std::string name;
  int64_t size = 1;
};

// The ranks first, first + 1, … in a grid: along the first axis neighbours differ by 1, along the next by that axis's
// size, and so on.
class RankGrid {
 public:
  RankGrid() = default;
  // `axes`: fastest first, sizes ≥ 1, names unique.
  RankGrid(std::vector<MeshAxis> axes, int64_t first_rank = 0);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  int64_t first() const { return first_; }
  int64_t size() const { return size_; }
  bool contains(int64_t rank) const { return rank >= first_ && rank < first_ + size_; }
  int64_t size(std::string_view axis) const;
  // Where `rank`, one of the grid's, is along an axis.
  int64_t coordinate(int64_t rank, std::string_view axis) const;
  // The ranks that share all coordinates but those along `axes`, `rank` among them: ascending.
  std::vector<int64_t> group_of(int64_t rank, const std::vector<std::string>& axes) const;
  // All such groups, by their lowest rank: each rank is in exactly one.
  std::vector<std::vector<int64_t>> groups(const std::vector<std::string>& axes) const;

 private:
  size_t index_of(std::string_view axis) const;

  std::vector<MeshAxis> axes_;
  std::vector<int64_t> strides_;
  int64_t first_ = 0, size_ = 1;
};

}  // namespace parvl
