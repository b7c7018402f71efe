#include "parvl/train/vision_share.h"

#include "parvl/base/check.h"
#include "parvl/plan/balance.h"

namespace parvl {
namespace {

// The images of each group, ascending; `given`: as share_images' groups.
std::vector<std::vector<int64_t>> deal_out(const std::vector<Grid>& grids, int64_t groups,
                                           const std::vector<int64_t>& given) {
  std::vector<double> patches;
  for (const Grid& grid : grids) patches.push_back(static_cast<double>(grid.patches()));
  const std::vector<int64_t> parts = given.empty() ? spread(patches, groups) : given;
  PARVL_CHECK(parts.size() == grids.size(), "images that are dealt out are others than a micro batch has");
  std::vector<std::vector<int64_t>> out(static_cast<size_t>(groups));
  for (size_t i = 0; i < parts.size(); ++i) out[static_cast<size_t>(parts[i])].push_back(static_cast<int64_t>(i));
  return out;
}

}  // namespace

VisionShare share_images(const VisionLayout& layout, const std::vector<Grid>& grids, int64_t merge,
                         const std::vector<int64_t>& raster, const std::vector<int64_t>& given) {
  const int64_t unit = merge * merge;
  std::vector<int64_t> firsts;  // merged tokens of all images before each
  int64_t tokens = 0;
  for (const Grid& grid : grids) {
    firsts.push_back(tokens);
    tokens += grid.patches() / unit;
  }
  VisionShare out;
  out.order.resize(static_cast<size_t>(tokens));
  const auto groups = deal_out(grids, layout.ranks / layout.encoder, given);
  int64_t row = 0;
  for (const std::vector<int64_t>& images : groups) {
    const int64_t begin = row;
    for (const int64_t image : images) {
      const int64_t first = firsts[static_cast<size_t>(image)];
      const int64_t count = grids[static_cast<size_t>(image)].patches() / unit;
      for (int64_t i = first; i < first + count; ++i) {
        out.order[static_cast<size_t>(i)] = row + (raster.empty() ? i : raster[static_cast<size_t>(i)]) - first;
      }
      row += count;
    }
    const RowSplit rows = even_rows(row - begin, layout.encoder);  // as the encoder's layers have them
    out.replica.counts.insert(out.replica.counts.end(), rows.counts.begin(), rows.counts.end());
  }
  out.images = groups[static_cast<size_t>(layout.rank / layout.encoder)];
  const int64_t first = layout.rank / layout.projector * layout.projector;
  out.projector.counts.assign(out.replica.counts.begin() + first,
                              out.replica.counts.begin() + first + layout.projector);
  return out;
}

}  // namespace parvl
