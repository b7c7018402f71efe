#include "parvl/exec/torch_executor.h"

#include <ATen/Parallel.h>

#include <deque>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/job_thread.h"
#include "parvl/exec/backbone_step.h"
#include "parvl/exec/decode_graphs.h"
#include "parvl/exec/encoder_ranks.h"
#include "parvl/exec/kv_transfer.h"
#include "parvl/exec/request_images.h"
#include "parvl/exec/request_state.h"
#include "parvl/models/packing.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

// What was computed.
struct Computed {
  Completion completion;
  at::Tensor visual;  // of an encoding: [tokens, hidden] on the device, ready
};

struct StepItem {
  std::shared_ptr<RequestState> state;
  SequenceWork work;
  std::vector<at::Tensor> visual;  // by work.media: the encoder's output [tokens, hidden] of the whole item
};

class TorchExecutor : public ModelExecutor {
 public:
  TorchExecutor(LoadedFiles files, const SchedulerConfig& config, const Clock& clock, ExecutorOptions options)
      : ranks_(std::move(options.ranks)),
        files_(std::move(files)),
        clock_(clock),
        micro_batch_tokens_(options.micro_batch_tokens > 0 ? options.micro_batch_tokens
                            : files_.device.is_cuda()      ? kGpuMicroBatch
                                                           : kCpuMicroBatch),
        runner_(files_, config.num_blocks, config.block_size),
        encodes_(files_, clock, other_encoders(std::move(options.watch_image)),
                 {.on_encode = options.hooks.on_encode, .on_encoded = options.hooks.on_encoded}) {
    if (!files_.device.is_cuda()) return;
    if (options.startup != nullptr) options.startup->begin("graphs");
    // One after the other, since PyTorch's random state takes part in a recording.
    encodes_.start(options.graphs);
    kv_fetches_.submit([device = files_.device] { use_own_stream(device); });
    backbone_
        .run([this, config, record = options.graphs] {
          use_own_stream(files_.device);
          graphs_ = make_decode_graphs(files_, runner_, config.max_seqs, config.max_model_len, record);
        })
        .get();
  }

  absl::Status health() const override { return ranks_ == nullptr ? absl::OkStatus() : ranks_->health(); }

  absl::Status begin(RequestId id, const EngineRequest& request) override {
    PARVL_RETURN_IF_ERROR(health());
    if (runner_.is_cut() && (request.kv != nullptr || request.kv_room != nullptr)) {
      return absl::UnimplementedError("an engine of several ranks neither leaves nor takes keys and values yet");
    }
    PARVL_RETURN_IF_ERROR(check_kv(model().spec().backbone, files_.dtype, runner_.pages().block_size(), request));
    const std::shared_ptr<const Prompt>& prompt = request.prompt;
    PARVL_RETURN_IF_ERROR(check_images({model().spec(), files_.dtype, files_.held.encoder}, request));
    std::vector<ImageSpan> images;
    std::vector<std::shared_ptr<EncodedSource>> sources;
    for (const MediaSpan& span : prompt->media) {
      const ProcessedImage& image = *prompt->images[static_cast<size_t>(span.image_index)];
      images.push_back({span.begin, {image.grid_t, image.grid_h, image.grid_w}});
      sources.push_back(request.source_of(span.image_index));
    }
    RopePositions positions = model().positions(static_cast<int64_t>(prompt->ids.size()), images);
    Sampler sampler(request.sampling, files_.end_tokens, prompt->ids);
    RequestState state{prompt,      std::move(sources),   request.kv,        request.kv_room,
                       prompt->ids, std::move(positions), std::move(sampler)};
    if (request.grammar != nullptr) state.grammar.emplace(request.grammar);
    for (const TokenId token : request.generated) {
      if (token < 0 || token >= model().spec().backbone.vocab) {
        return invalid("the answer so far holds the token ", token, ", which this model does not have");
      }
      state.tokens.push_back(token);
      state.sampler.accept(token);
      if (!state.grammar.has_value() || state.grammar->accept(token).ok()) continue;
      return invalid("the answer so far is not what its grammar allows");
    }
    states_.emplace(id, std::make_shared<RequestState>(std::move(state)));
    return absl::OkStatus();
  }
  void end(RequestId id) override { states_.erase(id); }
  void set_notify(std::function<void()> notify) override { notify_ = std::move(notify); }

  void submit(const SchedulerOutput& output) override {
    for (const SlotId slot : output.evicted) slots_.erase(slot);
    std::vector<EncodeQueue::Item> images;
    for (const EncodeWork& work : output.encodes) {
      EncodeQueue::Item item = encoding(work);
      if (item.source == nullptr && (!files_.held.encoder || item.image->patches.empty())) {
        const double now = clock_.now_seconds();  // nothing is encoded for it
        item.on_done({.status = absl::UnavailableError("what it was given is lost, and it brought no image"),
                      .start_s = now,
                      .end_s = now,
                      .fetched = true});
      } else {
        images.push_back(std::move(item));
      }
    }
    encodes_.submit(std::move(images));
    for (const KvFetch& work : output.kv_fetches) start_kv_fetch(work);
    if (output.sequences.empty()) return;
    auto items = std::make_shared<std::vector<StepItem>>();
    for (const SequenceWork& work : output.sequences) {
      StepItem item{states_.at(work.id), work, {}};
      for (const MediaUse& use : work.media) item.visual.push_back(slots_.at(use.slot));
      items->push_back(std::move(item));
    }
    backbone_.submit([this, items, step = output.step] { run_step(*items, step); });
  }

  std::optional<Completion> poll() override {
    std::lock_guard lock(mutex_);
    if (done_.empty()) return std::nullopt;
    Computed done = std::move(done_.front());
    done_.pop_front();
    if (done.visual.defined()) slots_.emplace(done.completion.slot, std::move(done.visual));
    return std::move(done.completion);
  }

 private:
  const Model& model() const { return *files_.model; }

  OtherEncoders other_encoders(std::function<std::function<void()>(int64_t)> watch) {
    if (ranks_ == nullptr) return {};
    return {ranks_->encoders(), [this](const absl::Status& why) { return ranks_->lose_for(why); }, std::move(watch)};
  }

  void report(Computed done) {
    {
      std::lock_guard lock(mutex_);
      done_.push_back(std::move(done));
    }
    notify_();
  }

  EncodeQueue::Item encoding(const EncodeWork& work) {
    const RequestState& state = *states_.at(work.id);
    const size_t item = static_cast<size_t>(work.item);
    const auto image = static_cast<size_t>(state.prompt->media[item].image_index);
    const auto on_done = [this, slot = work.slot](EncodeQueue::Done encoded) {
      Computed done;
      done.completion.kind = Completion::Kind::kEncode;
      done.completion.slot = slot;
      done.completion.status = std::move(encoded.status);
      done.completion.start_s = encoded.start_s;
      done.completion.end_s = encoded.end_s;
      done.completion.replayed = encoded.replayed;
      done.completion.fetched = encoded.fetched;
      done.visual = std::move(encoded.visual);
      report(std::move(done));
    };
    return {work.slot.value, state.prompt->images[image], state.sources[item], on_done};
  }

  void start_kv_fetch(const KvFetch& work) {
    kv_fetches_.submit([this, work, state = states_.at(work.id)] {
      Computed done;
      done.completion.kind = Completion::Kind::kKvFetch;
      done.completion.request = work.id;
      done.completion.start_s = clock_.now_seconds();
      done.completion.status = catch_exceptions("fetching keys and values failed", [&] {
        return state->kv->fetch([&](auto data) { copy_in(data, work, runner_.pages()); });
      });
      done.completion.end_s = clock_.now_seconds();
      report(std::move(done));
    });
  }

  // On the backbone's thread.
  void run_step(std::vector<StepItem>& items, StepId step) {
    at::NoGradGuard no_grad;
    Computed done;
    done.completion.start_s = clock_.now_seconds();
    done.completion.step = step;
    done.completion.status = catch_exceptions("a generation step failed", [&] {
      const std::future<void> masks = fill_masks(items);
      const bool graph = takes_graph(items);
      done.completion.replayed = graph && graphs_->recorded();
      done.completion.tokens = graph ? run_graph(items, masks) : sample(items, forward(items), masks);
      for (const StepItem& item : items) {  // before anybody may take the pages
        if (item.work.samples && item.state->kv_room != nullptr)
          copy_out(runner_.pages(), item.work, *item.state->kv_room);
      }
      return absl::OkStatus();
    });
    if (!done.completion.status.ok()) {
      done.completion.tokens.clear();
      // The others stand in the middle of the step, or are gone: no step can follow.
      if (ranks_ != nullptr) done.completion.status = ranks_->lose_for(done.completion.status);
      // What it had queued may still read what goes below. A device that is lost says so again.
      (void)catch_exceptions("a failed step could not be ended", [&] {
        synchronize(files_.device);
        return absl::OkStatus();
      });
    }
    done.completion.end_s = clock_.now_seconds();
    items.clear();  // encoder outputs may go before anybody hears of the step
    report(std::move(done));
  }

  // What the grammars allow next, found out on a thread of its own while the model computes.
  std::future<void> fill_masks(const std::vector<StepItem>& items) {
    std::vector<std::shared_ptr<RequestState>> states;
    std::vector<MaskJob> jobs;
    for (const StepItem& item : items) {
      if (!item.work.samples || !item.state->grammar.has_value()) continue;
      states.push_back(item.state);
      jobs.push_back({&*item.state->grammar, &item.state->mask, &item.state->mask_status});
    }
    auto done = std::make_shared<std::promise<void>>();
    std::future<void> future = done->get_future();
    if (states.empty()) {
      done->set_value();
      return future;
    }
    grammar_.submit([states, jobs = std::move(jobs), done]() mutable {
      parvl::fill_masks(std::move(jobs));
      done->set_value();
    });
    return future;
  }

  // Whether each sequence has one new token, so that a recorded step does it.
  bool takes_graph(const std::vector<StepItem>& items) const {
    return graphs_ != nullptr && static_cast<int64_t>(items.size()) <= graphs_->max_rows() &&
           std::all_of(items.begin(), items.end(), [](const StepItem& item) {
             return item.work.count == 1 && item.work.begin > 0 && item.work.samples && item.work.media.empty();
           });
  }

  std::vector<SampledToken> run_graph(const std::vector<StepItem>& items, const std::future<void>& masks) {
    BackboneStep step;
    step.recorded = true;
    for (const StepItem& item : items) add_tokens(item, step);
    if (ranks_ != nullptr) ranks_->send(to_message(step));
    std::vector<DecodeRow> rows = decode_rows(step);
    for (size_t i = 0; i < items.size(); ++i) rows[i].sample = sample_row(*items[i].state);
    const absl::Span<const kernels::SampledRow> chosen = graphs_->run(rows);
    masks.wait();
    std::vector<RequestState*> states;
    for (const StepItem& item : items) states.push_back(item.state.get());
    return take(states, chosen, [this](size_t i) { return graphs_->logits(i); });
  }

  static kernels::SampleRow sample_row(const RequestState& state) {
    if (!state.is_plain()) return {};
    const SamplingParams& params = state.sampler.params();
    return {params.temperature, params.seed, state.sampler.position(), params.logprobs ? 1 : 0};
  }

  // The tokens that the GPU chose; where it could not, the sampler's from the row's logits (float32 on the CPU).
  template <typename LogitsOf>
  static std::vector<SampledToken> take(const std::vector<RequestState*>& states,
                                        absl::Span<const kernels::SampledRow> chosen, LogitsOf logits_of) {
    std::vector<SampledToken> out(states.size());
    for (size_t i = 0; i < states.size(); ++i) {
      RequestState& state = *states[i];
      if (!state.is_plain() || chosen[i].broken != 0) {
        const at::Tensor logits_V = logits_of(i);
        out[i] = choose(state, {logits_V.data_ptr<float>(), static_cast<size_t>(logits_V.size(0))});
        continue;
      }
      out[i].id = chosen[i].token;
      if (state.sampler.params().logprobs) out[i].logprob = {chosen[i].token, chosen[i].logprob, {}};
      accept(state, out[i]);
    }
    return out;
  }

  // The new tokens of a sequence, and its blocks.
  static void add_tokens(const StepItem& item, BackboneStep& step) {
    const SequenceWork& work = item.work;
    for (int64_t i = work.begin; i < work.begin + work.count; ++i) {
      step.ids.push_back(item.state->tokens[static_cast<size_t>(i)]);
      step.positions.push_back(item.state->position(i));
    }
    PagedSequence sequence{{}, work.begin, work.count};
    for (const BlockId block : work.blocks) sequence.blocks.push_back(block.value);
    step.sequences.push_back(std::move(sequence));
  }

  // Logits [S, V] after the last token of each of the S sequences that sample, on the device; undefined without any.
  at::Tensor forward(const std::vector<StepItem>& items) {
    BackboneStep step;
    std::vector<at::Tensor> visual;
    for (const StepItem& item : items) {
      const SequenceWork& work = item.work;
      const int64_t base = static_cast<int64_t>(step.ids.size());
      add_tokens(item, step);
      for (size_t m = 0; m < work.media.size(); ++m) {
        const MediaSpan& span = item.state->prompt->media[static_cast<size_t>(work.media[m].item)];
        const int64_t from = std::max(span.begin, work.begin);
        const int64_t to = std::min(span.begin + span.length, work.begin + work.count);
        visual.push_back(item.visual[m].narrow(0, from - span.begin, to - from));
        for (int64_t i = from; i < to; ++i) step.visual_rows.push_back(base + i - work.begin);
      }
      if (work.samples) step.sample_rows.push_back(base + work.count - 1);
    }
    step.micro_batches =
        count_micro_batches(static_cast<int64_t>(step.ids.size()), runner_.stages(), micro_batch_tokens_);
    if (ranks_ != nullptr) ranks_->send(to_message(step));
    return runner_.run(step, visual.empty() ? at::Tensor() : at::cat(visual, 0));
  }

  std::vector<SampledToken> sample(const std::vector<StepItem>& items, const at::Tensor& device_logits_SV,
                                   const std::future<void>& masks) {
    masks.wait();
    std::vector<RequestState*> states;
    for (const StepItem& item : items) {
      if (item.work.samples) states.push_back(item.state.get());
    }
    if (states.empty()) return {};
    if (cuda::fits_sample(device_logits_SV)) {
      std::vector<kernels::SampleRow> rows;
      for (const RequestState* state : states) rows.push_back(sample_row(*state));
      return take(states, cuda::decode_sample(device_logits_SV, rows),
                  [&](size_t i) { return device_logits_SV[static_cast<int64_t>(i)].to(at::kCPU, at::kFloat); });
    }
    const at::Tensor logits_SV = device_logits_SV.to(at::kCPU, at::kFloat).contiguous();
    std::vector<SampledToken> out(states.size());
    at::parallel_for(0, static_cast<int64_t>(states.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const size_t vocab = static_cast<size_t>(logits_SV.size(1));
        out[static_cast<size_t>(i)] = choose(*states[static_cast<size_t>(i)],
                                             {logits_SV.data_ptr<float>() + static_cast<size_t>(i) * vocab, vocab});
      }
    });
    return out;
  }

  static SampledToken choose(RequestState& state, absl::Span<const float> logits_V) {
    SampledToken token;
    if (state.grammar.has_value()) token.status = state.mask_status;
    if (!token.status.ok()) return token;
    auto choice = state.sampler.choose(logits_V, state.mask);
    token.status = choice.status();
    if (!choice.ok()) return token;
    token.id = choice->token_id;
    token.logprob = std::move(choice->logprob);
    accept(state, token);
    return token;
  }

  static void accept(RequestState& state, SampledToken& token) {
    state.sampler.accept(token.id);
    state.tokens.push_back(token.id);
    if (!state.grammar.has_value()) return;
    token.status = state.grammar->accept(token.id);
    token.last = state.grammar->ended();
  }

  // About from here on the arithmetic of a product takes longer than reading its matrix.
  static constexpr int64_t kCpuMicroBatch = 32, kGpuMicroBatch = 256;

  std::unique_ptr<EngineRanks> ranks_;  // null: it computes alone
  LoadedFiles files_;
  const Clock& clock_;
  const int64_t micro_batch_tokens_;
  BackboneRunner runner_;
  std::unique_ptr<DecodeGraphs> graphs_;  // the backbone thread's
  // The caller's thread only.
  absl::flat_hash_map<RequestId, std::shared_ptr<RequestState>> states_;
  absl::flat_hash_map<SlotId, at::Tensor> slots_;
  std::mutex mutex_;
  std::deque<Computed> done_;
  std::function<void()> notify_;
  JobThread grammar_, kv_fetches_, backbone_;  // last: they use all of the above until they are joined
  EncoderRanks encodes_;
};

}  // namespace

std::unique_ptr<ModelExecutor> make_torch_executor(LoadedFiles files, const SchedulerConfig& config, const Clock& clock,
                                                   ExecutorOptions options) {
  return std::make_unique<TorchExecutor>(std::move(files), config, clock, std::move(options));
}

}  // namespace parvl
