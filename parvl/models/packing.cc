#include "parvl/models/packing.h"

#include "parvl/base/check.h"
#include "parvl/nn/device.h"

namespace parvl {

at::Tensor to_device(const std::vector<int64_t>& values, at::Device device) {
  return upload(at::tensor(values, at::TensorOptions().dtype(at::kLong)), device);
}

at::ScalarType pixel_type(const Model& model) { return model.params().owned().front()->value.scalar_type(); }

void put_pixels(const float* patches, const at::Tensor& rows) {
  rows.copy_(at::from_blob(const_cast<float*>(patches), rows.sizes(), at::kFloat));
}

namespace {

// Grids and pixels of `images` (null: all), which count over all sequences.
void put_images(const Model& model, const std::vector<SequenceInput>& sequences, const std::vector<int64_t>* images,
                at::Device device, PackedBatch& out) {
  std::vector<const float*> sources;
  size_t next = 0;
  int64_t index = 0, patches = 0;
  for (const SequenceInput& sequence : sequences) {
    for (size_t i = 0; i < sequence.images.size(); ++i, ++index) {
      if (images != nullptr && (next == images->size() || (*images)[next] != index)) continue;
      ++next;
      out.grids.push_back(sequence.images[i].grid);
      sources.push_back(sequence.pixels[i]);
      PARVL_CHECK(sources.back() != nullptr, "an image is encoded on a rank that has no pixels of it");
      patches += out.grids.back().patches();
    }
  }
  if (out.grids.empty()) return;
  // On the way to a GPU through pinned memory, which it reads at full speed and without waiting for us.
  const auto options = at::TensorOptions().dtype(pixel_type(model)).pinned_memory(device.is_cuda());
  const at::Tensor pixels = at::empty({patches, model.spec().vision->patch_values()}, options);
  int64_t row = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    put_pixels(sources[i], pixels.narrow(0, row, out.grids[i].patches()));
    row += out.grids[i].patches();
  }
  out.pixels = pixels.to(device, /*non_blocking=*/true);
}

}  // namespace

std::vector<Grid> grids_of(const std::vector<SequenceInput>& sequences) {
  std::vector<Grid> out;
  for (const SequenceInput& sequence : sequences) {
    for (const ImageSpan& image : sequence.images) out.push_back(image.grid);
  }
  return out;
}

PackedBatch pack(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device,
                 std::shared_ptr<AttentionBackend> attention, const std::vector<int64_t>* images) {
  PackedBatch out;
  put_images(model, sequences, images, device, out);
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
  if (!visual_rows.empty()) out.backbone.visual_rows = to_device(visual_rows, device);
  out.backbone.ids = to_device(ids, device);
  out.backbone.rope = model.backbone().rope(positions, device);
  out.backbone.attention = attention ? attention : std::make_shared<PackedBackend>(SeqLayout(lengths, device));
  out.loss_rows = to_device(loss_rows, device);
  out.targets = to_device(targets, device);
  return out;
}

PackedBatch pack_images(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device,
                        const std::vector<int64_t>* images) {
  PackedBatch out;
  put_images(model, sequences, images, device, out);
  return out;
}

at::Tensor encode_images(const Model& model, const VisionBatch& batch, const at::Tensor& pixels) {
  const Bundle features = run_pieces(model.vision_encoder()->pieces(batch), Bundle{{"pixels", pixels}});
  return run_pieces(model.projector()->pieces(batch), features).at("visual");
}

at::Tensor encode_images(const Model& model, const PackedBatch& batch, at::Device device) {
  if (batch.grids.empty()) return {};
  return encode_images(model, model.vision_encoder()->batch(batch.grids, device), batch.pixels);
}

std::vector<at::Tensor> each_image(const Model& model, const std::vector<ImageSpan>& images, const at::Tensor& visual) {
  const int64_t merge = model.spec().vision->merge;
  std::vector<at::Tensor> out;
  int64_t row = 0;
  for (const ImageSpan& image : images) {
    const int64_t tokens = image.grid.patches() / (merge * merge);
    out.push_back(visual.narrow(0, row, tokens).clone());
    row += tokens;
  }
  return out;
}

at::Tensor run_backbone(const Model& model, const PackedBatch& batch, const at::Tensor& visual) {
  Bundle in;
  if (visual.defined()) in.set("visual", visual);
  return run_pieces(model.backbone().pieces(batch.backbone), in).at("hidden");
}

}  // namespace parvl
