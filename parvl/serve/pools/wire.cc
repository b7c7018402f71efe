#include "parvl/serve/pools/wire.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace parvl {
namespace {

void write_sampling(const SamplingParams& sampling, wire::Sampling& out) {
  out.set_temperature(sampling.temperature);
  out.set_top_p(sampling.top_p);
  out.set_top_k(sampling.top_k);
  out.set_min_p(sampling.min_p);
  out.set_presence_penalty(sampling.presence_penalty);
  out.set_frequency_penalty(sampling.frequency_penalty);
  out.set_repetition_penalty(sampling.repetition_penalty);
  for (const auto& [token, bias] : sampling.logit_bias) (*out.mutable_logit_bias())[token] = bias;
  out.set_seed(sampling.seed);
  out.set_max_tokens(sampling.max_tokens);
  out.set_min_tokens(sampling.min_tokens);
  for (const std::string& stop : sampling.stop) out.add_stop(stop);
  for (const TokenId token : sampling.stop_token_ids) out.add_stop_token_ids(token);
  out.set_ignore_eos(sampling.ignore_eos);
  out.set_logprobs(sampling.logprobs);
  out.set_top_logprobs(sampling.top_logprobs);
}

SamplingParams read_sampling(const wire::Sampling& message) {
  SamplingParams out;
  out.temperature = message.temperature();
  out.top_p = message.top_p();
  out.top_k = message.top_k();
  out.min_p = message.min_p();
  out.presence_penalty = message.presence_penalty();
  out.frequency_penalty = message.frequency_penalty();
  out.repetition_penalty = message.repetition_penalty();
  for (const auto& [token, bias] : message.logit_bias()) out.logit_bias[token] = bias;
  out.seed = message.seed();
  out.max_tokens = message.max_tokens();
  out.min_tokens = message.min_tokens();
  out.stop.assign(message.stop().begin(), message.stop().end());
  out.stop_token_ids.assign(message.stop_token_ids().begin(), message.stop_token_ids().end());
  out.ignore_eos = message.ignore_eos();
  out.logprobs = message.logprobs();
  out.top_logprobs = message.top_logprobs();
  return out;
}

}  // namespace

void write_image(const ProcessedImage& image, const ImagePlace& place, wire::Image& out) {
  out.set_grid_t(image.grid_t);
  out.set_grid_h(image.grid_h);
  out.set_grid_w(image.grid_w);
  out.set_patch_floats(image.patch_floats);
  out.set_merge_size(image.merge_size);
  out.set_key(image.key.data(), image.key.size());
  out.set_pixels_at(place.pixels);
  out.set_output_at(place.output);
}

absl::StatusOr<ProcessedImage> read_image(const wire::Image& message) {
  constexpr int32_t kMost = 1 << 16;
  ProcessedImage out;
  for (const int32_t side : {message.grid_t(), message.grid_h(), message.grid_w(), message.patch_floats()}) {
    if (side < 1 || side > kMost) return invalid("an image of the request has a side of ", side);
  }
  out.grid_t = message.grid_t();
  out.grid_h = message.grid_h();
  out.grid_w = message.grid_w();
  out.patch_floats = message.patch_floats();
  out.merge_size = message.merge_size();
  if (out.merge_size < 1 || out.grid_h % out.merge_size != 0 || out.grid_w % out.merge_size != 0) {
    return invalid("an image of the request cannot be merged by ", out.merge_size);
  }
  if (message.key().size() != out.key.size()) return invalid("an image of the request has a key of the wrong length");
  std::memcpy(out.key.data(), message.key().data(), out.key.size());
  return out;
}

void write_request(const EngineRequest& request, const std::vector<ImagePlace>& places, wire::Generate& out) {
  const Prompt& prompt = *request.prompt;
  out.mutable_prompt()->Assign(prompt.ids.begin(), prompt.ids.end());
  for (const MediaSpan& span : prompt.media) {
    wire::Span& to = *out.add_media();
    to.set_image(span.image_index);
    to.set_begin(span.begin);
    to.set_length(span.length);
  }
  for (size_t i = 0; i < prompt.images.size(); ++i) write_image(*prompt.images[i], places[i], *out.add_images());
  write_sampling(request.sampling, *out.mutable_sampling());
  out.mutable_generated()->Assign(request.generated.begin(), request.generated.end());
  if (request.grammar != nullptr) out.set_grammar(request.grammar->source());
  out.set_priority(request.priority);
  out.set_cache_salt(request.cache_salt);
}

absl::StatusOr<EngineRequest> read_request(const wire::Generate& message) {
  auto prompt = std::make_shared<Prompt>();
  prompt->ids.assign(message.prompt().begin(), message.prompt().end());
  for (const wire::Image& image : message.images()) {
    PARVL_ASSIGN_OR_RETURN(ProcessedImage read, read_image(image));
    prompt->images.push_back(std::make_shared<const ProcessedImage>(std::move(read)));
  }
  const auto length = static_cast<int64_t>(prompt->ids.size());
  int64_t end = 0;
  for (const wire::Span& span : message.media()) {
    const bool known = span.image() >= 0 && static_cast<size_t>(span.image()) < prompt->images.size();
    if (!known || span.begin() < end || span.length() > length - span.begin() ||
        span.length() != prompt->images[static_cast<size_t>(span.image())]->num_tokens()) {
      return invalid("the place of an image in the prompt makes no sense");
    }
    end = span.begin() + span.length();
    prompt->media.push_back({span.image(), span.begin(), span.length()});
  }
  EngineRequest out;
  out.prompt = std::move(prompt);
  out.sampling = read_sampling(message.sampling());
  out.generated.assign(message.generated().begin(), message.generated().end());
  out.priority = message.priority();
  out.cache_salt = message.cache_salt();
  return out;
}

void write_token(const TokenEvent& event, wire::Token& out) {
  out.set_token(event.token_id);
  out.set_text(event.text);
  out.set_finish(static_cast<int32_t>(event.finish));
  wire::Logprob& logprob = *out.mutable_logprob();
  logprob.set_token(event.logprob.token_id);
  logprob.set_logprob(event.logprob.logprob);
  for (const auto& [token, value] : event.logprob.top) {
    logprob.add_top(token);
    logprob.add_top_logprob(value);
  }
}

TokenEvent read_token(const wire::Token& message) {
  TokenEvent out;
  out.token_id = message.token();
  out.text = message.text();
  const bool known = message.finish() >= 0 && message.finish() <= static_cast<int32_t>(FinishReason::kLength);
  out.finish = known ? static_cast<FinishReason>(message.finish()) : FinishReason::kNone;
  out.logprob.token_id = message.logprob().token();
  out.logprob.logprob = message.logprob().logprob();
  const int top = std::min(message.logprob().top_size(), message.logprob().top_logprob_size());
  for (int i = 0; i < top; ++i) {
    out.logprob.top.emplace_back(message.logprob().top(i), message.logprob().top_logprob(i));
  }
  return out;
}

void write_result(const absl::StatusOr<GenerateResult>& result, wire::Ended& out) {
  write_failure(result.status(), *out.mutable_failure());
  if (!result.ok()) return;
  out.set_cached_tokens(result->cached_tokens);
  out.set_queue_ms(result->queue_ms);
  out.set_encode_ms(result->encode_ms);
  out.set_prefill_ms(result->prefill_ms);
  out.set_overlap_ms(result->overlap_ms);
  out.set_fetch_ms(result->fetch_ms);
}

void write_failure(const absl::Status& status, wire::Failure& out) {
  out.set_code(static_cast<int32_t>(status.code()));
  out.set_message(std::string(status.message()));
}

absl::Status read_failure(const wire::Failure& message) {
  return absl::Status(static_cast<absl::StatusCode>(message.code()), message.message());
}

void write_stats(const EngineStats& stats, wire::Counts& out) {
  out.set_running(stats.running);
  out.set_waiting(stats.waiting);
  out.set_blocks(stats.blocks);
  out.set_blocks_used(stats.blocks_used);
  out.set_encoder_bytes_used(stats.encoder_bytes_used);
  out.set_preemptions(stats.preemptions);
  out.set_prefix_queries(stats.prefix_queries);
  out.set_prefix_hits(stats.prefix_hits);
  out.set_block_lookups(stats.block_lookups);
  out.set_encoder_queries(stats.encoder_queries);
  out.set_encoder_hits(stats.encoder_hits);
  out.set_backbone_busy_s(stats.backbone_busy_s);
  out.set_encoder_busy_s(stats.encoder_busy_s);
  out.set_free_kv_tokens(stats.free_kv_tokens);
  out.set_pending_tokens(stats.pending_tokens);
  out.set_encoder_bytes(stats.encoder_bytes);
  out.set_encoder_bytes_held(stats.encoder_bytes_held);
  out.set_kv_fetched(stats.kv_fetched);
  out.set_kv_fetched_tokens(stats.kv_fetched_tokens);
  out.set_kv_fetch_failures(stats.kv_fetch_failures);
  out.set_handed_over(stats.handed_over);
  out.set_fetched(stats.fetched);
  out.set_fetch_busy_s(stats.fetch_busy_s);
  for (const WorkCount& work : stats.work) {
    out.add_replayed(work.replayed);
    out.add_launched(work.launched);
  }
}

EngineStats read_stats(const wire::Counts& message) {
  EngineStats out;
  out.running = message.running();
  out.waiting = message.waiting();
  out.blocks = message.blocks();
  out.blocks_used = message.blocks_used();
  out.encoder_bytes_used = message.encoder_bytes_used();
  out.preemptions = message.preemptions();
  out.prefix_queries = message.prefix_queries();
  out.prefix_hits = message.prefix_hits();
  out.block_lookups = message.block_lookups();
  out.encoder_queries = message.encoder_queries();
  out.encoder_hits = message.encoder_hits();
  out.backbone_busy_s = message.backbone_busy_s();
  out.encoder_busy_s = message.encoder_busy_s();
  out.free_kv_tokens = message.free_kv_tokens();
  out.pending_tokens = message.pending_tokens();
  out.encoder_bytes = message.encoder_bytes();
  out.encoder_bytes_held = message.encoder_bytes_held();
  out.kv_fetched = message.kv_fetched();
  out.kv_fetched_tokens = message.kv_fetched_tokens();
  out.kv_fetch_failures = message.kv_fetch_failures();
  out.handed_over = message.handed_over();
  out.fetched = message.fetched();
  out.fetch_busy_s = message.fetch_busy_s();
  const int kinds = std::min({message.replayed_size(), message.launched_size(), static_cast<int>(out.work.size())});
  for (int i = 0; i < kinds; ++i) out.work[static_cast<size_t>(i)] = {message.replayed(i), message.launched(i)};
  return out;
}

void write_options(const EngineOptions& options, wire::Assign& out) {
  out.set_device(options.load.device);
  out.set_dtype(options.load.dtype);
  out.set_max_model_len(options.load.max_model_len);
  if (options.load.memory_utilization.has_value()) out.set_memory_utilization(*options.load.memory_utilization);
  out.set_memory_limit_bytes(options.load.memory_limit_bytes);
  out.set_max_seqs(options.max_seqs);
  out.set_max_batched_tokens(options.max_batched_tokens);
  out.set_step_s(options.step_s);
  out.set_kv_cache_bytes(options.kv_cache_bytes);
  out.set_encoder_cache_bytes(options.encoder_cache_bytes);
  out.set_prefix_caching(options.prefix_caching);
  out.set_enforce_eager(options.enforce_eager);
  out.set_tensor_ranks(options.tensor_ranks);
  out.set_pipeline_stages(options.pipeline_stages);
  for (const std::string& module : options.load.modules) out.add_modules(module);
  for (const std::string& block : options.load.shared_weights) out.add_shared_weights(block);
}

EngineOptions read_options(const wire::Assign& message) {
  EngineOptions out;
  out.load.device = message.device();
  out.load.dtype = message.dtype();
  out.load.max_model_len = message.max_model_len();
  if (message.has_memory_utilization()) out.load.memory_utilization = message.memory_utilization();
  out.load.memory_limit_bytes = message.memory_limit_bytes();
  out.max_seqs = message.max_seqs();
  out.max_batched_tokens = message.max_batched_tokens();
  out.step_s = message.step_s();
  out.kv_cache_bytes = message.kv_cache_bytes();
  out.encoder_cache_bytes = message.encoder_cache_bytes();
  out.prefix_caching = message.prefix_caching();
  out.enforce_eager = message.enforce_eager();
  out.tensor_ranks = std::max<int64_t>(1, message.tensor_ranks());
  out.pipeline_stages = std::max<int64_t>(1, message.pipeline_stages());
  out.load.modules.assign(message.modules().begin(), message.modules().end());
  out.load.shared_weights.assign(message.shared_weights().begin(), message.shared_weights().end());
  return out;
}

}  // namespace parvl
