// The tokenizer's limits, streams and safety; its results are compared with the reference library in tests/parity.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "parvl/base/rng.h"
#include "parvl/media/tokenizer.h"
#include "parvl/media/unicode.h"

namespace parvl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// All 256 bytes as tokens 0..255 in GPT-2's order of characters, then merges; special tokens last.
Json byte_level(const std::vector<std::pair<std::string, std::string>>& merges, const std::vector<std::string>& special,
                const Json& normalizer = nullptr, const std::string& pattern = R"(\s+|\S+)") {
  Json vocab = Json::object();
  int id = 0;
  for (char32_t code = 0; code < 0x144; ++code) {
    std::string text, bytes;
    append_utf8(text, code);
    if (bytes_of_spelled(text, bytes)) vocab[text] = id++;
  }
  Json merge_list = Json::array();
  for (const auto& [left, right] : merges) {
    vocab[left + right] = id++;
    merge_list.push_back({left, right});
  }
  Json added = Json::array();
  for (const std::string& token : special) {
    added.push_back({{"id", id++}, {"content", token}, {"special", true}, {"normalized", false}});
  }
  return {{"added_tokens", added},
          {"normalizer", normalizer},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merge_list}}}};
}

std::shared_ptr<const Tokenizer> made(const Json& json) {
  auto tokenizer = Tokenizer::from_json(json, "test");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *tokenizer;
}

TEST(Tokenizer, AMegabyteWordIsFast) {
  const auto tokenizer =
      made(byte_level({{"a", "b"}, {"b", "a"}, {"ab", "ab"}, {"a", "a"}, {"aa", "aa"}, {"abab", "abab"}}, {}));
  std::string word;
  Rng rng(1);
  while (word.size() < 1 << 20) word += rng.below(3) == 0 ? "b" : "a";
  const auto start = std::chrono::steady_clock::now();
  const auto ids = tokenizer->encode(word, true);
  const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_EQ(tokenizer->decode(ids, false), word);
  EXPECT_LT(ids.size(), word.size());
  EXPECT_LT(seconds, 20) << "a quadratic merge takes hours";
}

TEST(Tokenizer, ManyMarksAndInvalidBytesAreFast) {
  const auto tokenizer = made(byte_level({}, {}, {{"type", "NFC"}}));
  std::string marks = "a";
  for (int i = 0; i < 200'000; ++i) marks += i % 2 == 0 ? "\u0301" : "\u0323";  // above, below: the order changes
  EXPECT_EQ(tokenizer->encode(marks, true).size(), marks.size());  // "a" and a mark of two bytes give one of three
  std::string noise;
  Rng rng(2);
  for (int i = 0; i < 200'000; ++i) noise += static_cast<char>(rng.below(256));
  const auto plain = made(byte_level({}, {}));
  EXPECT_EQ(plain->decode(plain->encode(noise, false), false), repair_utf8(noise));
}

TEST(Tokenizer, RangesLieInTheInputAndInOrder) {
  const auto tokenizer = made(byte_level({{"a", "b"}}, {"<s>"}, {{"type", "NFC"}}));
  Rng rng(3);
  const std::string pieces[] = {"ab",       "e\u0301",       "\u00e9",       " ", "<s>", "\xff",
                                "\xe2\x82", "q\u0323\u0307", "\u1100\u1161", "x"};
  for (int round = 0; round < 300; ++round) {
    std::vector<TextRun> runs;
    std::string all;
    for (int i = 0; i < 6; ++i) {
      runs.push_back({pieces[rng.below(10)], rng.below(2) == 0});
      all += runs.back().text;
    }
    size_t last = 0;
    for (const EncodedToken& token : tokenizer->encode(runs)) {
      ASSERT_LE(token.begin, token.end);
      ASSERT_LE(token.end, all.size());
      ASSERT_GE(token.end, last);
      last = token.end;
      if (tokenizer->is_special(token.id)) {
        ASSERT_EQ(all.substr(token.begin, token.end - token.begin), "<s>");
      }
    }
    ASSERT_EQ(last, all.size());
  }
}

TEST(Tokenizer, ATypedSpecialTokenStaysTextEvenWhereMergesSpellIt) {
  Json json = byte_level({{"<", "s"}, {"<s", ">"}}, {});
  const int id = json["model"]["vocab"]["<s>"];
  json["added_tokens"] = {{{"id", id}, {"content", "<s>"}, {"special", true}, {"normalized", false}}};
  for (const bool ignore_merges : {false, true}) {
    json["model"]["ignore_merges"] = ignore_merges;
    const auto tokenizer = made(json);
    EXPECT_THAT(tokenizer->encode("<s>", true), ElementsAre(id));
    const auto typed = tokenizer->encode("<s>", false);
    EXPECT_THAT(typed, ::testing::Not(::testing::Contains(id)));
    EXPECT_EQ(tokenizer->decode(typed, true), "<s>");
  }
}

TEST(Tokenizer, AnswersAreTheSameFromManyThreads) {
  const auto tokenizer = made(byte_level({{"a", "b"}, {"ab", "ab"}}, {"<s>"}, {{"type", "NFC"}}));
  const std::string text = "<s>abab e\u0301 abx <s> ababab";
  const auto want = tokenizer->encode(text, true);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) wrong[t] += tokenizer->encode(text, true) != want;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(wrong, ElementsAre(0, 0, 0, 0));
}

TEST(Tokenizer, APatternThatBacktracksForeverIsCutShort) {
  // Without a limit this takes 2^60 steps; the text comes back whole, uncut.
  const auto tokenizer = made(byte_level({}, {}, nullptr, R"((?:(?:a|a)*)*[bc])"));
  const std::string text(60, 'a');
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text + "!", true), false), text + "!");
}

TEST(Utf8Stream, HoldsBackHalfCharacters) {
  const std::string text = "a\u00e9\u20ac\U0001F642z";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    Utf8Stream stream;
    std::string out = stream.push(text.substr(0, cut));
    EXPECT_TRUE(is_valid_utf8(out)) << cut;
    out += stream.push(text.substr(cut));
    out += stream.flush();
    EXPECT_EQ(out, text) << cut;
  }
  Utf8Stream bytes;
  std::string out;
  for (const char c : text) out += bytes.push(std::string(1, c));
  EXPECT_EQ(out, text);
}

TEST(Utf8Stream, WhatCanNeverBecomeACharacterIsReplaced) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("\xff"), "\uFFFD");
  EXPECT_EQ(stream.push("\xe2\x82"), "");
  EXPECT_EQ(stream.push("x"), "\uFFFDx");
  EXPECT_EQ(stream.push("\xf0\x9f\x99"), "");
  EXPECT_EQ(stream.flush(), "\uFFFD");
  EXPECT_EQ(stream.flush(), "");
  EXPECT_EQ(stream.push("\xed\xa0\x80"), "\uFFFD\uFFFD\uFFFD");  // a surrogate
  EXPECT_EQ(stream.push("\xc0\xaf"), "\uFFFD\uFFFD");            // over-long
}

TEST(Tokenizer, MessagesQuoteTheFileOnOneShortLine) {
  Json json = byte_level({}, {}, {{"type", "odd\n\x01\xff" + std::string(5000, 'x')}});
  const auto status = Tokenizer::from_json(json, "f").status();
  EXPECT_THAT(status.message(), HasSubstr("odd"));
  EXPECT_LT(status.message().size(), 600u);
  EXPECT_TRUE(is_valid_utf8({status.message().data(), status.message().size()}));
  for (const char c : status.message()) EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20);
}

TEST(Tokenizer, IdsAreBounded) {
  Json json = byte_level({}, {});
  json["model"]["vocab"]["zz"] = 1 << 24;
  EXPECT_THAT(Tokenizer::from_json(json, "f").status().message(), HasSubstr("whole number from 0 to 16777215"));
  const auto tokenizer = made(byte_level({}, {"<s>"}));
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->token_bytes(256), "<s>");
  EXPECT_EQ(tokenizer->token_bytes(257), "");
  EXPECT_EQ(tokenizer->token_bytes(-1), "");
  EXPECT_EQ(tokenizer->id_of("<s>"), 256);
  EXPECT_EQ(tokenizer->id_of("nothing"), -1);
}

}  // namespace
}  // namespace parvl
