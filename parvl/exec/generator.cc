#include "parvl/exec/generator.h"

#include <algorithm>
#include <limits>

#include "parvl/base/file.h"
#include "parvl/exec/kv_cache.h"
#include "parvl/exec/sampler.h"
#include "parvl/exec/text_stream.h"
#include "parvl/models/checkpoint.h"
#include "parvl/models/packing.h"
#include "parvl/nn/device.h"

namespace parvl {

namespace {

struct GenerationDefaults {
  SamplingParams sampling;
  std::vector<TokenId> end_tokens;
};

absl::StatusOr<GenerationDefaults> read_defaults(const std::string& dir, const ModelSpec& spec) {
  GenerationDefaults out;
  for (int64_t id : spec.eos_tokens) out.end_tokens.push_back(static_cast<TokenId>(id));
  auto config = read_json_file(dir + "/generation_config.json");
  if (absl::IsNotFound(config.status())) return out;
  if (!config.ok()) return config.status();
  if (!config->is_object()) return invalid(dir, "/generation_config.json is not a JSON object");
  SamplingParams& s = out.sampling;
  const absl::Status status = [&]() -> absl::Status {
    PARVL_ASSIGN_OR_RETURN(s.temperature, json_value<double>(*config, "temperature", s.temperature));
    PARVL_ASSIGN_OR_RETURN(s.top_p, json_value<double>(*config, "top_p", s.top_p));
    PARVL_ASSIGN_OR_RETURN(s.top_k, json_value<int64_t>(*config, "top_k", s.top_k));
    PARVL_ASSIGN_OR_RETURN(s.min_p, json_value<double>(*config, "min_p", s.min_p));
    PARVL_ASSIGN_OR_RETURN(s.repetition_penalty,
                           json_value<double>(*config, "repetition_penalty", s.repetition_penalty));
    PARVL_ASSIGN_OR_RETURN(const bool sample, json_value<bool>(*config, "do_sample", true));
    if (!sample) s.temperature = 0;
    return absl::OkStatus();
  }();
  PARVL_RETURN_IF_ERROR(with_context(status, dir + "/generation_config.json"));
  const absl::Status sampling = validate_sampling(s, spec.backbone.vocab);
  if (!sampling.ok()) return with_context(sampling, dir + "/generation_config.json");
  if (!config->contains("eos_token_id") || (*config)["eos_token_id"].is_null()) return out;
  const Json& eos = (*config)["eos_token_id"];
  out.end_tokens.clear();
  for (const Json& id : eos.is_array() ? eos : Json::array({eos})) {
    if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<TokenId>::max()) {
      return invalid(dir, "/generation_config.json: 'eos_token_id' must be a token id or a list of them");
    }
    out.end_tokens.push_back(id.get<TokenId>());
  }
  return out;
}

class TorchGenerator : public Generator {
 public:
  TorchGenerator(std::shared_ptr<const PromptBuilder> prompts, std::unique_ptr<Model> model,
                 GenerationDefaults defaults, at::Device device, int64_t max_model_len, const Clock* clock)
      : prompts_(std::move(prompts)),
        model_(std::move(model)),
        defaults_(std::move(defaults)),
        device_(device),
        max_len_(max_model_len),
        clock_(clock) {}

  const PromptBuilder& prompts() const override { return *prompts_; }
  int64_t max_model_len() const override { return max_len_; }
  SamplingParams default_sampling() const override { return defaults_.sampling; }
  std::string device_name() const override { return device_text(device_); }

  absl::StatusOr<GenerateResult> generate(const Prompt& prompt, const SamplingParams& sampling,
                                          const std::function<bool(const TokenEvent&)>& on_token) override {
    PARVL_RETURN_IF_ERROR(validate_sampling(sampling, model_->spec().backbone.vocab));
    if (prompt.ids.empty()) return invalid("the prompt is empty");
    if (static_cast<int64_t>(prompt.ids.size()) >= max_len_) {
      return invalid("the prompt has ", prompt.ids.size(), " tokens; the model's limit is ", max_len_,
                     " for prompt and answer together, so at most ", max_len_ - 1, " may be prompt");
    }
    for (TokenId id : prompt.ids) {
      if (id < 0 || id >= model_->spec().backbone.vocab)
        return invalid("the prompt holds the token id ", id, ", outside the vocabulary");
    }
    GenerateResult result;
    const absl::Status status =
        catch_exceptions("generation failed", [&] { return run(prompt, sampling, on_token, result); });
    if (!status.ok()) return status;
    return result;
  }

 private:
  absl::Status run(const Prompt& prompt, SamplingParams sampling,
                   const std::function<bool(const TokenEvent&)>& on_token, GenerateResult& result) {
    at::NoGradGuard no_grad;
    const double start = now();
    const int64_t prompt_tokens = static_cast<int64_t>(prompt.ids.size()), room = max_len_ - prompt_tokens;
    sampling.max_tokens = sampling.max_tokens < 0 ? room : std::min(sampling.max_tokens, room);
    result.prompt_tokens = prompt_tokens;
    KvPages pages(model_->spec().backbone, model_->params().owned().front()->value.scalar_type(), device_);
    auto attention = std::make_shared<CachedAttention>(pages);
    Sampler sampler(sampling, defaults_.end_tokens, prompt.ids);
    TextStream stream(sampling, defaults_.end_tokens);
    int64_t next_position = 0;
    at::Tensor logits = prefill(prompt, attention, next_position, start, result);
    double first = 0;
    while (result.finish == FinishReason::kNone) {
      const at::Tensor row = logits.to(at::kCPU, at::kFloat).contiguous();
      PARVL_ASSIGN_OR_RETURN(Sampler::Choice choice, sampler.choose(absl::MakeConstSpan(
                                                         row.data_ptr<float>(), static_cast<size_t>(row.numel()))));
      sampler.accept(choice.token_id);
      TokenEvent event;
      event.token_id = choice.token_id;
      if (sampling.logprobs) event.logprob = choice.logprob;
      const Tokenizer& tokenizer = prompts_->tokenizer();
      TextStream::Delta delta =
          stream.push(choice.token_id, tokenizer.token_bytes(choice.token_id), tokenizer.is_special(choice.token_id));
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
    next_position = model_->positions(tokens, sequence.images).next;
    attention->begin(tokens);
    const PackedBatch batch = pack(*model_, {sequence}, device_, attention);
    const at::Tensor visual = encode_images(*model_, batch, device_);
    if (visual.defined()) {
      synchronize(device_);
      result.encode_ms = (now() - start) * 1e3;
    }
    const at::Tensor hidden = run_backbone(*model_, batch, visual);
    attention->commit();
    return model_->backbone().logits(hidden.narrow(0, tokens - 1, 1)).squeeze(0);
  }

  at::Tensor decode(TokenId token, const std::shared_ptr<CachedAttention>& attention, int64_t position) {
    attention->begin(1);
    BackboneBatch batch;
    batch.ids = at::full({1}, token, at::TensorOptions().dtype(at::kLong).device(device_));
    batch.rope = model_->backbone().rope({{position, position, position}}, device_);
    batch.attention = attention;
    const at::Tensor hidden = run_pieces(model_->backbone().pieces(batch), {}).at("hidden");
    attention->commit();
    return model_->backbone().logits(hidden).squeeze(0);
  }

  std::shared_ptr<const PromptBuilder> prompts_;
  std::unique_ptr<Model> model_;
  GenerationDefaults defaults_;
  at::Device device_;
  int64_t max_len_;
  const Clock* clock_;
};

absl::StatusOr<std::unique_ptr<Generator>> load_generator(const std::string& dir, const GeneratorOptions& options) {
  PARVL_ASSIGN_OR_RETURN(const ModelSpec spec, load_model_spec(dir));
  DType dtype = spec.dtype;
  if (options.dtype != "auto") {
    PARVL_ASSIGN_OR_RETURN(dtype, parse_dtype(options.dtype));
  }
  int64_t max_len = spec.backbone.max_positions;
  if (options.max_model_len < 0)
    return invalid("max-model-len ", options.max_model_len, " is negative (0: the model's)");
  if (options.max_model_len > max_len) {
    return invalid("max-model-len ", options.max_model_len, " is over the model's ", max_len, " positions");
  }
  if (options.max_model_len > 0) max_len = options.max_model_len;
  PARVL_ASSIGN_OR_RETURN(auto prompts, PromptBuilder::load(dir));
  if (prompts->has_images()) {
    const ImageProcessorConfig& images = prompts->image_processor().config();
    PARVL_RETURN_IF_ERROR(check_image_inputs(
        spec, {images.patch_size, images.temporal_patch_size, images.merge_size, 3, prompts->image_token()}, dir));
  }
  PARVL_ASSIGN_OR_RETURN(GenerationDefaults defaults, read_defaults(dir, spec));
  auto model = Model::create(spec);
  PARVL_RETURN_IF_ERROR(match_weights(*model, dir).status());  // before a damaged configuration asks for absurd memory
  PARVL_ASSIGN_OR_RETURN(const at::Device device, select_device(options.device));
  model->params().allocate(to_scalar_type(dtype), device);
  PARVL_RETURN_IF_ERROR(load_weights(*model, dir));
  return std::make_unique<TorchGenerator>(std::move(prompts), std::move(model), std::move(defaults), device, max_len,
                                          options.clock);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Generator>> Generator::load(const std::string& dir, const GeneratorOptions& options) {
  std::unique_ptr<Generator> out;
  PARVL_RETURN_IF_ERROR(catch_exceptions("cannot load " + dir, [&]() -> absl::Status {
    PARVL_ASSIGN_OR_RETURN(out, load_generator(dir, options));
    return absl::OkStatus();
  }));
  return out;
}

}  // namespace parvl
