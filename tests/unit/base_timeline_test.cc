// A recording of what ran when: its file at every moment, its limits, and what is told of a track that it does not
// know.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <thread>
#include <vector>

#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/base/timeline.h"
#include "tests/unit/temporary_folder.h"

namespace parvl {
namespace {

using testing::HasSubstr;

class TimelineTest : public testing::Test {
 protected:
  std::string path(const std::string& name = "t.json") const { return folder_.path() + "/" + name; }
  // The events of a file, which must be whole JSON, without those that name rows.
  static std::vector<Json> events(const std::string& path) {
    const auto json = read_json_file(path);
    EXPECT_TRUE(json.ok()) << json.status();
    std::vector<Json> out;
    for (const Json& event : (*json)["traceEvents"]) {
      if (event["ph"] != "M") out.push_back(event);
    }
    return out;
  }

  ManualClock clock_{5'000'000'000};
  TemporaryFolder folder_;
};

TEST_F(TimelineTest, TheFileIsWholeAfterEveryCall) {
  Timeline timeline({path()}, clock_);
  const int lane = timeline.add_lane("a \"lane\"");
  ASSERT_TRUE(timeline.start().ok());
  EXPECT_EQ(events(path()).size(), 0u);
  const TrackId track = timeline.new_track();
  timeline.begin(track, "id \"1\"\n\xff", 1.5, {{"text", std::string("t\\")}, {"whole", int64_t{-3}}, {"part", 0.25}});
  EXPECT_EQ(events(path()).size(), 1u);
  timeline.lane_span(lane, "step", 2, 2.000'000'5);
  timeline.counter("running", 2, 3);
  timeline.end(track, "id \"1\"\n\xff", 1234567.000'000'001);
  const std::vector<Json> all = events(path());
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0]["ts"], 1.5e6);
  EXPECT_EQ(all[0]["args"], (Json{{"text", "t\\"}, {"whole", -3}, {"part", 0.25}}));
  EXPECT_EQ(all[1]["dur"], 0.5);
  EXPECT_EQ(all[2]["args"]["value"], 3);
  EXPECT_THAT(*read_file(path()), HasSubstr("1234567000000.001"));  // to the nanosecond, however long the machine is up
  EXPECT_EQ(all[3]["id"], all[0]["id"]);
}

TEST_F(TimelineTest, StartsAndStops) {
  Timeline timeline({path("a.b.json")}, clock_);
  EXPECT_EQ(timeline.new_track().value, 0);
  timeline.counter("running", 1, 1);
  EXPECT_FALSE(std::filesystem::exists(path("a.b.json")));
  EXPECT_TRUE(absl::IsFailedPrecondition(timeline.stop().status()));
  ASSERT_TRUE(timeline.start().ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(timeline.start().status()));
  const TrackId old = timeline.new_track();
  timeline.begin(old, "a", 1);
  EXPECT_EQ(*timeline.stop(), path("a.b.json"));
  timeline.end(old, "a", 2);
  EXPECT_EQ(*timeline.start(), path("a.b-2.json"));
  timeline.end(old, "a", 3);  // began in another file
  timeline.begin(timeline.new_track(), "b", 4);
  EXPECT_EQ(events(path("a.b.json")).size(), 1u);
  ASSERT_EQ(events(path("a.b-2.json")).size(), 1u);
  EXPECT_EQ(events(path("a.b-2.json"))[0]["name"], "b");
}

TEST_F(TimelineTest, EndsAtItsLimit) {
  Timeline timeline({path(), 4096}, clock_);
  ASSERT_TRUE(timeline.start().ok());
  for (int i = 0; i < 1000; ++i) timeline.counter("running", i, i);
  EXPECT_FALSE(timeline.recording());
  EXPECT_LE(std::filesystem::file_size(path()), 4096u);
  EXPECT_THAT(events(path()).back()["name"].get<std::string>(), HasSubstr("full"));
}

TEST_F(TimelineTest, FilesThatCannotBeWritten) {
  EXPECT_THAT(std::string(Timeline({path("no/such/t.json")}, clock_).start().status().message()),
              HasSubstr("no/such/t.json: No such file"));
  Timeline full({"/dev/full"}, clock_);
  EXPECT_TRUE(absl::IsInvalidArgument(full.start().status()));
  EXPECT_FALSE(full.recording());
}

TEST_F(TimelineTest, ThreadsDoNotMixTheirEvents) {
  Timeline timeline({path()}, clock_);
  ASSERT_TRUE(timeline.start().ok());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&timeline] {
      for (int i = 0; i < 200; ++i) timeline.span(timeline.new_track(), "s", i, i + 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<Json> all = events(path());
  EXPECT_EQ(all.size(), 4u * 200u * 2u);
  std::map<std::string, int> ids;
  for (const Json& event : all) ++ids[event["id"].get<std::string>()];
  EXPECT_EQ(ids.size(), 800u);
}

}  // namespace
}  // namespace parvl
