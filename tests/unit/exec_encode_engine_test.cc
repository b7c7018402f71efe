// Images through an encode engine: the bytes of the model itself, refusals, limits, cancelling and ends.
#include <gmock/gmock.h>

#include <condition_variable>

#include "parvl/exec/load.h"
#include "parvl/models/packing.h"
#include "tests/unit/exec_encoded_fixture.h"
#include "tests/unit/exec_engine_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

class EncodeEngineTest : public EngineTest {
 protected:
  static std::unique_ptr<EncodeEngine> load_encoder(const std::string& dir, EngineOptions options = {}) {
    options.load.device = test_device();
    auto engine = load_encode_engine(dir, options, clock());
    if (!engine.ok()) throw std::runtime_error(engine.status().ToString());
    return *std::move(engine);
  }

  static std::vector<std::shared_ptr<const ProcessedImage>> make_images(const std::string& dir) {
    const auto prompts = *PromptBuilder::load(dir);
    std::vector<std::shared_ptr<const ProcessedImage>> out;
    for (const auto& [width, height] :
         std::vector<std::pair<int, int>>{{20, 28}, {28, 20}, {64, 64}, {8, 80}, {100, 36}, {20, 28}}) {
      out.push_back(image(*prompts, width, height, static_cast<int>(out.size())));
    }
    return out;
  }

  // What the whole model makes of an image, and with the modules that only belong to the backbone left out of it.
  static std::string by_the_model(const LoadedFiles& whole, const ProcessedImage& image) {
    at::NoGradGuard no_grad;
    SequenceInput input;
    input.images.push_back({0, {image.grid_t, image.grid_h, image.grid_w}});
    input.pixels.push_back(image.patches.data());
    const at::Tensor visual =
        encode_images(*whole.model, pack_images(*whole.model, {input}, whole.device), whole.device).to(at::kCPU);
    return {static_cast<const char*>(visual.data_ptr()), visual.nbytes()};
  }

  // Ends of several images, each of which comes once.
  struct Ends {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<absl::StatusOr<EncodedImage>> all;
    std::function<void(const absl::StatusOr<EncodedImage>&)> add() {
      return [this](const absl::StatusOr<EncodedImage>& one) {
        std::lock_guard lock(mutex);
        all.push_back(one);
        changed.notify_all();
      };
    }
    void wait_for(size_t count) {
      std::unique_lock lock(mutex);
      EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return all.size() >= count; }));
    }
  };

  // Keeps an encode engine's thread busy until it is let go: inside the end of an image.
  struct Blocker {
    std::promise<void> reached, go;
    AlignedBytes memory{0};
    Blocker(EncodeEngine& engine, const std::shared_ptr<const ProcessedImage>& image)
        : memory(engine.layout_of(*image)->at(0).bytes) {
      const auto block = [this, waits = std::make_shared<std::shared_future<void>>(go.get_future())](const auto&) {
        reached.set_value();
        waits->wait();
      };
      EXPECT_TRUE(engine.submit({image, {memory.span()}, block}).ok());
      reached.get_future().wait();
    }
  };
};

class EncodeFamilyTest : public EncodeEngineTest,
                         public testing::WithParamInterface<std::tuple<const char*, const char*>> {};

TEST_P(EncodeFamilyTest, GivesTheBytesOfTheModel) {
  const auto& [family, dtype] = GetParam();
  const std::string dir = make_dir(family);
  EngineOptions options;
  options.load.dtype = dtype;
  const auto engine = load_encoder(dir, options);
  options.load.device = test_device();
  LoadedFiles whole = *read_files(dir, options.load);
  ASSERT_TRUE(load_weights(whole, dir, options.load).ok());
  const auto images = make_images(dir);
  Ends ends;
  std::vector<AlignedBytes> memory;
  for (const auto& image : images) {
    std::vector<TransferTensor> layout = *engine->layout_of(*outline(*image));  // pixels have no part in it
    ASSERT_EQ(layout.size(), 1u);
    EXPECT_EQ(layout[0].name, "visual");
    EXPECT_EQ(layout[0].dtype, whole.dtype);
    EXPECT_EQ(layout[0].shape, (std::vector<int64_t>{image->num_tokens(), 32}));
    const int64_t bytes = layout[0].bytes;
    EXPECT_EQ(bytes, image->num_tokens() * 32 * dtype_bytes(whole.dtype));
    EXPECT_EQ(*place_tensors(layout), bytes);  // as a transfer says it
    EXPECT_EQ(layout[0].bytes, bytes);
    memory.emplace_back(bytes);
    ASSERT_TRUE(engine->submit({image, {memory.back().span()}, ends.add()}).ok());
  }
  ends.wait_for(images.size());
  std::set<std::string> different;
  for (size_t i = 0; i < images.size(); ++i) {
    ASSERT_TRUE(ends.all[i].ok()) << ends.all[i].status();
    if (test_device() == "cpu") {  // a GPU takes them together
      EXPECT_EQ(memory[i].text(), by_the_model(whole, *images[i])) << i;
    }
    different.insert(memory[i].text());
  }
  EXPECT_EQ(different.size(), images.size());
  const EncodeStats stats = engine->stats();
  EXPECT_EQ(stats.encoded, static_cast<int64_t>(images.size()));
  EXPECT_EQ(stats.images, 0);
  EXPECT_EQ(stats.patches, 0);
  EXPECT_GT(stats.busy_s, 0);
  EXPECT_EQ(stats.work.replayed + stats.work.launched, stats.encoded);
}

INSTANTIATE_TEST_SUITE_P(Families, EncodeFamilyTest,
                         testing::Combine(testing::Values("qwen2_vl", "qwen2_5_vl"),
                                          testing::Values("float32", "bfloat16", "float16", "float64")));

TEST_F(EncodeEngineTest, TheExampleModel) {
  const std::string dir = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/model";
  EngineOptions options;
  options.load.device = test_device();
  const auto engine = load_encoder(dir, options);
  LoadedFiles whole = *read_files(dir, options.load);
  ASSERT_TRUE(load_weights(whole, dir, options.load).ok());
  for (const auto& image : make_images(dir)) {
    const auto encoded = encode(*engine, image);
    if (test_device() == "cpu") {
      EXPECT_EQ(encoded->held.text(), by_the_model(whole, *image));
    }
  }
}

TEST_F(EncodeEngineTest, RefusesWhatCannotBeEncoded) {
  const std::string dir = make_dir("qwen2_vl");
  const auto engine = load_encoder(dir);
  const auto good = make_images(dir).front();
  AlignedBytes memory(engine->layout_of(*good)->at(0).bytes);
  const auto refusal = [&](const std::function<void(ProcessedImage&)>& change, int64_t less = 0) {
    auto image = std::make_shared<ProcessedImage>(*good);
    change(*image);
    const bool grid = image->grid_t != good->grid_t || image->grid_h != good->grid_h || image->grid_w != good->grid_w ||
                      image->merge_size != good->merge_size;
    EXPECT_EQ(engine->layout_of(*image).ok(), !grid);
    const auto room = memory.span().subspan(0, memory.bytes - static_cast<size_t>(less));
    const auto id =
        engine->submit({image, {room}, [](const auto&) { FAIL() << "an image that was refused has ended"; }});
    EXPECT_EQ(id.status().code(), absl::StatusCode::kInvalidArgument) << id.status();
    return std::string(id.status().message());
  };
  EXPECT_THAT(refusal([](ProcessedImage&) {}, 4), HasSubstr("bytes, and its destination is not"));
  EXPECT_THAT(refusal([](ProcessedImage& image) { image.patches.clear(); }), HasSubstr("patches have 0 values"));
  EXPECT_THAT(refusal([](ProcessedImage& image) { image.patches.pop_back(); }), HasSubstr("values instead of"));
  EXPECT_THAT(refusal([](ProcessedImage& image) { --image.grid_h; }), HasSubstr("cannot be joined 2 × 2"));
  EXPECT_THAT(refusal([](ProcessedImage& image) { image.merge_size = 0; }), HasSubstr("cannot be joined 2 × 2"));
  EXPECT_THAT(refusal([](ProcessedImage& image) { image.grid_t = 0; }), HasSubstr("has 0 patches"));
  EXPECT_THAT(refusal([](ProcessedImage& image) { image.grid_w = 1 << 30; }), HasSubstr("has 1073741824 patches"));
  EXPECT_THAT(refusal([](ProcessedImage& image) {
                image.grid_t = 1000;
                image.patches.resize(image.patches.size() * 1000);
              }),
              HasSubstr("larger than any that this model's processor makes"));
  EXPECT_EQ(engine->stats().images, 0);
  EXPECT_EQ(memory.text(), std::string(memory.bytes, '\xab'));
  EXPECT_NE(encode(*engine, good)->held.text(), memory.text());
}

TEST_F(EncodeEngineTest, TakesSoManyImagesAtOnceAndNoMore) {
  const std::string dir = make_dir("qwen2_vl");
  EngineOptions options;
  options.max_seqs = 3;
  const auto engine = load_encoder(dir, options);
  EXPECT_EQ(engine->max_images(), 3);
  const auto images = make_images(dir);
  Blocker blocker(*engine, images[0]);
  Ends ends;
  // The one whose end blocks is not here any more.
  std::vector<AlignedBytes> memory;
  int64_t patches = 0;
  for (size_t i = 1; i <= 3; ++i) {
    memory.emplace_back(engine->layout_of(*images[i])->at(0).bytes);
    patches += images[i]->num_patches();
    ASSERT_TRUE(engine->submit({images[i], {memory.back().span()}, ends.add()}).ok());
  }
  EXPECT_EQ(engine->stats().images, 3);
  EXPECT_EQ(engine->stats().patches, patches);
  AlignedBytes more(engine->layout_of(*images[4])->at(0).bytes);
  const auto refused = engine->submit({images[4], {more.span()}, ends.add()});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("3 images"));
  blocker.go.set_value();
  ends.wait_for(3);
  for (const auto& end : ends.all) EXPECT_TRUE(end.ok()) << end.status();
  ASSERT_TRUE(engine->submit({images[4], {more.span()}, ends.add()}).ok());
  ends.wait_for(4);
}

TEST_F(EncodeEngineTest, ACancelledImageEndsOnceAndLeavesItsRoomAlone) {
  const std::string dir = make_dir("qwen2_vl");
  const auto engine = load_encoder(dir);
  const auto images = make_images(dir);
  auto blocker = std::make_unique<Blocker>(*engine, images[0]);
  Ends cancelled, others;
  std::vector<AlignedBytes> memory;
  std::vector<EncodeId> ids;
  for (size_t i = 1; i <= 4; ++i) {
    memory.emplace_back(engine->layout_of(*images[i])->at(0).bytes);
    Ends& ends = i % 2 == 0 ? cancelled : others;
    ids.push_back(*engine->submit({images[i], {memory.back().span()}, ends.add()}));
  }
  for (const size_t i : {1, 3}) {
    engine->cancel(ids[i]);
    engine->cancel(ids[i]);  // has no effect
  }
  engine->cancel(EncodeId{12345});
  blocker->go.set_value();
  cancelled.wait_for(2);
  others.wait_for(2);
  EXPECT_EQ(engine->stats().work.launched + engine->stats().work.replayed, 3);  // nobody encodes what nobody wants
  for (const size_t i : {1, 3}) {
    EXPECT_EQ(cancelled.all[i / 2].status().code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(memory[i].text(), std::string(memory[i].bytes, '\xab'));
    engine->cancel(ids[i]);
  }
  for (const size_t i : {0, 2}) {
    EXPECT_TRUE(others.all[i / 2].ok());
    EXPECT_EQ(memory[i].text(), encode(*engine, images[i + 1])->held.text());
  }
  EXPECT_EQ(engine->stats().images, 0);
  EXPECT_EQ(engine->stats().patches, 0);
  EXPECT_EQ(cancelled.all.size(), 2u);
  EXPECT_EQ(others.all.size(), 2u);
}

TEST_F(EncodeEngineTest, TellsOfEachBatchWhenItBeginsAndWhenItIsDone) {
  const std::string dir = make_dir("qwen2_vl");
  EngineOptions options;
  std::vector<std::string> told;
  std::atomic<int> turns = 0;
  options.hooks.on_encode = [&](int64_t patches) { told.push_back(absl::StrCat("begin ", patches)); };
  options.hooks.on_encoded = [&](int64_t patches, double seconds) {
    EXPECT_GE(seconds, 0);
    told.push_back(absl::StrCat("done ", patches));
  };
  options.hooks.on_turn = [&] { ++turns; };
  auto engine = load_encoder(dir, options);
  const auto images = make_images(dir);
  std::vector<std::string> want;
  for (size_t i = 0; i < 3; ++i) {
    encode(*engine, images[i]);
    while (turns <= static_cast<int>(i)) std::this_thread::yield();
    want.push_back(absl::StrCat("begin ", images[i]->num_patches()));
    want.push_back(absl::StrCat("done ", images[i]->num_patches()));
  }
  engine.reset();
  EXPECT_EQ(told, want);
  EXPECT_EQ(turns, 3);
}

// Stops whoever asks it for the time, once it is told to.
class StoppingClock : public Clock {
 public:
  int64_t now_ns() const override {
    if (armed_.exchange(false)) {
      reached_.set_value();
      go_.get_future().wait();
    }
    return real_.now_ns();
  }
  int64_t wall_ns() const override { return real_.wall_ns(); }
  void arm() { armed_ = true; }
  void wait_until_reached() const { reached_.get_future().wait(); }
  void go() { go_.set_value(); }

 private:
  const RealClock real_;
  mutable std::atomic<bool> armed_ = false;
  mutable std::promise<void> reached_, go_;
};

TEST_F(EncodeEngineTest, AnImageThatIsCancelledWhileItIsEncodedLeavesItsRoomAlone) {
  const std::string dir = make_dir("qwen2_vl");
  StoppingClock stopping;
  EngineOptions options;
  options.load.device = test_device();
  const auto engine = *load_encode_engine(dir, options, stopping);
  const auto image = make_images(dir).front();
  const AlignedBytes memory(engine->layout_of(*image)->at(0).bytes);
  Ends ends;
  stopping.arm();
  const EncodeId id = *engine->submit({image, {memory.span()}, ends.add()});
  stopping.wait_until_reached();  // in the encoder's hands
  engine->cancel(id);
  EXPECT_TRUE(ends.all.empty());
  stopping.go();
  ends.wait_for(1);
  EXPECT_TRUE(absl::IsCancelled(ends.all[0].status()));
  EXPECT_EQ(memory.text(), std::string(memory.bytes, '\xab'));
  EXPECT_EQ(engine->stats().encoded, 0);
  EXPECT_GT(engine->stats().busy_s, 0);
}

TEST_F(EncodeEngineTest, StoppingEndsWhatWaits) {
  const std::string dir = make_dir("qwen2_vl");
  StoppingClock stopping;
  EngineOptions options;
  options.load.device = test_device();
  auto engine = *load_encode_engine(dir, options, stopping);
  const auto images = make_images(dir);
  Ends ends;
  std::vector<AlignedBytes> memory;
  stopping.arm();
  for (const auto& image : images) {
    memory.emplace_back(engine->layout_of(*image)->at(0).bytes);
    ASSERT_TRUE(engine->submit({image, {memory.back().span()}, ends.add()}).ok());
  }
  stopping.wait_until_reached();
  // Which of the others it has encoded when it hears of its end is a matter of luck; on a GPU they may all be at once.
  std::thread stop([&] { engine.reset(); });
  stopping.go();
  stop.join();
  ASSERT_EQ(ends.all.size(), images.size());
  EXPECT_TRUE(ends.all[0].ok());
  for (const auto& end : ends.all) EXPECT_TRUE(end.ok() || absl::IsCancelled(end.status())) << end.status();
}

// While many threads submit and cancel.
TEST_F(EncodeEngineTest, EveryImageEndsOnce) {
  const std::string dir = make_dir("qwen2_5_vl");
  EngineOptions options;
  options.max_seqs = 8;
  auto engine = load_encoder(dir, options);
  const auto images = make_images(dir);
  std::vector<std::string> want;
  for (const auto& image : images) want.push_back(encode(*engine, image)->held.text());
  std::atomic<int64_t> taken = 0, ended = 0, right = 0, cancelled = 0, full = 0;
  std::vector<std::thread> clients;
  for (size_t t = 0; t < 4; ++t) {
    clients.emplace_back([&, t] {
      for (size_t i = 0; i < 100; ++i) {
        const size_t which = (t + i) % images.size();
        const AlignedBytes memory(engine->layout_of(*images[which])->at(0).bytes);
        const auto id = engine->submit({images[which], {memory.span()}, [&, memory, which](const auto& result) {
                                          ++ended;
                                          right += result.ok() && memory.text() == want[which];
                                          cancelled += absl::IsCancelled(result.status());
                                        }});
        full += absl::IsResourceExhausted(id.status());
        taken += id.ok();
        if (id.ok() && i % 3 == 0) engine->cancel(*id);
        if (!id.ok()) std::this_thread::yield();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  engine.reset();  // in the middle: what waits ends with it
  EXPECT_EQ(ended, taken);
  EXPECT_EQ(right + cancelled, taken);
  EXPECT_GT(right, 0);
  EXPECT_GT(cancelled, 0);
  EXPECT_GT(full, 0);
}

}  // namespace
}  // namespace parvl
