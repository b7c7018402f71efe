// A micro batch's images over the ranks that encode them. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "parvl/models/model.h"
#include "parvl/nn/row_split.h"

namespace parvl {

// The ranks that encode a micro batch's images (its replica's, or the encoder's own) in ascending order; each `encoder`
// neighbours encode together, each `projector` project together.
struct VisionLayout {
  int64_t ranks = 1;
  int64_t encoder = 1, projector = 1;  // divide `ranks`
  int64_t rank = 0;                    // this one, among `ranks`; any where this one encodes nothing
};

struct VisionShare {
  std::vector<int64_t> images;  // that this rank encodes, with its encoder group; ascending
  // Merged tokens that each rank has after the encoder: of this rank's projector group, and of all that encode.
  RowSplit projector, replica;
  std::vector<int64_t> order;  // merged token i of the batch (raster order) is row order[i] of all ranks' rows
};

// Every image goes to one encoder group: that which `groups` names, or where it is empty so that patches are even (see
// `spread`). `raster`: VisionEncoder::raster of all images.
VisionShare share_images(const VisionLayout& layout, const std::vector<Grid>& grids, int64_t merge,
                         const std::vector<int64_t>& raster, const std::vector<int64_t>& groups = {});

}  // namespace parvl
