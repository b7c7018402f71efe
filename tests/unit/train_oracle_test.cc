// The oracle: layouts of ranks against one process, in float64, over a covering array of layouts, models, data and
// freezing; and the oracle's own test, in which a fault is put into what the ranks say to each other.
#include <absl/strings/match.h>
#include <absl/strings/str_join.h>

#include <cmath>
#include <iostream>
#include <optional>

#include "comm_faulty.h"
#include "parvl/comm/local/local_group.h"
#include "parvl/train/verify.h"
#include "train_fixture.h"
#include "train_layouts.h"

namespace parvl {
namespace {

const std::vector<CoverAxis> kAxes = {
    {"family", {"qwen2_vl", "qwen2_5_vl", "qwen2"}},
    {"tp", {"1", "2", "4"}},
    {"dp", {"1", "2"}},
    {"pp", {"1", "2", "3"}},
    {"stages", {"even", "given"}},
    // Over the LLM's ranks, cut over two of them, or on so many ranks of its own, of which two may encode together.
    {"encoder", {"dp", "tp2", "own1", "own2", "own3", "own2 tp2", "own4 tp2"}},
    {"projector", {"dp", "tp2"}},
    {"zero", {"0", "1"}},
    {"kv_heads", {"4", "2", "1"}},
    {"vocabulary", {"384", "391"}},
    {"tied", {"yes", "no"}},
    {"frozen", {"nothing", "encoder", "encoder and projector", "backbone", "norms"}},
    {"data", {"mixed", "one image", "no images", "few answers"}},
    {"recompute", {"none", "full"}},
};

class Choices {
 public:
  explicit Choices(CoverRow row) : row_(std::move(row)) {}
  const std::string& operator[](const std::string& axis) const {
    for (size_t a = 0; a < kAxes.size(); ++a) {
      if (kAxes[a].name == axis) return kAxes[a].choices[row_[a]];
    }
    throw std::runtime_error("no axis " + axis);
  }
  int64_t number(const std::string& axis) const { return std::stoll((*this)[axis]); }
  bool has_vision() const { return (*this)["family"] != "qwen2"; }
  int64_t own_ranks() const { return absl::StartsWith((*this)["encoder"], "own") ? (*this)["encoder"][3] - '0' : 0; }
  std::string text() const {
    std::vector<std::string> out;
    for (size_t a = 0; a < kAxes.size(); ++a) out.push_back(kAxes[a].name + "=" + kAxes[a].choices[row_[a]]);
    return absl::StrJoin(out, " ");
  }

 private:
  CoverRow row_;
};

// A layout that the contract allows.
bool allowed(const CoverRow& row) {
  const Choices c(row);
  const bool cut = c["encoder"] == "tp2" || c["projector"] == "tp2";
  if (cut && (c.number("tp") == 1 || !c.has_vision())) return false;
  if (c.own_ranks() > 0 && (!c.has_vision() || c["projector"] == "tp2")) return false;
  if (!c.has_vision() &&
      (c["data"] == "mixed" || c["data"] == "one image" || absl::StrContains(c["frozen"], "encoder")))
    return false;
  if (c.number("pp") == 1 && c["stages"] == "given") return false;
  const int64_t ranks = c.number("tp") * c.number("dp") * c.number("pp") + c.own_ranks();
  return ranks > 1 && ranks <= 12;
}

class OracleTest : public TrainFixture {
 protected:
  // Writes configuration and data; the recipe of one process.
  void prepare(const Choices& c) {
    auto config = *read_json_file(std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/start/config.json");
    config.update({{"model_type", c["family"]},
                   {"hidden_size", 32},
                   {"intermediate_size", 24},
                   {"num_hidden_layers", 3},
                   {"num_attention_heads", 4},
                   {"num_key_value_heads", c.number("kv_heads")},
                   {"vocab_size", c.number("vocabulary")},
                   {"tie_word_embeddings", c["tied"] == "yes"},
                   {"initializer_range", 0.2}});
    config.erase("architectures");
    config["rope_scaling"]["mrope_section"] = {1, 1, 2};
    Json& vision = config["vision_config"];
    if (c["family"] == "qwen2_vl") {
      vision.update({{"depth", 2}, {"embed_dim", 16}, {"hidden_size", 32}, {"num_heads", 4}, {"mlp_ratio", 2}});
    } else if (c["family"] == "qwen2_5_vl") {
      const Json patch = vision["patch_size"], merge = vision["spatial_merge_size"];
      vision = {{"depth", 2},
                {"num_heads", 4},
                {"patch_size", patch},
                {"spatial_merge_size", merge},
                {"temporal_patch_size", vision["temporal_patch_size"]},
                {"in_channels", 3},
                {"hidden_size", 16},
                {"out_hidden_size", 32},
                {"intermediate_size", 24},
                {"window_size", 2 * patch.get<int>() * merge.get<int>()},
                {"fullatt_block_indexes", {1}}};
    } else {
      config.erase("vision_config");
      config.erase("rope_scaling");
    }
    std::ofstream(folder_ / "config.json") << config.dump(2);
    write_data(c["data"], c.has_vision());
    recipe_.tokenizer = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/start";
    if (!c.has_vision()) {
      const std::filesystem::path text_only = folder_ / "text_only";
      std::filesystem::remove_all(text_only);
      std::filesystem::copy(recipe_.tokenizer, text_only);
      std::filesystem::remove(text_only / "preprocessor_config.json");
      recipe_.tokenizer = text_only.string();
    }
    recipe_.data.micro_batch = 2;
    recipe_.data.global_batch = 8;
    recipe_.optim = {};
    recipe_.optim.name = "sgd";
    recipe_.optim.lr = 0.05;
    recipe_.optim.clip_norm = 0.5;
    recipe_.optim.weight_decay = 0.01;
    recipe_.train.recompute = c["recompute"];
    recipe_.train.freeze = {};
    if (absl::StrContains(c["frozen"], "encoder")) recipe_.train.freeze.push_back("vision_encoder.*");
    if (absl::StrContains(c["frozen"], "projector")) recipe_.train.freeze.push_back("projector.*");
    if (c["frozen"] == "backbone") {
      recipe_.train.freeze = {c.has_vision() ? "llm_backbone.*" : "llm_backbone.layers.*"};
    }
    if (c["frozen"] == "norms") recipe_.train.freeze = {"*norm*"};
    recipe_.parallel = {};
  }

  void write_data(const std::string& kind, bool images) {
    std::ofstream data(folder_ / "data.jsonl");
    for (int i = 0; i < kSamples; ++i) {
      // Every fourth line has no image and every fifth no answer.
      const bool text = !images || kind == "no images" || (kind == "one image" && i > 0);
      const int like = text ? 4 * i + 3 : i;
      Json one = line(like);
      if (kind == "few answers" && i % 4 != 1) one["messages"] = Json::array({one["messages"][0]});
      data << one.dump() << "\n";
    }
  }

  ParallelSpec layout(const Choices& c) const {
    ParallelSpec out;
    out.llm.tp = c.number("tp");
    out.llm.dp = c.number("dp");
    out.llm.pp = c.number("pp");
    if (c["stages"] == "given")
      out.llm.stages = out.llm.pp == 2 ? std::vector<int64_t>{3, 0} : std::vector<int64_t>{0, 2, 1};
    out.zero = c.number("zero");
    const int64_t ranks = out.llm.product();
    if (c["encoder"] == "tp2") out.vision_encoder = ModuleLayout{.dp = ranks / 2, .tp = 2};
    if (const int64_t own = c.own_ranks(); own > 0) {
      const int64_t tp = absl::EndsWith(c["encoder"], "tp2") ? 2 : 1;
      out.vision_encoder = ModuleLayout{.dp = own / tp, .tp = tp, .ranks = own};
    }
    if (c["projector"] == "tp2") out.projector = ModuleLayout{.dp = ranks / 2, .tp = 2};
    return out;
  }

  // Every rank's result, with `wrap` around each rank's communicator.
  using Wrap = std::function<std::unique_ptr<Communicator>(Communicator&)>;
  std::vector<absl::StatusOr<VerifyRun>> run_ranks(const ParallelSpec& spec, int64_t steps, const Wrap& wrap = {}) {
    Recipe recipe = recipe_;
    recipe.parallel = spec;
    std::vector<absl::StatusOr<VerifyRun>> out(static_cast<size_t>(spec.world()));
    run_local_world(spec.world(), {}, [&](Communicator& communicator) {
      TrainerEnvironment env = environment();
      env.write = [](std::string_view) {};
      env.record = {};
      env.stop_requested = {};
      env.loader_threads = 1;
      const std::unique_ptr<Communicator> wrapped = wrap ? wrap(communicator) : nullptr;
      env.communicator = wrapped ? wrapped.get() : &communicator;
      out[static_cast<size_t>(communicator.rank())] = run_steps(recipe, env, steps);
    });
    return out;
  }
};

// What the run is held to; "" when it keeps all of it.
std::string violation(const std::vector<absl::StatusOr<VerifyRun>>& runs, const VerifyRun& want) {
  std::vector<std::string> failures;
  for (size_t rank = 0; rank < runs.size(); ++rank) {
    if (!runs[rank].ok()) failures.push_back(absl::StrCat("rank ", rank, ": ", runs[rank].status().ToString()));
  }
  if (!failures.empty()) return absl::StrJoin(failures, "\n");
  for (const auto& run : runs) {
    const VerifyResult result = compare(*run, want);
    const std::pair<double, std::string> errors[] = {
        {result.max_relative_error / 1e-10, "gradient of " + result.parameter},
        {result.loss_error / 1e-12, "loss"},
        {result.grad_norm_error / 1e-12, "gradient norm"},
        {result.weight_error / 1e-10, "weights after the steps"}};
    for (const auto& [error, what] : errors) {
      if (!(error <= 1)) return absl::StrCat(what, ": ", error, " times its bound");
    }
    for (const auto& [name, tensor] : run->weights) {
      if (!tensor.equal(runs[0]->weights.at(name))) return name + " differs between ranks";
    }
    if (!run->replicas.ok()) return run->replicas.ToString();
  }
  return "";
}

TEST_F(OracleTest, EveryPairOfChoicesEqualsOneProcess) {
  const Cover cover = cover_pairs(kAxes, allowed, /*seed=*/7);
  std::cout << cover.rows.size() << " layouts cover " << cover.pairs << " of " << cover.possible
            << " pairs of choices\n";
  EXPECT_EQ(cover.pairs, cover.possible);
  double worst = 0;
  for (const CoverRow& row : cover.rows) {
    const Choices c(row);
    SCOPED_TRACE(c.text());
    prepare(c);
    const auto want = run_steps(recipe_, environment(), 3);
    ASSERT_TRUE(want.ok()) << want.status();
    const auto runs = run_ranks(layout(c), 3);
    EXPECT_EQ(violation(runs, *want), "");
    if (runs[0].ok()) worst = std::max(worst, compare(*runs[0], *want).max_relative_error);
  }
  std::cout << "the largest relative error of a gradient is " << worst << "\n";
}

// The choices by name; the first of each axis that is not named.
Choices choices(const std::vector<std::pair<std::string, std::string>>& chosen) {
  CoverRow row(kAxes.size());
  for (const auto& [name, choice] : chosen) {
    for (size_t a = 0; a < kAxes.size(); ++a) {
      for (size_t i = 0; i < kAxes[a].choices.size(); ++i) {
        if (kAxes[a].name == name && kAxes[a].choices[i] == choice) row[a] = i;
      }
    }
  }
  return Choices(row);
}

// Rounding is no larger than one process's: of both against float64, after 20 steps.
TEST_F(OracleTest, TwentyStepsInFloat32StayAsNearAsOneProcess) {
  const std::vector<Choices> layouts = {
      choices({{"tp", "2"}, {"dp", "2"}, {"zero", "1"}}), choices({{"tp", "4"}, {"kv_heads", "1"}, {"encoder", "tp2"}}),
      choices({{"pp", "3"}, {"dp", "2"}}), choices({{"family", "qwen2_5_vl"}, {"tp", "2"}, {"pp", "2"}}),
      choices({{"dp", "2"}, {"pp", "2"}, {"encoder", "own3"}, {"zero", "1"}})};
  for (const Choices& c : layouts) {
    SCOPED_TRACE(c.text());
    prepare(c);
    recipe_.train.dtype = "float64";
    const VerifyRun exact = *run_steps(recipe_, environment(), 20);
    recipe_.train.dtype = "float32";
    const VerifyResult alone = compare(*run_steps(recipe_, environment(), 20), exact);
    const auto runs = run_ranks(layout(c), 20);
    for (const auto& run : runs) {
      ASSERT_TRUE(run.ok()) << run.status();
      const VerifyResult got = compare(*run, exact);
      EXPECT_LE(got.weight_error, 4 * alone.weight_error);
      EXPECT_LE(got.loss_error, 4 * alone.loss_error);
      EXPECT_LE(got.max_relative_error, 4 * alone.max_relative_error) << got.parameter;
    }
  }
}

bool is_sum(int64_t, ReduceOp op) { return op == ReduceOp::kSum; }
bool is_one_number(int64_t count, ReduceOp op) { return count == 1 && is_sum(count, op); }
// Sums of the loss have two numbers a target, of which a micro batch here has fewer than 40.
bool is_of_loss(int64_t count, ReduceOp op) { return count > 1 && count < 80 && is_sum(count, op); }
bool is_of_gradients(int64_t count, ReduceOp op) { return count >= 80 && is_sum(count, op); }

const std::vector<Fault> kFaults = {
    {"gradients of norms and biases are not summed over tensor ranks", "llm_backbone.tp", "all_reduce", Fault::kOwn,
     is_of_gradients},
    {"... are averaged", "llm_backbone.tp", "all_reduce", Fault::kMean, is_of_gradients},
    {"clip norm counts elements twice", "world", "all_reduce", Fault::kTwice, is_one_number},
    {"softmax over the own part of the vocabulary", "llm_backbone.tp", "all_reduce", Fault::kOwn, is_of_loss},
    {"maximum over the own part of the vocabulary", "llm_backbone.tp", "all_reduce", Fault::kOwn,
     [](int64_t, ReduceOp op) { return op == ReduceOp::kMax; }},
    {"outputs of cut matrices are not summed", "llm_backbone.tp", "reduce_scatter", Fault::kOwn, {}},
    {"... are averaged", "llm_backbone.tp", "reduce_scatter", Fault::kMean, {}},
    {"rows gathered in a wrong rank order", "llm_backbone.tp", "all_gather", Fault::kRotate, {}},
    {"other ranks' rows are lost", "llm_backbone.tp", "all_gather", Fault::kOwn, {}},
    {"rows of an earlier layer", "llm_backbone.tp", "all_gather", Fault::kStale, {}},
    {"gradients are not summed over replicas", "llm_backbone.data", "all_reduce", Fault::kOwn, {}},
    {"... are averaged", "llm_backbone.data", "all_reduce", Fault::kMean, {}},
    {"... are those of the step before", "llm_backbone.data", "all_reduce", Fault::kStale, {}},
    {"the encoder's gradient is dropped", "vision_encoder.data", "all_reduce", Fault::kZero, {}},
    {"the encoder's gradient is of the own images", "vision_encoder.data", "all_reduce", Fault::kOwn, {}},
    {"the projector's gradient is of the own images", "projector.data", "all_reduce", Fault::kOwn, {}},
    {"the loss is divided by a rank's share of the targets", "world", "all_reduce", Fault::kMean, is_sum},
    {"images in a wrong rank order", "llm_backbone.model", "all_gather", Fault::kRotate, {}},
    {"other ranks' images are lost", "llm_backbone.model", "all_gather", Fault::kOwn, {}},
    {"images get the own rows' gradients", "llm_backbone.model", "reduce_scatter", Fault::kOwn, {}},
    {"ZeRO: gradients are not summed", "llm_backbone.data", "reduce_scatter", Fault::kOwn, {}},
    {"ZeRO: parts in a wrong rank order", "llm_backbone.data", "all_gather", Fault::kRotate, {}},
    {"ZeRO: values of the step before", "llm_backbone.data", "all_gather", Fault::kStale, {}},
    {"a stage's input is lost", "llm_backbone.pp.0>1", "receive", Fault::kZero, {}},
    {"a stage's input is that of the micro batch before", "llm_backbone.pp.1>2", "receive", Fault::kStale, {}},
    {"a stage's gradient is lost", "llm_backbone.pp.1>0", "receive", Fault::kZero, {}},
    {"a stage's gradient is that of the micro batch before", "llm_backbone.pp.2>1", "receive", Fault::kStale, {}},
    {"the tied embedding is not summed over its stages", "llm_backbone.tied", "all_reduce", Fault::kOwn, {}},
    {"... is that of the step before", "llm_backbone.tied", "all_reduce", Fault::kStale, {}},
    {"the gradient norm is of the own stage", "world", "all_reduce", Fault::kOwn, is_one_number},
    {"the encoder's gradients of norms are not summed", "vision_encoder.tp", "all_reduce", Fault::kOwn,
     is_of_gradients},
    {"outputs of the encoder's cut matrices are not summed", "vision_encoder.tp", "reduce_scatter", Fault::kOwn, {}},
    {"the projector's gradients of norms are not summed", "projector.tp", "all_reduce", Fault::kOwn,
     [](int64_t count, ReduceOp) { return count > 1; }},
    {"outputs of the projector's cut matrices are not summed", "projector.tp", "reduce_scatter", Fault::kOwn, {}},
    {"embeddings from an encoder's own rank are lost", "vision_encoder.images.4>0", "receive", Fault::kZero, {}},
    {"... are those of the micro batch before", "vision_encoder.images.4>2", "receive", Fault::kStale, {}},
    {"gradients to an encoder's own rank are lost", "vision_encoder.images.0>4", "receive", Fault::kZero, {}},
    {"... of one of two tensor ranks count twice", "vision_encoder.images.1>5", "receive", Fault::kTwice, {}},
    {"... are those of the micro batch before", "vision_encoder.images.0>4", "receive", Fault::kStale, {}},
    {"embeddings in a wrong order", "vision_encoder.images.5>0", "receive", Fault::kRotate, {}},
};

// The oracle's own test.
TEST_F(OracleTest, EveryFaultIsSeen) {
  const std::vector<Choices> layouts = {
      choices({{"tp", "2"}, {"dp", "2"}}),
      choices({{"tp", "4"}, {"dp", "1"}, {"kv_heads", "2"}, {"encoder", "tp2"}, {"projector", "tp2"}}),
      choices({{"tp", "2"}, {"dp", "2"}, {"zero", "1"}, {"encoder", "tp2"}}),
      choices({{"pp", "3"}, {"dp", "2"}, {"tied", "yes"}}),
      choices({{"tp", "2"}, {"dp", "2"}, {"encoder", "own2"}})};  // LLM 0 1 and 2 3, encoders 4 and 5
  prepare(layouts[0]);
  std::map<size_t, VerifyRun> references;
  for (const Fault& fault : kFaults) {
    SCOPED_TRACE(fault.name);
    std::string seen;
    std::atomic<int> applied = 0;
    for (size_t i = 0; i < layouts.size() && seen.empty(); ++i) {
      prepare(layouts[i]);
      if (references.count(i) == 0) references[i] = *run_steps(recipe_, environment(), 3);
      const auto wrap = [&](Communicator& inner) {
        return std::make_unique<FaultyCommunicator>(inner, fault, applied);
      };
      seen = violation(run_ranks(layout(layouts[i]), 3, wrap), references[i]);
    }
    EXPECT_GT(applied, 0) << "no call was spoiled";
    EXPECT_NE(seen, "") << "nobody noticed";
    std::cout << fault.name << ": " << seen << "\n";
  }
}

}  // namespace
}  // namespace parvl
