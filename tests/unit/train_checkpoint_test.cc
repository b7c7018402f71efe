// Checkpoints on disk: what is in them, damage of every kind to every file, leftovers, order.
#include <algorithm>

#include "parvl/train/checkpoint_manifest.h"
#include "parvl/train/checkpointer.h"
#include "train_fixture.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class CheckpointTest : public TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    recipe_.train.dtype = "bfloat16";
    recipe_.train.steps = 2;
    recipe_.train.checkpoint_every = 1;
    ASSERT_TRUE(run().ok());
    newest_ = folder_ / "out/step-2";
    for (const auto& entry : fs::recursive_directory_iterator(newest_)) {
      if (entry.is_regular_file()) files_.push_back(fs::relative(entry.path(), newest_).string());
    }
    ASSERT_EQ(files_.size(), 11u) << ::testing::PrintToString(files_);
    recipe_.train.steps = 3;
  }
  std::string content(const fs::path& path) { return *read_file(path.string()); }
  static void write(const fs::path& path, const std::string& text) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
  }

  // Resuming from the damaged checkpoint names the file and offers the one before; nothing is trained or written.
  void expect_refused(const std::string& file) {
    const absl::Status status = run();
    EXPECT_EQ(exit_code(status), 2) << file;
    EXPECT_THAT(std::string(status.message()), HasSubstr(newest_.string()));
    EXPECT_THAT(std::string(status.message()), HasSubstr(file));
    EXPECT_THAT(std::string(status.message()),
                HasSubstr((folder_ / "out/step-1").string() + " is whole: set train.resume to it"));
    EXPECT_TRUE(losses().empty());
    EXPECT_FALSE(fs::exists(folder_ / "out/step-3"));
  }

  fs::path newest_;
  std::vector<std::string> files_;
};

TEST_F(CheckpointTest, AFlippedByteInAnyFileIsFound) {
  for (const std::string& file : files_) {
    const std::string good = content(newest_ / file);
    for (const size_t at : {size_t{0}, good.size() / 2, good.size() - 1}) {
      for (const char mask : {'\x01', '\x20', '\x40'}) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ mask);
        write(newest_ / file, bad);
        SCOPED_TRACE(absl::StrCat(file, " at ", at));
        const absl::Status status = check_checkpoint(newest_.string());
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(status.message()), HasSubstr(file));
      }
    }
    expect_refused(file);
    write(newest_ / file, good);
  }
  EXPECT_TRUE(run().ok());
}

TEST_F(CheckpointTest, AMissingShortenedOrEmptyFileIsFound) {
  for (const std::string& file : files_) {
    const std::string good = content(newest_ / file);
    fs::remove(newest_ / file);
    expect_refused(file);
    write(newest_ / file, good.substr(0, good.size() / 2));
    expect_refused(file);
    write(newest_ / file, "");
    expect_refused(file);
    write(newest_ / file, good);
  }
  EXPECT_TRUE(run().ok());
}

TEST_F(CheckpointTest, TheOneBeforeCanBeResumedByItsPath) {
  write(newest_ / "model.safetensors", "");
  recipe_.train.resume = (folder_ / "out/step-1").string();
  ASSERT_TRUE(run().ok()) << text_;
  EXPECT_EQ(losses().size(), 2u);
  EXPECT_TRUE(check_checkpoint(newest_.string()).ok());  // made again
  // From here on the folder is well without the path.
  recipe_.train.resume = "auto";
  recipe_.train.steps = 4;
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(losses().size(), 1u);
}

TEST_F(CheckpointTest, WithoutAWholeOneTheMessageSaysSo) {
  write(newest_ / "config.json", "");
  fs::remove_all(folder_ / "out/step-1");
  EXPECT_THAT(std::string(run().message()), HasSubstr("no other checkpoint there is whole: set train.resume to never"));
  recipe_.train.resume = newest_.string();
  EXPECT_THAT(std::string(run().message()), HasSubstr("config.json"));
}

// Whole checkpoints whose own files say something else: the hashes are made right again.
class RewrittenTest : public CheckpointTest {
 protected:
  void SetUp() override {
    CheckpointTest::SetUp();
    manifest_ = *read_json_file((newest_ / kManifestFile).string());
  }
  void rewrite_manifest(const std::function<void(Json& content)>& change) {
    change(manifest_["content"]);
    manifest_["sha256"] = sha256_hex(manifest_["content"].dump());
    write(newest_ / kManifestFile, manifest_.dump());
  }
  void rewrite(const std::string& file, const std::string& text) {
    write(newest_ / file, text);
    rewrite_manifest([&](Json& content) { content["files"][file] = sha256_hex(text); });
  }
  Json manifest_;
};

TEST_F(RewrittenTest, UnsoundStepsAreRefused) {
  const Json state = *read_json_file((newest_ / kStateFile).string());
  for (const auto& [step, updates] : std::vector<std::pair<Json, Json>>{{-1, 0}, {2, 3}, {"2", 2}, {2, nullptr}}) {
    Json bad = state;
    bad["step"] = step;
    bad["updates"] = updates;
    rewrite(kStateFile, bad.dump());
    EXPECT_EQ(exit_code(run()), 2) << bad.dump();
  }
  rewrite(kStateFile, state.dump());
  EXPECT_TRUE(run().ok());
}

TEST_F(RewrittenTest, AnotherOptimizersStateIsRefused) {
  const std::string file = "trainer/state-0-of-1.json";
  const Json shard = *read_json_file((newest_ / file).string());
  Json bad = shard;  // a value less of the first tensor
  bad["slices"][0]["slice"][4] = bad["slices"][0]["slice"][4].get<int64_t>() - 1;
  rewrite(file, bad.dump());
  EXPECT_THAT(std::string(run().message()), HasSubstr("is not as long as its slice"));
  bad = shard;
  bad["slices"][0]["numel"] = 2 * bad["slices"][0]["numel"].get<int64_t>();
  rewrite(file, bad.dump());
  EXPECT_EQ(exit_code(run()), 2);
  bad = shard;
  bad["slices"].erase(0);
  rewrite(file, bad.dump());
  EXPECT_THAT(std::string(run().message()), HasSubstr("not one slice a tensor"));
  rewrite(file, "[]");
  EXPECT_EQ(exit_code(run()), 2);
  rewrite_manifest([&](Json& content) { content["files"].erase(file); });
  EXPECT_THAT(std::string(run().message()), HasSubstr("it lacks 'vision_encoder."));
}

TEST_F(RewrittenTest, OtherFormatsAndFilesOutsideAreRefused) {
  rewrite_manifest([](Json& content) { content["format"] = 3; });
  EXPECT_THAT(std::string(run().message()), HasSubstr("has the format 3; this program reads format 2"));
  rewrite_manifest([](Json& content) {
    content["format"] = 2;
    content["files"]["../../data.jsonl"] = std::string(64, '0');
  });
  EXPECT_THAT(std::string(run().message()), HasSubstr("names a file outside the checkpoint"));
  const Json files = {{"config.json", std::string(64, '0')}};  // as before there were parts of the state
  write(newest_ / kManifestFile, Json{{"files", files}, {"sha256", sha256_hex(files.dump())}}.dump());
  EXPECT_THAT(std::string(run().message()), HasSubstr("was written by an earlier version of this program"));
}

TEST_F(CheckpointTest, SixteenBitCheckpointsKeepTheMasters) {
  const std::string header = content(newest_ / "trainer/state-0-of-1.safetensors").substr(0, 20000);
  EXPECT_THAT(header, HasSubstr("llm_backbone.norm.weight.master"));
  const Json config = *read_json_file((newest_ / "config.json").string());
  EXPECT_EQ(config["torch_dtype"], "bfloat16");
}

TEST_F(CheckpointTest, LeftoversGoAndWhatWasPutAsideComesBack) {
  const fs::path out = folder_ / "out";
  fs::create_directories(out / ".step-9.tmp/trainer");
  write(out / ".step-9.tmp/model.safetensors", "half");
  fs::rename(newest_, out / ".step-2.tmp.replaced");  // a process died between putting aside and publishing
  fs::create_directories(out / ".step-2.tmp");
  fs::create_directories(out / ".step-1.tmp.replaced");  // and one after publishing
  fs::create_directories(out / "step-notes");
  write(out / "step-7", "a file of the user's");
  fs::create_directories(out / "step-007");
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(losses().size(), 1u);  // went on from step 2
  EXPECT_EQ(list_checkpoints(out.string()), (std::vector<int64_t>{3, 2, 1}));
  std::vector<std::string> hidden;
  for (const auto& entry : fs::directory_iterator(out)) {
    if (entry.path().filename().string()[0] == '.') hidden.push_back(entry.path().string());
  }
  EXPECT_TRUE(hidden.empty()) << ::testing::PrintToString(hidden);
  EXPECT_TRUE(fs::exists(out / "step-notes") && fs::exists(out / "step-7") && fs::exists(out / "step-007"));
}

TEST_F(CheckpointTest, FoldersThatCannotBeUsed) {
  write(folder_ / "file", "");
  recipe_.train.out = (folder_ / "file/out").string();
  EXPECT_THAT(std::string(run().message()), HasSubstr("train.out: cannot make the folder"));
  recipe_.train.out = (folder_ / "file").string();
  EXPECT_EQ(exit_code(run()), 2);
}

TEST_F(CheckpointTest, EmptyCompanionFilesAreKept) {
  const fs::path tokenizer = folder_ / "tokenizer";
  fs::copy(recipe_.tokenizer, tokenizer);
  write(tokenizer / "merges.txt", "");
  recipe_.tokenizer = tokenizer.string();
  const absl::Status status = run();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(fs::exists(folder_ / "out/step-3/merges.txt"));
  EXPECT_TRUE(check_checkpoint((folder_ / "out/step-3").string()).ok());
}

}  // namespace
}  // namespace parvl
