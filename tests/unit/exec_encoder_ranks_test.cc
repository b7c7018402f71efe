// Images over the encoders of several ranks: who encodes what, that the features are those of one encoder to the bit,
// and what becomes of an image whose encoder is gone.
#include <gmock/gmock.h>

#include <numeric>

#include "parvl/base/rng.h"
#include "parvl/exec/encoder_ranks.h"
#include "parvl/models/packing.h"
#include "tests/unit/exec_ranks_fixture.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(DealImages, TheLargestFirstToWhoHasTheLeast) {
  struct Row {
    std::vector<int64_t> patches, load;
    std::vector<size_t> want;
  };
  for (const Row& row : {Row{{}, {0, 0}, {}}, Row{{5}, {0, 0}, {0}}, Row{{5, 5, 5}, {0, 0}, {0, 1, 0}},
                         Row{{1, 2, 9, 8}, {0, 0}, {0, 1, 0, 1}}, Row{{4, 4}, {9, 0, 3}, {1, 2}},
                         Row{{7, 1, 1}, {0, 0, 0}, {0, 1, 2}}, Row{{3, 3}, {0}, {0, 0}}}) {
    std::vector<int64_t> load = row.load;
    EXPECT_EQ(deal_images(row.patches, load), row.want);
    EXPECT_EQ(std::accumulate(load.begin(), load.end(), int64_t{0}),
              std::accumulate(row.load.begin(), row.load.end(), int64_t{0}) +
                  std::accumulate(row.patches.begin(), row.patches.end(), int64_t{0}));
  }
}

// Whatever the images: no rank has more than another and the smallest image that it was given.
TEST(DealImages, StaysEven) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    std::vector<int64_t> patches(1 + rng.below(20)), load(1 + rng.below(6));
    for (int64_t& one : patches) one = 1 + static_cast<int64_t>(rng.below(1000));
    const std::vector<size_t> ranks = deal_images(patches, load);
    for (size_t rank = 0; rank < load.size(); ++rank) {
      int64_t sum = 0, smallest = std::numeric_limits<int64_t>::max();
      for (size_t i = 0; i < patches.size(); ++i) {
        if (ranks[i] != rank) continue;
        sum += patches[i];
        smallest = std::min(smallest, patches[i]);
      }
      EXPECT_EQ(sum, load[rank]);
      EXPECT_TRUE(sum == 0 || sum - smallest <= *std::min_element(load.begin(), load.end())) << seed;
    }
  }
}

class EncoderRanksTest : public EngineTest {
 protected:
  static std::shared_ptr<LoadedFiles> load_encoder(const std::string& dir) {
    const LoadOptions options{.device = "cpu", .modules = {"vision_encoder", "projector"}};
    auto out = std::make_shared<LoadedFiles>(*read_files(dir, options));
    EXPECT_TRUE(load_weights(*out, dir, options).ok());
    return out;
  }
  static at::Tensor encode(const LoadedFiles& files, const ProcessedImage& image) {
    SequenceInput one;
    one.images.push_back({0, {image.grid_t, image.grid_h, image.grid_w}});
    one.pixels.push_back(image.patches.data());
    return encode_images(*files.model, pack_images(*files.model, {one}, at::kCPU), at::kCPU);
  }

  static absl::Status never(const absl::Status& why) {
    ADD_FAILURE() << why;
    return why;
  }

  // An image on its way, and what became of it.
  struct Asked {
    std::shared_ptr<const ProcessedImage> image;
    std::promise<EncodeQueue::Done> promise;
    std::future<EncodeQueue::Done> done = promise.get_future();
  };
  static EncodeQueue::Item item(Asked& asked) {
    EncodeQueue::Item out;
    out.image = asked.image;
    out.on_done = [&asked](EncodeQueue::Done done) { asked.promise.set_value(std::move(done)); };
    return out;
  }
  static void submit_both(EncoderRanks& ranks, Asked& first, Asked& second) {
    std::vector<EncodeQueue::Item> both;
    both.push_back(item(first));
    both.push_back(item(second));
    ranks.submit(std::move(both));
  }
};

TEST_F(EncoderRanksTest, FeaturesAreThoseOfOneEncoderAndTheWorkIsShared) {
  constexpr int64_t kRanks = 3;
  for (const std::string family : {"qwen2_vl", "qwen2_5_vl"}) {
    const std::string dir = make_dir(family);
    std::vector<int64_t> dealt(kRanks);
    std::vector<EncodedCount> counts(kRanks);
    run_local_world(kRanks, {}, [&](Communicator& communicator) {
      const auto files = load_encoder(dir);
      const auto links = *EncoderLinks::connect(communicator, 1000);  // less than any image
      if (communicator.rank() > 0) {
        EncodeQueue queue(*files, clock());
        counts[static_cast<size_t>(communicator.rank())] = run_encoder_rank(queue, *links);
        return;
      }
      std::atomic<int64_t> begun = 0, over = 0;  // patches of other ranks
      EncoderRanks ranks(*files, clock(), {links, never, [&](int64_t patches) {
                                             begun += patches;
                                             return [&over, patches] { over += patches; };
                                           }});
      std::vector<std::unique_ptr<Asked>> all;
      std::vector<EncodeQueue::Item> items;
      std::vector<int64_t> patches;
      for (int i = 0; i < 8; ++i) {
        all.push_back(std::make_unique<Asked>());
        all.back()->image = image(*files->prompts, 16 + 8 * i, 40 - 4 * i, i);
        items.push_back(item(*all.back()));
        patches.push_back(all.back()->image->num_patches());
      }
      (void)deal_images(patches, dealt);
      ranks.submit(std::move(items));
      for (const auto& asked : all) {
        const EncodeQueue::Done done = asked->done.get();
        ASSERT_TRUE(done.status.ok()) << done.status;
        EXPECT_TRUE(at::equal(done.visual, encode(*files, *asked->image)));
        EXPECT_LE(done.start_s, done.end_s);
        EXPECT_FALSE(done.fetched);
      }
      EXPECT_EQ(begun, dealt[1] + dealt[2]);
      EXPECT_EQ(over, begun);
    });
    for (size_t rank = 1; rank < kRanks; ++rank) {
      EXPECT_EQ(counts[rank].patches, dealt[rank]);
      EXPECT_GT(counts[rank].images, 0);
    }
    EXPECT_LT(*std::max_element(dealt.begin(), dealt.end()), 2 * *std::min_element(dealt.begin(), dealt.end()));
  }
}

// One that a rank cannot encode ends by itself; the next one goes there as before.
TEST_F(EncoderRanksTest, AFailureIsItsImagesAlone) {
  const std::string dir = make_dir("qwen2_vl");
  run_local_world(2, {}, [&](Communicator& communicator) {
    const auto files = load_encoder(dir);
    const auto links = *EncoderLinks::connect(communicator);
    if (communicator.rank() > 0) {
      EncodeQueue queue(*files, clock());
      run_encoder_rank(queue, *links);
      return;
    }
    EncoderRanks ranks(*files, clock(), {links, never, {}});
    Asked here, bad, good;
    here.image = image(*files->prompts, 60, 60, 1);
    auto broken = std::make_shared<ProcessedImage>(*image(*files->prompts, 28, 28, 2));
    broken->grid_h = broken->grid_w = 5;  // which the model cannot merge
    bad.image = broken;
    submit_both(ranks, here, bad);
    EXPECT_FALSE(bad.done.get().status.ok());
    ASSERT_TRUE(here.done.get().status.ok());
    here = Asked();
    here.image = image(*files->prompts, 60, 60, 3);
    good.image = image(*files->prompts, 28, 28, 2);
    submit_both(ranks, here, good);
    const EncodeQueue::Done done = good.done.get();
    ASSERT_TRUE(done.status.ok()) << done.status;
    EXPECT_TRUE(at::equal(done.visual, encode(*files, *good.image)));
    EXPECT_TRUE(here.done.get().status.ok());
  });
}

// An answer that came whole, and that cannot be kept here: the next one goes there as before.
TEST_F(EncoderRanksTest, AFailureToTakeTheFeaturesIsItsImagesAlone) {
  const std::string dir = make_dir("qwen2_vl");
  run_local_world(2, {}, [&](Communicator& communicator) {
    const auto files = load_encoder(dir);
    const auto links = *EncoderLinks::connect(communicator);
    if (communicator.rank() > 0) {
      EncodeQueue queue(*files, clock());
      EXPECT_EQ(run_encoder_rank(queue, *links).images, 2);
      return;
    }
    EncoderRanks ranks(*files, clock(), {links, never, {}});
    for (const bool fails : {true, false}) {
      files->device = fails ? at::Device(at::kCUDA, 99) : at::Device(at::kCPU);  // which no machine has
      Asked here, there;
      here.image = image(*files->prompts, 60, 60, 1);
      there.image = image(*files->prompts, 28, 28, 2);
      submit_both(ranks, here, there);
      const EncodeQueue::Done done = there.done.get();
      EXPECT_EQ(done.status.ok(), !fails) << done.status;
      EXPECT_EQ(here.done.get().status.ok(), !fails);
      EXPECT_TRUE(fails || at::equal(done.visual, encode(*files, *there.image)));
    }
  });
}

// The links are closed at the end, whoever waits for an answer: that is no loss.
TEST_F(EncoderRanksTest, EndingWhileAnotherRankEncodesIsNoLoss) {
  const std::string dir = make_dir("qwen2_vl");
  std::promise<void> asked_there;
  run_local_world(2, {}, [&](Communicator& communicator) {
    const auto files = load_encoder(dir);
    const auto links = *EncoderLinks::connect(communicator);
    if (communicator.rank() > 0) {
      EXPECT_TRUE(links->from(0).read().ok());  // the head of an image
      EXPECT_TRUE(links->from(0).read().ok());  // its patches
      asked_there.set_value();
      EXPECT_FALSE(links->from(0).read().ok());  // no answer until all ends
      return;
    }
    Asked here, there;
    {
      EncoderRanks ranks(*files, clock(), {links, never, {}});
      here.image = image(*files->prompts, 60, 60, 1);
      there.image = image(*files->prompts, 28, 28, 2);
      submit_both(ranks, here, there);
      EXPECT_TRUE(here.done.get().status.ok());
      asked_there.get_future().wait();
    }
    EXPECT_EQ(there.done.get().status.code(), absl::StatusCode::kUnavailable);
  });
}

TEST_F(EncoderRanksTest, AnEncoderThatIsGoneIsToldOnceForEachOfItsImages) {
  const std::string dir = make_dir("qwen2_vl");
  run_local_world(2, {}, [&](Communicator& communicator) {
    const auto files = load_encoder(dir);
    const auto links = *EncoderLinks::connect(communicator);
    if (communicator.rank() > 0) {
      ASSERT_TRUE(links->from(0).read().ok());  // the head of an image
      return;                                   // and it is no more
    }
    std::atomic<int> told = 0;
    const auto broken = [&told](const absl::Status& why) -> absl::Status {
      ++told;
      EXPECT_THAT(std::string(why.message()), HasSubstr("the encoder of rank 1"));
      return absl::UnavailableError("rank 1 was ended by SIGKILL");
    };
    EncoderRanks ranks(*files, clock(), {links, broken, {}});
    Asked asked[4];
    std::vector<EncodeQueue::Item> items;
    for (Asked& one : asked) {
      one.image = image(*files->prompts, 28, 28, 1);
      items.push_back(item(one));
    }
    ranks.submit(std::move(items));
    for (size_t i = 0; i < 4; ++i) {
      const EncodeQueue::Done done = asked[i].done.get();
      if (i % 2 == 0) {
        EXPECT_TRUE(done.status.ok()) << done.status;
      } else {
        EXPECT_EQ(done.status, absl::UnavailableError("rank 1 was ended by SIGKILL"));
      }
    }
    EXPECT_EQ(told, 2);
  });
}

// The engine over ranks: several images of one request, encoded on all of them; the request is cancelled meanwhile.
TEST_F(EncoderRanksTest, RequestsThatEndMeanwhileLeaveNothingBehind) {
  const std::string dir = make_dir("qwen2_vl");
  const auto engine = load(dir, over_ranks({.max_seqs = 6}, 2));
  for (int round = 0; round < 20; ++round) {
    std::vector<std::shared_ptr<const ProcessedImage>> images;
    for (int i = 0; i < 5; ++i) images.push_back(image(engine->prompts(), 28, 20, 10 * round + i));
    const auto prompt = std::make_shared<const Prompt>(chat(engine->prompts(), "see", "and", std::move(images)));
    const auto pending = std::make_shared<Pending>();
    SamplingParams sampling;
    sampling.max_tokens = 5;
    engine->cancel(submit(*engine, prompt, sampling, pending));
    (void)pending->end.get_future().get();
    EXPECT_EQ(pending->ends, 1);
  }
  expect_nothing_held(*engine);
  // Slots of encodings under way come back when these are done.
  while (engine->stats().encoder_bytes_held > 0) std::this_thread::yield();
  const std::vector<Case> cases = make_cases(dir);
  run_all(*engine, cases, 1);
}

}  // namespace
}  // namespace parvl
