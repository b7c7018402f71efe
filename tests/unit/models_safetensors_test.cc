// The safetensors reader and the files of a directory: what is valid, and every way to be damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "parvl/models/safetensors.h"
#include "parvl/models/weight_files.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string with_length(uint64_t length, const std::string& rest) {
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + rest;
}

std::string file_of(const std::string& header, size_t data_bytes) {
  return with_length(header.size(), header + std::string(data_bytes, 'x'));
}

// A header's text for one tensor.
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\": {\"dtype\": \"" + dtype + "\", \"shape\": " + shape + ", \"data_offsets\": " + offsets +
         "}";
}

std::string refusal(const std::string& file) {
  auto entries = read_safetensors_header(file, "DIR/model.safetensors");
  EXPECT_FALSE(entries.ok());
  EXPECT_EQ(exit_code(entries.status()), 2) << entries.status();
  const std::string message(entries.status().message());
  EXPECT_THAT(message, testing::StartsWith("DIR/model.safetensors"));
  EXPECT_LT(message.size(), 600u);
  return message;
}

TEST(Safetensors, ReadsTensorsInTheirOrder) {
  const std::string header = "{\"__metadata__\": {\"format\": \"pt\"}, " + entry("b", "BF16", "[4]", "[24, 32]") +
                             ", " + entry("a.weight", "F32", "[2, 3]", "[0, 24]") + ", " +
                             entry("c", "F64", "[]", "[32, 40]") + ", " + entry("none", "F16", "[0, 7]", "[40, 40]") +
                             "}  ";
  const auto entries = read_safetensors_header(file_of(header, 40), "f");
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 4u);
  const uint64_t data = 8 + header.size();
  EXPECT_EQ((*entries)[0].name, "a.weight");
  EXPECT_EQ((*entries)[0].dtype, "F32");
  EXPECT_THAT((*entries)[0].shape, ElementsAre(2, 3));
  EXPECT_EQ((*entries)[0].offset, data);
  EXPECT_EQ((*entries)[0].bytes, 24u);
  EXPECT_EQ((*entries)[1].name, "b");
  EXPECT_EQ((*entries)[1].offset, data + 24);
  EXPECT_THAT((*entries)[2].shape, ElementsAre());
  EXPECT_EQ((*entries)[3].bytes, 0u);
}

TEST(Safetensors, ReadsTypesThatModelsDoNotUse) {
  for (const char* dtype : {"I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"}) {
    EXPECT_TRUE(read_safetensors_header(file_of("{" + entry("a", dtype, "[3]", "[0, 3]") + "}", 3), "f").ok()) << dtype;
    EXPECT_THAT(std::string(parse_safetensors_dtype(dtype).status().message()),
                AllOf(HasSubstr(dtype), HasSubstr("F32, BF16, F16 and F64")));
  }
}

TEST(Safetensors, WritesWhatItReads) {
  std::vector<TensorEntry> tensors = {
      {"x \"quoted\"", "F32", {3}, 0, 12}, {"y", "BF16", {2, 1}, 0, 4}, {"é", "F64", {}, 0, 8}};
  const std::string header = make_safetensors_header(tensors);
  EXPECT_EQ(header.size() % 8, 0u) << "the data is aligned";
  const auto read = read_safetensors_header(header + std::string(24, 'x'), "f");
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ((*read)[i].name, tensors[i].name);
    EXPECT_EQ((*read)[i].dtype, tensors[i].dtype);
    EXPECT_EQ((*read)[i].shape, tensors[i].shape);
    EXPECT_EQ((*read)[i].offset, tensors[i].offset);
  }
}

TEST(Safetensors, CutAnywhereIsRefused) {
  const std::string file = file_of("{" + entry("a", "F32", "[2, 3]", "[0, 24]") + "}", 24);
  ASSERT_TRUE(read_safetensors_header(file, "f").ok());
  for (size_t size = 0; size < file.size(); ++size) refusal(file.substr(0, size));
  EXPECT_THAT(refusal(""), HasSubstr("too short"));
  EXPECT_THAT(refusal(file.substr(0, 40)), HasSubstr("cut short"));
  EXPECT_THAT(refusal(file.substr(0, file.size() - 1)), AllOf(HasSubstr("'a'"), HasSubstr("cut short")));
  EXPECT_THAT(refusal(file + "y"), HasSubstr("behind its last tensor"));
}

TEST(Safetensors, HeaderLengthsThatCannotBe) {
  EXPECT_THAT(refusal(with_length(UINT64_MAX, std::string(100, ' '))), HasSubstr("18446744073709551615"));
  EXPECT_THAT(refusal(with_length(UINT64_MAX - 7, "{}")), HasSubstr("not a safetensors file"));
  EXPECT_THAT(refusal(with_length(3, "{}")), HasSubstr("cut short"));
  EXPECT_THAT(refusal(with_length(0, "")), HasSubstr("header"));
  // The format's limit, reached with a file that is long enough.
  EXPECT_THAT(refusal(with_length((100u << 20) + 1, std::string((100u << 20) + 2, ' '))), HasSubstr("104857601"));
}

TEST(Safetensors, HeadersThatAreNoHeader) {
  EXPECT_THAT(refusal(file_of("not json", 0)), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal(file_of("[]", 0)), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal(file_of("null", 0)), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal(file_of(std::string(5000, '['), 0)), HasSubstr("nested"));
  EXPECT_THAT(refusal(file_of("{\"a\": 5}", 0)), HasSubstr("lacks dtype"));
  EXPECT_THAT(refusal(file_of("{\"a\": {\"dtype\": \"F32\", \"shape\": [1]}}", 4)), HasSubstr("data_offsets"));
  EXPECT_THAT(refusal(file_of("{\"a\": {\"dtype\": 32, \"shape\": [1], \"data_offsets\": [0, 4]}}", 4)),
              HasSubstr("unknown dtype"));
  EXPECT_THAT(refusal(file_of("{" + entry("a", "F33", "[1]", "[0, 4]") + "}", 4)), HasSubstr("unknown dtype"));
  EXPECT_THAT(refusal(file_of("{" + entry("a", "f32", "[1]", "[0, 4]") + "}", 4)), HasSubstr("unknown dtype"));
}

TEST(Safetensors, ShapesThatCannotBe) {
  for (const char* shape : {"[-1]", "[1.5]", "[\"1\"]", "4", "null", "{\"0\": 1}", "[true]", "[1099511627777]",
                            "[18446744073709551615]", "[1e300]", "[1,1,1,1,1,1,1,1,1]"}) {
    EXPECT_THAT(refusal(file_of("{" + entry("a", "F32", shape, "[0, 4]") + "}", 4)), HasSubstr("malformed shape"))
        << shape;
  }
  // Products that wrap around to the true number of bytes, or to zero.
  for (const char* shape :
       {"[1099511627776, 1099511627776]", "[1099511627776, 4194304]", "[4294967296, 4294967296, 1]"}) {
    EXPECT_THAT(refusal(file_of("{" + entry("a", "F32", shape, "[0, 0]") + "}", 0)), HasSubstr("larger than any file"))
        << shape;
  }
  EXPECT_THAT(refusal(file_of("{" + entry("a", "F32", "[2]", "[0, 4]") + "}", 4)), HasSubstr("another size"));
}

TEST(Safetensors, OffsetsThatCannotBe) {
  for (const char* offsets : {"[0]", "[0, 4, 8]", "[-4, 0]", "[0, \"4\"]", "[0.0, 4.0]", "4", "[null, null]"}) {
    EXPECT_THAT(refusal(file_of("{" + entry("a", "F32", "[1]", offsets) + "}", 4)), HasSubstr("data_offsets"))
        << offsets;
  }
  for (const char* offsets :
       {"[4, 0]", "[0, 8]", "[18446744073709551612, 18446744073709551615]", "[4, 18446744073709551615]"}) {
    EXPECT_THAT(refusal(file_of("{" + entry("a", "F32", "[1]", offsets) + "}", 4)), HasSubstr("outside the file"))
        << offsets;
  }
}

TEST(Safetensors, TensorsThatOverlapOrLeaveGaps) {
  const auto two = [](const std::string& first, const std::string& second, size_t bytes) {
    return file_of("{" + entry("a", "F32", "[2]", first) + ", " + entry("b", "F32", "[2]", second) + "}", bytes);
  };
  EXPECT_TRUE(read_safetensors_header(two("[0, 8]", "[8, 16]", 16), "f").ok());
  EXPECT_TRUE(read_safetensors_header(two("[8, 16]", "[0, 8]", 16), "f").ok());
  EXPECT_THAT(refusal(two("[0, 8]", "[4, 12]", 12)), HasSubstr("overlaps"));
  EXPECT_THAT(refusal(two("[0, 8]", "[0, 8]", 8)), HasSubstr("overlaps"));
  EXPECT_THAT(refusal(two("[0, 8]", "[12, 20]", 20)), HasSubstr("gap"));
  EXPECT_THAT(refusal(two("[4, 12]", "[12, 20]", 20)), HasSubstr("gap"));
}

TEST(Safetensors, OneNameTwiceInAHeader) {
  const std::string a = entry("a", "F32", "[1]", "[0, 4]");
  EXPECT_THAT(refusal(file_of("{" + a + ", " + a + "}", 4)), HasSubstr("twice"));
  // Names with quotes, colons and braces inside do not confuse the count.
  const std::string odd = entry("{\\\"x\\\": [", "F32", "[1]", "[0, 4]");
  EXPECT_TRUE(read_safetensors_header(file_of("{" + odd + "}", 4), "f").ok());
}

TEST(Safetensors, MessagesArePrintable) {
  const std::string name = "\\u001b[31m\\n" + std::string(3000, 'n');
  EXPECT_THAT(refusal(file_of("{" + entry(name, "F32", "[1]", "[0, 8]") + "}", 8)), testing::Not(HasSubstr("\x1b")));
}

class WeightFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = testing::TempDir() + "/weight_files_" + std::to_string(::getpid());
    std::filesystem::create_directories(dir_ + "/model");
    dir_ += "/model";
  }
  void TearDown() override { std::filesystem::remove_all(std::filesystem::path(dir_).parent_path()); }
  void write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ + "/" + name, std::ios::binary) << text;
  }
  void write_tensor(const std::string& file, const std::string& tensor) {
    write(file, file_of("{" + entry(tensor, "F32", "[1]", "[0, 4]") + "}", 4));
  }
  std::string refusal() {
    auto stored = open_weight_files(dir_);
    EXPECT_FALSE(stored.ok());
    EXPECT_EQ(exit_code(stored.status()), 2) << stored.status();
    return std::string(stored.status().message());
  }
  std::string dir_;
};

TEST_F(WeightFiles, OneFile) {
  write_tensor("model.safetensors", "a");
  write("pytorch_model.bin", "ignored beside safetensors");
  const auto stored = open_weight_files(dir_);
  ASSERT_TRUE(stored.ok()) << stored.status();
  ASSERT_EQ(stored->size(), 1u);
  EXPECT_EQ(stored->at("a").file_name, "model.safetensors");
  EXPECT_EQ(stored->at("a").file->bytes().substr(stored->at("a").entry.offset), "xxxx");
}

TEST_F(WeightFiles, Shards) {
  write_tensor("one.safetensors", "a");
  write_tensor("two.safetensors", "b");
  write("model.safetensors.index.json", R"({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})");
  const auto stored = open_weight_files(dir_);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->at("a").file_name, "one.safetensors");
  EXPECT_EQ(stored->at("b").file_name, "two.safetensors");
}

TEST_F(WeightFiles, OneNameInTwoShards) {
  write_tensor("one.safetensors", "a");
  write_tensor("two.safetensors", "a");
  write("model.safetensors.index.json", R"({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("two.safetensors"), HasSubstr("'a'"), HasSubstr("one.safetensors")));
}

TEST_F(WeightFiles, IndexesThatPointOutside) {
  write_tensor("../outside.safetensors", "a");
  for (const char* name :
       {"../outside.safetensors", "sub/x.safetensors", "/etc/passwd", "..", ".", "", ".hidden", "a\\u0000b"}) {
    write("model.safetensors.index.json", std::string(R"({"weight_map": {"a": ")") + name + "\"}}");
    EXPECT_THAT(refusal(), AllOf(HasSubstr("index.json"), HasSubstr("not a plain file name"))) << name;
  }
}

TEST_F(WeightFiles, DamagedIndexes) {
  const std::string index = "model.safetensors.index.json";
  write(index, "{");
  EXPECT_THAT(refusal(), HasSubstr("not valid JSON"));
  for (const char* text : {"[]", "{}", R"({"weight_map": []})", R"({"weight_map": {}})"}) {
    write(index, text);
    EXPECT_THAT(refusal(), HasSubstr("weight_map")) << text;
  }
  write(index, R"({"weight_map": {"a": 5}})");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("'a'"), HasSubstr("not a string")));
  write(index, R"({"weight_map": {"a": "gone.safetensors"}})");
  EXPECT_THAT(refusal(), HasSubstr("gone.safetensors"));
  std::filesystem::create_directory(dir_ + "/folder.safetensors");
  write(index, R"({"weight_map": {"a": "folder.safetensors"}})");
  EXPECT_THAT(refusal(), HasSubstr("folder.safetensors"));
}

TEST_F(WeightFiles, WeightsThatCanCarryCodeAreRefusedByName) {
  EXPECT_THAT(refusal(), HasSubstr("neither model.safetensors nor"));
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt"}) {
    write(name, "x");
    EXPECT_THAT(refusal(), AllOf(HasSubstr(name), HasSubstr("convert it to safetensors")));
    std::filesystem::remove(dir_ + "/" + name);
  }
}

TEST_F(WeightFiles, AnEmptyFile) {
  write("model.safetensors", "");
  EXPECT_THAT(refusal(), HasSubstr("model.safetensors"));
}

}  // namespace
}  // namespace parvl
