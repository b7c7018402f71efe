// A request's body and its media URLs, as anyone may send them: parsed, or refused with a good message and a status of
// 4xx.
#include "parvl/exec/sampler.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/media_source.h"
#include "parvl/serve/openai_request.h"
#include "tests/fuzz/fuzz.h"

std::vector<std::string> fuzz_seeds() {
  return {
      R"({"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi \u00e9"}, {"type": "image_url",)"
      R"( "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}]}], "stream": true,)"
      R"( "stream_options": {"include_usage": true}, "max_tokens": 12, "temperature": 0.5})",
      R"({"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": null}, {"role": "tool"}], "top_p": 1,)"
      R"( "top_k": -1, "min_p": 0, "seed": -5, "stop": ["a", "b"], "stop_token_ids": [1], "n": 1, "logprobs": true,)"
      R"( "top_logprobs": 3, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1,)"
      R"( "logit_bias": {"5": -100}, "ignore_eos": true, "min_tokens": 2, "max_completion_tokens": 3})",
      R"({"messages": "x", "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "priority": -3,)"
      R"( "n": 2, "cache_salt": "s", "mm_processor_kwargs": {"max_pixels": 9}, "modalities": ["text"], "function_call": "auto", "functions": []})",
      R"({"messages": [{"role": "user", "content": [{"type": "input_audio"}, {"type": "video_url"}, {"type": 5}]}]})",
      R"({"prompt": ["a", [1, 2]], "n": 2, "logprobs": 3, "echo": false, "suffix": "", "best_of": 2, "max_tokens": 4})",
      R"({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},)"
      R"( {"role": "tool", "tool_call_id": "c", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", "description": "d",)"
      R"( "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}], "parallel_tool_calls": false,)"
      R"( "tool_choice": {"type": "function", "function": {"name": "f"}}})",
      R"({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true,)"
      R"( "schema": {"$defs": {"d": {"enum": [1, "x"]}}, "anyOf": [{"$ref": "#/$defs/d"}, {"type": "array", "items": {"type": "string"}}]}}}})",
      R"({"prompt": "a", "structured_outputs": {"choice": ["a", "b"], "regex": null}, "guided_json": "{}", "suffix": "b"})",
      R"({"prompt": [1, 2, 99], "stream": true, "stop": "x"})",
      "data:image/png;base64,aGVs\r\nbG8-_%3D",
      "data:,a%20b%",
      "file:///no/such%20file",
      "https://host.test/a.png",
  };
}

namespace {

void require_refusal(const absl::Status& status) {
  const int http_status = parvl::http_status_of(status);
  FUZZ_REQUIRE(http_status >= 400 && http_status < 500);
  require_good_message(std::string(status.message()));
  const parvl::Json body = parvl::Json::parse(parvl::error_body(status));
  FUZZ_REQUIRE(body["error"]["message"].get<std::string>().size() <= 1000);
}

void parse_completion(const std::string& text, const parvl::RequestRules& rules) {
  const auto request = parvl::parse_request(text, parvl::Api::kCompletions, rules);
  if (!request.ok()) return require_refusal(request.status());
  FUZZ_REQUIRE(!request->prompts.empty());
  FUZZ_REQUIRE(request->choices == static_cast<int64_t>(request->prompts.size()) * request->n);
  FUZZ_REQUIRE(request->choices <= parvl::kMaxChoices);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  parvl::RequestRules rules;
  rules.vocab_size = 100;
  rules.takes_images = true;
  rules.max_images = 2;
  rules.tools = {"hermes", "<t>", "<t>{\"name\": \"", "\", \"arguments\": ", "}</t>", "\n", true};
  rules.fills_in = size % 2 == 0;
  parse_completion(text, rules);
  const auto request = parvl::parse_request(text, parvl::Api::kChat, rules);
  if (!request.ok()) {
    require_refusal(request.status());
  } else {
    FUZZ_REQUIRE(!request->messages.empty());
    FUZZ_REQUIRE(static_cast<int64_t>(request->images.size()) <= rules.max_images);
    FUZZ_REQUIRE(request->n >= 1 && request->n <= parvl::kMaxChoices);
    FUZZ_REQUIRE(parvl::validate_sampling(request->sampling, rules.vocab_size).ok());
  }
  parvl::MediaPolicy policy;
  policy.local_path = "/no/such";
  policy.image.max_bytes = 64;
  policy.fetch.domains = {"no-such-host.invalid"};  // URLs are read, and nothing is fetched
  parvl::MediaFetcher fetcher(policy);
  std::vector<std::string> urls = {text};
  if (request.ok()) {
    for (const auto& image : request->images) urls.push_back(image.url);
  }
  for (const std::string& url : urls) {
    const auto bytes = parvl::load_media(url, policy, "image 1", fetcher);
    if (!bytes.ok()) {
      require_refusal(bytes.status());
    } else {
      FUZZ_REQUIRE(!bytes->empty() && bytes->size() <= policy.image.max_bytes);
    }
  }
  return 0;
}
