// Sequences with images → one packed batch for a model's pieces.
#pragma once

#include <vector>

#include "parvl/models/model.h"

namespace parvl {

// Indices (token ids, rows, blocks) as an int64 tensor on the device.
at::Tensor to_device(const std::vector<int64_t>& values, at::Device device);

struct SequenceInput {
  std::vector<int32_t> ids;
  std::vector<ImageSpan> images;  // in order of position
  // Per image: [grid.patches() · patch_values], borrowed until pack returns; null: not to be encoded here.
  std::vector<const float*> pixels;
  std::vector<uint8_t> is_target;  // per token, or empty: token i is learned from position i − 1
};

struct PackedBatch {
  std::vector<Grid> grids;  // of the images to encode here, in packed order
  at::Tensor pixels;        // [P, patch_values] of these in the model's type on the device; undefined without
  BackboneBatch backbone;
  at::Tensor loss_rows;  // int64 [R]: rows whose output predicts a target
  at::Tensor targets;    // int64 [R]
  int64_t tokens = 0;
  int64_t num_targets = 0;
};

// All images of the sequences, in packed order.
std::vector<Grid> grids_of(const std::vector<SequenceInput>& sequences);

// `attention` null: packed attention inside each sequence (training, scoring). `images`: those of grids_of to encode
// here, ascending; null: all. A first token is never a target.
PackedBatch pack(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device,
                 std::shared_ptr<AttentionBackend> attention = nullptr, const std::vector<int64_t>* images = nullptr);

// The images alone: `grids` and `pixels`. `images` as for pack.
PackedBatch pack_images(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device,
                        const std::vector<int64_t>* images = nullptr);

// The type that a model computes in, which its pixels are converted to on their way.
at::ScalarType pixel_type(const Model& model);
// An image's patches [rows, patch_values] into those rows, which are on the CPU.
void put_pixels(const float* patches, const at::Tensor& rows);

// Vision encoder and projector without autograd: "visual" [V, hidden].
at::Tensor encode_images(const Model& model, const VisionBatch& batch, const at::Tensor& pixels);
// The same; undefined without images.
at::Tensor encode_images(const Model& model, const PackedBatch& batch, at::Device device);
// Each image's rows of "visual", in memory of their own, so that an image that goes gives its memory back.
std::vector<at::Tensor> each_image(const Model& model, const std::vector<ImageSpan>& images, const at::Tensor& visual);
// The decoder's output "hidden" [T, hidden] without autograd.
at::Tensor run_backbone(const Model& model, const PackedBatch& batch, const at::Tensor& visual);

}  // namespace parvl
