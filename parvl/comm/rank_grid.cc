#include "parvl/comm/rank_grid.h"

#include <algorithm>

#include "parvl/base/check.h"

namespace parvl {

RankGrid::RankGrid(std::vector<MeshAxis> axes, int64_t first_rank) : axes_(std::move(axes)), first_(first_rank) {
  for (const MeshAxis& axis : axes_) {
    PARVL_CHECK(axis.size >= 1, "a mesh axis without ranks");
    PARVL_CHECK(std::count_if(axes_.begin(), axes_.end(), [&](const MeshAxis& a) { return a.name == axis.name; }) == 1,
                "two mesh axes of one name");
    strides_.push_back(size_);
    size_ *= axis.size;
  }
}

size_t RankGrid::index_of(std::string_view axis) const {
  const auto found = std::find_if(axes_.begin(), axes_.end(), [&](const MeshAxis& a) { return a.name == axis; });
  PARVL_CHECK(found != axes_.end(), "no such mesh axis");
  return static_cast<size_t>(found - axes_.begin());
}

int64_t RankGrid::size(std::string_view axis) const { return axes_[index_of(axis)].size; }

int64_t RankGrid::coordinate(int64_t rank, std::string_view axis) const {
  PARVL_CHECK(contains(rank), "a rank outside of the grid");
  const size_t i = index_of(axis);
  return (rank - first_) / strides_[i] % axes_[i].size;
}

std::vector<int64_t> RankGrid::group_of(int64_t rank, const std::vector<std::string>& axes) const {
  PARVL_CHECK(contains(rank), "a rank outside of the grid");
  std::vector<size_t> free;
  for (const std::string& axis : axes) free.push_back(index_of(axis));
  std::sort(free.begin(), free.end());
  std::vector<int64_t> out = {rank};
  for (const size_t i : free) out[0] -= coordinate(rank, axes_[i].name) * strides_[i];
  for (const size_t i : free) {
    const size_t so_far = out.size();
    for (int64_t k = 1; k < axes_[i].size; ++k) {
      for (size_t j = 0; j < so_far; ++j) out.push_back(out[j] + k * strides_[i]);
    }
  }
  return out;
}

std::vector<std::vector<int64_t>> RankGrid::groups(const std::vector<std::string>& axes) const {
  std::vector<std::vector<int64_t>> out;
  for (int64_t rank = first_; rank < first_ + size_; ++rank) {
    std::vector<int64_t> group = group_of(rank, axes);
    if (group.front() == rank) out.push_back(std::move(group));
  }
  return out;
}

}  // namespace parvl
