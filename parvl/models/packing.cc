#include "parvl/models/packing.h"

#include <ATen/Parallel.h>

#include "parvl/base/check.h"

namespace parvl {

at::Tensor to_device(const std::vector<int64_t>& values, at::Device device) {
  return at::tensor(values, at::TensorOptions().dtype(at::kLong)).to(device);
}

namespace {

at::Tensor copy_pixels(const Model& model, const std::vector<SequenceInput>& sequences, const std::vector<Grid>& grids,
                       at::Device device) {
  const int64_t values = model.spec().vision->patch_values();
  int64_t patches = 0;
  for (const Grid& grid : grids) patches += grid.patches();
  // On the way to a GPU through pinned memory, which it reads at full speed and without waiting for us.
  const auto options = at::TensorOptions().dtype(at::kFloat).pinned_memory(device.is_cuda());
  const at::Tensor pixels = at::empty({patches, values}, options);
  std::vector<std::pair<const float*, int64_t>> images;  // and the values before each in the packed order
  int64_t before = 0;
  for (const SequenceInput& sequence : sequences) {
    for (size_t i = 0; i < sequence.images.size(); ++i) {
      images.emplace_back(sequence.pixels[i], before);
      before += sequence.images[i].grid.patches() * values;
    }
  }
  images.emplace_back(nullptr, before);
  at::parallel_for(0, static_cast<int64_t>(images.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    for (size_t i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      std::copy_n(images[i].first, images[i + 1].second - images[i].second,
                  pixels.data_ptr<float>() + images[i].second);
    }
  });
  return pixels.to(device, /*non_blocking=*/true);
}

}  // namespace

PackedBatch pack(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device,
                 std::shared_ptr<AttentionBackend> attention) {
  PackedBatch out;
  std::vector<int64_t> ids, visual_rows, loss_rows, targets, lengths;
  std::vector<std::array<int64_t, 3>> positions;
  for (const SequenceInput& sequence : sequences) {
    const int64_t base = static_cast<int64_t>(ids.size()), length = static_cast<int64_t>(sequence.ids.size());
    ids.insert(ids.end(), sequence.ids.begin(), sequence.ids.end());
    lengths.push_back(length);
    const RopePositions rope = model.positions(length, sequence.images);
    positions.insert(positions.end(), rope.at.begin(), rope.at.end());
    for (const ImageSpan& image : sequence.images) {
      PARVL_CHECK(model.vision_encoder() != nullptr, "an image reached a text-only model");
      out.grids.push_back(image.grid);
      const int64_t merge = model.spec().vision->merge, merged = image.grid.patches() / (merge * merge);
      for (int64_t i = 0; i < merged; ++i) visual_rows.push_back(base + image.begin + i);
    }
    for (size_t i = 1; i < sequence.is_target.size(); ++i) {
      if (!sequence.is_target[i]) continue;
      loss_rows.push_back(base + static_cast<int64_t>(i) - 1);
      targets.push_back(sequence.ids[i]);
    }
  }
  out.tokens = static_cast<int64_t>(ids.size());
  out.num_targets = static_cast<int64_t>(targets.size());
  if (!out.grids.empty()) {
    out.pixels = copy_pixels(model, sequences, out.grids, device);
    out.backbone.visual_rows = to_device(visual_rows, device);
  }
  out.backbone.ids = to_device(ids, device);
  out.backbone.rope = model.backbone().rope(positions, device);
  out.backbone.attention = attention ? attention : std::make_shared<PackedBackend>(SeqLayout(lengths, device));
  out.loss_rows = to_device(loss_rows, device);
  out.targets = to_device(targets, device);
  return out;
}

PackedBatch pack_images(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device) {
  PackedBatch out;
  for (const SequenceInput& sequence : sequences) {
    for (const ImageSpan& image : sequence.images) out.grids.push_back(image.grid);
  }
  if (!out.grids.empty()) out.pixels = copy_pixels(model, sequences, out.grids, device);
  return out;
}

at::Tensor encode_images(const Model& model, const PackedBatch& batch, at::Device device) {
  if (batch.grids.empty()) return {};
  Bundle bundle = run_pieces(model.vision_encoder()->pieces(batch.grids, device), Bundle{{"pixels", batch.pixels}});
  return run_pieces(model.projector()->pieces(batch.grids, device), bundle).at("visual");
}

at::Tensor run_backbone(const Model& model, const PackedBatch& batch, const at::Tensor& visual) {
  Bundle in;
  if (visual.defined()) in.set("visual", visual);
  return run_pieces(model.backbone().pieces(batch.backbone), in).at("hidden");
}

}  // namespace parvl
