#include "parvl/exec/generator.h"

#include <algorithm>
#include <optional>

#include "parvl/exec/kv_cache.h"
#include "parvl/exec/load.h"
#include "parvl/exec/sampler.h"
#include "parvl/exec/text_stream.h"
#include "parvl/models/packing.h"
#include "parvl/nn/device.h"

namespace parvl {

namespace {

class TorchGenerator : public Generator {
 public:
  TorchGenerator(LoadedFiles files, const std::string& dir, const GeneratorOptions& options)
      : files_(std::move(files)),
        dir_(dir),
        load_(options.load),
        clock_(options.clock),
        grammars_(files_.prompts->tokenizer(), files_.end_tokens) {}

  absl::Status load_weights(const RequestSize& largest) override {
    return catch_exceptions("cannot load " + dir_, [&]() -> absl::Status {
      const OneRequest request{files_.dtype, largest.prompt_tokens, largest.tokens, largest.max_patches};
      PARVL_RETURN_IF_ERROR(check_one_request(model().spec(), request, memory_there(files_, load_)));
      return parvl::load_weights(files_, dir_, load_);
    });
  }

  const PromptBuilder& prompts() const override { return *files_.prompts; }
  int64_t max_model_len() const override { return files_.max_model_len; }
  SamplingParams default_sampling() const override { return files_.sampling; }
  std::string device_name() const override { return device_text(files_.device); }
  GrammarCompiler& grammars() override { return grammars_; }

  absl::StatusOr<GenerateResult> generate(const Prompt& prompt, const SamplingParams& sampling,
                                          const std::function<bool(const TokenEvent&)>& on_token,
                                          std::shared_ptr<const Grammar> grammar) override {
    PARVL_RETURN_IF_ERROR(validate_sampling(sampling, model().spec().backbone.vocab));
    if (prompt.ids.empty()) return invalid("the prompt is empty");
    if (static_cast<int64_t>(prompt.ids.size()) >= files_.max_model_len) {
      return invalid("the prompt has ", prompt.ids.size(), " tokens; the model's limit is ", files_.max_model_len,
                     " for prompt and answer together, so at most ", files_.max_model_len - 1, " may be prompt");
    }
    for (TokenId id : prompt.ids) {
      if (id < 0 || id >= model().spec().backbone.vocab)
        return invalid("the prompt holds the token id ", id, ", outside the vocabulary");
    }
    GenerateResult result;
    const absl::Status status = catch_exceptions("generation failed", [&] {
      std::optional<GrammarMatcher> matcher;
      if (grammar != nullptr) matcher.emplace(std::move(grammar));
      return run(prompt, sampling, on_token, matcher, result);
    });
    if (!status.ok()) return status;
    return result;
  }

 private:
  absl::Status run(const Prompt& prompt, SamplingParams sampling,
                   const std::function<bool(const TokenEvent&)>& on_token, std::optional<GrammarMatcher>& grammar,
                   GenerateResult& result) {
    at::NoGradGuard no_grad;
    const double start = now();
    const int64_t prompt_tokens = static_cast<int64_t>(prompt.ids.size()), room = files_.max_model_len - prompt_tokens;
    sampling.max_tokens = sampling.max_tokens < 0 ? room : std::min(sampling.max_tokens, room);
    result.prompt_tokens = prompt_tokens;
    KvPages pages(model().spec().backbone, model().params().owned().front()->value.scalar_type(), files_.device);
    auto attention = std::make_shared<CachedAttention>(pages);
    Sampler sampler(sampling, files_.end_tokens, prompt.ids);
    TextStream stream(sampling, files_.end_tokens);
    int64_t next_position = 0;
    at::Tensor logits = prefill(prompt, attention, next_position, start, result);
    double first = 0;
    std::vector<uint32_t> mask;
    while (result.finish == FinishReason::kNone) {
      const at::Tensor row = logits.to(at::kCPU, at::kFloat).contiguous();
      if (grammar.has_value()) PARVL_RETURN_IF_ERROR(grammar->fill(mask));
      PARVL_ASSIGN_OR_RETURN(Sampler::Choice choice,
                             sampler.choose({row.data_ptr<float>(), static_cast<size_t>(row.numel())}, mask));
      sampler.accept(choice.token_id);
      if (grammar.has_value()) PARVL_RETURN_IF_ERROR(grammar->accept(choice.token_id));
      TokenEvent event;
      event.token_id = choice.token_id;
      if (sampling.logprobs) event.logprob = choice.logprob;
      const Tokenizer& tokenizer = files_.prompts->tokenizer();
      TextStream::Delta delta =
          stream.push(choice.token_id, tokenizer.token_bytes(choice.token_id), tokenizer.is_special(choice.token_id),
                      grammar.has_value() && grammar->ended());
      event.text = delta.text;
      event.finish = delta.finish;
      const double time = now();
      if (result.token_ids.empty()) {
        first = time;
        result.ttft_ms = (time - start) * 1e3;
      } else {
        result.tpot_ms = (time - first) * 1e3 / static_cast<double>(result.token_ids.size());
      }
      result.token_ids.push_back(event.token_id);
      result.text += event.text;
      if (sampling.logprobs) result.logprobs.push_back(event.logprob);
      result.finish = event.finish;
      if (on_token && !on_token(event)) return absl::OkStatus();  // cancelled: finish stays kNone unless it just ended
      if (result.finish == FinishReason::kNone) logits = decode(choice.token_id, attention, next_position++);
    }
    return absl::OkStatus();
  }

  double now() const { return clock_ != nullptr ? clock_->now_seconds() : 0; }

  // Encodes the images, fills the cache with the prompt, and gives the last position's logits [V].
  at::Tensor prefill(const Prompt& prompt, const std::shared_ptr<CachedAttention>& attention, int64_t& next_position,
                     double start, GenerateResult& result) {
    SequenceInput sequence;
    sequence.ids = prompt.ids;
    for (const MediaSpan& span : prompt.media) {
      const ProcessedImage& image = *prompt.images[static_cast<size_t>(span.image_index)];
      sequence.images.push_back({span.begin, {image.grid_t, image.grid_h, image.grid_w}});
      sequence.pixels.push_back(image.patches.data());
    }
    const int64_t tokens = static_cast<int64_t>(prompt.ids.size());
    next_position = model().positions(tokens, sequence.images).next;
    attention->begin(tokens);
    const PackedBatch batch = pack(model(), {sequence}, files_.device, attention);
    const at::Tensor visual = encode_images(model(), batch, files_.device);
    if (visual.defined()) {
      synchronize(files_.device);
      result.encode_ms = (now() - start) * 1e3;
    }
    const at::Tensor hidden = run_backbone(model(), batch, visual);
    attention->commit();
    return model().backbone().logits(hidden.narrow(0, tokens - 1, 1)).squeeze(0);
  }

  at::Tensor decode(TokenId token, const std::shared_ptr<CachedAttention>& attention, int64_t position) {
    attention->begin(1);
    BackboneBatch batch;
    batch.ids = at::full({1}, token, at::TensorOptions().dtype(at::kLong).device(files_.device));
    batch.rope = model().backbone().rope({{position, position, position}}, files_.device);
    batch.attention = attention;
    const at::Tensor hidden = run_pieces(model().backbone().pieces(batch), {}).at("hidden");
    attention->commit();
    return model().backbone().logits(hidden).squeeze(0);
  }

  const Model& model() const { return *files_.model; }

  LoadedFiles files_;
  const std::string dir_;
  const LoadOptions load_;
  const Clock* clock_;
  GrammarCompiler grammars_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Generator>> Generator::open(const std::string& dir, const GeneratorOptions& options) {
  std::unique_ptr<Generator> out;
  PARVL_RETURN_IF_ERROR(catch_exceptions("cannot load " + dir, [&]() -> absl::Status {
    PARVL_ASSIGN_OR_RETURN(LoadedFiles files, read_files(dir, options.load));
    if (!files.held.encoder || !files.held.backbone) return invalid("a generator must hold all modules of its model");
    out = std::make_unique<TorchGenerator>(std::move(files), dir, options);
    return absl::OkStatus();
  }));
  return out;
}

absl::StatusOr<std::unique_ptr<Generator>> Generator::load(const std::string& dir, const GeneratorOptions& options) {
  PARVL_ASSIGN_OR_RETURN(std::unique_ptr<Generator> out, open(dir, options));
  PARVL_RETURN_IF_ERROR(out->load_weights({}));
  return out;
}

}  // namespace parvl
