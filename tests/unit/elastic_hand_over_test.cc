// A request whose answer is begun on one instance and goes on on another.
#include "tests/unit/request_driver.h"

namespace parvl {
namespace {

// An answer that is begun on B, whose keys and values lie there.
struct HandingOver : RequestDriver {
  explicit HandingOver(const RequestShape& shape) : RequestDriver(shape) {
    if (shape.items > 0) {
      happens({.kind = Kind::kEncodingPlaced, .instance = kA, .attempt = 1});
      happens({.kind = Kind::kEncoded, .attempt = 1});
    }
    EXPECT_THAT(happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = 1, .hands_over = true}),
                ElementsAre(Do::kGenerate));
    EXPECT_THAT(token(0, 1), ElementsAre(Do::kDeliver)) << "whoever goes on may need the images";
    EXPECT_THAT(happens({.kind = Kind::kPrefilled, .attempt = 1}), ElementsAre(Do::kPlaceDecoding));
    EXPECT_TRUE(request.has_kv());
  }
  std::vector<Do> place(InstanceId instance, int attempt) {
    return happens({.kind = Kind::kGenerationPlaced, .instance = instance, .attempt = attempt});
  }
};

TEST(HandOver, GoesOnWhereItsAnswerIsDecodedAndLetsGoOfTheRestWithTheFirstTokenThere) {
  HandingOver d({.items = 1});
  EXPECT_THAT(d.place(kC, 2), ElementsAre(Do::kDecode));
  EXPECT_THAT(d.token(1, 1), IsEmpty()) << "that part is over";
  EXPECT_THAT(d.happens({.kind = Kind::kPrefilled, .attempt = 1}), IsEmpty());
  EXPECT_THAT(d.token(1, 2), ElementsAre(Do::kDeliver, Do::kLetGo, Do::kLetGoKv));
  EXPECT_FALSE(d.request.has_kv());
  EXPECT_THAT(d.token(2, 2), ElementsAre(Do::kDeliver));
  EXPECT_THAT(d.happens({.kind = Kind::kFinished, .attempt = 2}), ElementsAre(Do::kEnd));
}

TEST(HandOver, AnAnswerThatEndsWithItsFirstTokenGoesNowhere) {
  RequestDriver d({});
  d.happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = 1, .hands_over = true});
  EXPECT_THAT(d.token(0, 1), ElementsAre(Do::kDeliver));
  EXPECT_THAT(d.happens({.kind = Kind::kFinished, .attempt = 1}), ElementsAre(Do::kEnd));
}

TEST(HandOver, WhoeverWasLostBeforeHisFirstTokenIsReplacedFromTheSameKeysAndValues) {
  HandingOver d({.items = 1});
  d.place(kC, 2);
  EXPECT_THAT(d.happens({.kind = Kind::kInstanceLost, .instance = kC}), ElementsAre(Do::kPlaceDecoding));
  EXPECT_THAT(d.place(kA, 3), ElementsAre(Do::kDecode));
  EXPECT_THAT(d.token(1, 3), ElementsAre(Do::kDeliver, Do::kLetGo, Do::kLetGoKv));
}

TEST(HandOver, AfterThatItIsBegunAgainFromWhatTheClientHas) {
  HandingOver d({});
  d.place(kC, 2);
  d.token(1, 2);
  EXPECT_THAT(d.happens({.kind = Kind::kInstanceLost, .instance = kC}), ElementsAre(Do::kPlaceGeneration));
  EXPECT_THAT(d.happens({.kind = Kind::kGenerationPlaced, .instance = kB, .attempt = 3, .hands_over = true}),
              ElementsAre(Do::kGenerate));
  EXPECT_THAT(d.token(2, 3), ElementsAre(Do::kDeliver));
  EXPECT_THAT(d.happens({.kind = Kind::kPrefilled, .attempt = 3}), ElementsAre(Do::kPlaceDecoding));
}

TEST(HandOver, KeysAndValuesThatAreLostAreComputedAgainUnlessSomebodyIsFetchingThem) {
  HandingOver waits({.items = 1});
  EXPECT_THAT(waits.happens({.kind = Kind::kInstanceLost, .instance = kA}), IsEmpty()) << "images are in them";
  EXPECT_THAT(waits.happens({.kind = Kind::kInstanceLost, .instance = kB}), ElementsAre(Do::kPlaceEncoding));
  EXPECT_THAT(waits.place(kC, 2), IsEmpty());
  HandingOver fetches({});
  fetches.place(kC, 2);
  EXPECT_THAT(fetches.happens({.kind = Kind::kInstanceLost, .instance = kB}), IsEmpty()) << "it may have them";
  EXPECT_THAT(fetches.token(1, 2), ElementsAre(Do::kDeliver)) << "and nothing is left to let go";
  HandingOver failed({});
  failed.place(kC, 2);
  EXPECT_THAT(failed.happens({.kind = Kind::kKvLost, .attempt = 1}), IsEmpty());
  EXPECT_THAT(failed.happens({.kind = Kind::kKvLost, .attempt = 2}), ElementsAre(Do::kLetGoKv));
  EXPECT_THAT(failed.happens({.kind = Kind::kKvLost, .attempt = 2}), IsEmpty()) << "once";
  EXPECT_THAT(failed.happens({.kind = Kind::kGenerationFailed, .attempt = 2, .status = lost()}),
              ElementsAre(Do::kPlaceGeneration));
}

TEST(HandOver, BothHalvesAreOneTry) {
  HandingOver d({.max_generations = 2});
  for (const int attempt : {2, 3}) {
    d.place(kC, attempt);
    const auto then = d.request.handle({.kind = Kind::kGenerationFailed, .attempt = attempt, .status = lost()});
    const std::vector<Do> once = {Do::kPlaceDecoding}, twice = {Do::kLetGoKv, Do::kEnd};
    EXPECT_EQ(kinds(then), attempt == 2 ? once : twice);
  }
}

TEST(HandOver, AClientThatLeavesLetsKeysAndValuesGo) {
  HandingOver d({});
  EXPECT_THAT(d.happens({.kind = Kind::kLeft}), ElementsAre(Do::kLetGoKv, Do::kEnd));
  HandingOver runs({});
  runs.place(kC, 2);
  EXPECT_THAT(runs.happens({.kind = Kind::kLeft}), ElementsAre(Do::kLetGoKv, Do::kCancelGeneration, Do::kEnd));
}

}  // namespace
}  // namespace parvl
