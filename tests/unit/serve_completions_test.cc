// Plain completions, and text ↔ tokens.
#include "parvl/base/file.h"
#include "parvl/serve/openai_request.h"
#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class CompletionsTest : public ServerTest {
 protected:
  TestReply post(const std::string& path, const Json& body) {
    TestClient client(server_->port());
    return client.post(path, body.dump());
  }
  TestReply complete(const Json& body) { return post("/v1/completions", body); }
};

TEST_F(CompletionsTest, ContinuesAText) {
  script_->cached_tokens = 2;
  start();
  const TestReply reply =
      complete({{"prompt", "a<|im_end|>"}, {"model", "alias"}, {"temperature", 0}, {"priority", 4}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  EXPECT_EQ(json["object"], "text_completion");
  EXPECT_TRUE(json["id"].get<std::string>().starts_with("cmpl-"));
  EXPECT_EQ(json["model"], "alias");
  ASSERT_EQ(json["choices"].size(), 1u);
  EXPECT_EQ(json["choices"][0],
            Json({{"index", 0}, {"text", "Hello!"}, {"logprobs", nullptr}, {"finish_reason", "stop"}}));
  EXPECT_EQ(json["usage"]["prompt_tokens"], 2);
  EXPECT_EQ(json["usage"]["completion_tokens"], 4);
  EXPECT_EQ(json["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
  EXPECT_THAT(script_->prompts[0].ids, ElementsAre('a', 257));  // no template, and the text may name special tokens
  EXPECT_EQ(script_->samplings[0].temperature, 0);
  EXPECT_EQ(script_->samplings[0].max_tokens, -1);
  EXPECT_THAT(script_->priorities, ElementsAre(4));
}

TEST_F(CompletionsTest, ManyPromptsOfTextAndTokens) {
  script_->cached_tokens = 10;
  start();
  const TestReply reply =
      complete({{"prompt", Json::array({"ab", Json::array({99, 100, 101})})}, {"n", 2}, {"seed", 7}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  ASSERT_EQ(json["choices"].size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(json["choices"][i]["index"], i);
  ASSERT_EQ(script_->prompts.size(), 4u);
  EXPECT_THAT(script_->prompts[1].ids, ElementsAre('a', 'b'));
  EXPECT_THAT(script_->prompts[2].ids, ElementsAre(99, 100, 101));
  std::vector<uint64_t> seeds;
  for (const SamplingParams& sampling : script_->samplings) seeds.push_back(sampling.seed);
  EXPECT_THAT(seeds, ElementsAre(7, 8, 7, 8));  // a prompt's answers do not depend on its neighbours
  EXPECT_EQ(json["usage"]["prompt_tokens"], 5);
  EXPECT_EQ(json["usage"]["completion_tokens"], 16);
  EXPECT_EQ(json["usage"]["prompt_tokens_details"]["cached_tokens"], 22);  // 10 and 12: of each prompt's first choice
  EXPECT_EQ(complete({{"prompt", {5, 6}}}).status, 200);
  EXPECT_THAT(script_->prompts[4].ids, ElementsAre(5, 6));  // a list of numbers is one prompt
}

TEST_F(CompletionsTest, Streams) {
  start();
  const TestReply reply =
      complete({{"prompt", {"a", "b"}}, {"stream", true}, {"stream_options", {{"include_usage", true}}}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  const auto events = reply.events();
  std::vector<std::string> texts(2), finishes(2);
  ASSERT_GE(events.size(), 2u);
  for (size_t i = 0; i + 2 < events.size(); ++i) {
    const Json chunk = Json::parse(events[i]);
    EXPECT_EQ(chunk["object"], "text_completion");
    const Json& choice = chunk["choices"][0];
    texts[choice["index"]] += choice["text"].get<std::string>();
    if (!choice["finish_reason"].is_null()) finishes[choice["index"]] += choice["finish_reason"].get<std::string>();
  }
  EXPECT_THAT(texts, ElementsAre("Hello!", "Hello!"));
  EXPECT_THAT(finishes, ElementsAre("stop", "stop"));
  EXPECT_EQ(Json::parse(events[events.size() - 2])["usage"]["total_tokens"], 10);
  EXPECT_EQ(events.back(), "[DONE]");
}

TEST_F(CompletionsTest, LogprobsInTheLegacyForm) {
  script_->pieces = {"H\xc3\xa9", "lo"};
  start();
  Json body = {{"prompt", "x"}, {"logprobs", 2}};
  const Json whole = complete(body).json()["choices"][0]["logprobs"];
  EXPECT_EQ(whole["tokens"], Json({"H", "l", "<|im_end|>"}));
  EXPECT_EQ(whole["token_logprobs"], Json({-0.5, -0.5, -0.5}));
  EXPECT_EQ(whole["text_offset"], Json({0, 1, 2}));
  ASSERT_EQ(whole["top_logprobs"].size(), 3u);
  EXPECT_EQ(whole["top_logprobs"][0]["H"], -0.5);  // the chosen one is always there
  body["stream"] = true;
  Json offsets = Json::array();
  for (const std::string& event : complete(body).events()) {
    if (event == "[DONE]") continue;
    const Json choice = Json::parse(event)["choices"][0];
    if (choice["logprobs"].is_null()) continue;
    for (const Json& offset : choice["logprobs"]["text_offset"]) offsets.push_back(offset);
  }
  EXPECT_EQ(offsets, Json({0, 1, 2}));
  EXPECT_EQ(complete({{"prompt", "x"}, {"logprobs", 0}}).json()["choices"][0]["logprobs"]["top_logprobs"].size(), 3u);
}

TEST_F(CompletionsTest, WrongPromptsAndFieldsAre400) {
  start();
  struct Case {
    Json fields;
    std::string param, says;
  };
  const std::vector<Case> cases = {
      {Json::object(), "prompt", "is missing"},
      {{{"prompt", 5}}, "prompt", "a string, a list of strings"},
      {{{"prompt", Json::array()}}, "prompt", "at least one"},
      {{{"prompt", Json::array({"a", 5})}}, "prompt", "found 5"},
      {{{"prompt", Json::array({5, "a"})}}, "prompt", "found string"},
      {{{"prompt", ""}}, "prompt", "is empty"},
      {{{"prompt", Json::array({"a", Json::array()})}}, "prompt", "prompt 2 of 2 is empty"},
      {{{"prompt", Json::array({261})}}, "prompt", "from 0 to 260"},
      {{{"prompt", Json::array({-1})}}, "prompt", "from 0 to 260"},
      {{{"prompt", "<|image_pad|>"}}, "prompt", "/v1/chat/completions"},
      {{{"prompt", std::string(250, 'x')}}, "prompt", "limited to 200"},
      {{{"prompt", Json::array({"a", "b"})}, {"n", 65}}, "prompt", "130 choices"},
      {{{"prompt", "a"}, {"logprobs", true}}, "logprobs", "whole number"},
      {{{"prompt", "a"}, {"logprobs", 21}}, "logprobs", "between 0 and 20"},
      {{{"prompt", "a"}, {"echo", true}, {"logprobs", 1}}, "echo", "log-probabilities"},
      {{{"prompt", "a"}, {"suffix", "z"}}, "suffix", "has not learned to fill in text"},
      {{{"prompt", "a"}, {"best_of", 3}}, "best_of", "not available yet"},
      {{{"prompt", "a"}, {"temperature", 9}}, "temperature", "between 0 and 2"},
      {{{"prompt", "a"}, {"response_format", {{"type", "yaml"}}}}, "response_format", "json_schema"},
  };
  for (const Case& c : cases) {
    const TestReply reply = complete(c.fields);
    EXPECT_EQ(reply.status, 400) << c.fields;
    EXPECT_EQ(reply.param(), c.param) << c.fields << reply.body;
    EXPECT_THAT(reply.message(), HasSubstr(c.says)) << c.fields;
  }
  EXPECT_EQ(complete({{"prompt", "a"}, {"model", "other"}}).status, 404);
  EXPECT_EQ(complete({{"prompt", "a"}, {"n", 2}, {"best_of", 2}, {"echo", false}, {"suffix", nullptr}}).status, 200);
}

TEST_F(CompletionsTest, EchoBeginsWithThePrompt) {
  start();
  const Json fields = {{"prompt", Json::array({"ab", Json::array({99, 257})})}, {"n", 2}, {"echo", true}};
  const Json choices = complete(fields).json()["choices"];
  ASSERT_EQ(choices.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(choices[i]["text"], i < 2 ? "abHello!" : "c<|im_end|>Hello!");
}

TEST_F(CompletionsTest, ASuffixIsFilledInBefore) {
  const std::string path = folder_.path() + "/tokenizer.json";
  Json tokenizer = *read_json_file(path);
  for (const char* text : kFillInTokens) {
    Json token = tokenizer["added_tokens"][0];
    token["id"] = 256 + tokenizer["added_tokens"].size();
    token["content"] = text;
    tokenizer["added_tokens"].push_back(token);
  }
  ASSERT_TRUE(write_file_atomically(path, tokenizer.dump()).ok());
  start();
  const TestReply reply = complete({{"prompt", "a"}, {"suffix", "yz"}, {"echo", true}});
  EXPECT_EQ(reply.json()["choices"][0]["text"], "aHello!");
  EXPECT_THAT(script_->prompts.back().ids, testing::ElementsAre(261, 'a', 262, 'y', 'z', 263));
  EXPECT_EQ(complete({{"prompt", Json::array({5})}, {"suffix", "z"}}).param(), "suffix");
}

TEST_F(CompletionsTest, TokenizeTextAndMessages) {
  start();
  Json json = post("/tokenize", {{"prompt", "hi<|im_end|>"}}).json();
  EXPECT_EQ(json, Json({{"tokens", {'h', 'i', 257}}, {"count", 3}, {"max_model_len", 200}}));
  EXPECT_EQ(post("/tokenize", {{"prompt", ""}, {"add_special_tokens", false}}).json()["count"], 0);
  const Json messages = user_says("hi")["messages"];
  const Json asking = post("/tokenize", {{"messages", messages}}).json();
  EXPECT_EQ(chat(user_says("hi")).json()["usage"]["prompt_tokens"], asking["count"]);
  EXPECT_EQ(asking["tokens"], Json(script_->prompts[0].ids));
  const Json told = post("/tokenize", {{"messages", messages}, {"add_generation_prompt", false}}).json();
  EXPECT_EQ(told["count"].get<int>() + 11, asking["count"]);  // without <|im_start|>, "assistant" and its line break
}

TEST_F(CompletionsTest, TokenizeCountsWhatIsOverTheContext) {
  start();
  const std::string text(100'000, 'x');
  EXPECT_EQ(post("/tokenize", {{"prompt", text}}).json()["count"], 100'000);
  EXPECT_GT(post("/tokenize", {{"messages", user_says(text)["messages"]}}).json()["count"], 100'000);
  EXPECT_EQ(post("/v1/completions", {{"prompt", text}}).code(), "context_length_exceeded");
}

TEST_F(CompletionsTest, DetokenizeGivesTheTextBack) {
  start();
  const std::string text = "h\xc3\xa9 <|im_start|>";
  const Json tokens = post("/tokenize", {{"prompt", text}}).json()["tokens"];
  EXPECT_EQ(post("/detokenize", {{"tokens", tokens}}).json(), Json({{"prompt", text}}));
  EXPECT_EQ(post("/detokenize", {{"tokens", Json::array()}}).json()["prompt"], "");
}

TEST_F(CompletionsTest, WrongTokenizeRequestsAreRefused) {
  start();
  EXPECT_EQ(post("/tokenize", Json::object()).param(), "prompt");
  EXPECT_EQ(post("/tokenize", {{"prompt", "a"}, {"messages", Json::array()}}).status, 400);
  EXPECT_EQ(post("/tokenize", {{"prompt", Json::array({"a"})}}).param(), "prompt");
  EXPECT_EQ(post("/tokenize", {{"messages", Json::array()}}).param(), "messages");
  EXPECT_EQ(post("/tokenize", {{"prompt", std::string(2'000'000, 'x')}}).code(), "context_length_exceeded");
  EXPECT_EQ(post("/tokenize", {{"prompt", "a"}, {"model", "other"}}).status, 404);
  EXPECT_EQ(post("/detokenize", {{"tokens", {5, 261}}}).param(), "tokens");
  EXPECT_EQ(post("/detokenize", {{"tokens", "a"}}).param(), "tokens");
  EXPECT_EQ(post("/detokenize", Json::object()).status, 400);
  EXPECT_EQ(post("/detokenize", {{"tokens", {5}}, {"model", "other"}}).code(), "model_not_found");
}

}  // namespace
}  // namespace parvl
