// The formulas of plan/cost and train/layout against what ranks really hold, keep and call.
#include <array>
#include <atomic>

#include "comm_counting.h"
#include "looking_clock.h"
#include "parvl/comm/local/local_group.h"
#include "parvl/train/layout_report.h"
#include "parvl/train/micro_batch.h"
#include "parvl/train/vision_share.h"
#include "train_fixture.h"

namespace parvl {
namespace {

struct Case {
  std::string name;
  ParallelSpec parallel;
  std::function<void(Recipe&)> change;
};

ParallelSpec parallel_of(const ModuleLayout& llm, int64_t zero = 0) {
  ParallelSpec out;
  out.llm = llm;
  out.zero = zero;
  return out;
}

class FormulasTest : public TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    recipe_.data.micro_batch = 2;
    recipe_.data.global_batch = 8;
    recipe_.optim.weight_decay = 0.01;
    set_config({{"num_attention_heads", 4}, {"num_key_value_heads", 2}, {"hidden_size", 32}, {"vocab_size", 391}},
               {{"num_heads", 4}, {"hidden_size", 32}});
  }
  void set_config(const Json& values, const Json& vision = Json::object()) {
    Json config = *read_json_file(recipe_.config);
    config.update(values);
    config["vision_config"].update(vision);
    std::ofstream(folder_ / "config.json") << config.dump();
  }
  ModelSpec spec() const { return *parse_model_spec(*read_json_file(recipe_.config), "config"); }

  void on_ranks(const std::function<void(Trainer&, CountingCommunicator&)>& body) {
    const int64_t world = recipe_.parallel.world();
    std::vector<absl::Status> statuses(static_cast<size_t>(world));
    run_local_world(world, {}, [&](Communicator& inner) {
      CountingCommunicator communicator(inner);
      TrainerEnvironment env = environment();
      env.write = [](std::string_view) {};
      env.record = {};
      env.stop_requested = {};
      env.loader_threads = 1;
      env.communicator = world > 1 ? &communicator : nullptr;
      absl::Status& status = statuses[static_cast<size_t>(inner.rank())];
      auto trainer = Trainer::create(recipe_, env);
      status = trainer.status();
      if (!trainer.ok()) return;
      status = catch_exceptions("a rank failed", [&] {
        body(**trainer, communicator);
        return absl::OkStatus();
      });
    });
    for (const absl::Status& status : statuses) ASSERT_TRUE(status.ok()) << status;
  }

  // All samples alike.
  void write_long_answers(bool images = false) {
    std::string answer;
    for (int i = 0; i < 40; ++i) answer += "a red rectangle, a circle. ";
    std::ofstream data(folder_ / "data.jsonl");
    Json content = {{{"type", "text"}, {"text", "what?"}}};
    if (images) content.push_back({{"type", "image"}, {"image", "0.png"}});
    const Json messages = {{{"role", "user"}, {"content", content}}, {{"role", "assistant"}, {"content", answer}}};
    for (int i = 0; i < kSamples; ++i) data << Json{{"messages", messages}}.dump() << "\n";
  }

  // The micro batches of an LLM rank's batch as formulas want them.
  std::vector<StepMicrobatch> microbatches(const Layout& layout, const GlobalBatch& batch) const {
    std::vector<StepMicrobatch> out;
    const auto micro = static_cast<size_t>(recipe_.data.micro_batch);
    for (size_t begin = 0; begin < batch.samples.size(); begin += micro) {
      StepMicrobatch one;
      std::vector<Grid> grids;
      std::vector<int64_t> encoders;  // of an encoder's own ranks
      for (size_t i = begin; i < begin + micro && layout.encoder_apart(); ++i) {
        for (const int64_t group : encoders_of(batch.samples[i], batch.encoders[i])) encoders.push_back(group);
      }
      for (const SequenceInput& sequence : to_sequences(batch.samples, begin, begin + micro)) {
        one.tokens += static_cast<int64_t>(sequence.ids.size());
        for (size_t t = 1; t < sequence.is_target.size(); ++t) one.targets += sequence.is_target[t];
        for (const ImageSpan& image : sequence.images) grids.push_back(image.grid);
      }
      if (one.targets == 0) continue;
      const int64_t encoder = layout.cut("vision_encoder").ranks, ranks = layout.encoding_ranks();
      for (int64_t first = 0; first < ranks && !grids.empty(); first += encoder) {
        const VisionShare share = share_images({ranks, encoder, layout.cut("projector").ranks, first}, grids,
                                               spec().vision->merge, {}, encoders);
        int64_t patches = 0;
        for (const int64_t image : share.images) patches += grids[static_cast<size_t>(image)].patches();
        one.patches.push_back(patches);
      }
      out.push_back(one);
    }
    return out;
  }

  // One step's calls by rank against the formulas', and what each rank holds.
  void expect_as_formulas(const Case& c) {
    SCOPED_TRACE(c.name);
    const Recipe before = recipe_;
    recipe_.parallel = c.parallel;
    if (c.change) c.change(recipe_);
    const absl::StatusOr<Layout> layout = Layout::create(spec(), recipe_);
    ASSERT_TRUE(layout.ok()) << layout.status();
    StepMicrobatches all(static_cast<size_t>(layout->replicas()));
    std::vector<CallCounts> counted(static_cast<size_t>(layout->mesh().world));
    on_ranks([&](Trainer& trainer, CountingCommunicator& communicator) {
      const int64_t rank = trainer.ranks().rank();
      const auto loader = trainer.make_loader();
      const GlobalBatch batch = *loader->next();
      if (layout->place_of(rank) == 0 && layout->replica_of(rank) >= 0) {
        all[static_cast<size_t>(layout->replica_of(rank))] = microbatches(*layout, batch);
      }
      expect_held_bytes(*layout, trainer);
      communicator.take();
      ASSERT_TRUE(trainer.train_step(batch).ok());
      counted[static_cast<size_t>(rank)] = communicator.take();
    });
    const auto rows = step_traffic(*layout, all);
    ASSERT_TRUE(rows.ok()) << rows.status();
    expect_counts(*rows, counted);
    recipe_ = before;
  }

  static void expect_counts(const std::vector<GroupTraffic>& rows, const std::vector<CallCounts>& counted) {
    std::vector<CallCounts> want(counted.size());
    for (const GroupTraffic& row : rows) {
      const bool message = row.traffic.call == TrafficKind::kSend;
      for (const int64_t rank : message ? std::vector<int64_t>{row.ranks[0]} : row.ranks) {
        want[static_cast<size_t>(rank)].of[{row.group, to_string(row.traffic.call)}] = {row.traffic.calls,
                                                                                        row.traffic.bytes};
      }
    }
    for (size_t rank = 0; rank < counted.size(); ++rank) EXPECT_EQ(text(counted[rank]), text(want[rank])) << rank;
  }
  static std::string text(const CallCounts& counts) {
    std::string out;
    for (const auto& [key, count] : counts.of) {
      absl::StrAppend(&out, key.first, " ", key.second, " ", count.calls, " ", count.bytes, "\n");
    }
    return out;
  }

  // Of the whole batch as one micro batch, what is this rank's part of it. Rows of an encoder apart hold anything.
  Bundle forward(const Trainer& trainer, const GlobalBatch& batch, std::vector<Segment>& segments) const {
    const Model& model = trainer.model();
    const RunRanks& ranks = trainer.ranks();
    std::vector<int64_t> encoders;
    for (size_t i = 0; i < batch.samples.size() && ranks.encoder_apart(); ++i) {
      for (const int64_t group : encoders_of(batch.samples[i], batch.encoders[i])) encoders.push_back(group);
    }
    const MicroBatch micro =
        make_micro_batch(model, to_sequences(batch.samples, 0, batch.samples.size()), at::kCPU, ranks, encoders);
    SegmentList list(model.params(), recipe_.train.recompute == "full");
    Bundle bundle;
    if (!ranks.encoder_apart() || ranks.is_encoder()) {
      list.add_vision(model, micro, bundle);
    } else {
      list.starts_after(true);
      bundle.set("visual", at::zeros({micro.share->replica.total(), model.spec().backbone.hidden}, pixel_type(model)));
    }
    if (!ranks.is_encoder()) {
      if (micro.share) list.add(exchange_piece(micro));
      list.add(model.backbone().pieces(micro.packed.backbone));
      list.add(
          model.backbone().loss_piece(micro.packed.tokens, micro.packed.loss_rows, micro.packed.targets, /*scale=*/1));
    }
    segments = list.take();
    for (Segment& segment : segments) bundle = segment.forward(bundle);
    return bundle;
  }

  static void expect_held_bytes(const Layout& layout, const Trainer& trainer) {
    const auto bytes = [](const at::Tensor& t) { return t.defined() ? static_cast<int64_t>(t.nbytes()) : 0; };
    const StepMicrobatches any(static_cast<size_t>(layout.replicas()), {{10, 5, {}}});
    const RankBytes want = *layout.bytes(trainer.ranks().rank(), any);
    RankBytes got;
    for (const Param* param : trainer.model().params().owned()) {
      if (!param->trainable()) got.weights += bytes(param->value);
    }
    for (const OptimGroupState& group : trainer.optimizer().groups()) {
      got.weights += bytes(group.value);
      got.gradients += bytes(group.grad);
      got.optimizer += bytes(group.moment1) + bytes(group.moment2);
      if (!group.value.is_same(group.master)) got.optimizer += bytes(group.master);
    }
    EXPECT_EQ(got.weights, want.weights) << trainer.ranks().rank();
    EXPECT_EQ(got.gradients, want.gradients);
    EXPECT_EQ(got.optimizer, want.optimizer);
  }
};

TEST_F(FormulasTest, AStepMakesTheCallsThatTheFormulasSay) {
  ParallelSpec encoder = parallel_of({.dp = 1, .tp = 2});
  encoder.vision_encoder = ModuleLayout{.dp = 1, .tp = 2};
  ParallelSpec projector = parallel_of({.dp = 1, .tp = 4});
  projector.vision_encoder = ModuleLayout{.dp = 2, .tp = 2};
  projector.projector = ModuleLayout{.dp = 1, .tp = 4};
  ParallelSpec apart = parallel_of({.dp = 2, .tp = 2}, 1), apart_cut = parallel_of({.dp = 1, .pp = 2});
  apart.vision_encoder = ModuleLayout{.dp = 3, .ranks = 3};
  apart_cut.vision_encoder = ModuleLayout{.dp = 1, .tp = 2, .ranks = 2};
  ParallelSpec uneven = parallel_of({.dp = 1, .pp = 3});
  uneven.llm.stages = {0, 1, 1};
  const auto recompute = [](Recipe& recipe) { recipe.train.recompute = "full"; };
  const auto freeze = [](const std::vector<std::string>& patterns) {
    return [patterns](Recipe& recipe) { recipe.train.freeze = patterns; };
  };
  const std::vector<Case> cases = {
      {"one process", parallel_of({}), {}},
      {"dp2", parallel_of({.dp = 2}), {}},
      {"dp2 zero1", parallel_of({.dp = 2}, 1), {}},
      {"dp2 zero1 bfloat16", parallel_of({.dp = 2}, 1), [](Recipe& recipe) { recipe.train.dtype = "bfloat16"; }},
      {"tp2", parallel_of({.tp = 2}), {}},
      {"tp4 with two key heads", parallel_of({.tp = 4}), {}},
      {"pp2", parallel_of({.pp = 2}), {}},
      {"pp3 without layers on the first", uneven, {}},
      {"pp2 tp2", parallel_of({.tp = 2, .pp = 2}), {}},
      {"dp2 tp2 pp2 zero1", parallel_of({.dp = 2, .tp = 2, .pp = 2}, 1), {}},
      {"encoder tp2", encoder, {}},
      {"encoder tp2, projector tp4, sgd", projector, [](Recipe& recipe) { recipe.optim.name = "sgd"; }},
      {"tp2 recomputed", parallel_of({.tp = 2}), recompute},
      {"pp2 tp2 recomputed", parallel_of({.tp = 2, .pp = 2}), recompute},
      {"encoder tp2 recomputed", encoder, recompute},
      {"tp2, vision frozen", parallel_of({.tp = 2}), freeze({"vision_encoder.*", "projector.*"})},
      {"encoder tp2, the first layers frozen", encoder,
       freeze({"vision_encoder.*", "projector.*", "llm_backbone.embed.*", "llm_backbone.layers.0.*"})},
      {"pp2 tp2, backbone frozen", parallel_of({.tp = 2, .pp = 2}), freeze({"llm_backbone.*"})},
      {"encoder apart on three ranks, two tensor parallel replicas", apart, {}},
      {"encoder apart on three ranks, frozen", apart, freeze({"vision_encoder.*", "projector.*"})},
      {"encoder apart cut over two ranks, two stages", apart_cut, {}},
      {"encoder apart cut over two ranks, recomputed", apart_cut, recompute},
      {"encoder apart cut over two ranks, only the projector trained", apart_cut,
       freeze({"vision_encoder.*", "llm_backbone.*"})},
      {"tp2 recomputed, a part of the encoder frozen", encoder,
       [&](Recipe& recipe) {
         recompute(recipe);
         recipe.train.freeze = {"vision_encoder.patch_embed.*", "vision_encoder.blocks.0.*"};
       }},
  };
  for (const bool tied : {true, false}) {
    set_config({{"tie_word_embeddings", tied}});
    for (const Case& c : cases) expect_as_formulas(c);
  }
}

// Of 8,000 words each of two ranks computes 4,000: no tensor has more logits than a micro batch's rows of these, and
// what the ranks say to each other is far less than that.
TEST_F(FormulasTest, NobodyHasTheLogitsOfAllWords) {
  static CountingAllocator allocator;  // tensors that static objects hold outlive the test
  constexpr int64_t kWords = 8000;
  set_config({{"vocab_size", kWords}});
  write_long_answers();
  recipe_.data.micro_batch = recipe_.data.global_batch = 12;
  recipe_.train.dtype = "float32";
  recipe_.parallel = parallel_of({.tp = 2});
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
  std::atomic<int64_t> rows = 0, message = 0;
  on_ranks([&](Trainer& trainer, CountingCommunicator& communicator) {
    const auto loader = trainer.make_loader();
    const GlobalBatch batch = *loader->next();
    ASSERT_TRUE(trainer.ranks().agree(absl::OkStatus()).ok());
    communicator.take();
    if (trainer.ranks().rank() == 0) allocator.take_largest();
    ASSERT_TRUE(trainer.ranks().agree(absl::OkStatus()).ok());
    const absl::StatusOr<StepResult> result = trainer.train_step(batch);
    ASSERT_TRUE(result.ok());
    rows = result->targets;
    message = std::max<int64_t>(message, communicator.take().largest);
  });
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/100);
  ASSERT_GT(rows, 300);  // so that logits are larger than all gradients together, which have two matrices of 32 a word
  EXPECT_EQ(allocator.take_largest(), rows * kWords / 2 * 4);
  EXPECT_LT(message, rows * kWords / 20);
}

// What a micro batch's forward leaves for its backward.
TEST_F(FormulasTest, KeptActivations) {
  static CountingAllocator allocator;
  set_config({{"num_hidden_layers", 4}});
  recipe_.data.micro_batch = recipe_.data.global_batch = 12;
  recipe_.train.dtype = "float32";
  ParallelSpec apart = parallel_of({});
  apart.vision_encoder = ModuleLayout{.ranks = 1};
  for (const ParallelSpec& parallel : {parallel_of({}), parallel_of({.tp = 2}), apart}) {
    for (const char* recompute : {"none", "full"}) {
      const int64_t ranks = parallel.world();
      SCOPED_TRACE(absl::StrCat(ranks, " ", parallel.llm.tp, " ", recompute));
      recipe_.parallel = parallel;
      recipe_.train.recompute = recompute;
      const Layout layout = *Layout::create(spec(), recipe_);
      c10::SetCPUAllocator(&allocator, /*priority=*/100);
      int64_t before = 0, after = 0;
      std::vector<StepMicrobatch> one;
      on_ranks([&](Trainer& trainer, CountingCommunicator&) {
        const auto all_here = [&] { ASSERT_TRUE(trainer.ranks().agree(absl::OkStatus()).ok()); };
        const bool first = trainer.ranks().rank() == 0;
        const auto loader = trainer.make_loader();
        const GlobalBatch batch = *loader->next();
        if (first) one = microbatches(layout, batch);
        all_here();
        if (first) before = allocator.live();
        all_here();
        std::vector<Segment> segments;
        const Bundle out = forward(trainer, batch, segments);
        all_here();
        if (first) after = allocator.live();
        all_here();
      });
      c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/100);
      int64_t want = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) want += layout.bytes(rank, {one})->activations;
      if (recipe_.train.recompute == "full") {  // nothing is made again yet, and the loss's rows are not kept
        const MicrobatchRows rows{one[0].tokens, 0, one[0].targets};
        const TensorCut cut = layout.cut("llm_backbone");
        const int64_t again = layer_activations(spec().backbone, rows.tokens, {cut.ranks, cut.value, false}) +
                              loss_activations(spec().backbone, rows, cut);
        want -= parallel.llm.tp * again;
      }
      EXPECT_NEAR(static_cast<double>(after - before) / static_cast<double>(want), 1, 0.05)
          << after - before << " kept, " << want << " by formula";
    }
  }
}

// The most that each stage's rank keeps between two actions of a step.
TEST_F(FormulasTest, KeptActivationsOfStages) {
  static CountingAllocator allocator;
  static std::array<LookingClock::Rank, 4> counts;
  const LookingClock clock;
  set_config({{"num_hidden_layers", 6}});
  recipe_.data.micro_batch = 1;
  recipe_.train.dtype = "float32";
  for (const bool images : {false, true}) {
    write_long_answers(images);
    for (const auto& [tp, pp] : {std::pair(1, 2), std::pair(1, 3), std::pair(2, 2)}) {
      recipe_.parallel = parallel_of({.tp = tp, .pp = pp});
      const Layout layout = *Layout::create(spec(), recipe_);
      std::vector<StepMicrobatch> all;
      std::vector<int64_t> kept(static_cast<size_t>(layout.mesh().world));
      c10::SetCPUAllocator(&allocator, /*priority=*/100);
      on_ranks([&](Trainer& trainer, CountingCommunicator&) {
        const auto rank = static_cast<size_t>(trainer.ranks().rank());
        const auto loader = trainer.make_loader();
        const GlobalBatch batch = *loader->next();
        if (rank == 0) all = microbatches(layout, batch);
        std::vector<ActionRecord> records;
        PipelineOptions options;
        options.clock = &clock;
        options.record = &records;
        for (size_t i = 0; i < batch.samples.size(); ++i) {
          PipelineMicrobatch& one = options.microbatches.emplace_back();
          for (const ImageSpan& image : to_sequence(batch.samples[i]).images) one.grids.push_back(image.grid);
        }
        options.sequences = [&](int64_t i) {
          return to_sequences(batch.samples, static_cast<size_t>(i), static_cast<size_t>(i) + 1);
        };
        counts[rank].live = counts[rank].most = 0;
        LookingClock::look_at(&counts[rank]);
        run_pipeline(trainer.model(), trainer.ranks(), at::kCPU, options);
        LookingClock::look_at(nullptr);
        kept[rank] = counts[rank].most;
      });
      c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), /*priority=*/100);
      for (size_t rank = 0; rank < kept.size(); ++rank) {
        const int64_t want = layout.bytes(static_cast<int64_t>(rank), {all})->activations;
        // The formula counts what each micro batch under way sends; most of it has been received by then.
        EXPECT_NEAR(static_cast<double>(kept[rank]) / static_cast<double>(want), 1, 0.13)
            << "tp " << tp << " pp " << pp << (images ? " images" : "") << " rank " << rank << ": " << kept[rank]
            << " kept, " << want << " by formula";
      }
    }
  }
}

}  // namespace
}  // namespace parvl
