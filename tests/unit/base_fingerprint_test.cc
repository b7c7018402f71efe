#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <functional>
#include <set>
#include <utility>

#include "parvl/base/file.h"
#include "parvl/base/fingerprint.h"
#include "tests/unit/temporary_folder.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;

class FingerprintTest : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) {
    ASSERT_TRUE(write_file_atomically(path(name), text).ok());
  }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }
  std::string now() const { return fingerprint_model(folder_.path()).value(); }
  void set_time(const std::string& name, int64_t seconds, int64_t nanoseconds) {
    const timespec times[2] = {{seconds, nanoseconds}, {seconds, nanoseconds}};
    ASSERT_EQ(::utimensat(AT_FDCWD, path(name).c_str(), times, 0), 0);
  }
  TemporaryFolder folder_;
};

TEST_F(FingerprintTest, ChangesWithWhateverAModelIsLoadedFrom) {
  for (const char* name : {"model.safetensors", "config.json", "tokenizer.json", "merges.txt", "a.jinja", "t.model"}) {
    write(name, "0123456789");
    set_time(name, 1000, 5);
  }
  const std::string first = now();
  EXPECT_EQ(now(), first);
  std::set<std::string> seen = {first};
  const std::pair<const char*, std::function<void()>> kChanges[] = {
      {"a nanosecond", [&] { set_time("model.safetensors", 1000, 6); }},
      {"a size", [&] { fs::resize_file(path("config.json"), 9), set_time("config.json", 1000, 5); }},
      {"another file of the same size and time", [&] { write("t.model", "0123456789"), set_time("t.model", 1000, 5); }},
      {"one more", [&] { write("model-2.safetensors", "x"); }},
      {"another name", [&] { fs::rename(path("merges.txt"), path("vocab.txt")); }},
      {"one less", [&] { fs::remove(path("a.jinja")); }},
  };
  for (const auto& [what, change] : kChanges) {
    change();
    EXPECT_TRUE(seen.insert(now()).second) << what;
  }
}

TEST_F(FingerprintTest, WhatNoModelIsLoadedFromDoesNotCount) {
  write("config.json", "{}");
  const std::string first = now();
  write("README.md", "x");
  write(".gitattributes", "x");
  fs::create_directory(path("checkpoint.json"));
  EXPECT_EQ(now(), first);
}

TEST_F(FingerprintTest, ALinkCountsAsWhatItLeadsTo) {
  fs::create_directory(path("blobs"));
  write("blobs/a", "x");
  write("blobs/b", "x");
  fs::create_symlink("blobs/a", path("model.safetensors"));
  const std::string first = now();
  set_time("blobs/a", 1000, 5);
  const std::string second = now();
  EXPECT_NE(second, first);
  fs::remove(path("model.safetensors"));
  fs::create_symlink("blobs/b", path("model.safetensors"));
  EXPECT_NE(now(), second);
}

TEST_F(FingerprintTest, NoDirectoryIsNotFound) {
  for (const char* name : {"nowhere", "file"}) {
    write("file", "x");
    const absl::Status status = fingerprint_model(path(name)).status();
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_NE(status.message().find(path(name)), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace parvl
