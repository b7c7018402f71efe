// What plan/cost/values says a rank holds, against the tables of the models themselves.
#include <gmock/gmock.h>

#include "models_fixture.h"
#include "parvl/base/clock.h"
#include "parvl/comm/local/local_group.h"
#include "parvl/plan/cost/values.h"
#include "parvl/train/run_ranks.h"

namespace parvl {
namespace {

// Where one of `ranks` ranks stands, for ParamTable::split; it has nobody to talk to.
class PlaceOnly : public ProcessGroup {
 public:
  PlaceOnly(int64_t rank, int64_t ranks) : rank_(rank), ranks_(ranks) {}
  int64_t rank() const override { return rank_; }
  int64_t size() const override { return ranks_; }
  const std::string& name() const override { return name_; }
  std::unique_ptr<Work> all_reduce(Buffer, ReduceOp) override { return nullptr; }
  std::unique_ptr<Work> all_gather(ConstBuffer, Buffer) override { return nullptr; }
  std::unique_ptr<Work> reduce_scatter(ConstBuffer, Buffer) override { return nullptr; }
  std::unique_ptr<Work> broadcast(Buffer, int64_t) override { return nullptr; }
  std::unique_ptr<Work> all_to_all(ConstBuffer, absl::Span<const int64_t>, Buffer, absl::Span<const int64_t>) override {
    return nullptr;
  }
  std::unique_ptr<Work> send(ConstBuffer, int64_t) override { return nullptr; }
  std::unique_ptr<Work> receive(Buffer, int64_t) override { return nullptr; }
  std::unique_ptr<Work> barrier() override { return nullptr; }
  void abort(const std::string&) override {}

 private:
  int64_t rank_, ranks_;
  std::string name_ = "place";
};

constexpr const char* kFamilies[] = {"llama", "qwen2", "qwen2_vl", "qwen2_5_vl"};

// Heads for four ranks; a vocabulary that four do not divide.
ModelSpec spec_of(const std::string& family, bool tied, int64_t kv_heads) {
  Json config = tiny_config(family);
  config["tie_word_embeddings"] = tied;
  config["num_key_value_heads"] = kv_heads;
  config["vocab_size"] = 391;
  if (config.contains("vision_config")) config["vision_config"]["num_heads"] = 4;
  return *parse_model_spec(config, "config");
}

void expect_held(const ModelSpec& spec, int64_t ranks, int64_t rank) {
  PlaceOnly group(rank, ranks);
  const std::unique_ptr<Model> model = Model::create(spec);
  for (const Module module : {Module::kVisionEncoder, Module::kProjector, Module::kBackbone}) {
    ASSERT_TRUE(model->params().split(module, ranks == 1 ? nullptr : &group).ok());
  }
  const std::vector<Param*> real = model->params().owned();
  const std::vector<ParamSpec> params = list_params(spec);
  ASSERT_EQ(params.size(), real.size());
  for (size_t i = 0; i < params.size(); ++i) {
    SCOPED_TRACE(absl::StrCat(params[i].name, " on ", rank, " of ", ranks));
    EXPECT_EQ(params[i].name, real[i]->name);
    EXPECT_EQ(params[i].module, to_string(real[i]->module));
    EXPECT_EQ(params[i].shape, real[i]->shape);
    const HeldPart held = *held_part(params[i], ranks, rank);
    EXPECT_EQ(held.values, real[i]->part_numel());
    EXPECT_EQ(held.parts, real[i]->part.count);
    EXPECT_EQ(held.copies, real[i]->part.copies);
  }
}

TEST(HeldValues, EveryFamilyOnEveryTensorRank) {
  for (const char* family : kFamilies) {
    for (const bool tied : {false, true}) {
      for (const int64_t kv_heads : {1, 2, 4}) {
        SCOPED_TRACE(absl::StrCat(family, tied ? " tied " : " ", kv_heads));
        for (const int64_t ranks : {1, 2, 4}) {
          for (int64_t rank = 0; rank < ranks; ++rank) expect_held(spec_of(family, tied, kv_heads), ranks, rank);
        }
      }
    }
  }
}

TEST(HeldValues, WhatCannotBeCutIsRefusedAlike) {
  PlaceOnly group(0, 3);
  const ModelSpec spec = spec_of("qwen2", false, 2);
  const std::unique_ptr<Model> model = Model::create(spec);
  const absl::Status want = model->params().split(Module::kBackbone, &group);
  ASSERT_FALSE(want.ok());
  for (const ParamSpec& param : list_params(spec)) {
    const absl::StatusOr<HeldPart> held = held_part(param, 3, 0);
    if (held.ok()) continue;
    EXPECT_EQ(held.status(), want);
    return;
  }
  FAIL() << "nothing is refused";
}

TEST(HeldValues, EveryStage) {
  for (const bool tied : {false, true}) {
    const ModelSpec spec = spec_of("qwen2_vl", tied, 2);
    const std::unique_ptr<Model> model = Model::create(spec);
    ParallelSpec parallel;
    parallel.llm.pp = 3;
    parallel.llm.stages = {0, 1, 1};
    const auto stages = *split_layers(spec.backbone.layers, 3, parallel.llm.stages);
    run_local_world(3, {}, [&](Communicator& communicator) {
      const RealClock clock;
      CheckOptions checks;
      checks.clock = &clock;
      const auto ranks = RunRanks::create(parallel, spec, &communicator, checks);
      ASSERT_TRUE(ranks.ok()) << ranks.status();
      for (const ParamSpec& param : list_params(spec)) {
        for (int64_t stage = 0; stage < 3; ++stage) {
          EXPECT_EQ(on_stage(param, stages[static_cast<size_t>(stage)]),
                    (*ranks)->holds(*model->params().find(param.name), stage))
              << param.name << " on " << stage;
        }
      }
    });
  }
}

}  // namespace
}  // namespace parvl
