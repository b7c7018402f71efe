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

namespace {

// Every rank's rows to all, in the order of the batch's images.
Piece exchange_piece(const VisionShare& share, const TensorParallel& replica, at::Device device) {
  return {"visual_exchange", {}, [replica, rows = share.replica, order = to_device(share.order, device)](const Bundle& in) {
            return Bundle{{"visual", replica.gather_rows(in.at("visual"), rows).index_select(0, order)}};
          }};
}

// The pieces of a micro batch with what each needs a graph for, which follows from the freeze plan alone: a rank without
// images has the same borders as the others.
class SegmentList {
 public:
  SegmentList(const ParamTable& params, bool recompute) : params_(params), recompute_(recompute) {}

  void add(Piece piece) {
    const bool trained = has_trained_params(params_, piece);
    segments_.emplace_back(std::move(piece), SegmentOptions{trained_before_, trained, recompute_});
    trained_before_ = trained_before_ || trained;
  }
  void add(std::vector<Piece> pieces) {
    for (Piece& piece : pieces) add(std::move(piece));
  }
  // A module whose pieces run on other ranks only.
  void skip(const std::string& prefix) {
    trained_before_ = trained_before_ || has_trained_params(params_, {"", {prefix}, {}});
  }
  std::vector<Segment> take() { return std::move(segments_); }

 private:
  const ParamTable& params_;
  bool recompute_, trained_before_ = false;
  std::vector<Segment> segments_;
};

}  // namespace

MicroBatch make_micro_batch(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device,
                            const RunRanks& ranks) {
  MicroBatch out;
  out.grids = grids_of(sequences);
  if (ranks.replica() != nullptr && !out.grids.empty()) {
    out.share = share_images(ranks.vision_layout(), out.grids, model.spec().vision->merge,
                             model.vision_encoder()->raster(out.grids));
    out.replica = TensorParallel(ranks.replica());
  }
  out.packed = pack(model, sequences, device, nullptr, out.share ? &out.share->images : nullptr);
  return out;
}

std::vector<Piece> vision_pieces(const Model& model, const MicroBatch& batch, Bundle& bundle) {
  const at::Device device = batch.packed.backbone.ids.device();
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
  if (batch.share) out.push_back(exchange_piece(*batch.share, batch.replica, device));
  return out;
}

at::Tensor forward_backward(const Model& model, const MicroBatch& batch, double scale, bool recompute) {
  const PackedBatch& packed = batch.packed;
  if (packed.num_targets == 0) {
    return at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(packed.backbone.ids.device()));
  }
  SegmentList list(model.params(), recompute);
  Bundle bundle;
  if (!batch.grids.empty()) {
    if (packed.grids.empty()) list.skip("vision_encoder.");
    list.add(vision_pieces(model, batch, bundle));
  }
  list.add(model.backbone().pieces(packed.backbone));
  list.add(model.backbone().loss_piece(packed.tokens, packed.loss_rows, packed.targets, scale));

  std::vector<Segment> segments = list.take();
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
