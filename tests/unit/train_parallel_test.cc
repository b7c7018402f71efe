// Runs of several ranks, as threads: equal to one process, in every way of keeping the optimizer's state.
#include <absl/strings/match.h>

#include <cmath>

#include "parvl/comm/local/local_group.h"
#include "parvl/train/verify.h"
#include "train_fixture.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

class ParallelTrainTest : public TrainFixture {
 protected:
  struct Outcome {
    std::vector<absl::Status> statuses;                     // by rank
    std::vector<std::map<std::string, at::Tensor>> values;  // by rank
    std::vector<double> losses, norms;
  };

  void SetUp() override {
    TrainFixture::SetUp();
    recipe_.data.micro_batch = 1;
    recipe_.optim.clip_norm = 0.5;
    recipe_.optim.weight_decay = 0.01;
    recipe_.optim.schedule = "cosine";
  }

  // The fixture's sinks are rank 0's.
  TrainerEnvironment rank_environment(Communicator& communicator) {
    TrainerEnvironment env = environment();
    if (communicator.rank() > 0) {
      env.write = [](std::string_view) {};
      env.record = {};
      env.stop_requested = {};
    }
    env.communicator = &communicator;
    env.checks.full = full_checks_;
    return env;
  }

  Outcome train(int64_t dp, int64_t zero, int64_t tp = 1, int64_t pp = 1, int64_t own = 0, int64_t own_tp = 1) {
    recipe_.parallel.llm.dp = dp;
    recipe_.parallel.llm.tp = tp;
    recipe_.parallel.llm.pp = pp;
    recipe_.parallel.zero = zero;
    recipe_.parallel.vision_encoder.reset();
    if (own > 0) recipe_.parallel.vision_encoder = ModuleLayout{.dp = own / own_tp, .tp = own_tp, .ranks = own};
    const int64_t world = recipe_.parallel.world();
    events_.clear();
    Outcome out;
    out.statuses.resize(static_cast<size_t>(world));
    out.values.resize(static_cast<size_t>(world));
    run_local_world(world, {}, [&](Communicator& communicator) {
      const auto rank = static_cast<size_t>(communicator.rank());
      auto trainer = Trainer::create(recipe_, rank_environment(communicator));
      out.statuses[rank] = trainer.ok() ? (*trainer)->run() : trainer.status();
      if (!out.statuses[rank].ok()) return;
      const ParamTable& params = (*trainer)->model().params();
      const auto type = at::TensorOptions().dtype(to_scalar_type(*parse_dtype(recipe_.train.dtype)));
      for (const Param* param : params.untied()) {
        out.values[rank][param->name] = (*trainer)->ranks().whole(params, *param, param->value, type).clone();
      }
    });
    out.losses = losses();
    for (const Json& event : events_) {
      if (event["event"] == "step") out.norms.push_back(event["grad_norm"].get<double>());
    }
    return out;
  }

  Outcome train_afresh(int64_t dp, int64_t zero, int64_t tp = 1, int64_t pp = 1, int64_t own = 0, int64_t own_tp = 1) {
    std::filesystem::remove_all(recipe_.train.out);
    Outcome out = train(dp, zero, tp, pp, own, own_tp);
    for (const absl::Status& status : out.statuses) EXPECT_TRUE(status.ok()) << status;
    return out;
  }

  bool full_checks_ = false;
  // The largest difference over the largest value of each tensor.
  static double error(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want) {
    double out = got.size() == want.size() ? 0 : 1;
    for (const auto& [name, tensor] : want) {
      const double scale = std::max(tensor.abs().max().item<double>(), 1e-5);
      out = std::max(out, (got.at(name) - tensor).abs().max().item<double>() / scale);
    }
    return out;
  }
};

TEST_F(ParallelTrainTest, EveryLayoutEqualsOneProcess) {
  for (const char* name : {"adamw", "sgd"}) {
    recipe_.optim.name = name;
    recipe_.optim.momentum = recipe_.optim.name == "sgd" ? 0.9 : 0;
    const Outcome want = train_afresh(1, 0);
    ASSERT_EQ(want.losses.size(), 6u);
    for (const auto& [dp, zero, tp, pp, own] :
         {std::tuple(2, 0, 1, 1, 0), std::tuple(2, 1, 1, 1, 0), std::tuple(4, 0, 1, 1, 0), std::tuple(4, 1, 1, 1, 0),
          std::tuple(1, 0, 2, 1, 0), std::tuple(2, 1, 2, 1, 0), std::tuple(1, 0, 1, 2, 0), std::tuple(2, 1, 2, 2, 0),
          std::tuple(1, 0, 1, 1, 1), std::tuple(2, 1, 1, 1, 3), std::tuple(2, 1, 2, 2, 2)}) {
      SCOPED_TRACE(absl::StrCat(name, " dp ", dp, " zero ", zero, " tp ", tp, " pp ", pp, " encoder apart ", own));
      const Outcome got = train_afresh(dp, zero, tp, pp, own);
      ASSERT_EQ(got.losses.size(), want.losses.size());
      for (size_t i = 0; i < want.losses.size(); ++i) {
        EXPECT_NEAR(got.losses[i], want.losses[i], 1e-12 * std::abs(want.losses[i]));
        EXPECT_NEAR(got.norms[i], want.norms[i], 1e-10 * want.norms[i]);
      }
      EXPECT_LT(error(got.values[0], want.values[0]), 1e-9);
      for (const auto& values : got.values) {
        for (const auto& [param, tensor] : values) EXPECT_TRUE(tensor.equal(got.values[0].at(param))) << param;
      }
    }
  }
}

// 16-bit values: the masters are cut too.
TEST_F(ParallelTrainTest, CutMastersGiveTheSameBitsAsWholeOnes) {
  recipe_.train.dtype = "bfloat16";
  const Outcome whole = train_afresh(2, 0), cut = train_afresh(2, 1);
  EXPECT_EQ(whole.losses, cut.losses);
  EXPECT_EQ(error(cut.values[1], whole.values[1]), 0);
}

TEST_F(ParallelTrainTest, ARunGoesOnInAnotherLayout) {
  const Outcome want = train_afresh(1, 0);
  std::filesystem::remove_all(recipe_.train.out);
  std::vector<double> losses;
  recipe_.train.checkpoint_every = 2;
  for (const auto& [stop, dp, zero, tp, pp, own] :
       {std::tuple(1, 2, 1, 1, 1, 0), std::tuple(1, 1, 1, 1, 1, 2), std::tuple(1, 1, 0, 2, 1, 0),
        std::tuple(1, 1, 0, 1, 2, 0), std::tuple(1, 2, 1, 1, 1, 3), std::tuple(0, 2, 1, 2, 2, 0)}) {
    stop_after_ = stop;
    const Outcome part = train(dp, zero, tp, pp, own);
    for (const absl::Status& status : part.statuses) ASSERT_TRUE(status.ok()) << status;
    losses.insert(losses.end(), part.losses.begin(), part.losses.end());
    if (stop == 0) {
      EXPECT_LT(error(part.values[3], want.values[0]), 1e-9);
    }
  }
  ASSERT_EQ(losses.size(), want.losses.size());
  for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], want.losses[i], 1e-10);
}

// At one layout a resumed run is the undisturbed one to the bit.
TEST_F(ParallelTrainTest, AResumedRunEqualsAnUndisturbedOne) {
  recipe_.train.dtype = "bfloat16";
  for (const auto& [tp, pp, own] :
       {std::tuple(1, 1, 0), std::tuple(2, 1, 0), std::tuple(1, 2, 0), std::tuple(1, 1, 3), std::tuple(2, 1, 2)}) {
    const Outcome whole = train_afresh(2, 1, tp, pp, own, tp);
    std::filesystem::remove_all(recipe_.train.out);
    stop_after_ = 3;
    const Outcome first = train(2, 1, tp, pp, own, tp);
    stop_after_ = 0;
    const Outcome second = train(2, 1, tp, pp, own, tp);
    std::vector<double> losses = first.losses;
    losses.insert(losses.end(), second.losses.begin(), second.losses.end());
    EXPECT_EQ(losses, whole.losses);
    EXPECT_EQ(error(second.values[1], whole.values[1]), 0);
  }
}

// The directory that a cut model writes is the one that a whole model with the same weights writes.
TEST_F(ParallelTrainTest, ACutModelIsSavedWhole) {
  recipe_.train.steps = 1;
  recipe_.optim.lr = 0;
  std::vector<std::string> files;
  for (const auto& [tp, pp, own] :
       {std::tuple(1, 1, 0), std::tuple(2, 1, 0), std::tuple(1, 2, 0), std::tuple(1, 2, 2)}) {
    train_afresh(1, 0, tp, pp, own, /*own_tp=*/2);
    files.push_back(*read_file(recipe_.train.out + "/step-1/model.safetensors"));
  }
  EXPECT_EQ(files[0], files[1]);
  EXPECT_EQ(files[0], files[2]);
  EXPECT_EQ(files[0], files[3]);
}

// Every rank takes its part of the evaluation, and the score is the whole one.
TEST_F(ParallelTrainTest, EveryLayoutEvaluatesAlike) {
  recipe_.data.eval = recipe_.data.train;
  recipe_.optim.lr = 0.01;
  std::vector<Json> scores;
  for (const auto& [dp, tp, pp, own] : {std::tuple(1, 1, 1, 0), std::tuple(4, 1, 1, 0), std::tuple(2, 2, 1, 0),
                                        std::tuple(2, 1, 2, 0), std::tuple(1, 1, 1, 1), std::tuple(2, 2, 2, 2)}) {
    train_afresh(dp, 0, tp, pp, own, own > 1 ? 2 : 1);
    for (const Json& event : events_) {
      if (event["event"] == "eval") scores.push_back(event);
    }
  }
  ASSERT_EQ(scores.size(), 6u);
  EXPECT_EQ(scores[0]["samples"], 10);
  for (const Json& score : scores) {
    EXPECT_EQ(score["samples"], scores[0]["samples"]);
    EXPECT_EQ(score["accuracy"], scores[0]["accuracy"]);
    EXPECT_NEAR(score["loss"].get<double>(), scores[0]["loss"].get<double>(), 1e-10);
  }
}

TEST_F(ParallelTrainTest, HeadsThatCannotBeCutAreRefused) {
  const Outcome out = train(1, 0, 4);
  for (const absl::Status& status : out.statuses) {
    EXPECT_EQ(exit_code(status), 2) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("tp = 4 does not divide the 2 parts that"));
  }
  // All ranks say it, not only those that would have to cut.
  for (const absl::Status& status : train(1, 0, 1, 1, 4, 4).statuses) {
    EXPECT_EQ(exit_code(status), 2) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("vision_encoder: tp = 4 does not divide the 2 parts that"));
  }
}

// With its header whole, the image is bad only for who decodes it: the replica's rank, or one of the encoder's own.
TEST_F(ParallelTrainTest, ABadSampleEndsAllRanksAndTheOneThatHasItNamesIt) {
  std::filesystem::resize_file(folder_ / "5.png", 40);
  for (const auto& [dp, own] : {std::pair(4, 0), std::pair(2, 2)}) {
    const Outcome out = train(dp, 0, 1, 1, own);
    int named = 0;
    for (const absl::Status& status : out.statuses) {
      ASSERT_FALSE(status.ok());
      if (absl::StrContains(status.message(), "5.png")) {
        ++named;
      } else {
        EXPECT_THAT(std::string(status.message()), HasSubstr("failed; its own last line says why"));
      }
    }
    EXPECT_EQ(named, 1) << own;
  }
}

// An encoder rank that sends what nobody expects: all ranks say which call of which group it was, before any update.
TEST_F(ParallelTrainTest, AWrongMessageOfImagesIsNamed) {
  recipe_.parallel.vision_encoder = ModuleLayout{.dp = 1, .ranks = 1};
  std::vector<absl::Status> statuses(2);
  std::vector<bool> changed(2);
  run_local_world(2, {}, [&](Communicator& communicator) {
    const auto rank = static_cast<size_t>(communicator.rank());
    auto trainer = Trainer::create(recipe_, rank_environment(communicator));
    statuses[rank] = trainer.status();
    if (!trainer.ok()) return;
    const auto before = state(**trainer);
    double wrong[3] = {1, 2, 3};
    std::unique_ptr<Work> work;
    if (rank == 1) work = (*trainer)->ranks().images(1, 0)->send({wrong, 3, DType::kFloat64}, 0);
    statuses[rank] = catch_exceptions("a step", [&] { return (*trainer)->run(); });
    changed[rank] = !same(before, state(**trainer));
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("group vision_encoder.images.1>0, message 0 from rank 1 to rank 0: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 called send of 3 float64 to rank 0"));
  }
  EXPECT_FALSE(changed[0] || changed[1]);
}

// What verify sees: gradients of the first batch, and a difference where there is one.
TEST_F(ParallelTrainTest, VerifyFindsEqualGradientsAndSeesUnequalOnes) {
  const VerifyRun want = *run_steps(recipe_, environment(), 3);
  for (const int64_t zero : {0, 1}) {
    recipe_.parallel.llm.dp = 4;
    recipe_.parallel.zero = zero;
    std::vector<absl::StatusOr<VerifyRun>> runs(4);
    run_local_world(4, {}, [&](Communicator& rank) {
      runs[static_cast<size_t>(rank.rank())] = run_steps(recipe_, rank_environment(rank), 3);
    });
    for (const auto& run : runs) {
      ASSERT_TRUE(run.ok()) << run.status();
      const VerifyResult result = compare(*run, want);
      EXPECT_LT(result.max_relative_error, 1e-10) << result.parameter;
      EXPECT_LT(result.loss_error, 1e-12);
      EXPECT_LT(result.grad_norm_error, 1e-12);
      EXPECT_LT(result.weight_error, 1e-9);
    }
    VerifyRun wrong = *runs[0];
    const std::string name = wrong.gradients.rbegin()->first;
    wrong.gradients[name] = wrong.gradients[name].mul(1 + 1e-6);
    EXPECT_EQ(compare(wrong, want).parameter, name);
    EXPECT_NEAR(compare(wrong, want).max_relative_error, 1e-6, 1e-8);
    wrong.gradients.erase(name);
    EXPECT_EQ(compare(wrong, want).max_relative_error, 1);
  }
}

// What verify looks at beside the numbers: a value that is another on one of the ranks that share it.
TEST_F(ParallelTrainTest, UnequalReplicasAreNamed) {
  struct Row {
    ModuleLayout llm;
    std::string spoiled, says;
  };
  const std::vector<Row> rows = {
      {{.dp = 4}, "llm_backbone.norm.weight", "'llm_backbone.norm.weight' is another on rank 1"},
      {{.tp = 2}, "llm_backbone.norm.weight", "'llm_backbone.norm.weight' is another on rank 1"},
      {{.pp = 2}, "llm_backbone.embed.weight", "'llm_backbone.embed.weight' is another on rank 1"},
      {{.dp = 2, .tp = 2}, "llm_backbone.layers.0.attn.q.weight", "is another on rank 1; 1 of "}};
  for (const Row& row : rows) {
    recipe_.parallel.llm = row.llm;
    const int64_t world = row.llm.product();
    std::vector<absl::Status> before(static_cast<size_t>(world)), after(before);
    run_local_world(world, {}, [&](Communicator& communicator) {
      const auto rank = static_cast<size_t>(communicator.rank());
      const auto trainer = Trainer::create(recipe_, rank_environment(communicator));
      before[rank] = trainer.status();
      if (!trainer.ok()) return;
      before[rank] = expect_equal_values(**trainer);
      // Rank 1 of the group: with dp and tp the last of the four.
      if (communicator.rank() == (world == 4 && row.llm.tp == 2 ? 3 : 1)) {
        const at::Tensor value = (*trainer)->model().params().find(row.spoiled)->value;
        value.view(-1)[0].add_(1e-9);
      }
      after[rank] = expect_equal_values(**trainer);
    });
    int named = 0;
    for (size_t rank = 0; rank < after.size(); ++rank) {
      EXPECT_TRUE(before[rank].ok()) << before[rank];
      ASSERT_FALSE(after[rank].ok());
      named += absl::StrContains(after[rank].message(), row.says) ? 1 : 0;
    }
    EXPECT_GE(named, 2) << row.spoiled;  // all of the group; others hear of it
  }
}

// Every call is compared before its result is used; nothing else changes.
TEST_F(ParallelTrainTest, FullChecksChangeNoResult) {
  recipe_.train.steps = 2;
  const Outcome want = train_afresh(2, 1, 2, 2);
  full_checks_ = true;
  const Outcome got = train_afresh(2, 1, 2, 2);
  EXPECT_EQ(got.losses, want.losses);
  ASSERT_EQ(got.losses.size(), 2u);
  EXPECT_EQ(error(got.values[7], want.values[0]), 0);
}

// Ranks that were started with unlike recipes would learn nonsense, or wait for each other.
TEST_F(ParallelTrainTest, UnlikeRecipesAreRefused) {
  recipe_.parallel.llm.dp = 2;
  for (int what = 0; what < 3; ++what) {
    std::vector<absl::Status> statuses(2);
    run_local_world(2, {}, [&](Communicator& rank) {
      Recipe recipe = recipe_;
      if (rank.rank() == 1 && what == 0) recipe.optim.lr *= 2;
      if (rank.rank() == 1 && what == 1) recipe.parallel.zero = 1;
      if (rank.rank() == 1 && what == 2) recipe.seed += 1;
      statuses[static_cast<size_t>(rank.rank())] = Trainer::create(recipe, rank_environment(rank)).status();
    });
    for (const absl::Status& status : statuses) {
      const char* const sections[] = {"'optim'", "'parallel'", "'model'"};
      EXPECT_EQ(exit_code(status), 2) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(sections[what]));
    }
  }
}

TEST_F(ParallelTrainTest, AnotherNumberOfProcessesIsRefused) {
  recipe_.parallel.llm.dp = 2;
  EXPECT_THAT(std::string(run().message()), HasSubstr("layout has 2 ranks, but 1 process was started; start 2"));
}

}  // namespace
}  // namespace parvl
