#include "parvl/train/micro_batch.h"

#include <algorithm>

namespace parvl {

MicroBatch make_micro_batch(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device,
                            const RunRanks& ranks, const std::vector<int64_t>& encoders) {
  MicroBatch out;
  out.device = device;
  out.grids = grids_of(sequences);
  if ((ranks.encoder_apart() || ranks.replica() != nullptr) && !out.grids.empty()) {
    out.share = share_images(ranks.vision_layout(), out.grids, model.spec().vision->merge,
                             model.vision_encoder()->raster(out.grids), encoders);
    if (!ranks.encoder_apart()) out.replica = TensorParallel(ranks.replica());
  }
  const std::vector<int64_t> none, *images = out.share ? &out.share->images : nullptr;
  if (ranks.is_encoder()) {
    out.packed = pack_images(model, sequences, device, images);
  } else {
    out.packed = pack(model, sequences, device, nullptr, ranks.encoder_apart() ? &none : images);
  }
  return out;
}

std::vector<Piece> vision_pieces(const Model& model, const MicroBatch& batch, Bundle& bundle) {
  const at::Device device = batch.device;
  std::vector<Piece> out;
  VisionBatch vision;
  if (batch.packed.grids.empty()) {  // others have images
    const auto options = at::TensorOptions().dtype(pixel_type(model)).device(device);
    bundle.set("features", at::empty({0, model.spec().vision->hidden}, options));
  } else {
    bundle.set("pixels", batch.packed.pixels);
    vision = model.vision_encoder()->batch(batch.packed.grids, device);
    out = model.vision_encoder()->pieces(vision);
  }
  if (batch.share) {
    vision.raster = at::Tensor();  // the exchange puts all in order
    vision.merged = batch.share->projector;
  }
  for (Piece& piece : model.projector()->pieces(vision)) out.push_back(std::move(piece));
  return out;
}

Bundle no_visual(const Model& model, at::Device device) {
  const auto options = at::TensorOptions().dtype(pixel_type(model)).device(device);
  return {{"visual", at::empty({0, model.spec().backbone.hidden}, options)}};
}

Piece exchange_piece(const MicroBatch& batch) {
  return {"visual_exchange",
          {},
          [replica = batch.replica, rows = batch.share->replica,
           order = to_device(batch.share->order, batch.device)](const Bundle& in) {
            return Bundle{{"visual", replica.gather_rows(in.at("visual"), rows).index_select(0, order)}};
          }};
}

bool has_trained_params(const ParamTable& params, const Piece& piece) {
  return std::any_of(params.all().begin(), params.all().end(), [&](const auto& param) {
    return param->trains && std::any_of(piece.owns.begin(), piece.owns.end(),
                                        [&](const std::string& prefix) { return param->name.rfind(prefix, 0) == 0; });
  });
}

void SegmentList::add(Piece piece) {
  const bool trained = has_trained_params(params_, piece);
  const bool recompute = recompute_ && !piece.owns.empty();  // an exchange keeps nothing to save
  segments_.emplace_back(std::move(piece), SegmentOptions{trained_before_, trained, recompute});
  starts_after(trained);
}

void SegmentList::add(std::vector<Piece> pieces) {
  for (Piece& piece : pieces) add(std::move(piece));
}

void SegmentList::add_vision(const Model& model, const MicroBatch& batch, Bundle& bundle) {
  if (batch.packed.grids.empty()) starts_after(has_trained_params(params_, {"", {"vision_encoder."}, {}}));
  add(vision_pieces(model, batch, bundle));
}

}  // namespace parvl
