// Request parsing and errors, without a server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/exec/sampler.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/openai_reply.h"
#include "parvl/serve/openai_request.h"
#include "parvl/serve/trace_context.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

RequestRules rules() {
  RequestRules rules;
  rules.vocab_size = 300;
  rules.takes_images = true;
  rules.max_images = 2;
  return rules;
}

Json basic() { return {{"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})}}; }

Json with_part(const Json& part) {
  return {{"messages", Json::array({{{"role", "user"}, {"content", Json::array({part})}}})}};
}

absl::StatusOr<GenerateRequest> parse(const Json& body) { return parse_request(body.dump(), Api::kChat, rules()); }

std::string field_of(const absl::Status& status) {
  const auto payload = status.GetPayload(kFieldPayload);
  return payload.has_value() ? std::string(*payload) : "";
}

TEST(ChatRequestTest, MessagesAndParts) {
  const Json body = {
      {"model", "m"},
      {"messages",
       Json::array(
           {{{"role", "developer"}, {"content", "be brief"}},
            {{"role", "user"},
             {"name", "Ann"},
             {"content", Json::array({{{"type", "image_url"}, {"image_url", {{"url", "data:a"}, {"detail", "low"}}}},
                                      {{"type", "text"}, {"text", "what?"}},
                                      {{"type", "image_url"}, {"image_url", "data:b"}}})}},
            {{"role", "assistant"}, {"content", nullptr}}})}};
  const auto request = parse(body);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->model, "m");
  ASSERT_EQ(request->messages.size(), 3u);
  EXPECT_EQ(request->messages[0].role, "system");
  EXPECT_EQ(request->messages[0].content[0].text, "be brief");
  ASSERT_EQ(request->messages[1].content.size(), 3u);
  EXPECT_EQ(request->messages[1].content[0].image_index, 0);
  EXPECT_EQ(request->messages[1].content[1].text, "what?");
  EXPECT_EQ(request->messages[1].content[2].image_index, 1);
  EXPECT_TRUE(request->messages[2].content.empty());
  ASSERT_EQ(request->images.size(), 2u);
  EXPECT_EQ(request->images[1].url, "data:b");
  EXPECT_EQ(request->images[1].where, "messages[1].content[2].image_url");
}

TEST(ChatRequestTest, NullIsAbsent) {
  Json body = basic();
  for (const char* field : {"temperature", "top_p", "stop", "seed", "tools", "tool_choice", "response_format", "n",
                            "max_tokens", "logit_bias", "stream", "stream_options", "user", "logprobs", "model"}) {
    body[field] = nullptr;
  }
  EXPECT_TRUE(parse(body).ok()) << parse(body).status();
}

TEST(ChatRequestTest, HarmlessValuesOfUnbuiltFieldsAreAccepted) {
  Json body = basic();
  body.update({{"n", 1},
               {"tools", Json::array()},
               {"tool_choice", "none"},
               {"response_format", {{"type", "text"}}},
               {"priority", 0},
               {"mm_processor_kwargs", Json::object()},
               {"modalities", {"text"}}});
  const auto request = parse(body);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_TRUE(request->unknown_fields.empty());
}

TEST(ChatRequestTest, FieldsOfTheEngineAndTheImageProcessor) {
  const auto plain = parse(basic());
  EXPECT_EQ(plain->n, 1);
  EXPECT_EQ(plain->priority, 0);
  EXPECT_EQ(plain->cache_salt, "");
  EXPECT_EQ(plain->pixels.min_pixels, 0);
  Json body = basic();
  body.update({{"n", 128},
               {"priority", -7},
               {"cache_salt", "tenant 1"},
               {"mm_processor_kwargs", {{"min_pixels", nullptr}, {"max_pixels", 5000}}}});
  const auto request = parse(body);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->n, 128);
  EXPECT_EQ(request->priority, -7);
  EXPECT_EQ(request->cache_salt, "tenant 1");
  EXPECT_EQ(request->pixels.min_pixels, 0);
  EXPECT_EQ(request->pixels.max_pixels, 5000);
}

TEST(ChatRequestTest, UnknownFieldsAreListed) {
  Json body = basic();
  body.update({{"user", "u"}, {"best_of", 3}});
  EXPECT_THAT(parse(body)->unknown_fields, ElementsAre("best_of", "user"));
}

TEST(ChatRequestTest, NumbersKeepTheirValues) {
  Json body = basic();
  body.update({{"seed", 18446744073709551615ull},
               {"max_tokens", 7.0},
               {"stop_token_ids", {1, 2}},
               {"ignore_eos", true},
               {"min_tokens", 2},
               {"repetition_penalty", 1.2},
               {"frequency_penalty", -1},
               {"logprobs", true},
               {"top_logprobs", 4},
               {"stream", true},
               {"stream_options", {{"include_usage", true}}}});
  const auto request = parse(body);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->sampling.seed, 18446744073709551615ull);
  EXPECT_EQ(request->sampling.max_tokens, 7);
  EXPECT_THAT(request->sampling.stop_token_ids, ElementsAre(1, 2));
  EXPECT_EQ(request->sampling.frequency_penalty, -1.0);
  EXPECT_TRUE(request->include_usage);
}

TEST(ChatRequestTest, WrongValuesAre400AndNameTheField) {
  struct Case {
    const char* field;
    Json value;
    std::string param;
  };
  const std::vector<Case> cases = {
      {"temperature", "hot", "temperature"},
      {"temperature", 3, "temperature"},
      {"top_p", 0, "top_p"},
      {"top_k", 1.5, "top_k"},
      {"min_p", -0.1, "min_p"},
      {"max_tokens", 0, "max_tokens"},
      {"max_tokens", "many", "max_tokens"},
      {"max_completion_tokens", -1, "max_completion_tokens"},
      {"max_tokens", 1e300, "max_tokens"},
      {"seed", 1.5, "seed"},
      {"stop", 3, "stop"},
      {"stop", Json::array({1}), "stop"},
      {"stop", "", "stop"},
      {"stop_token_ids", "5", "stop_token_ids"},
      {"stop_token_ids", Json::array({"5"}), "stop_token_ids"},
      {"stop_token_ids", Json::array({99999999999}), "stop_token_ids"},
      {"stop_token_ids", Json::array({-99999999999}), "stop_token_ids"},
      {"stop_token_ids", Json::array({300}), "stop_token_ids"},
      {"logit_bias", Json::array(), "logit_bias"},
      {"logit_bias", {{"x", 1}}, "logit_bias"},
      {"logit_bias", {{"1", "x"}}, "logit_bias"},
      {"logit_bias", {{"400", 1}}, "logit_bias"},
      {"logprobs", 3, "logprobs"},
      {"top_logprobs", 2, "top_logprobs"},
      {"stream", "yes", "stream"},
      {"stream_options", {{"include_usage", true}}, "stream_options"},
      {"n", 0, "n"},
      {"n", 129, "n"},
      {"n", "two", "n"},
      {"priority", 1.5, "priority"},
      {"priority", int64_t{1} << 31, "priority"},
      {"cache_salt", 5, "cache_salt"},
      {"cache_salt", std::string(257, 's'), "cache_salt"},
      {"repetition_penalty", 1e-320, "repetition_penalty"},
      {"mm_processor_kwargs", 5, "mm_processor_kwargs"},
      {"mm_processor_kwargs", {{"max_pixels", 0}}, "mm_processor_kwargs"},
      {"mm_processor_kwargs", {{"min_pixels", "few"}}, "mm_processor_kwargs"},
      {"model", 5, "model"},
      {"messages", "hi", "messages"},
      {"messages", nullptr, "messages"},
      {"messages", Json::array(), "messages"},
      {"messages", Json::array({1}), "messages[0]"},
      {"messages", Json::array({{{"content", "x"}}}), "messages[0].role"},
      {"messages", Json::array({{{"role", "king"}, {"content", "x"}}}), "messages[0].role"},
      {"messages", Json::array({{{"role", "user"}}}), "messages[0].content"},
      {"messages", Json::array({{{"role", "user"}, {"content", 5}}}), "messages[0].content"},
      {"messages", Json::array({{{"role", "user"}, {"content", Json::array({5})}}}), "messages[0].content[0]"},
      {"response_format", "json", "response_format"},
      {"cache_salt", "", "cache_salt"},
  };
  for (const Case& c : cases) {
    Json body = basic();
    body[c.field] = c.value;
    const auto request = parse(body);
    EXPECT_EQ(http_status_of(request.status()), 400) << c.field << c.value;
    EXPECT_EQ(field_of(request.status()), c.param) << request.status();
  }
}

TEST(ChatRequestTest, WrongNumbersAreShown) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("max_tokens": 1.5)", "'max_tokens' must be a whole number, found 1.5"},
      {R"("max_tokens": 9223372036854775808)",
       "'max_tokens' is too large: it must be at most 9223372036854775807, found 9223372036854775808"},
      {R"("max_tokens": 1e30)", "'max_tokens' is too large: it must be at most 9223372036854775807, found 1e+30"},
      {R"("min_tokens": -1e30)", "'min_tokens' is too small: it must be at least -9223372036854775808, found -1e+30"},
      {R"("seed": 1.5)", "'seed' must be a whole number, found 1.5"},
      {R"("seed": 18446744073709551616)",
       "'seed' must be between -9223372036854775808 and 18446744073709551615, found 1.8446744073709552e+19"},
      {R"("stop_token_ids": [2.5])", "'stop_token_ids' must be a list of token ids (whole numbers), found 2.5"},
      {R"("temperature": "hot")", "'temperature' must be a number, found string"},
  };
  for (const auto& [field, message] : cases) {
    const std::string body = R"({"messages": [{"role": "user", "content": "hi"}], )" + field + "}";
    EXPECT_EQ(parse_request(body, Api::kChat, rules()).status().message(), message);
  }
  EXPECT_EQ(parse_request("{x", Api::kChat, rules()).status().message().substr(0, 46),
            "the body: not valid JSON: parse error at colum");
}

TEST(ChatRequestTest, ASaltIsShort) {
  Json body = basic();
  body["cache_salt"] = std::string(256, 's');
  EXPECT_EQ(parse(body)->cache_salt.size(), 256u);
  body["cache_salt"] = std::string(10'000'000, 's');
  EXPECT_EQ(parse(body).status().message(),
            "'cache_salt' has 10000000 bytes, over the limit of 256; send a hash of it");
}

TEST(ChatRequestTest, DetailOfAnImageIsAWord) {
  const auto with_detail = [](const Json& detail) {
    return parse(with_part({{"type", "image_url"}, {"image_url", {{"url", "data:,x"}, {"detail", detail}}}})).status();
  };
  for (const Json& detail : {Json("auto"), Json("low"), Json("high"), Json(nullptr)}) {
    EXPECT_TRUE(with_detail(detail).ok()) << with_detail(detail);
  }
  for (const Json& detail : {Json(5), Json("ultra"), Json(""), Json("LOW")}) {
    EXPECT_EQ(field_of(with_detail(detail)), "messages[0].content[0].image_url.detail");
    EXPECT_EQ(http_status_of(with_detail(detail)), 400);
  }
}

TEST(ChatRequestTest, WhatIsNotBuiltSaysSo) {
  const std::vector<std::pair<const char*, Json>> cases = {
      {"functions", Json::array({1})},
      {"function_call", "f"},
      {"structured_outputs", {{"grammar", "root ::= x"}}},
      {"mm_processor_kwargs", {{"do_resize", false}}},
      {"modalities", {"text", "audio"}},
  };
  for (const auto& [field, value] : cases) {
    Json body = basic();
    body[field] = value;
    const absl::Status status = parse(body).status();
    EXPECT_EQ(http_status_of(status), 400) << field;
    EXPECT_THAT(std::string(status.message()), HasSubstr("not available yet")) << field;
    EXPECT_EQ(field_of(status), field);
  }
  for (const auto& [type, word] : {std::pair("input_audio", "audio"), std::pair("video_url", "video")}) {
    const absl::Status status = parse(with_part({{"type", type}})).status();
    EXPECT_THAT(std::string(status.message()), testing::AllOf(HasSubstr(word), HasSubstr("not available yet")));
  }
}

TEST(ChatRequestTest, ImagesAreCountedAndRefusedByATextModel) {
  const Json image = {{"type", "image_url"}, {"image_url", {{"url", "data:,x"}}}};
  Json body = with_part(image);
  body["messages"][0]["content"] = Json::array({image, image, image});
  EXPECT_THAT(std::string(parse(body).status().message()), HasSubstr("more than 2 images"));
  RequestRules text_only = rules();
  text_only.takes_images = false;
  const auto request = parse_request(with_part(image).dump(), Api::kChat, text_only);
  EXPECT_THAT(std::string(request.status().message()), HasSubstr("is an image, and this model takes no images"));
  text_only.why_no_images = "a.json is missing";
  EXPECT_THAT(std::string(parse_request(with_part(image).dump(), Api::kChat, text_only).status().message()),
              HasSubstr("is an image, and a.json is missing"));
  EXPECT_EQ(http_status_of(parse(with_part({{"type", "image_url"}})).status()), 400);
  EXPECT_EQ(http_status_of(parse(with_part({{"type", "image_url"}, {"image_url", {{"url", 5}}}})).status()), 400);
}

TEST(ChatRequestTest, HugeAndDeepBodiesAreRefusedBeforeTheyAreBuilt) {
  std::string many = "{\"messages\": [";
  for (int i = 0; i < 1'000'001; ++i) many += "0,";
  EXPECT_THAT(std::string(parse_request(many + "0]}", Api::kChat, rules()).status().message()),
              HasSubstr("1000000 JSON values"));
  const std::string deep = std::string(100'000, '[');
  EXPECT_EQ(http_status_of(parse_request(deep, Api::kChat, rules()).status()), 400);
  EXPECT_EQ(http_status_of(parse_request("[]", Api::kChat, rules()).status()), 400);
  EXPECT_EQ(http_status_of(parse_request("{\"messages\": \"\xff\"}", Api::kChat, rules()).status()), 400);
}

TEST(TraceContext, TraceparentAsTheStandardHasIt) {
  const std::string trace(32, 'a'), parent = "00f067aa0ba902b7";
  const auto context = parse_traceparent("00-" + trace + "-" + parent + "-01");
  ASSERT_TRUE(context.has_value());
  EXPECT_EQ(context->trace_id, trace);
  EXPECT_EQ(context->parent_id, parent);
  EXPECT_TRUE(parse_traceparent("cc-" + trace + "-" + parent + "-01-more").has_value());
  const std::string zeros(32, '0');
  for (const std::string& header :
       {std::string(), "00-" + trace + "-" + parent, "00-" + trace + "-" + parent + "-01-more",
        "cc-" + trace + "-" + parent + "-01more", "ff-" + trace + "-" + parent + "-01",
        "00-" + zeros + "-" + parent + "-01", "00-" + trace + "-0000000000000000-01",
        "00-" + std::string(32, 'A') + "-" + parent + "-01", "00-" + trace + "x" + parent + "-01",
        "0x-" + trace + "-" + parent + "-01", "00-" + trace + "-" + parent + "-zz"}) {
    EXPECT_FALSE(parse_traceparent(header).has_value()) << header;
  }
}

TEST(ApiError, ShapeAndLength) {
  const Json json = Json::parse(error_body(api_error(422, std::string(999, 'x') + "éé", "c", "f")));
  EXPECT_EQ(json["error"]["message"].get<std::string>().size(), 1000u);
  EXPECT_EQ(json["error"]["type"], "invalid_request_error");
  EXPECT_EQ(json["error"]["param"], "f");
  EXPECT_EQ(json["error"]["code"], "c");
  EXPECT_TRUE(Json::parse(error_body(failed("x")))["error"]["param"].is_null());
  EXPECT_NO_THROW(Json::parse(error_body(invalid("bad \xff bytes"))));
  EXPECT_EQ(http_status_of(not_available_yet("x")), 400);
  EXPECT_EQ(http_status_of(absl::OkStatus()), 200);
}

TEST(ApiError, ShortenCutsBetweenCharacters) {
  EXPECT_EQ(shorten("abc", 3), "abc");
  EXPECT_EQ(shorten("éééé", 6), "é...");
  EXPECT_EQ(shorten("😀😀😀", 8), "😀...");
}

}  // namespace
}  // namespace parvl
