#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>

#include "tests/unit/request_driver.h"

namespace parvl {
namespace {

TEST(Request, OutputThatCannotBeFetchedIsMadeAgain) {
  RequestDriver d({.items = 1});
  d.encode_and_generate();
  const auto lost_output = d.request.handle({.kind = Kind::kOutputLost, .attempt = 1});
  EXPECT_THAT(kinds(lost_output), ElementsAre(Do::kLetGo));
  EXPECT_TRUE(lost_output[0].lost) << "so that nobody else is given it";
  EXPECT_THAT(d.happens({.kind = Kind::kOutputLost, .attempt = 1}), IsEmpty()) << "once";
  EXPECT_THAT(d.happens({.kind = Kind::kGenerationFailed, .attempt = 1, .status = lost()}),
              ElementsAre(Do::kPlaceEncoding));
  EXPECT_THAT(d.happens({.kind = Kind::kEncodingPlaced, .instance = kC, .attempt = 2}), ElementsAre(Do::kEncode));
  EXPECT_THAT(d.happens({.kind = Kind::kEncoded, .attempt = 2}), ElementsAre(Do::kPlaceGeneration));
}

TEST(Request, WhatAnAttemptThatHasMovedOnLacksIsNoNews) {
  RequestDriver d({.items = 1});
  d.encode_and_generate();
  EXPECT_THAT(d.happens({.kind = Kind::kInstanceLost, .instance = kB}), ElementsAre(Do::kPlaceGeneration));
  EXPECT_THAT(d.happens({.kind = Kind::kOutputLost, .attempt = 1}), IsEmpty()) << "while it waits for its place";
  EXPECT_EQ(d.request.holder(0), kA);
  EXPECT_THAT(d.happens({.kind = Kind::kGenerationFailed, .attempt = 1, .status = lost()}), IsEmpty());
  EXPECT_THAT(d.happens({.kind = Kind::kGenerationPlaced, .instance = kC, .attempt = 2}), ElementsAre(Do::kGenerate));
  EXPECT_THAT(d.happens({.kind = Kind::kOutputLost, .attempt = 1}), IsEmpty());
  EXPECT_EQ(d.request.holder(0), kA);
}

TEST(Request, FetchingImagesAgainAfterATokenCountsForNoTry) {
  RequestDriver d({.items = 2, .max_encodings = 2, .max_generations = 2});
  int64_t tokens = 0;
  const auto place = [&](int attempt) {
    for (const size_t item : {0, 1}) {
      EXPECT_THAT(d.happens({.kind = Kind::kEncodingPlaced, .instance = kA, .item = item, .attempt = attempt}),
                  ElementsAre(Do::kEncode))
          << attempt;
      d.happens({.kind = Kind::kEncoded, .item = item, .attempt = attempt});
    }
    EXPECT_THAT(d.happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = attempt}),
                ElementsAre(Do::kGenerate));
  };
  for (int attempt = 1; attempt <= 10; ++attempt) {
    place(attempt);
    d.token(tokens++, attempt);
    EXPECT_THAT(d.happens({.kind = Kind::kOutputLost, .item = 1, .attempt = attempt}), IsEmpty()) << "let go before";
    EXPECT_THAT(d.happens({.kind = Kind::kGenerationFailed, .attempt = attempt, .status = lost()}),
                ElementsAre(Do::kPlaceEncoding, Do::kPlaceEncoding));
  }
  // Without a token in between it does.
  place(11);
  d.happens({.kind = Kind::kOutputLost, .item = 1, .attempt = 11});
  EXPECT_THAT(d.happens({.kind = Kind::kGenerationFailed, .attempt = 11, .status = lost()}),
              ElementsAre(Do::kPlaceEncoding));
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kA, .item = 1, .attempt = 12});
  d.happens({.kind = Kind::kEncoded, .item = 1, .attempt = 12});
  d.happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = 12});
  EXPECT_THAT(d.happens({.kind = Kind::kGenerationFailed, .attempt = 12, .status = lost()}),
              testing::Contains(Do::kEnd));
}

TEST(Request, TextIsGeneratedAtOnceAndEndsOnce) {
  RequestDriver d({});
  EXPECT_THAT(d.first, ElementsAre(Do::kPlaceGeneration));
  EXPECT_THAT(d.happens({.kind = Kind::kGenerationPlaced, .instance = kA, .attempt = 1}), ElementsAre(Do::kGenerate));
  EXPECT_THAT(d.token(0, 1), ElementsAre(Do::kDeliver));
  EXPECT_THAT(d.token(0, 1), IsEmpty()) << "the same again";
  EXPECT_THAT(d.token(2, 1), IsEmpty()) << "one is missing in between";
  EXPECT_THAT(d.token(1, 1), ElementsAre(Do::kDeliver));
  EXPECT_THAT(d.happens({.kind = Kind::kFinished, .attempt = 1}), ElementsAre(Do::kEnd));
  EXPECT_TRUE(d.request.ended());
  for (const Kind kind :
       {Kind::kToken, Kind::kFinished, Kind::kLeft, Kind::kTimeUp, Kind::kInstanceLost, Kind::kNowhere}) {
    EXPECT_THAT(d.happens({.kind = kind, .instance = kA, .attempt = 1, .index = 2}), IsEmpty());
  }
}

TEST(Request, EncoderOutputIsLetGoWithTheFirstToken) {
  RequestDriver d({.items = 1});
  d.encode_and_generate();
  EXPECT_THAT(d.token(0, 1), ElementsAre(Do::kDeliver, Do::kLetGo));
  EXPECT_THAT(d.token(1, 1), ElementsAre(Do::kDeliver));
  EXPECT_EQ(d.request.holder(0), std::nullopt);
}

TEST(Request, ImagesFanOutAndTheGenerationWaitsForAll) {
  RequestDriver d({.items = 2});
  EXPECT_THAT(d.first, ElementsAre(Do::kPlaceEncoding, Do::kPlaceEncoding));
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kA, .item = 0, .attempt = 1});
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kB, .item = 1, .attempt = 1});
  EXPECT_THAT(d.happens({.kind = Kind::kEncoded, .item = 1, .attempt = 1}), IsEmpty());
  EXPECT_THAT(d.happens({.kind = Kind::kEncoded, .item = 1, .attempt = 1}), IsEmpty());
  EXPECT_THAT(d.happens({.kind = Kind::kEncoded, .item = 0, .attempt = 1}), ElementsAre(Do::kPlaceGeneration));
}

TEST(Request, AnEncodingGoesElsewhereWhenItsInstanceIsLost) {
  RequestDriver d({.items = 1});
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kA, .attempt = 1});
  EXPECT_THAT(d.happens({.kind = Kind::kInstanceLost, .instance = kB}), IsEmpty());
  EXPECT_THAT(d.happens({.kind = Kind::kInstanceLost, .instance = kA}), ElementsAre(Do::kPlaceEncoding));
  EXPECT_THAT(d.happens({.kind = Kind::kEncoded, .attempt = 1}), IsEmpty()) << "the lost one speaks";
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kC, .attempt = 2});
  EXPECT_THAT(d.happens({.kind = Kind::kEncoded, .attempt = 2}), ElementsAre(Do::kPlaceGeneration));
}

TEST(Request, OutputThatIsLostBeforeItWasTakenIsMadeAgain) {
  RequestDriver d({.items = 1});
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kA, .attempt = 1});
  d.happens({.kind = Kind::kEncoded, .attempt = 1});
  EXPECT_THAT(d.happens({.kind = Kind::kInstanceLost, .instance = kA}), ElementsAre(Do::kPlaceEncoding));
  EXPECT_THAT(d.happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = 1}), IsEmpty())
      << "its image is gone";
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kC, .attempt = 2});
  EXPECT_THAT(d.happens({.kind = Kind::kEncoded, .attempt = 2}), ElementsAre(Do::kPlaceGeneration));
}

TEST(Request, OutputThatARunningGenerationMayHaveIsNotMadeAgainForNothing) {
  RequestDriver d({.items = 1});
  d.encode_and_generate();
  EXPECT_THAT(d.happens({.kind = Kind::kInstanceLost, .instance = kA}), IsEmpty());
  EXPECT_THAT(d.token(0, 1), ElementsAre(Do::kDeliver)) << "it had it, and nothing is left to let go";
}

TEST(Request, AGenerationGoesOnFromWhatTheClientHas) {
  RequestDriver d({});
  d.happens({.kind = Kind::kGenerationPlaced, .instance = kA, .attempt = 1});
  d.token(0, 1);
  d.token(1, 1);
  EXPECT_THAT(d.happens({.kind = Kind::kInstanceLost, .instance = kA}), ElementsAre(Do::kPlaceGeneration));
  EXPECT_THAT(d.token(2, 1), IsEmpty()) << "from the lost one";
  d.happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = 2});
  EXPECT_EQ(d.request.delivered(0), 2);
  EXPECT_THAT(d.token(2, 2), ElementsAre(Do::kDeliver));
}

TEST(Request, AfterTheFirstTokenALostGenerationNeedsItsImagesAgain) {
  RequestDriver d({.items = 1});
  d.encode_and_generate();
  d.token(0, 1);
  EXPECT_THAT(d.happens({.kind = Kind::kInstanceLost, .instance = kB}), ElementsAre(Do::kPlaceEncoding));
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kA, .attempt = 2});
  EXPECT_THAT(d.happens({.kind = Kind::kEncoded, .attempt = 2}), ElementsAre(Do::kPlaceGeneration));
}

TEST(Request, OnlyChoicesThatAreNotFinishedGoOn) {
  RequestDriver d({.choices = 2});
  d.happens({.kind = Kind::kGenerationPlaced, .instance = kA, .attempt = 1});
  d.token(0, 1, 0);
  EXPECT_THAT(d.happens({.kind = Kind::kFinished, .choice = 0, .attempt = 1}), IsEmpty());
  d.happens({.kind = Kind::kInstanceLost, .instance = kA});
  EXPECT_TRUE(d.request.finished(0));
  EXPECT_FALSE(d.request.finished(1));
  d.happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = 2});
  EXPECT_THAT(d.token(1, 2, 0), IsEmpty());
  d.token(0, 2, 1);
  EXPECT_THAT(d.happens({.kind = Kind::kFinished, .choice = 1, .attempt = 2}), ElementsAre(Do::kEnd));
}

TEST(Request, WhatNobodyElseCouldDoEndsIt) {
  RequestDriver d({.items = 1});
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kA, .attempt = 1});
  const auto actions =
      d.request.handle({.kind = Kind::kEncodingFailed, .attempt = 1, .status = absl::InvalidArgumentError("broken")});
  ASSERT_THAT(kinds(actions), ElementsAre(Do::kEnd));
  EXPECT_EQ(actions[0].status.message(), "broken");
}

TEST(Request, TriesAreBounded) {
  RequestDriver d({.max_generations = 2});
  d.happens({.kind = Kind::kGenerationPlaced, .instance = kA, .attempt = 1});
  EXPECT_THAT(d.happens({.kind = Kind::kGenerationFailed, .attempt = 1, .status = lost()}),
              ElementsAre(Do::kPlaceGeneration));
  d.happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = 2});
  const auto actions = d.request.handle({.kind = Kind::kGenerationFailed, .attempt = 2, .status = lost()});
  ASSERT_THAT(kinds(actions), ElementsAre(Do::kEnd));
  EXPECT_TRUE(absl::IsUnavailable(actions[0].status));
}

TEST(Request, AClientThatLeavesFreesEverything) {
  RequestDriver d({.items = 3});
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kA, .item = 0, .attempt = 1});
  d.happens({.kind = Kind::kEncoded, .item = 0, .attempt = 1});
  d.happens({.kind = Kind::kEncodingPlaced, .instance = kB, .item = 1, .attempt = 1});
  EXPECT_THAT(d.happens({.kind = Kind::kLeft}), ElementsAre(Do::kCancelEncoding, Do::kLetGo, Do::kEnd));
}

// A made-up cluster that loses instances, doubles and delays messages; the promises of the header.
class World {
 public:
  World(const RequestShape& shape, bool halves) : shape_(shape), halves_(halves), request_(shape) {
    carry_out(request_.start());
  }

  bool over() const { return request_.ended(); }

  void step(bool calm) {
    const int dice = *rc::gen::inRange(0, calm ? 6 : 11);
    if (dice == 6) return lose();
    if (dice == 7) return say_something_old();
    if (dice == 8 && !old_.empty()) return tell(*rc::gen::elementOf(old_));
    if (dice == 10) return lack();
    if (dice == 9 && *rc::gen::inRange(0, 6) == 0) return tell({.kind = Kind::kTimeUp, .status = lost()});
    advance();
  }

  void check_end() const {
    RC_ASSERT(ends_ == 1);
    RC_ASSERT(kept_.empty() && encoding_.empty() && !generating_ && !kv_.has_value());
  }

 private:
  InstanceId some_instance() { return InstanceId{*rc::gen::inRange(1, 4) + 10 * generation_of_instances_}; }

  // What the cluster owes next.
  void advance() {
    if (!placing_.empty()) {
      const auto [item, attempt] = *placing_.begin();
      placing_.erase(placing_.begin());
      return tell({.kind = Kind::kEncodingPlaced, .instance = some_instance(), .item = item, .attempt = attempt});
    }
    if (!encoding_.empty()) {
      const auto [item, place] = *encoding_.begin();
      encoding_.erase(encoding_.begin());
      kept_.insert({item, place});
      return tell({.kind = Kind::kEncoded, .instance = place.first, .item = item, .attempt = place.second});
    }
    if (placing_generation_ > 0) {
      const int attempt = std::exchange(placing_generation_, 0);
      const bool hands_over = halves_ && !placing_decoding_ && *rc::gen::inRange(0, 4) > 0;
      hands_over_ = hands_over;
      return tell(
          {.kind = Kind::kGenerationPlaced, .instance = some_instance(), .attempt = attempt, .hands_over = hands_over});
    }
    if (!generating_) return;
    for (size_t c = 0; c < shape_.choices; ++c) {
      if (request_.finished(c)) continue;
      if (hands_over_ && next_[c] > from_[c] && next_[c] < 3) continue;  // it has done its part
      if (next_[c] < 3) return tell({.kind = Kind::kToken, .choice = c, .attempt = attempt_, .index = next_[c]++});
      return tell({.kind = Kind::kFinished, .choice = c, .attempt = attempt_});
    }
    RC_ASSERT(!kv_.has_value());
    kv_ = {generator_, attempt_};
    generating_ = false;
    tell({.kind = Kind::kPrefilled, .attempt = attempt_});
  }

  // The generation cannot have what lies elsewhere, and says so.
  void lack() {
    if (!generating_ || hands_over_) return;
    tell({.kind = Kind::kKvLost, .attempt = attempt_});
    if (shape_.items > 0 && *rc::gen::arbitrary<bool>()) tell({.kind = Kind::kOutputLost, .attempt = attempt_});
    generating_ = false;
    tell({.kind = Kind::kGenerationFailed, .attempt = attempt_, .status = lost()});
  }

  void lose() {
    const InstanceId gone = some_instance();
    lost_.insert(gone.value);
    std::erase_if(encoding_, [&](const auto& entry) { return entry.second.first == gone; });
    std::erase_if(kept_, [&](const auto& entry) { return entry.second.first == gone; });
    if (generating_ && generator_ == gone) generating_ = false;
    if (kv_.has_value() && kv_->first == gone) kv_.reset();
    ++generation_of_instances_;  // new names for those that come after
    tell({.kind = Kind::kInstanceLost, .instance = gone});
  }

  void say_something_old() {
    const auto kind = *rc::gen::element(Kind::kToken, Kind::kFinished, Kind::kEncoded, Kind::kGenerationFailed,
                                        Kind::kPrefilled, Kind::kKvLost, Kind::kOutputLost);
    tell({.kind = kind, .item = 0, .attempt = attempt_ - 1, .index = 0, .status = lost()});
  }

  void tell(const RequestEvent& event) {
    // A message may come again later; but that an instance is lost, or the time up, is told once.
    if (event.kind == Kind::kToken || event.kind == Kind::kEncoded) old_.push_back(event);
    carry_out(request_.handle(event));
  }

  void carry_out(const std::vector<RequestAction>& actions) {
    for (const RequestAction& action : actions) {
      RC_ASSERT(ends_ == 0);
      const bool on_instance = action.instance.value != 0;
      if (on_instance) RC_ASSERT(!lost_.contains(action.instance.value));
      switch (action.kind) {
        case Do::kPlaceEncoding:
          placing_[action.item] = action.attempt;
          break;
        case Do::kEncode:
          RC_ASSERT(encoding_.emplace(action.item, std::pair(action.instance, action.attempt)).second);
          break;
        case Do::kPlaceGeneration:
        case Do::kPlaceDecoding:
          placing_generation_ = action.attempt;
          placing_decoding_ = action.kind == Do::kPlaceDecoding;
          break;
        case Do::kDecode:
        case Do::kGenerate:
          RC_ASSERT(!generating_);
          RC_ASSERT(kv_.has_value() == (action.kind == Do::kDecode));
          for (size_t i = 0; i < shape_.items; ++i) RC_ASSERT(kv_.has_value() || request_.holder(i).has_value());
          generating_ = true;
          generator_ = action.instance;
          attempt_ = action.attempt;
          next_.clear();
          for (size_t c = 0; c < shape_.choices; ++c) next_.push_back(request_.delivered(c));
          from_ = next_;
          break;
        case Do::kDeliver:
          RC_ASSERT(request_.delivered(action.choice) >= ++delivered_[action.choice]);
          break;
        case Do::kLetGo:
          RC_ASSERT(kept_.erase(action.item) == 1);
          break;
        case Do::kLetGoKv:
          RC_ASSERT(kv_ == std::pair(action.instance, action.attempt));
          kv_.reset();
          break;
        case Do::kCancelEncoding:
          RC_ASSERT(encoding_.erase(action.item) == 1);
          break;
        case Do::kCancelGeneration:
          RC_ASSERT(std::exchange(generating_, false));
          break;
        case Do::kEnd:
          ++ends_;
          if (action.status.ok()) {
            for (size_t c = 0; c < shape_.choices; ++c) RC_ASSERT(delivered_[c] == 3);
            generating_ = false;
          }
          break;
      }
    }
    for (size_t c = 0; c < shape_.choices; ++c) RC_ASSERT(request_.delivered(c) == delivered_[c]);
  }

  const RequestShape shape_;
  const bool halves_;  // some instances hand over what they begin
  RequestLifecycle request_;
  int64_t generation_of_instances_ = 0;
  std::set<int64_t> lost_;
  std::map<size_t, int> placing_;                                 // item → attempt
  std::map<size_t, std::pair<InstanceId, int>> encoding_, kept_;  // item → instance, attempt
  int placing_generation_ = 0, attempt_ = 0;
  bool generating_ = false, placing_decoding_ = false, hands_over_ = false;
  InstanceId generator_ = {};
  std::optional<std::pair<InstanceId, int>> kv_;  // where it lies, of which attempt
  std::vector<int64_t> next_, from_;
  std::map<size_t, int64_t> delivered_;
  std::vector<RequestEvent> old_;
  int ends_ = 0;
};

RC_GTEST_PROP(RequestProperty, KeepsItsPromisesWhateverIsLost, ()) {
  World world({.items = *rc::gen::inRange<size_t>(0, 4), .choices = *rc::gen::inRange<size_t>(1, 4)},
              *rc::gen::arbitrary<bool>());
  for (int i = 0; i < 60 && !world.over(); ++i) world.step(false);
  for (int i = 0; i < 200 && !world.over(); ++i) world.step(true);
  RC_ASSERT(world.over());
  world.check_end();
}

}  // namespace
}  // namespace parvl
