#include "parvl/exec/text_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/base/rng.h"

namespace parvl {
namespace {

constexpr TokenId kEnd = 1000;
constexpr TokenId kText = 1;  // TextStream asks an id only whether it ends the text

struct Result {
  std::string text;
  FinishReason finish = FinishReason::kNone;
  std::vector<std::string> deltas;
};

// Pushes the pieces until the stream finishes; an end token follows the last.
Result run(const SamplingParams& params, const std::vector<std::string>& pieces) {
  TextStream stream(params, {kEnd});
  Result result;
  const auto take = [&](TextStream::Delta delta) {
    result.text += delta.text;
    result.deltas.push_back(delta.text);
    result.finish = delta.finish;
    return delta.finish != FinishReason::kNone;
  };
  for (const std::string& piece : pieces) {
    if (take(stream.push(kText, piece, false))) return result;
  }
  take(stream.push(kEnd, "<|end|>", true));
  return result;
}

SamplingParams with_stop(std::vector<std::string> stop) {
  SamplingParams params;
  params.stop = std::move(stop);
  return params;
}

TEST(TextStream, ShowsPlainTextAtOnceAndNeverTheEndToken) {
  const Result result = run({}, {"Hello", ", ", "world"});
  EXPECT_EQ(result.text, "Hello, world");
  EXPECT_EQ(result.finish, FinishReason::kStop);
  EXPECT_THAT(result.deltas, testing::ElementsAre("Hello", ", ", "world", ""));
}

TEST(TextStream, HoldsAnUnfinishedCharacter) {
  const Result result = run({}, {"a\xe2\x82",
                                 "\xac"
                                 "b"});
  EXPECT_THAT(result.deltas, testing::ElementsAre("a", "€b", ""));
  const Result cut = run({}, {"a\xe2\x82"});
  EXPECT_THAT(cut.deltas, testing::ElementsAre("a", "\xef\xbf\xbd"));
}

TEST(TextStream, StopStringIsCutAcrossTokens) {
  const Result result = run(with_stop({"STOP"}), {"one S", "T", "OP two"});
  EXPECT_EQ(result.text, "one ");
  EXPECT_EQ(result.finish, FinishReason::kStop);
  EXPECT_THAT(result.deltas, testing::ElementsAre("one ", "", ""));
}

TEST(TextStream, NothingFollowsAStopStringNotEvenAnUnfinishedCharacter) {
  const Result result = run(with_stop({"."}), {"yes.\xe2\x82"});
  EXPECT_EQ(result.text, "yes");
}

TEST(TextStream, UndecidedBeginningIsShownWhenItTurnsOutToBeText) {
  EXPECT_THAT(run(with_stop({"STOP"}), {"S", "TO", "RE"}).deltas, testing::ElementsAre("", "", "STORE", ""));
  EXPECT_EQ(run(with_stop({"STOP"}), {"STO"}).text, "STO");  // the end token decides
  EXPECT_EQ(run(with_stop({"aab"}), {"aaab"}).text, "a");
}

TEST(TextStream, FirstCompleteStopWinsAndOfThoseTheLongest) {
  EXPECT_EQ(run(with_stop({"abcd", "bc"}), {"xabcd"}).text, "xa");
  EXPECT_EQ(run(with_stop({"c", "abc"}), {"xabc"}).text, "x");
  EXPECT_EQ(run(with_stop({"ab", "abc"}), {"xabc"}).text, "x");
}

TEST(TextStream, MaxTokensEndsByLengthAndShowsWhatWaited) {
  SamplingParams params = with_stop({"STOP"});
  params.max_tokens = 2;
  const Result result = run(params, {"a", "ST", "OP"});
  EXPECT_EQ(result.text, "aST");
  EXPECT_EQ(result.finish, FinishReason::kLength);
  EXPECT_EQ(run(params, {"a", "STOP"}).finish, FinishReason::kStop);
  params.max_tokens = 1;
  EXPECT_EQ(run(params, {}).finish, FinishReason::kStop);  // the end token as the last allowed one
}

TEST(TextStream, MinTokensKeepsEarlyStopsAsText) {
  SamplingParams params = with_stop({"ab"});
  params.min_tokens = 3;
  EXPECT_EQ(run(params, {"ab", "-", "ab", "x"}).text, "ab-");
  EXPECT_EQ(run(params, {"ab", "-", "a", "b"}).text, "ab-");  // begun before, complete after
  EXPECT_EQ(run(params, {"ab", "ab", "c"}).text, "ababc");
  TextStream stream(params, {kEnd});
  EXPECT_EQ(stream.push(kEnd, "<|end|>", true).finish, FinishReason::kNone);
}

TEST(TextStream, IgnoreEosGoesOnButStopTokensStillEnd) {
  SamplingParams params;
  params.ignore_eos = true;
  params.stop_token_ids = {7};
  TextStream stream(params, {kEnd});
  EXPECT_EQ(stream.push(kEnd, "<|end|>", true).finish, FinishReason::kNone);
  EXPECT_EQ(stream.push(kText, "x", false).text, "x");
  const auto last = stream.push(7, "seven", false);
  EXPECT_EQ(last.finish, FinishReason::kStop);
  EXPECT_EQ(last.text, "");
}

TEST(TextStream, HiddenTokensDoNotBreakACharacter) {
  TextStream stream({}, {kEnd});
  EXPECT_EQ(stream.push(kText, "\xe2\x82", false).text, "");
  EXPECT_EQ(stream.push(5, "<|x|>", true).text, "");
  EXPECT_EQ(stream.push(kText, "\xac", false).text, "€");
}

TEST(TextStream, FlushGivesWhatWaits) {
  TextStream stream(with_stop({"STOP"}), {kEnd});
  EXPECT_EQ(stream.push(kText, "a ST", false).text, "a ");
  EXPECT_EQ(stream.flush(), "ST");
  EXPECT_EQ(stream.flush(), "");
}

// The definition, on whole bytes: the text up to the first complete stop string.
std::string expected_text(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t cut = 0;
    for (const std::string& stop : stops) {
      if (end >= stop.size() && text.compare(end - stop.size(), stop.size(), stop) == 0)
        cut = std::max(cut, stop.size());
    }
    if (cut > 0) return text.substr(0, end - cut);
  }
  return text;
}

TEST(TextStream, AnyTokenisationGivesTheSameTextAndNoStopStringLeaks) {
  const std::vector<std::string> letters = {"a", "b", "é", "€", "😀"};
  Rng rng(3);
  for (int round = 0; round < 5000; ++round) {
    const size_t alphabet = 2 + rng.below(letters.size() - 1);
    const auto word = [&](size_t length) {
      std::string out;
      for (size_t i = 0; i < length; ++i) out += letters[rng.below(alphabet)];
      return out;
    };
    const std::string text = word(rng.below(30));
    std::vector<std::string> stops;
    for (size_t i = rng.below(4); i > 0; --i) stops.push_back(word(1 + rng.below(5)));
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t length = 1 + rng.below(6);
      pieces.push_back(text.substr(at, length));
      at += length;
    }
    const std::string expected = expected_text(text, stops);
    const Result result = run(with_stop(stops), pieces);
    ASSERT_EQ(result.text, expected) << "round " << round;
    // At every moment: what is out is a prefix of the final text (nothing leaked), and all of what is certain is out.
    std::string out, seen;
    for (size_t i = 0; i < result.deltas.size(); ++i) {
      out += result.deltas[i];
      ASSERT_EQ(expected.compare(0, out.size(), out), 0) << "round " << round;
      if (i >= pieces.size()) break;
      seen += pieces[i];
      if (stops.empty()) {
        Utf8Stream whole;
        ASSERT_EQ(out, whole.push(seen));
      }
    }
  }
}

}  // namespace
}  // namespace parvl
