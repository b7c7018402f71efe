// That several ranks really share the work: matrix products, weights, images, memory.
#include <ATen/record_function.h>
#include <absl/strings/match.h>

#include <atomic>
#include <future>
#include <numeric>

#include "counting_allocator.h"
#include "parvl/comm/local/local_group.h"
#include "parvl/train/vision_share.h"
#include "train_fixture.h"

namespace parvl {
namespace {

// Floating-point operations of the matrix products of this thread while it lives. A product of [m, k] and [k, n] is
// 2 · m · k · n; attention is not counted.
class ProductCounter {
 public:
  ProductCounter() {
    t_flops = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&ProductCounter::count).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  ~ProductCounter() { at::removeCallback(handle_); }
  double flops() const { return t_flops; }

 private:
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& call) {
    const std::string name = call.name();
    // aten::linear is made of these.
    const size_t first = name == "aten::mm" ? 0 : name == "aten::addmm" || name == "aten::addmm_" ? 1 : 2;
    if (first == 2) return nullptr;
    const auto inputs = call.inputs();
    const at::Tensor a = inputs[first].toTensor(), b = inputs[first + 1].toTensor();
    t_flops += 2.0 * static_cast<double>(a.size(0) * a.size(1) * b.size(1));
    return nullptr;
  }
  static thread_local double t_flops;
  at::CallbackHandle handle_;
};
thread_local double ProductCounter::t_flops = 0;

class SharesTest : public TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    recipe_.data.micro_batch = 2;
    recipe_.data.global_batch = 8;
    recipe_.train.steps = 4;
  }
  TrainerEnvironment rank_environment(Communicator& communicator) {
    TrainerEnvironment env = environment();
    env.write = [](std::string_view) {};
    env.record = {};
    env.stop_requested = {};
    env.loader_threads = 1;
    env.communicator = communicator.world() > 1 ? &communicator : nullptr;
    return env;
  }
  // `body` on every rank of the layout, with its trainer.
  void on_ranks(const ModuleLayout& layout, const std::function<void(Trainer&)>& body) {
    recipe_.parallel.llm = layout;
    const int64_t world = recipe_.parallel.world();
    std::vector<absl::Status> statuses(static_cast<size_t>(world));
    run_local_world(world, {}, [&](Communicator& communicator) {
      auto trainer = Trainer::create(recipe_, rank_environment(communicator));
      absl::Status& status = statuses[static_cast<size_t>(communicator.rank())];
      status = trainer.status();
      if (trainer.ok()) {
        status = catch_exceptions("a rank failed", [&] {
          body(**trainer);
          return absl::OkStatus();
        });
      }
    });
    for (const absl::Status& status : statuses) ASSERT_TRUE(status.ok()) << status;
  }
  void expect_nothing_left_behind(const ModuleLayout& layout);
  // Of two ranks.
  void expect_overlap(const ModuleLayout& layout, int64_t first, int64_t second, const std::vector<int>& lines);
  // Of one step's matrix products, by rank.
  std::vector<double> product_flops(const ModuleLayout& layout) {
    recipe_.parallel.llm = layout;
    std::vector<double> out(static_cast<size_t>(recipe_.parallel.world()));
    on_ranks(layout, [&](Trainer& trainer) {
      const auto loader = trainer.make_loader();
      const GlobalBatch batch = *loader->next();
      const ProductCounter counter;
      EXPECT_TRUE(trainer.train_step(batch).ok());
      out[static_cast<size_t>(trainer.ranks().rank())] = counter.flops();
    });
    return out;
  }
};

// Nothing is computed twice: the ranks' products add up to one process's, to the operation.
TEST_F(SharesTest, ProductsAddUpToOneProcesss) {
  const double whole = product_flops({})[0];
  ASSERT_GT(whole, 1e6);
  for (const ModuleLayout& layout :
       {ModuleLayout{.dp = 2}, ModuleLayout{.pp = 2}, ModuleLayout{.dp = 2, .pp = 2}, ModuleLayout{.dp = 4}}) {
    const std::vector<double> parts = product_flops(layout);
    EXPECT_EQ(std::accumulate(parts.begin(), parts.end(), 0.0), whole) << layout.dp << " " << layout.pp;
  }
}

// With the encoder apart its ranks alone compute on images, and decode only those that they encode; none has more than
// its share and a largest image.
TEST_F(SharesTest, AnEncodersOwnRanksShareTheImages) {
  const double whole = product_flops({})[0];
  for (const int64_t own : {1, 2, 3}) {
    SCOPED_TRACE(own);
    recipe_.parallel.vision_encoder = ModuleLayout{.dp = own, .ranks = own};
    std::vector<int64_t> encoded(static_cast<size_t>(own));
    int64_t all = 0, largest = 0;
    on_ranks({.dp = 2}, [&](Trainer& trainer) {
      const auto loader = trainer.make_loader();
      const GlobalBatch batch = *loader->next();
      const EncoderShare share = trainer.ranks().encoder_share();
      EXPECT_EQ(batch.samples.size(), trainer.ranks().is_encoder() ? 8 : 4);
      for (size_t i = 0; i < batch.samples.size(); ++i) {
        for (size_t image = 0; image < batch.samples[i].images.size(); ++image) {
          const ProcessedImage& one = *batch.samples[i].images[image];
          EXPECT_EQ(one.patches.empty(), batch.encoders[i][image] != share.group);
          if (!one.patches.empty()) encoded[static_cast<size_t>(share.group)] += one.num_patches();
          if (share.group != 0) continue;  // one rank sees the outlines of all
          all += one.num_patches();
          largest = std::max(largest, one.num_patches());
        }
      }
    });
    EXPECT_EQ(std::accumulate(encoded.begin(), encoded.end(), int64_t{0}), all);
    EXPECT_LE(*std::max_element(encoded.begin(), encoded.end()), all / own + largest);
    const std::vector<double> parts = product_flops({.dp = 2});
    EXPECT_EQ(std::accumulate(parts.begin(), parts.end(), 0.0), whole);
    for (const double part : parts) EXPECT_GT(part, 0);
  }
}

// With two tensor ranks and one key head each rank computes that head; the rest is shared evenly.
TEST_F(SharesTest, TensorRanksHaveEvenProducts) {
  auto config = *read_json_file(recipe_.config);
  config["num_key_value_heads"] = 2;
  std::ofstream(folder_ / "config.json") << config.dump();
  const double whole = product_flops({})[0];
  ASSERT_GT(whole, 1e6);
  const std::vector<double> parts = product_flops({.tp = 2});
  EXPECT_EQ(parts[0] + parts[1], whole);
  EXPECT_LT(std::max(parts[0], parts[1]), 1.2 * whole / 2);
}

// The stages of a pipeline work at the same time: the second does not end its first micro batch before the first one
// has begun its second. So do an encoder on its own rank, the last, and the backbone.
TEST_F(SharesTest, StagesOverlap) {
  expect_overlap({.pp = 2}, /*first=*/0, /*second=*/1, {3, 7, 11});  // without images: each is made at its forward
}

TEST_F(SharesTest, AnEncoderApartWorksAhead) {
  recipe_.parallel.vision_encoder = ModuleLayout{.dp = 1, .ranks = 1};
  expect_overlap({}, /*first=*/1, /*second=*/0, {0, 1, 2});
}

void SharesTest::expect_overlap(const ModuleLayout& layout, int64_t first, int64_t second,
                                const std::vector<int>& lines) {
  std::promise<void> second_begun;
  const std::shared_future<void> begun = second_begun.get_future().share();
  on_ranks(layout, [&](Trainer& trainer) {
    const int64_t rank = trainer.ranks().rank();
    const GlobalBatch samples = batch(lines);
    PipelineOptions options;
    for (const Prompt& sample : samples.samples) {
      PipelineMicrobatch& microbatch = options.microbatches.emplace_back();
      for (const ImageSpan& image : to_sequence(sample).images) microbatch.grids.push_back(image.grid);
      if (trainer.ranks().encoder_apart()) microbatch.encoders.assign(microbatch.grids.size(), 0);
    }
    options.sequences = [&](int64_t microbatch) {
      if (rank == first && microbatch == 1) second_begun.set_value();
      // Made when its input is received, before its forward is done.
      if (rank == second && microbatch == 0) begun.wait();
      return to_sequences(samples.samples, static_cast<size_t>(microbatch), static_cast<size_t>(microbatch) + 1);
    };
    run_pipeline(trainer.model(), trainer.ranks(), at::kCPU, options);
  });
}

TEST_F(SharesTest, WeightsAreNotHeldTwice) {
  int64_t whole = 0;
  on_ranks({}, [&](Trainer& trainer) {
    for (const Param* param : trainer.model().params().owned()) whole += param->part_numel();
  });
  for (const ModuleLayout& layout : {ModuleLayout{.tp = 2}, ModuleLayout{.pp = 2}, ModuleLayout{.tp = 2, .pp = 2}}) {
    std::atomic<int64_t> counted = 0, held = 0;
    on_ranks(layout, [&](Trainer& trainer) {
      for (const Param* param : trainer.model().params().owned()) {
        if (param->module != Module::kBackbone) continue;
        held += param->part_numel();
        if (trainer.ranks().counts(*param)) counted += param->part_numel();
      }
    });
    int64_t backbone = 0,
            doubled = 0;  // what each tensor rank has whole, the shared key head, the tied embedding's copy
    on_ranks({}, [&](Trainer& trainer) {
      for (const Param* param : trainer.model().params().owned()) {
        if (param->module != Module::kBackbone) continue;
        backbone += param->numel();
        const bool one_head = absl::StrContains(param->name, ".k.") || absl::StrContains(param->name, ".v.");
        if (layout.tp == 2 && (!param->shard.cut() || one_head)) doubled += param->numel();
        if (layout.pp == 2 && param->name == "llm_backbone.embed.weight") doubled += param->numel();
      }
    });
    EXPECT_EQ(counted, backbone) << layout.tp << " " << layout.pp;
    EXPECT_EQ(held, backbone + doubled) << layout.tp << " " << layout.pp;
  }
}

// Live tensors after each of many steps, of all ranks together.
TEST_F(SharesTest, StepsLeaveNothingBehind) { expect_nothing_left_behind({.tp = 2, .pp = 2}); }

TEST_F(SharesTest, StepsWithAnEncoderApartLeaveNothingBehind) {
  recipe_.parallel.vision_encoder = ModuleLayout{.dp = 2, .ranks = 2};
  expect_nothing_left_behind({.dp = 2});
}

void SharesTest::expect_nothing_left_behind(const ModuleLayout& layout) {
  static CountingAllocator allocator;  // tensors that static objects hold outlive the test
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
  const char* many = std::getenv("PARVL_SOAK_STEPS");
  recipe_.train.steps = many == nullptr ? 100 : std::atoll(many);
  std::vector<int64_t> live;
  on_ranks(layout, [&](Trainer& trainer) {
    const auto loader = trainer.make_loader();
    for (int64_t step = 0; step < recipe_.train.steps; ++step) {
      {
        const absl::StatusOr<GlobalBatch> batch = loader->next();
        ASSERT_TRUE(batch.ok()) << batch.status();
        ASSERT_TRUE(trainer.train_step(*batch).ok());
      }
      ASSERT_TRUE(trainer.ranks().agree(absl::OkStatus()).ok());  // all have ended the step
      if (trainer.ranks().rank() == 0) live.push_back(allocator.live());
      ASSERT_TRUE(trainer.ranks().agree(absl::OkStatus()).ok());  // none has begun the next
    }
  });
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/100);
  ASSERT_EQ(static_cast<int64_t>(live.size()), recipe_.train.steps);
  for (size_t step = 3; step < live.size(); ++step) EXPECT_EQ(live[step], live[2]) << "after step " << step;
}

TEST(ShareImages, PatchesAreEvenAndEveryImageIsOnceThere) {
  const std::vector<Grid> grids = {{1, 8, 8}, {1, 4, 4}, {1, 4, 6}, {1, 12, 8}, {1, 2, 2}, {1, 8, 6}};
  int64_t total = 0;
  for (const Grid& grid : grids) total += grid.patches();
  for (const auto& [ranks, encoder, projector] :
       {std::tuple(1, 1, 1), std::tuple(2, 1, 1), std::tuple(4, 1, 2), std::tuple(4, 2, 1), std::tuple(4, 2, 4)}) {
    std::vector<int64_t> seen(grids.size()), loads;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const VisionShare share = share_images({ranks, encoder, projector, rank}, grids, 2, {});
      EXPECT_EQ(share.replica.total(), total / 4);
      int64_t patches = 0;
      for (const int64_t image : share.images) patches += grids[static_cast<size_t>(image)].patches();
      if (rank % encoder == 0) {
        for (const int64_t image : share.images) ++seen[static_cast<size_t>(image)];
        loads.push_back(patches);
      }
      std::vector<int64_t> order = share.order;  // a permutation
      std::sort(order.begin(), order.end());
      for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], static_cast<int64_t>(i));
      const int64_t first = rank / projector * projector;
      for (int64_t i = 0; i < projector; ++i) {
        EXPECT_EQ(share.projector.counts[static_cast<size_t>(i)], share.replica.counts[static_cast<size_t>(first + i)]);
      }
    }
    for (const int64_t times : seen) EXPECT_EQ(times, 1);
    const int64_t mean = total / static_cast<int64_t>(loads.size()), largest = 96;  // an image is not divided
    EXPECT_LE(*std::max_element(loads.begin(), loads.end()), std::max(largest, mean * 12 / 10));
  }
}

// More ranks than images: those without have no rows.
TEST(ShareImages, OneImageForManyRanks) {
  const VisionShare share = share_images({4, 1, 1, 3}, {{1, 4, 4}}, 2, {2, 0, 3, 1});
  EXPECT_TRUE(share.images.empty());
  EXPECT_EQ(share.replica.counts, (std::vector<int64_t>{4, 0, 0, 0}));
  EXPECT_EQ(share.order, (std::vector<int64_t>{2, 0, 3, 1}));
}

}  // namespace
}  // namespace parvl
