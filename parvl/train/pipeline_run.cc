#include "parvl/train/pipeline_run.h"

#include <algorithm>
#include <set>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/nn/stage.h"
#include "parvl/nn/tensor_buffer.h"
#include "parvl/train/stage_messages.h"

namespace parvl {
namespace {

at::Tensor empty_rows(const Model& model, int64_t rows, at::Device device) {
  return at::empty({rows, model.spec().backbone.hidden}, at::TensorOptions().dtype(pixel_type(model)).device(device));
}

// An empty tensor for what the stage before sends: this rank's rows.
at::Tensor hidden_like(const Model& model, const MicroBatch& batch) {
  const TensorParallel& ranks = model.params().ranks(Module::kBackbone);
  const RowSplit rows = ranks.split(batch.packed.tokens);
  const int64_t own = ranks.alone() ? batch.packed.tokens : rows.counts[static_cast<size_t>(ranks.rank())];
  return empty_rows(model, own, batch.device);
}

// The groups of an encoder's own ranks that have any of a micro batch's images, ascending.
std::vector<int64_t> groups_with_images(const std::vector<int64_t>& encoders) {
  const std::set<int64_t> groups(encoders.begin(), encoders.end());
  return {groups.begin(), groups.end()};
}

// What a rank holds of a micro batch that is under way.
struct Live {
  MicroBatch batch;
  std::vector<Segment> encoder, exchange, stage;
  Bundle features;       // what the encoder's part gave
  Bundle in, out, grad;  // of the stage: its input, its output, and the gradient that comes or goes
  Bundle features_grad;
  bool stage_is_done = false;
};

// The gradient of a stage's input; where that is "visual" of an encoder's own ranks, how its rows lie on these.
struct Upstream {
  Bundle grad;
  RowSplit visual;
};

Bundle forward(std::vector<Segment>& segments, Bundle bundle) {
  for (Segment& segment : segments) bundle = segment.forward(bundle);
  return bundle;
}

// `is_final`, which may be empty, hears of the parameters that no segment before the last reads.
Bundle backward(std::vector<Segment>& segments, Bundle grad,
                const std::function<void(const std::string& prefix)>& is_final = {}) {
  while (!segments.empty()) {
    grad = segments.back().backward_input(grad);
    const std::vector<std::string> owned = segments.back().owns();
    segments.pop_back();
    for (size_t i = 0; is_final && i < owned.size(); ++i) {
      const bool read_before = std::any_of(segments.begin(), segments.end(), [&](const Segment& segment) {
        return std::count(segment.owns().begin(), segment.owns().end(), owned[i]) > 0;
      });
      if (!read_before) is_final(owned[i]);
    }
  }
  return grad;
}

class PipelineRun {
 public:
  PipelineRun(const Model& model, const RunRanks& ranks, at::Device device, const PipelineOptions& options)
      : model_(model), ranks_(ranks), device_(device), options_(options), messages_(ranks) {
    loss_ = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  }

  at::Tensor run() {
    const absl::StatusOr<PipelineSchedule> schedule = make_1f1b(shape());
    PARVL_CHECK(schedule.ok(), std::string(schedule.status().message()).c_str());
    shape_ = &schedule->shape;
    for (const Action& action : schedule->ranks[static_cast<size_t>(own_rank(*schedule))].actions) {
      const double begin = options_.record == nullptr ? 0 : options_.clock->now_seconds();
      perform(action);
      if (options_.record != nullptr) options_.record->push_back({action, begin, options_.clock->now_seconds()});
    }
    messages_.finish();
    return loss_;
  }

 private:
  // With one stage the images belong to its forward, so that not all micro batches' features are held at once.
  bool vision_in_stage() const { return ranks_.stages() == 1 && !ranks_.encoder_apart(); }

  int64_t own_rank(const PipelineSchedule& schedule) const {
    if (ranks_.is_encoder()) return schedule.encoder_rank(ranks_.encoder_share().group);
    return schedule.rank_of(ranks_.encoder_apart() ? ranks_.share(1).replica : 0, ranks_.stage());
  }

  // An LLM's rank knows its own replica's micro batches, and needs no others: of those it has nothing to do.
  PipelineShape shape() const {
    PipelineShape out;
    out.stages = ranks_.stages();
    const bool apart = ranks_.encoder_apart();
    if (apart) out.replicas = ranks_.share(1).replicas;
    const ParamTable& params = model_.params();
    const auto trained = [&](const std::string& prefix) { return has_trained_params(params, {"", {prefix}, {}}); };
    const bool vision_trained = trained("vision_encoder.") || trained("projector.");
    for (int64_t s = 0; s < out.stages; ++s) {
      out.stage_trained.push_back(ranks_.trains(params, s) || (vision_in_stage() && vision_trained));
    }
    out.tied = model_.spec().backbone.tied && params.find("llm_backbone.embed.weight")->trains;
    const bool encodes = !vision_in_stage() && model_.vision_encoder() != nullptr;
    out.encoder = apart ? EncoderPlace::kOwnRanks : encodes ? EncoderPlace::kAllRanks : EncoderPlace::kNone;
    out.encoder_ranks = ranks_.encoder_share().groups;
    out.encoder_trained = encodes && vision_trained;
    for (const PipelineMicrobatch& one : options_.microbatches) {
      Microbatch& microbatch = out.microbatches.emplace_back();
      if (apart) {
        microbatch = {one.replica, groups_with_images(one.encoders)};
      } else if (encodes && !one.grids.empty()) {
        microbatch.encoders = stages_with_images(one.grids);
      }
    }
    return out;
  }

  std::vector<int64_t> stages_with_images(const std::vector<Grid>& grids) const {
    const VisionShare share = share_images(ranks_.vision_layout(), grids, model_.spec().vision->merge, {});
    const auto a_stage = static_cast<int64_t>(share.replica.counts.size()) / ranks_.stages();
    std::vector<int64_t> out;
    for (int64_t s = 0; s < ranks_.stages(); ++s) {
      const auto first = share.replica.counts.begin() + s * a_stage;
      if (std::any_of(first, first + a_stage, [](int64_t rows) { return rows > 0; })) out.push_back(s);
    }
    return out;
  }

  void perform(const Action& action) {
    const bool sends_gradient = action.kind == ActionKind::kSend && action.payload == Payload::kGradient;
    Live& live = action.microbatch < 0 || sends_gradient ? none_ : at(action.microbatch);
    const bool encoder = action.stage == kEncoderStage;
    switch (action.kind) {
      case ActionKind::kForward:
        return encoder ? encode(live) : forward_stage(live, action.microbatch);
      case ActionKind::kBackward:
        if (encoder) {
          backward(live.encoder, std::exchange(live.features_grad, {}));
        } else {
          const bool last =
              ranks_.stages() == 1 && action.microbatch + 1 == static_cast<int64_t>(options_.microbatches.size());
          Upstream& upstream = upstream_[action.microbatch];
          upstream.grad = backward(live.stage, std::exchange(live.grad, {}),
                                   last ? options_.is_final : decltype(options_.is_final)());
          if (live.batch.share) upstream.visual = live.batch.share->replica;
        }
        return;
      case ActionKind::kSend:
        if (encoder) return messages_.send_visual(std::exchange(live.features, {}).at("visual"), replica_of(action));
        if (action.payload == Payload::kGradient) return send_gradient(action);
        return messages_.send(std::exchange(live.out, {}).at("hidden"), ranks_.stage() + 1);
      case ActionKind::kReceive:
        return action.payload == Payload::kOutput ? receive_input(live, action) : receive_gradient(live, action);
      case ActionKind::kExchange:
        return exchange(live, action.microbatch, action.payload);
      case ActionKind::kReduceTied:
        return wait(ranks_.tied()->all_reduce(buffer_of(model_.params().find("llm_backbone.embed.weight")->main_grad),
                                              ReduceOp::kSum));
      case ActionKind::kRelease:
        return release(live, action.microbatch, encoder);
      case ActionKind::kBackwardInput:
      case ActionKind::kBackwardWeight:
        break;
    }
    PARVL_CHECK(false, "a schedule has an action that is not carried out");
  }

  Live& at(int64_t microbatch) {
    auto [found, is_new] = live_.try_emplace(microbatch);
    if (is_new) {
      const std::vector<int64_t>& encoders = options_.microbatches[static_cast<size_t>(microbatch)].encoders;
      found->second.batch = make_micro_batch(model_, options_.sequences(microbatch), device_, ranks_, encoders);
    }
    return found->second;
  }

  int64_t replica_of(const Action& action) const {
    return shape_->microbatches[static_cast<size_t>(action.microbatch)].replica;
  }
  // The group of encoder ranks that a first stage's message is from or to.
  int64_t encoder_of(const Action& action) const { return action.peer - shape_->replicas * shape_->stages; }

  void receive_input(Live& live, const Action& action) {
    if (ranks_.stage() > 0) {
      live.in = Bundle{{"hidden", hidden_like(model_, live.batch)}};
      return messages_.receive(live.in.at("hidden"), ranks_.stage() - 1);
    }
    const RowSplit& rows = live.batch.share->replica;
    if (live.in.empty()) live.in = Bundle{{"visual", empty_rows(model_, rows.total(), device_)}};
    messages_.receive_visual(live.in.at("visual"), rows, encoder_of(action));
  }

  void receive_gradient(Live& live, const Action& action) {
    if (ranks_.is_encoder()) {
      const RowSplit& rows = live.batch.share->replica;
      const auto place = static_cast<size_t>(ranks_.encoder_place(ranks_.rank()));
      const at::Tensor like = empty_rows(model_, rows.counts[place], device_);
      live.features_grad = Bundle{{"visual", messages_.receive_visual_grad(like, replica_of(action))}};
      return;
    }
    live.grad = Bundle{{"hidden", hidden_like(model_, live.batch)}};
    messages_.receive(live.grad.at("hidden"), ranks_.stage() + 1);
  }

  void send_gradient(const Action& action) {
    const Upstream& upstream = upstream_.at(action.microbatch);
    if (ranks_.stage() > 0) {
      messages_.send(upstream.grad.at("hidden"), ranks_.stage() - 1);
    } else {
      messages_.send_visual_grad(upstream.grad.at("visual"), upstream.visual, encoder_of(action));
      const Microbatch& microbatch = shape_->microbatches[static_cast<size_t>(action.microbatch)];
      if (encoder_of(action) != microbatch.encoders.back()) return;  // another part of it is still to go
    }
    upstream_.erase(action.microbatch);
  }

  void encode(Live& live) {
    Bundle in;
    SegmentList list(model_.params(), options_.recompute);
    list.add_vision(model_, live.batch, in);
    live.encoder = list.take();
    live.features = forward(live.encoder, std::move(in));
    live.batch.packed.pixels = at::Tensor();  // the segments keep what their backward reads
  }

  // The images' embeddings to all ranks of the replica, of which the first stage's keep them; and their gradients back.
  void exchange(Live& live, int64_t microbatch, Payload payload) {
    if (payload == Payload::kGradient) {
      const auto found = upstream_.find(microbatch);  // on the first stage; others count as zero
      live.features_grad = backward(live.exchange, found == upstream_.end() ? Bundle() : found->second.grad);
      upstream_.erase(microbatch);
      return;
    }
    if (live.features.empty()) live.features = no_visual(model_, device_);
    SegmentList list(model_.params(), options_.recompute);
    list.starts_after(shape_->encoder_trained);
    list.add(exchange_piece(live.batch));
    live.exchange = list.take();
    const Bundle out = forward(live.exchange, live.features);
    if (ranks_.stage() == 0) live.in = out;
    live.features = {};
    if (!shape_->encoder_trained) live.exchange.clear();
  }

  void forward_stage(Live& live, int64_t microbatch) {
    const StagePart& part = ranks_.part();
    const PackedBatch& packed = live.batch.packed;
    SegmentList list(model_.params(), options_.recompute);
    if (!vision_in_stage()) {
      list.starts_after(stage_backward(*shape_, ranks_.stage(), microbatch).input_grad);
    } else if (!live.batch.grids.empty()) {
      list.add_vision(model_, live.batch, live.in);
    }
    const bool images_come = vision_in_stage() || (ranks_.encoder_apart() && part.embedding);
    if (images_come && live.batch.share) list.add(exchange_piece(live.batch));
    list.add(stage_pieces(model_.backbone().pieces(packed.backbone), part));
    if (part.head) {
      list.add(model_.backbone().loss_piece(packed.tokens, packed.loss_rows, packed.targets, options_.scale));
    }
    live.stage = list.take();
    live.out = forward(live.stage, std::exchange(live.in, {}));
    if (!part.head) return;
    const at::Tensor loss = live.out.at("loss");
    loss_.add_(loss);
    live.grad = Bundle{{"loss", at::ones_like(loss)}};
  }

  // The micro batch goes when neither the stage nor the encoder has anything to do with it any more.
  void release(Live& live, int64_t microbatch, bool encoder) {
    (encoder ? live.encoder : live.stage).clear();
    live.stage_is_done = live.stage_is_done || !encoder || ranks_.is_encoder();
    if (live.stage_is_done) live.out = {};
    if (live.stage_is_done && live.encoder.empty() && live.exchange.empty()) live_.erase(microbatch);
  }

  const Model& model_;
  const RunRanks& ranks_;
  at::Device device_;
  const PipelineOptions& options_;
  StageMessages messages_;
  const PipelineShape* shape_ = nullptr;
  std::map<int64_t, Live> live_;
  std::map<int64_t, Upstream> upstream_;  // may be sent after a release
  Live none_;
  at::Tensor loss_;
};

// All embeddings of a micro batch's images from an encoder's own ranks, in the order of the images. No autograd.
Bundle receive_images(const Model& model, const RunRanks& ranks, const MicroBatch& batch, StageMessages& messages) {
  const RowSplit& rows = batch.share->replica;
  const Bundle in = {{"visual", empty_rows(model, rows.total(), batch.device)}};
  for (int64_t group = 0; group < ranks.encoder_share().groups; ++group) {
    messages.receive_visual(in.at("visual"), rows, group);
  }
  return run_pieces({exchange_piece(batch)}, in);
}

}  // namespace

at::Tensor run_pipeline(const Model& model, const RunRanks& ranks, at::Device device, const PipelineOptions& options) {
  return PipelineRun(model, ranks, device, options).run();
}

at::Tensor run_stages(const Model& model, const RunRanks& ranks, const MicroBatch& batch, int64_t replica) {
  const StagePart part = ranks.part();
  StageMessages messages(ranks);
  Bundle bundle;
  if (!batch.grids.empty() && (ranks.is_encoder() || !ranks.encoder_apart())) {
    // Of an encoder's own ranks those whose group has none of the images have no part in it.
    if (ranks.is_encoder() && batch.packed.grids.empty()) return {};
    std::vector<Piece> pieces = vision_pieces(model, batch, bundle);
    if (batch.share && !ranks.is_encoder()) pieces.push_back(exchange_piece(batch));
    bundle = run_pieces(pieces, bundle);
  }
  if (ranks.is_encoder()) {
    if (!bundle.empty()) messages.send_visual(bundle.at("visual"), replica);
    messages.finish();
    return {};
  }
  if (!part.embedding) {
    bundle = Bundle{{"hidden", hidden_like(model, batch)}};
    messages.receive(bundle.at("hidden"), ranks.stage() - 1);
  } else if (ranks.encoder_apart() && batch.share) {
    bundle = receive_images(model, ranks, batch, messages);
  }
  const at::Tensor hidden =
      run_pieces(stage_pieces(model.backbone().pieces(batch.packed.backbone), part), bundle).at("hidden");
  if (!part.head) {
    messages.send(hidden, ranks.stage() + 1);
    messages.finish();
    return {};
  }
  const TensorParallel& tensor = model.params().ranks(Module::kBackbone);
  return tensor.gather_rows(hidden, tensor.split(batch.packed.tokens));
}

}  // namespace parvl
