#include "parvl/train/backprop.h"

#include <algorithm>

namespace parvl {

bool has_trained_params(const ParamTable& params, const Piece& piece) {
  return std::any_of(params.all().begin(), params.all().end(), [&](const auto& param) {
    return param->trainable() && std::any_of(piece.owns.begin(), piece.owns.end(), [&](const std::string& prefix) {
             return param->name.rfind(prefix, 0) == 0;
           });
  });
}

at::Tensor forward_backward(const Model& model, const PackedBatch& batch, double scale, bool recompute) {
  const at::Device device = batch.backbone.ids.device();
  if (batch.num_targets == 0) return at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
  std::vector<Piece> pieces;
  const auto append = [&](std::vector<Piece> more) {
    for (Piece& piece : more) pieces.push_back(std::move(piece));
  };
  Bundle bundle;
  if (!batch.grids.empty()) {
    bundle.set("pixels", batch.pixels);
    const VisionBatch vision = model.vision_encoder()->batch(batch.grids, device);
    append(model.vision_encoder()->pieces(vision));
    append(model.projector()->pieces(vision));
  }
  append(model.backbone().pieces(batch.backbone));
  pieces.push_back(model.backbone().loss_piece(batch.loss_rows, batch.targets, scale));

  std::vector<Segment> segments;
  bool trained_before = false;
  for (Piece& piece : pieces) {
    const bool trained = has_trained_params(model.params(), piece);
    segments.emplace_back(std::move(piece), SegmentOptions{trained_before, trained, recompute});
    trained_before = trained_before || trained;
  }
  for (Segment& segment : segments) bundle = segment.forward(bundle);
  const at::Tensor loss = bundle.at("loss");
  Bundle grad{{"loss", at::ones_like(loss)}};
  while (!segments.empty()) {
    grad = segments.back().backward_input(grad);
    segments.pop_back();
  }
  return loss;
}

}  // namespace parvl
