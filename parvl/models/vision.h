// What the vision encoders of the Qwen2-VL line share: patch order, rotary angles, the projector, names.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parvl/models/model.h"

namespace parvl {

// Row and column of every patch, in the processor's order (each merge × merge square contiguous), frames repeated.
std::vector<std::pair<int64_t, int64_t>> patch_positions(const std::vector<Grid>& grids, int64_t merge);

// Angles over two axes: the first quarter of a head's pairs turns with the row, the second with the column. float64 for
// a float64 model (`type`), else float32.
RotaryTable vision_rope(const VisionSpec& spec, const std::vector<std::pair<int64_t, int64_t>>& positions,
                        at::ScalarType type, at::Device device);

// One sequence a frame.
std::vector<int64_t> frame_lengths(const std::vector<Grid>& grids);

// norm → join merge² neighbours → linear → GELU → linear, then back into raster order.
std::unique_ptr<Projector> make_merger(ParamTable& params, const VisionSpec& spec, int64_t llm_hidden, bool layer_norm);

// Rotary positions with images: text counts on all axes; an image spreads over its merged grid from the current
// position, and the text after it goes on from the larger side (Wang et al., "Qwen2-VL", 2024, section 2.1).
RopePositions mrope_positions(int64_t tokens, const std::vector<ImageSpan>& images, int64_t merge);

// Pairs (our spelling, the checkpoint's) of parts of a name; the first that occurs is replaced.
using NameParts = std::vector<std::pair<std::string, std::string>>;
// Checkpoint spellings of a parameter of a model with `visual.` and `model.` parts; the first is the one written.
std::vector<std::string> vl_checkpoint_names(const Param& param, const NameParts& vision_parts);

// Patches → features, the same matrix for each. The object must outlive its pieces.
struct PatchEmbed {
  const TensorParallel* ranks = nullptr;
  int64_t row_unit = 1;  // see VisionBlock
  const Param* weight = nullptr;
  // Row i is patch order[i]; `order` undefined: patch i.
  Piece piece(const at::Tensor& order) const;
};
PatchEmbed make_patch_embed(ParamTable& params, const VisionSpec& spec);
VisionBlock make_vision_block(ParamTable& params, const VisionSpec& spec, int64_t index, bool layer_norm, bool gated);

}  // namespace parvl
