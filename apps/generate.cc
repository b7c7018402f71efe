// parvl generate: one answer, offline.
#include <absl/strings/numbers.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>

#include "apps/commands.h"
#include "apps/media_files.h"
#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/base/log.h"
#include "parvl/base/text.h"
#include "parvl/exec/generator.h"
#include "parvl/exec/sampler.h"
#include "parvl/media/grammar.h"
#include "parvl/media/json_schema.h"
#include "parvl/media/unicode.h"

namespace parvl {
namespace {

constexpr int64_t kJsonTopLogprobs = 5;     // without --top-logprobs
constexpr float kLowestLogprob = -9999.0f;  // JSON has no infinity

struct GenerateFlags {
  std::string model, prompt, json_schema;
  std::vector<std::string> images, audio, video;
  GeneratorOptions generator;
  std::optional<double> temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
  std::optional<int64_t> top_k, top_logprobs;
  std::vector<std::string> logit_bias, stop;
  std::vector<TokenId> stop_token_ids;
  int64_t max_tokens = -1, min_tokens = 0;
  std::string seed = "0";  // read as text, since the parser would turn -1 into 2^64 - 1
  bool ignore_eos = false, logprobs = false, raw = false, json = false;
};

// "ID=V" into the map.
absl::Status read_bias(const std::string& text, std::map<TokenId, double>& out) {
  const size_t equals = text.find('=');
  TokenId id = 0;
  double bias = 0;
  if (equals == std::string::npos || !absl::SimpleAtoi(text.substr(0, equals), &id) ||
      !absl::SimpleAtod(text.substr(equals + 1), &bias)) {
    return invalid("--logit-bias ", excerpt(text), " must be ID=VALUE, for example 42=-1.5");
  }
  out[id] = bias;
  return absl::OkStatus();
}

// The model's defaults, greedy, with what the flags say over them; checked.
absl::StatusOr<SamplingParams> read_sampling(const GenerateFlags& flags, const Generator& generator) {
  SamplingParams params = generator.default_sampling();
  params.temperature = flags.temperature.value_or(0.0);
  if (flags.top_p) params.top_p = *flags.top_p;
  if (flags.top_k) params.top_k = *flags.top_k;
  if (flags.min_p) params.min_p = *flags.min_p;
  if (flags.presence_penalty) params.presence_penalty = *flags.presence_penalty;
  if (flags.frequency_penalty) params.frequency_penalty = *flags.frequency_penalty;
  if (flags.repetition_penalty) params.repetition_penalty = *flags.repetition_penalty;
  for (const std::string& text : flags.logit_bias) PARVL_RETURN_IF_ERROR(read_bias(text, params.logit_bias));
  if (!flags.stop.empty()) params.stop = flags.stop;
  if (!flags.stop_token_ids.empty()) params.stop_token_ids = flags.stop_token_ids;
  if (flags.max_tokens != -1) params.max_tokens = flags.max_tokens;
  params.min_tokens = flags.min_tokens;
  params.ignore_eos = flags.ignore_eos;
  if (!absl::SimpleAtoi(flags.seed, &params.seed)) {
    return invalid("--seed must be a whole number from 0 to ", std::numeric_limits<uint64_t>::max(), ", found ",
                   excerpt(flags.seed));
  }
  params.logprobs = flags.logprobs || flags.top_logprobs.has_value() || flags.json;
  params.top_logprobs = flags.top_logprobs.value_or(flags.json ? kJsonTopLogprobs : 0);
  PARVL_RETURN_IF_ERROR(validate_sampling(params, generator.prompts().tokenizer().vocab_size()));
  return params;
}

absl::StatusOr<Prompt> read_prompt(const GenerateFlags& flags, const PromptBuilder& prompts) {
  if (flags.raw) {
    if (!flags.images.empty()) return invalid("--raw takes text only; leave out --image, or --raw");
    return prompts.build_plain(flags.prompt);
  }
  PARVL_ASSIGN_OR_RETURN(auto images, read_image_files(flags.images, prompts));
  Message message;
  message.role = "user";
  for (size_t i = 0; i < images.size(); ++i) {
    message.content.push_back({ContentPart::Kind::kImage, "", static_cast<int>(i)});
  }
  message.content.push_back({ContentPart::Kind::kText, flags.prompt, -1});
  return prompts.build({message}, std::move(images), {});
}

// What --json-schema asks for; null without it.
absl::StatusOr<std::shared_ptr<const Grammar>> read_grammar(const std::string& path, GrammarCompiler& compiler) {
  if (path.empty()) return nullptr;
  PARVL_ASSIGN_OR_RETURN(const std::string text, read_file(path, SchemaLimits::kMaxBytes));
  PARVL_ASSIGN_OR_RETURN(const OrderedJson json, parse_ordered_json(text, path));
  PARVL_ASSIGN_OR_RETURN(const OrderedJson schema, supported_schema(json, path));
  auto grammar = compiler.compile(grammar_source(json_format(schema)));
  if (!grammar.ok()) return with_context(grammar.status(), path);
  return grammar;
}

// An answer without a limit is counted as one of usual length.
RequestSize size_of(const Prompt& prompt, const SamplingParams& sampling, const Generator& generator) {
  constexpr int64_t kUsualAnswer = 1024;
  RequestSize size;
  size.prompt_tokens = std::max<int64_t>(1, static_cast<int64_t>(prompt.ids.size()));
  const int64_t answer = sampling.max_tokens < 0 ? kUsualAnswer : sampling.max_tokens;
  const int64_t room = std::max(size.prompt_tokens, generator.max_model_len()) - size.prompt_tokens;
  size.tokens = size.prompt_tokens + std::min(answer, room);
  for (const auto& image : prompt.images) size.max_patches = std::max(size.max_patches, image->num_patches());
  return size;
}

Json logprobs_json(const std::vector<TokenLogprob>& logprobs) {
  Json list = Json::array();
  for (const TokenLogprob& entry : logprobs) {
    Json top = Json::array();
    for (const auto& [id, value] : entry.top) top.push_back({id, std::max(value, kLowestLogprob)});
    list.push_back(
        {{"token_id", entry.token_id}, {"logprob", std::max(entry.logprob, kLowestLogprob)}, {"top", std::move(top)}});
  }
  return list;
}

void print_json(const GenerateResult& result) {
  const Json json = {{"text", result.text},
                     {"token_ids", result.token_ids},
                     {"prompt_tokens", result.prompt_tokens},
                     {"logprobs", logprobs_json(result.logprobs)},
                     {"finish_reason", to_string(result.finish)},
                     {"ttft_ms", result.ttft_ms},
                     {"tpot_ms", result.tpot_ms},
                     {"encode_ms", result.encode_ms}};
  std::printf("%s\n", json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

void print_logprobs(const std::vector<TokenLogprob>& logprobs, const Tokenizer& tokenizer) {
  for (const TokenLogprob& entry : logprobs) {
    std::printf("%8d %10.5f  %s\n", entry.token_id, entry.logprob,
                excerpt(tokenizer.decode({entry.token_id}, false)).c_str());
    for (const auto& [id, value] : entry.top) {
      std::printf("    %8d %10.5f  %s\n", id, value, excerpt(tokenizer.decode({id}, false)).c_str());
    }
  }
}

absl::Status run_generate(const GenerateFlags& flags) {
  if (!flags.audio.empty()) return not_available_yet("--audio");
  if (!flags.video.empty()) return not_available_yet("--video");
  if (!is_valid_utf8(flags.prompt)) return invalid("--prompt ", excerpt(flags.prompt), " is not UTF-8 text");
  Startup& startup = *flags.generator.load.startup;
  std::optional<Heartbeat> heartbeat(std::in_place, flags.generator.load.startup);
  PARVL_ASSIGN_OR_RETURN(auto generator, Generator::open(flags.model, flags.generator));
  PARVL_ASSIGN_OR_RETURN(const SamplingParams sampling, read_sampling(flags, *generator));
  PARVL_ASSIGN_OR_RETURN(const Prompt prompt, read_prompt(flags, generator->prompts()));
  if (!flags.json_schema.empty()) startup.begin("grammar");
  PARVL_ASSIGN_OR_RETURN(const auto grammar, read_grammar(flags.json_schema, generator->grammars()));
  PARVL_RETURN_IF_ERROR(generator->load_weights(size_of(prompt, sampling, *generator)));
  heartbeat.reset();  // from here on the answer is the sign of life
  const auto show = [&flags](const TokenEvent& event) {
    if (flags.json) return true;
    std::fwrite(event.text.data(), 1, event.text.size(), stdout);
    return std::fflush(stdout) == 0;  // a reader that has left needs no more tokens
  };
  PARVL_ASSIGN_OR_RETURN(const GenerateResult result, generator->generate(prompt, sampling, show, grammar));
  if (result.finish == FinishReason::kNone) return absl::OkStatus();  // main() says why
  if (flags.json) {
    print_json(result);
  } else {
    std::printf("\n");
    if (flags.logprobs || flags.top_logprobs.has_value()) {
      print_logprobs(result.logprobs, generator->prompts().tokenizer());
    }
  }
  return absl::OkStatus();
}

void add_sampling_options(CLI::App& command, GenerateFlags& flags) {
  command.add_option("--max-tokens", flags.max_tokens, "At most so many tokens (default: up to the context)");
  command.add_option("--min-tokens", flags.min_tokens, "No end and no stop string before so many tokens");
  command.add_option("--temperature", flags.temperature,
                     "0 is greedy, the default here whatever the model's file says");
  command.add_option("--seed", flags.seed, "Of sampling; the same seed gives the same tokens (default 0)");
  command.add_option("--top-k", flags.top_k, "Sample among the K likeliest; 0 or -1: all");
  command.add_option("--top-p", flags.top_p, "Sample among the likeliest that hold this share");
  command.add_option("--min-p", flags.min_p, "Leave out tokens below this share of the likeliest one's probability");
  command.add_option("--presence-penalty", flags.presence_penalty, "Subtracted from logits of tokens in the output");
  command.add_option("--frequency-penalty", flags.frequency_penalty, "The same, times how often they are there");
  command.add_option("--repetition-penalty", flags.repetition_penalty, "Over 1: against tokens of prompt and output");
  command.add_option("--logit-bias", flags.logit_bias, "ID=VALUE, added to a token's logit; may be repeated")
      ->allow_extra_args(false);
  command.add_option("--stop", flags.stop, "A text that ends the answer; may be repeated")->allow_extra_args(false);
  command.add_option("--stop-token-ids", flags.stop_token_ids, "A token that ends the answer; may be repeated")
      ->allow_extra_args(false);
  command.add_flag("--ignore-eos", flags.ignore_eos, "Go on after the model's end token");
  command.add_flag("--logprobs", flags.logprobs, "Print each token's log-probability");
  command.add_option("--top-logprobs", flags.top_logprobs, "And the N likeliest tokens in its place");
}

}  // namespace

void add_generate_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = app.add_subcommand("generate", "Answers one prompt, offline");
  named(command->add_option("--model", flags->model, "Model directory"))->required();
  command->add_option("--prompt", flags->prompt, "The user's text")->required();
  command->add_option("--image", flags->images, "An image file, put before the text; may be repeated")
      ->allow_extra_args(false);
  command->add_option("--audio", flags->audio, "Not available yet")->allow_extra_args(false);
  command->add_option("--video", flags->video, "Not available yet")->allow_extra_args(false);
  add_sampling_options(*command, *flags);
  command->add_option("--json-schema", flags->json_schema, "A file with a JSON schema that the answer must follow");
  command->add_flag("--raw", flags->raw, "The prompt as it is, without the chat template");
  command->add_option("--device", flags->generator.load.device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  command
      ->add_option("--dtype", flags->generator.load.dtype,
                   "auto (the directory's), float32, bfloat16, float16 or float64")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16", "float64"}));
  command->add_option("--max-model-len", flags->generator.load.max_model_len,
                      "Context in tokens; 0, the default: the model's");
  command->add_flag("--json", flags->json, "One JSON object: text, token_ids, prompt_tokens, logprobs, finish_reason");
  flags->generator.clock = &context.clock;
  run_with(*command, context, [flags, &context] {
    LoadOptions& load = flags->generator.load;
    load.memory_limit_bytes = context.memory_limit_bytes;
    load.startup = std::make_shared<Startup>(context.clock, [](const std::string& line) { log_info(line); });
    return run_generate(*flags);
  });
}

}  // namespace parvl
