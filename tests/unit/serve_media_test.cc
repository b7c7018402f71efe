// Media URLs, and messages with images → prompts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "parvl/base/file.h"
#include "parvl/exec/sampler.h"
#include "parvl/media/image.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/media_source.h"
#include "parvl/serve/prepare_prompt.h"
#include "tests/unit/serve_fake.h"

namespace parvl {
namespace {

using testing::HasSubstr;

Json with_part(const Json& part) {
  return {{"messages", Json::array({{{"role", "user"}, {"content", Json::array({part})}}})}};
}

std::string field_of(const absl::Status& status) {
  const auto payload = status.GetPayload(kFieldPayload);
  return payload.has_value() ? std::string(*payload) : "";
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

TEST(Base64, SaysWhatIsWrong) {
  EXPECT_EQ(decode_base64("AAA===").status().message(),
            "ends in 3 padding characters (=) of base64; there may be two at most");
  EXPECT_EQ(decode_base64("AAAAA").status().message(), "is cut short: its base64 has 5 digits");
}

absl::StatusOr<std::string> load(const std::string& url, const MediaPolicy& policy, const std::string& name) {
  MediaFetcher fetcher(policy);
  return load_media(url, policy, name, fetcher);
}

TEST(LoadMedia, DataUris) {
  const MediaPolicy policy;
  EXPECT_EQ(*load("data:image/png;base64,aGVsbG8=", policy, "x"), "hello");
  EXPECT_EQ(*load("DATA:;BASE64,aGVsbG8", policy, "x"), "hello");
  EXPECT_EQ(*load("data:image/png;base64,aGVsbG8%3D", policy, "x"), "hello");
  EXPECT_EQ(*load("data:,he%6C%6co", policy, "x"), "hello");
  EXPECT_EQ(*load("data:,100%", policy, "x"), "100%");
  for (const char* url : {"data:image/png;base64", "data:;base64,", "data:;base64,!!!!", "data:,"}) {
    EXPECT_EQ(http_status_of(load(url, policy, "image 1").status()), 422) << url;
    EXPECT_THAT(std::string(load(url, policy, "image 1").status().message()), HasSubstr("image 1"));
  }
  for (const char* url : {"", "x", "ftp://a/b", "http:", "https://example@host.test/b", "javascript:x", "data"}) {
    EXPECT_EQ(http_status_of(load(url, policy, "image 1").status()), 400) << url;
  }
  EXPECT_THAT(std::string(load("https://127.0.0.1/b", policy, "i").status().message()),
              HasSubstr("--allowed-private-media-hosts"));
  MediaPolicy small;
  small.image.max_bytes = 100;
  EXPECT_TRUE(load("data:;base64," + std::string(132, 'A'), small, "x").ok());  // 99 bytes
  EXPECT_EQ(http_status_of(load("data:;base64," + std::string(136, 'A'), small, "x").status()), 413);
  EXPECT_EQ(http_status_of(load("data:;base64," + std::string(10'000, 'A'), small, "x").status()), 413);
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
  const auto load_file = [&](const std::string& path, const MediaPolicy& policy) {
    return load("file://" + path, policy, "image 1");
  };
  MediaPolicy policy;
  EXPECT_EQ(http_status_of(load_file(base / "secret", policy).status()), 400);  // no folder allowed at all
  policy.local_path = *resolve_media_folder(base / "alias");
  const std::string open = (base / "open").string();
  EXPECT_EQ(*load_file(open + "/a%20b.png", policy), "inside");
  EXPECT_EQ(*load_file("localhost" + open + "/a b.png", policy), "inside");
  EXPECT_EQ(*load_file(open + "/link", policy), "inside");
  EXPECT_EQ(*load_file(open + "/sub/../link", policy), "inside");
  EXPECT_EQ(*load_file((base / "alias" / "link").string(), policy), "inside");
  for (const std::string& path :
       {base.string() + "/secret", open + "/escape", open + "/up/secret", open + "/../secret", open + "/%2e%2e/secret",
        open + "2/x", open + "/../missing", std::string("/etc/passwd"), std::string("otherhost") + open + "/link",
        std::string("relative"), open + "/a%00b", std::string("/proc/self/environ")}) {
    EXPECT_EQ(http_status_of(load_file(path, policy).status()), 400) << path << load_file(path, policy).status();
  }
  EXPECT_EQ(http_status_of(load_file(open + "/missing", policy).status()), 422);
  EXPECT_EQ(http_status_of(load_file(open + "/sub", policy).status()), 422);
  policy.image.max_bytes = 3;
  EXPECT_EQ(http_status_of(load_file(open + "/link", policy).status()), 413);
  EXPECT_FALSE(resolve_media_folder(base / "secret").ok());
}

class PreparePromptTest : public testing::Test {
 protected:
  PreparePromptTest() {
    write_model_folder(folder_.path());
    generator_ = std::make_unique<FakeEngine>(std::make_shared<FakeScript>(), folder_.path(), 100);
  }
  absl::StatusOr<Prompt> prepare(const Json& body) {
    RequestRules rules;
    rules.takes_images = true;
    rules.max_images = 2;
    const auto request = parse_request(body.dump(), Api::kChat, rules);
    if (!request.ok()) return request.status();
    const PromptLimits limits = prompt_limits(*generator_);
    return PromptMaker{generator_->prompts(), limits, policy_}.prepare_chat(*request);
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
  std::unique_ptr<FakeEngine> generator_;
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

// A source that cannot, for no fault of the picture's.
class LostImages : public ImageSource {
 public:
  explicit LostImages(absl::Status why) : why_(std::move(why)) {}
  absl::StatusOr<ProcessedImage> prepare(std::string_view, const ImageLimits&, const ImageProcessor&) override {
    return why_;
  }

 private:
  const absl::Status why_;
};

TEST_F(PreparePromptTest, ALostWorkerAndALackOfMemoryAreNotThePicturesFault) {
  for (const absl::Status& why : {absl::UnavailableError("it was killed"), absl::AbortedError("no room")}) {
    policy_.images = std::make_shared<LostImages>(why);
    const absl::Status status = prepare(with_part(picture(png(16, 16)))).status();
    EXPECT_EQ(http_status_of(status), 503);
    EXPECT_THAT(std::string(status.message()), HasSubstr("image 1 of 1"));
  }
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

TEST_F(PreparePromptTest, ARequestMayChangeTheSizesOfItsImages) {
  const auto with_kwargs = [&](const Json& arguments) {
    Json body = with_part(picture(png(40, 40)));  // 25 tokens, and the model's range is 64 to 4096 pixels
    body["mm_processor_kwargs"] = arguments;
    return prepare(body);
  };
  const auto whole = with_kwargs(Json::object()), small = with_kwargs({{"max_pixels", 1024}}),
             large = with_kwargs({{"min_pixels", 2000}, {"max_pixels", 6000}});
  ASSERT_TRUE(whole.ok() && small.ok() && large.ok()) << small.status() << large.status();
  EXPECT_EQ(whole->media[0].length, 25);
  EXPECT_EQ(small->media[0].length, 16);
  EXPECT_EQ(large->media[0].length, 36);
  EXPECT_NE(whole->images[0]->key, small->images[0]->key);  // no cache may take one for the other
  EXPECT_EQ(whole->images[0]->key, with_kwargs({{"max_pixels", 4096}})->images[0]->key);
  const absl::Status crossed = with_kwargs({{"min_pixels", 5000}}).status();
  EXPECT_EQ(http_status_of(crossed), 400);
  EXPECT_EQ(field_of(crossed), "mm_processor_kwargs");
  EXPECT_THAT(std::string(crossed.message()), HasSubstr("min_pixels (5000) must not be above max_pixels (4096)"));
  const absl::Status huge = with_kwargs({{"min_pixels", 4'000'000}, {"max_pixels", 4'000'000}}).status();
  EXPECT_EQ(http_status_of(huge), 400);
  EXPECT_EQ(
      huge.message(),
      "mm_processor_kwargs: min_pixels 4000000 makes an image at least 62500 tokens, but the context is limited to "
      "100 tokens (--max-model-len); lower it");
  EXPECT_EQ(field_of(huge), "mm_processor_kwargs");
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

}  // namespace
}  // namespace parvl
