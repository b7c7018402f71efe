// Request parsing, media URLs and reply shapes, without a server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "parvl/base/file.h"
#include "parvl/exec/sampler.h"
#include "parvl/media/image.h"
#include "parvl/serve/admission.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/media_source.h"
#include "parvl/serve/openai_reply.h"
#include "parvl/serve/openai_request.h"
#include "parvl/serve/prepare_prompt.h"
#include "tests/unit/serve_fake.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

ChatRules rules() {
  ChatRules rules;
  rules.vocab_size = 300;
  rules.takes_images = true;
  rules.max_images = 2;
  return rules;
}

Json basic() { return {{"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})}}; }

Json with_part(const Json& part) {
  return {{"messages", Json::array({{{"role", "user"}, {"content", Json::array({part})}}})}};
}

absl::StatusOr<ChatRequest> parse(const Json& body) { return parse_chat_request(body.dump(), rules()); }

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
               {"cache_salt", "s"},
               {"mm_processor_kwargs", Json::object()},
               {"modalities", {"text"}}});
  const auto request = parse(body);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_TRUE(request->unknown_fields.empty());
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

TEST(ChatRequestTest, WhatIsNotBuiltSaysSo) {
  const std::vector<std::pair<const char*, Json>> cases = {
      {"n", 2},
      {"tools", Json::array({{{"type", "function"}}})},
      {"tool_choice", "required"},
      {"functions", Json::array({1})},
      {"response_format", {{"type", "json_object"}}},
      {"priority", 5},
      {"mm_processor_kwargs", {{"max_pixels", 5}}},
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
  ChatRules text_only = rules();
  text_only.takes_images = false;
  const auto request = parse_chat_request(with_part(image).dump(), text_only);
  EXPECT_THAT(std::string(request.status().message()), HasSubstr("this model takes no images"));
  EXPECT_EQ(http_status_of(parse(with_part({{"type", "image_url"}})).status()), 400);
  EXPECT_EQ(http_status_of(parse(with_part({{"type", "image_url"}, {"image_url", {{"url", 5}}}})).status()), 400);
}

TEST(ChatRequestTest, HugeAndDeepBodiesAreRefusedBeforeTheyAreBuilt) {
  std::string many = "{\"messages\": [";
  for (int i = 0; i < 1'000'001; ++i) many += "0,";
  EXPECT_THAT(std::string(parse_chat_request(many + "0]}", rules()).status().message()),
              HasSubstr("1000000 JSON values"));
  const std::string deep = std::string(100'000, '[');
  EXPECT_EQ(http_status_of(parse_chat_request(deep, rules()).status()), 400);
  EXPECT_EQ(http_status_of(parse_chat_request("[]", rules()).status()), 400);
  EXPECT_EQ(http_status_of(parse_chat_request("{\"messages\": \"\xff\"}", rules()).status()), 400);
}

TEST(Base64, AllSpellingsOfTheSameBytes) {
  const std::string bytes = {'\xfb', '\xff', '\xfe', 'a', 'b'};
  for (const char* text : {"+//+YWI=", "-__-YWI=", "-__-YWI", "+/\n/+\r\nYW I=", "+//+YWI=\n"}) {
    EXPECT_EQ(*decode_base64(text), bytes) << text;
  }
  EXPECT_EQ(*decode_base64(""), "");
  for (const char* text : {"A", "AAAAA", "A*AA", "AA=A", "AAA===", "\xff\xff"}) {
    EXPECT_FALSE(decode_base64(text).ok()) << text;
  }
}

TEST(LoadMedia, DataUris) {
  const MediaPolicy policy;
  EXPECT_EQ(*load_media("data:image/png;base64,aGVsbG8=", policy, "x"), "hello");
  EXPECT_EQ(*load_media("DATA:;BASE64,aGVsbG8", policy, "x"), "hello");
  EXPECT_EQ(*load_media("data:image/png;base64,aGVsbG8%3D", policy, "x"), "hello");
  EXPECT_EQ(*load_media("data:,he%6C%6co", policy, "x"), "hello");
  EXPECT_EQ(*load_media("data:,100%", policy, "x"), "100%");
  for (const char* url : {"data:image/png;base64", "data:;base64,", "data:;base64,!!!!", "data:,"}) {
    EXPECT_EQ(http_status_of(load_media(url, policy, "image 1").status()), 422) << url;
    EXPECT_THAT(std::string(load_media(url, policy, "image 1").status().message()), HasSubstr("image 1"));
  }
  for (const char* url : {"", "x", "ftp://a/b", "http://a/b", "https://a/b", "javascript:x", "data"}) {
    EXPECT_EQ(http_status_of(load_media(url, policy, "image 1").status()), 400) << url;
  }
  EXPECT_THAT(std::string(load_media("https://a/b", policy, "i").status().message()), HasSubstr("not available yet"));
  MediaPolicy small;
  small.image.max_bytes = 100;
  EXPECT_TRUE(load_media("data:;base64," + std::string(132, 'A'), small, "x").ok());  // 99 bytes
  EXPECT_EQ(http_status_of(load_media("data:;base64," + std::string(136, 'A'), small, "x").status()), 413);
  EXPECT_EQ(http_status_of(load_media("data:;base64," + std::string(10'000, 'A'), small, "x").status()), 413);
}

TEST(LoadMedia, FilesStayInsideTheirFolder) {
  const TemporaryFolder root;
  namespace fs = std::filesystem;
  const fs::path base = root.path();
  fs::create_directories(base / "open" / "sub");
  ASSERT_TRUE(write_file_atomically(base / "open" / "a b.png", "inside").ok());
  ASSERT_TRUE(write_file_atomically(base / "secret", "outside").ok());
  fs::create_directories(base / "open2");
  ASSERT_TRUE(write_file_atomically(base / "open2" / "x", "neighbour").ok());
  fs::create_symlink("a b.png", base / "open" / "link");
  fs::create_symlink("../secret", base / "open" / "escape");
  fs::create_directory_symlink("..", base / "open" / "up");
  fs::create_directory_symlink("open", base / "alias");
  const auto load = [&](const std::string& path, const MediaPolicy& policy) {
    return load_media("file://" + path, policy, "image 1");
  };
  MediaPolicy policy;
  EXPECT_EQ(http_status_of(load(base / "secret", policy).status()), 400);  // no folder allowed at all
  policy.local_path = *resolve_media_folder(base / "alias");
  const std::string open = (base / "open").string();
  EXPECT_EQ(*load(open + "/a%20b.png", policy), "inside");
  EXPECT_EQ(*load("localhost" + open + "/a b.png", policy), "inside");
  EXPECT_EQ(*load(open + "/link", policy), "inside");
  EXPECT_EQ(*load(open + "/sub/../link", policy), "inside");
  EXPECT_EQ(*load((base / "alias" / "link").string(), policy), "inside");
  for (const std::string& path :
       {base.string() + "/secret", open + "/escape", open + "/up/secret", open + "/../secret", open + "/%2e%2e/secret",
        open + "2/x", open + "/../missing", std::string("/etc/passwd"), std::string("otherhost") + open + "/link",
        std::string("relative"), open + "/a%00b", std::string("/proc/self/environ")}) {
    EXPECT_EQ(http_status_of(load(path, policy).status()), 400) << path << load(path, policy).status();
  }
  EXPECT_EQ(http_status_of(load(open + "/missing", policy).status()), 422);
  EXPECT_EQ(http_status_of(load(open + "/sub", policy).status()), 422);
  policy.image.max_bytes = 3;
  EXPECT_EQ(http_status_of(load(open + "/link", policy).status()), 413);
  EXPECT_FALSE(resolve_media_folder(base / "secret").ok());
}

class PreparePromptTest : public testing::Test {
 protected:
  PreparePromptTest() {
    write_model_folder(folder_.path());
    generator_ = std::make_unique<FakeGenerator>(std::make_shared<FakeScript>(), folder_.path(), 100);
  }
  absl::StatusOr<Prompt> prepare(const Json& body) {
    const auto request = parse(body);
    if (!request.ok()) return request.status();
    return prepare_prompt(*request, generator_->prompts(), prompt_limits(*generator_), policy_);
  }
  static Json picture(const std::string& bytes) {
    std::string escaped;
    for (const unsigned char c : bytes) {
      constexpr char kDigits[] = "0123456789abcdef";
      escaped += {'%', kDigits[c >> 4], kDigits[c & 15]};
    }
    return {{"type", "image_url"}, {"image_url", {{"url", "data:image/png," + escaped}}}};
  }
  static std::string png(int width, int height) {
    return encode_png({width, height, std::vector<uint8_t>(static_cast<size_t>(width) * height * 3, 77)});
  }

  TemporaryFolder folder_;
  MediaPolicy policy_;
  std::unique_ptr<FakeGenerator> generator_;
};

TEST_F(PreparePromptTest, ImageTakesItsTokens) {
  const auto prompt = prepare(with_part(picture(png(16, 24))));
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  ASSERT_EQ(prompt->media.size(), 1u);
  EXPECT_EQ(prompt->media[0].length, 6);  // 2 x 3 merged patches of 8 pixels
  EXPECT_EQ(prompt->ids[prompt->media[0].begin], 260);
  EXPECT_EQ(prompt->images.size(), 1u);
}

TEST_F(PreparePromptTest, BrokenImagesAre422AndNameTheItem) {
  Json body = with_part(picture(png(16, 16)));
  body["messages"][0]["content"].push_back(picture(png(16, 16).substr(0, 60)));
  const absl::Status status = prepare(body).status();
  EXPECT_EQ(http_status_of(status), 422);
  EXPECT_THAT(std::string(status.message()), HasSubstr("image 2 of 2 (messages[0].content[1].image_url)"));
  EXPECT_EQ(field_of(status), "messages[0].content[1].image_url");
  EXPECT_EQ(http_status_of(prepare(with_part(picture("no image at all"))).status()), 422);
  EXPECT_EQ(http_status_of(prepare(with_part(picture(png(1700, 8)))).status()), 422);  // a ratio the processor refuses
}

TEST_F(PreparePromptTest, OverACapIs413AndOverTheContext400) {
  policy_.image.max_pixels = 100;
  EXPECT_EQ(http_status_of(prepare(with_part(picture(png(11, 10)))).status()), 413);
  EXPECT_TRUE(prepare(with_part(picture(png(10, 10)))).ok());
  policy_ = {};
  Json body = with_part(picture(png(64, 64)));  // 64 tokens each
  EXPECT_TRUE(prepare(body).ok());
  body["messages"][0]["content"].push_back(picture(png(64, 64)));
  const absl::Status status = prepare(body).status();
  EXPECT_EQ(http_status_of(status), 400);
  EXPECT_THAT(std::string(status.message()), HasSubstr("128 tokens, but the context is limited to 100"));
}

TEST_F(PreparePromptTest, TextFarOverTheContextIsNotEvenTokenised) {
  const absl::Status status =
      prepare({{"messages", Json::array({{{"role", "user"}, {"content", std::string(5'000'000, 'x')}}})}}).status();
  EXPECT_EQ(http_status_of(status), 400);
  EXPECT_THAT(std::string(status.message()), HasSubstr("at least"));
}

TEST_F(PreparePromptTest, PlaceholderTextOfAUserBindsToNoImage) {
  const auto prompt = prepare({{"messages", Json::array({{{"role", "user"}, {"content", "<|image_pad|>"}}})}});
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_TRUE(prompt->media.empty());
  EXPECT_EQ(std::count(prompt->ids.begin(), prompt->ids.end(), 260), 0);
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

TEST(AdmissionTest, CreditsGoByArrivalAndPlacesComeBack) {
  Admission line(3, 2);
  std::vector<int> turns;
  const auto enter = [&](int id) { return line.enter([&turns, id] { turns.push_back(id); }); };
  auto a = enter(1), b = enter(2), c = enter(3);
  EXPECT_EQ(enter(4), nullptr);
  EXPECT_THAT(turns, ElementsAre(1, 2));
  EXPECT_TRUE(a->has_credit());
  EXPECT_FALSE(c->has_credit());
  b.reset();
  EXPECT_THAT(turns, ElementsAre(1, 2, 3));
  auto d = enter(5);
  c.reset();  // before it was done
  EXPECT_THAT(turns, ElementsAre(1, 2, 3, 5));
  EXPECT_EQ(line.size(), 2u);
}

TEST(AdmissionTest, CapacityBoundsCredits) {
  Admission line(1, 2);
  auto a = line.enter([] {});
  EXPECT_EQ(line.enter([] {}), nullptr);
}

}  // namespace
}  // namespace parvl
