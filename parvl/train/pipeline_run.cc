#include "parvl/train/pipeline_run.h"

#include <algorithm>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/nn/tensor_buffer.h"

namespace parvl {
namespace {

// This stage's pieces of the backbone, without the loss.
std::vector<Piece> stage_pieces(const Model& model, const StagePart& part, const BackboneBatch& batch) {
  std::vector<Piece> all = model.backbone().pieces(batch), out;  // the embedding, then the layers
  if (part.embedding) out.push_back(std::move(all[0]));
  for (int64_t layer = part.first_layer; layer < part.first_layer + part.layers; ++layer) {
    out.push_back(std::move(all[static_cast<size_t>(layer + 1)]));
  }
  return out;
}

// An empty tensor for what the stage before sends: this rank's rows.
at::Tensor hidden_like(const Model& model, const PackedBatch& packed) {
  const TensorParallel& ranks = model.params().ranks(Module::kBackbone);
  const RowSplit rows = ranks.split(packed.tokens);
  const int64_t own = ranks.alone() ? packed.tokens : rows.counts[static_cast<size_t>(ranks.rank())];
  return at::empty({own, model.spec().backbone.hidden},
                   at::TensorOptions().dtype(pixel_type(model)).device(packed.backbone.ids.device()));
}

// Messages between neighbouring stages. One is posted when the one before it in its channel has arrived, so that a rank
// which waits for nobody does not fill the memory with what it sends.
class StageMessages {
 public:
  explicit StageMessages(const RunRanks& ranks) : ranks_(ranks) {}

  void send(const at::Tensor& tensor, int64_t to) {
    if (tensor.numel() == 0) return;  // the receiver knows
    ProcessGroup* group = ranks_.between_stages(ranks_.stage(), to);
    Sent& last = sent_[group];
    if (last.work != nullptr) wait(last.work);
    last.tensor = tensor.contiguous();
    last.work = group->send(buffer_of(last.tensor), to > ranks_.stage() ? 1 : 0);
  }
  at::Tensor receive(const at::Tensor& into, int64_t from) {
    if (into.numel() == 0) return into;
    wait(ranks_.between_stages(from, ranks_.stage())->receive(buffer_of(into), from > ranks_.stage() ? 1 : 0));
    return into;
  }
  void finish() {
    for (auto& [group, sent] : sent_) wait(sent.work);
    sent_.clear();
  }

 private:
  struct Sent {
    at::Tensor tensor;
    std::unique_ptr<Work> work;
  };
  const RunRanks& ranks_;
  std::map<ProcessGroup*, Sent> sent_;
};

// What a rank holds of a micro batch that is under way.
struct Live {
  MicroBatch batch;
  std::vector<Segment> encoder, exchange, stage;
  Bundle features;       // what the encoder's part gave
  Bundle in, out, grad;  // of the stage: its input, its output, and the gradient that comes or goes
  Bundle features_grad;
  bool stage_is_done = false;
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
    for (const Action& action : schedule->ranks[static_cast<size_t>(ranks_.stage())].actions) {
      const double begin = options_.record == nullptr ? 0 : options_.clock->now_seconds();
      perform(action);
      if (options_.record != nullptr) options_.record->push_back({action, begin, options_.clock->now_seconds()});
    }
    messages_.finish();
    return loss_;
  }

 private:
  bool one_stage() const { return ranks_.stages() == 1; }

  // With one stage the images belong to its forward, so that not all micro batches' features are held at once.
  PipelineShape shape() const {
    PipelineShape out;
    out.stages = ranks_.stages();
    const ParamTable& params = model_.params();
    const auto trained = [&](const std::string& prefix) { return has_trained_params(params, {"", {prefix}, {}}); };
    const bool vision_trained = trained("vision_encoder.") || trained("projector.");
    for (int64_t s = 0; s < out.stages; ++s) {
      out.stage_trained.push_back(ranks_.trains(params, s) || (one_stage() && vision_trained));
    }
    out.tied = model_.spec().backbone.tied && params.find("llm_backbone.embed.weight")->trains;
    const bool encodes = !one_stage() && model_.vision_encoder() != nullptr;
    out.encoder = encodes ? EncoderPlace::kAllRanks : EncoderPlace::kNone;
    out.encoder_trained = encodes && vision_trained;
    for (const std::vector<Grid>& grids : options_.grids) {
      Microbatch microbatch;
      if (encodes && !grids.empty()) microbatch.encoders = stages_with_images(grids);
      out.microbatches.push_back(microbatch);
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
          backward(live.encoder, std::move(live.features_grad));
        } else {
          const bool last = one_stage() && action.microbatch + 1 == static_cast<int64_t>(options_.grids.size());
          upstream_[action.microbatch] = backward(live.stage, std::exchange(live.grad, {}),
                                                  last ? options_.is_final : decltype(options_.is_final)());
        }
        return;
      case ActionKind::kSend:
        if (action.payload == Payload::kOutput)
          return messages_.send(std::exchange(live.out, {}).at("hidden"), action.peer);
        messages_.send(upstream_.at(action.microbatch).at("hidden"), action.peer);
        upstream_.erase(action.microbatch);
        return;
      case ActionKind::kReceive: {
        Bundle& to = action.payload == Payload::kOutput ? live.in : live.grad;
        to = Bundle{{"hidden", messages_.receive(hidden_like(model_, live.batch.packed), action.peer)}};
        return;
      }
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
    if (is_new) found->second.batch = make_micro_batch(model_, options_.sequences(microbatch), device_, ranks_);
    return found->second;
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
      live.features_grad = backward(live.exchange, found == upstream_.end() ? Bundle() : found->second);
      upstream_.erase(microbatch);
      return;
    }
    if (live.features.empty()) live.features = no_visual(model_, device_);
    SegmentList list(model_.params(), options_.recompute);
    list.starts_after(shape_->encoder_trained);
    list.add(exchange_piece(live.batch, device_));
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
    if (one_stage() && !live.batch.grids.empty()) {
      list.add_vision(model_, live.batch, live.in);
      if (live.batch.share) list.add(exchange_piece(live.batch, device_));
    }
    if (!one_stage()) list.starts_after(stage_backward(*shape_, ranks_.stage(), microbatch).input_grad);
    list.add(stage_pieces(model_, part, packed.backbone));
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
    live.stage_is_done = live.stage_is_done || !encoder;
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
  std::map<int64_t, Bundle> upstream_;  // gradients of the stage's inputs, which may be sent after a release
  Live none_;
  at::Tensor loss_;
};

}  // namespace

at::Tensor run_pipeline(const Model& model, const RunRanks& ranks, at::Device device, const PipelineOptions& options) {
  return PipelineRun(model, ranks, device, options).run();
}

at::Tensor run_stages(const Model& model, const RunRanks& ranks, const MicroBatch& batch) {
  const at::Device device = batch.packed.backbone.ids.device();
  const StagePart& part = ranks.part();
  Bundle bundle;
  if (!batch.grids.empty()) {
    std::vector<Piece> pieces = vision_pieces(model, batch, bundle);
    if (batch.share) pieces.push_back(exchange_piece(batch, device));
    bundle = run_pieces(pieces, bundle);
  }
  StageMessages messages(ranks);
  if (!part.embedding) {
    bundle = Bundle{{"hidden", messages.receive(hidden_like(model, batch.packed), ranks.stage() - 1)}};
  }
  const at::Tensor hidden = run_pieces(stage_pieces(model, part, batch.packed.backbone), bundle).at("hidden");
  if (!part.head) {
    messages.send(hidden, ranks.stage() + 1);
    messages.finish();
    return {};
  }
  const TensorParallel& tensor = model.params().ranks(Module::kBackbone);
  return tensor.gather_rows(hidden, tensor.split(batch.packed.tokens));
}

}  // namespace parvl
