#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "parvl/train/data_source.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

class SourceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("parvl_source_" + std::to_string(::getpid()) + "_" +
                                                  ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_ / "images");
    std::ofstream(folder_ / "images/a.png") << "not looked into here";
    std::ofstream(folder_ / "images/b.png") << "x";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<std::vector<RawSample>> read(const std::string& text, const SourceLimits& limits = {}) {
    std::istringstream stream(text);
    return read_jsonl(stream, "d.jsonl", folder_.string(), limits);
  }
  std::string error(const std::string& text, const SourceLimits& limits = {}) {
    const auto samples = read(text, limits);
    return samples.ok() ? "" : std::string(samples.status().message());
  }

  std::filesystem::path folder_;
};

TEST_F(SourceTest, TheContractsLine) {
  const auto samples = read(
      "\n"
      R"({"id": 7, "messages": [{"role": "user", "content": [{"type": "image", "image": "images/a.png"}, )"
      R"({"type": "text", "text": "what?"}, {"type": "image", "image": "images/../images/b.png"}]}, )"
      R"({"role": "assistant", "content": "a circle"}]})"
      "\r\n  \n"
      R"({"messages": [{"role": "system", "content": "s"}]})");
  ASSERT_TRUE(samples.ok()) << samples.status();
  ASSERT_EQ(samples->size(), 2u);
  const RawSample& first = (*samples)[0];
  EXPECT_EQ(first.name, "d.jsonl:2");
  EXPECT_EQ((*samples)[1].name, "d.jsonl:4");
  ASSERT_EQ(first.messages.size(), 2u);
  EXPECT_EQ(first.messages[0].role, "user");
  ASSERT_EQ(first.messages[0].content.size(), 3u);
  EXPECT_EQ(first.messages[0].content[0].kind, ContentPart::Kind::kImage);
  EXPECT_EQ(first.messages[0].content[1].text, "what?");
  EXPECT_EQ(first.messages[0].content[2].image_index, 1);
  EXPECT_EQ(first.messages[1].content[0].text, "a circle");
  EXPECT_EQ(first.image_paths[0], (folder_ / "images/a.png").string());
  EXPECT_EQ(first.image_paths[1], (folder_ / "images/b.png").string());
}

struct BadLine {
  const char* line;
  const char* message;
};

TEST_F(SourceTest, BadLinesAreRefusedByNumber) {
  const BadLine cases[] = {
      {"{", "d.jsonl:2: not valid JSON: parse error at column 2: "},
      {"\"x\"", "must be an object with \"messages\", found string"},
      {"{\"message\": []}", "has no \"messages\""},
      {"{\"messages\": []}", "must be a list of at least one message"},
      {"{\"messages\": 3}", "must be a list of at least one message"},
      {"{\"messages\": [3]}", "message 1: must be an object"},
      {R"({"messages": [{"role": "human", "content": "x"}]})",
       "message 1: has the role 'human'; valid: system, user, assistant, tool"},
      {R"({"messages": [{"role": 1, "content": "x"}]})", "'role' must be a string"},
      {R"({"messages": [{"role": "user"}]})", "message 1: has no \"content\""},
      {R"({"messages": [{"role": "user", "content": null}]})",
       "\"content\" must be text or a list of parts, found null"},
      {R"({"messages": [{"role": "user", "content": "x", "tool_calls": []}]})",
       "unknown key 'tool_calls'; valid: role, content"},
      {R"({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": ["x"]}]})",
       "message 2: a content part must be an object"},
      {R"({"messages": [{"role": "user", "content": [{"type": "picture"}]}]})",
       "content part of type 'picture'; valid: text, image"},
      {R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})", "needs \"text\" with text in it"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image", "image": 3}]}]})",
       "needs \"image\" with text in it"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image", "image": "images/c.png"}]}]})",
       "the image 'images/c.png' is not a file"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image", "image": "images"}]}]})",
       "the image 'images' is not a file"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image", "image": ""}]}]})",
       "the image '' is not a file"},
      // Found by the fuzzer: the path went into the message as it was.
      {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image\", \"image\": \"e\\u001be\"}]}]}",
       "/e?e')"},
      {R"({"messages": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]})",
       "'video' is not available yet"},
      {R"({"tools": [], "messages": [{"role": "user", "content": "x"}]})",
       "\"tools\" in training data is not available yet"},
  };
  for (const BadLine& c : cases) {
    const std::string message =
        error(std::string(R"({"messages": [{"role": "user", "content": "good"}]})") + "\n" + c.line + "\n");
    EXPECT_THAT(message, ::testing::StartsWith("d.jsonl:2: ")) << c.line;
    EXPECT_THAT(message, HasSubstr(c.message)) << c.line;
  }
}

TEST_F(SourceTest, LimitsAreReached) {
  const std::string line = R"({"messages": [{"role": "user", "content": "x"}]})";
  EXPECT_EQ(error(line + "\n", {.max_line_bytes = line.size()}), "");
  EXPECT_EQ(error("\n" + line + " \n", {.max_line_bytes = line.size()}), "d.jsonl:2: the line is longer than 48 bytes");
  EXPECT_EQ(error(line + "\n" + line, {.max_samples = 2}), "");
  EXPECT_EQ(error(line + "\n" + line, {.max_samples = 1}), "d.jsonl:2: more than 1 samples");
  const std::string images =
      R"({"messages": [{"role": "user", "content": [{"type": "image", "image": "images/a.png"}, {"type": "image", "image": "images/a.png"}]}]})";
  EXPECT_EQ(error(images, {.max_images = 2}), "");
  EXPECT_EQ(error(images, {.max_images = 1}), "d.jsonl:1: message 1: has more than 1 images");
}

TEST_F(SourceTest, DatasetFromAFile) {
  std::ofstream(folder_ / "d.jsonl")
      << R"({"messages": [{"role": "user", "content": [{"type": "image", "image": "images/a.png"}]}]})";
  std::ofstream(folder_ / "empty.jsonl") << "\n\n";
  const auto dataset = Dataset::load("d.jsonl", folder_.string());
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  EXPECT_EQ((*dataset)->size(), 1);
  EXPECT_TRUE(Dataset::load((folder_ / "d.jsonl").string(), "/elsewhere").ok());
  const auto message = [&](const std::string& source) {
    const auto loaded = Dataset::load(source, folder_.string());
    EXPECT_EQ(exit_code(loaded.status()), 2) << loaded.status();
    return std::string(loaded.status().message());
  };
  EXPECT_THAT(message("empty.jsonl"), HasSubstr("holds no sample"));
  EXPECT_THAT(message("missing.jsonl"), HasSubstr("missing.jsonl: No such file"));
  EXPECT_THAT(message("images"), HasSubstr("is a folder"));
  EXPECT_THAT(message("easy-vqa:trian"), HasSubstr("valid: easy-vqa:train"));
}

TEST_F(SourceTest, EasyVqaSplits) {
  std::filesystem::create_directories(folder_ / "vqa/train/images");
  std::ofstream(folder_ / "vqa/train/questions.json") << R"([["q0", "yes", 0], ["q1", "red", 11], ["q2", "no", 0]])";
  std::ofstream(folder_ / "vqa/train/images/0.png") << "x";
  const std::string data = (folder_ / "vqa").string();
  EXPECT_THAT(std::string(read_easy_vqa(data, "train").status().message()), HasSubstr("entry 1 needs"));
  const auto holdout = read_easy_vqa(data, "holdout");
  ASSERT_TRUE(holdout.ok()) << holdout.status();
  ASSERT_EQ(holdout->size(), 2u);
  EXPECT_EQ((*holdout)[1].name, "easy-vqa:holdout #2");
  std::ofstream(folder_ / "vqa/train/images/11.png") << "x";
  const auto fit = read_easy_vqa(data, "fit");
  ASSERT_TRUE(fit.ok()) << fit.status();
  ASSERT_EQ(fit->size(), 1u);
  EXPECT_EQ((*fit)[0].messages[0].content[0].kind, ContentPart::Kind::kImage);
  EXPECT_EQ((*fit)[0].messages[0].content[1].text, "q1");
  EXPECT_EQ((*fit)[0].messages[1].content[0].text, "red");
  for (const char* bad : {R"({})", R"([["q", "a"]])", R"([["q", "a", "0"]])", R"([["q", "a", -1]])", "[["}) {
    std::ofstream(folder_ / "vqa/train/questions.json") << bad;
    EXPECT_EQ(exit_code(read_easy_vqa(data, "train").status()), 2) << bad;
  }
}

// The real package, where the build put it.
TEST(EasyVqa, TheRealPackage) {
  const auto train = Dataset::load("easy-vqa:train", PARVL_SOURCE_DIR);
  ASSERT_TRUE(train.ok()) << train.status();
  EXPECT_EQ((*train)->size(), 38'575);
  const auto test = Dataset::load("easy-vqa:test", PARVL_SOURCE_DIR);
  ASSERT_TRUE(test.ok()) << test.status();
  EXPECT_EQ((*test)->size(), 9'673);
  const auto fit = Dataset::load("easy-vqa:fit", PARVL_SOURCE_DIR);
  const auto holdout = Dataset::load("easy-vqa:holdout", PARVL_SOURCE_DIR);
  ASSERT_TRUE(fit.ok() && holdout.ok());
  EXPECT_EQ((*fit)->size() + (*holdout)->size(), (*train)->size());
  std::set<std::string> fit_images, shared;
  for (int64_t i = 0; i < (*fit)->size(); ++i) fit_images.insert((*fit)->sample(i).image_paths[0]);
  for (int64_t i = 0; i < (*holdout)->size(); ++i) {
    if (fit_images.contains((*holdout)->sample(i).image_paths[0])) shared.insert((*holdout)->sample(i).name);
  }
  EXPECT_TRUE(shared.empty());
}

TEST(EasyVqa, FoundFromAFolderBelow) {
  const auto found = find_easy_vqa(std::string(PARVL_SOURCE_DIR) + "/tests/unit");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, std::string(PARVL_SOURCE_DIR) + "/.deps/data/easy_vqa/data");
}

}  // namespace
}  // namespace parvl
