#include "parvl/train/recipe.h"

#include <absl/strings/match.h>
#include <absl/strings/str_join.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "parvl/base/config.h"
#include "parvl/train/recipe_parallel.h"

namespace parvl {
namespace {

constexpr int64_t kMaxBatch = 1 << 20;
constexpr int64_t kMaxSteps = int64_t{1} << 40;
const std::vector<std::string> kEasyVqaSplits = {"train", "test", "fit", "holdout"};

// A path as written in the recipe → a path that means the same from anywhere. `base` is the recipe's folder.
std::string resolve(const std::string& base, const std::string& path) {
  if (path.empty()) return path;
  return (std::filesystem::path(base) / path).lexically_normal().string();  // an absolute `path` replaces `base`
}

void read_source(ConfigReader& data, const std::string& base, const std::string& key, std::string& out) {
  data.text(key, out);
  if (!absl::StartsWith(out, "easy-vqa:")) {
    out = resolve(base, out);
    return;
  }
  const std::string split = out.substr(9);
  if (std::find(kEasyVqaSplits.begin(), kEasyVqaSplits.end(), split) == kEasyVqaSplits.end()) {
    data.fail(key, "names an unknown split '" + split +
                       "'; valid: easy-vqa:train, easy-vqa:test, easy-vqa:fit, easy-vqa:holdout");
  }
}

absl::Status read_data(ConfigReader& root, const std::string& base, int64_t replicas, DataRecipe& out) {
  ConfigReader data = root.section("data");
  read_source(data, base, "train", out.train);
  read_source(data, base, "eval", out.eval);
  data.integer("micro_batch", out.micro_batch, 1, kMaxBatch);
  data.integer("global_batch", out.global_batch, 1, kMaxBatch);
  data.natural("shuffle_seed", out.shuffle_seed);
  data.integer("max_length", out.max_length, 0);
  data.choice("augment", out.augment, {"none", "dihedral"});
  if (out.train.empty()) data.fail("train", "is missing; give it a FILE.jsonl or easy-vqa:train");
  if (out.global_batch % (out.micro_batch * replicas) != 0) {
    const std::string& key = data.has("global_batch") ? "global_batch" : "micro_batch";
    const std::string dp = replicas > 1 ? absl::StrCat(" · dp (", replicas, ")") : "";
    data.fail(key, absl::StrCat("does not fit: global_batch (", out.global_batch,
                                ") must be a multiple of micro_batch (", out.micro_batch, ")", dp));
  }
  return data.finish();
}

absl::Status read_group(ConfigReader group, OptimGroup& out) {
  group.text("match", out.match);
  group.number("lr", out.lr, {.low = 0});
  group.number("weight_decay", out.weight_decay, {.low = 0});
  if (out.match.empty()) group.fail("match", "is missing; give it a pattern of parameter names, \"projector.*\" say");
  return group.finish();
}

absl::Status read_optim(ConfigReader& root, OptimRecipe& out) {
  ConfigReader optim = root.section("optim");
  optim.choice("name", out.name, {"adamw", "sgd"});
  optim.number("lr", out.lr, {.low = 0});
  std::vector<double> betas = {out.betas.first, out.betas.second};
  optim.number_list("betas", betas, {.low = 0, .high = 1, .high_open = true});
  if (betas.size() == 2) {
    out.betas = {betas[0], betas[1]};
  } else {
    optim.fail("betas", absl::StrCat("must list two numbers in [0, 1), found ", betas.size()));
  }
  optim.number("eps", out.eps, {.low = 0, .low_open = true});
  optim.number("weight_decay", out.weight_decay, {.low = 0});
  optim.number("momentum", out.momentum, {.low = 0, .high = 1, .high_open = true});
  optim.choice("schedule", out.schedule, {"constant", "cosine", "linear"});
  optim.integer("warmup_steps", out.warmup_steps, 0, kMaxSteps);
  optim.number("clip_norm", out.clip_norm, {.low = 0});
  std::vector<ConfigReader> groups = optim.section_list("groups");
  if (out.momentum != 0 && out.name != "sgd") {
    optim.fail("momentum", "belongs to sgd; leave it out, or set optim.name to sgd (adamw's is betas)");
  }
  PARVL_RETURN_IF_ERROR(optim.finish());
  for (const ConfigReader& group : groups) PARVL_RETURN_IF_ERROR(read_group(group, out.groups.emplace_back()));
  return absl::OkStatus();
}

absl::Status read_train(ConfigReader& root, const std::string& base, TrainRecipe& out) {
  ConfigReader train = root.section("train");
  train.integer("steps", out.steps, 1, kMaxSteps);
  train.choice("device", out.device, {"auto", "cpu", "cuda"});
  train.choice("dtype", out.dtype, {"float32", "bfloat16", "float64"});
  train.text_list("freeze", out.freeze);
  train.choice("recompute", out.recompute, {"none", "full"});
  train.text("resume", out.resume);
  if (out.resume.empty()) train.fail("resume", "must be auto, never, must, or the PATH of a checkpoint");
  if (out.resume != "auto" && out.resume != "never" && out.resume != "must") out.resume = resolve(base, out.resume);
  train.integer("checkpoint_every", out.checkpoint_every, 0, kMaxSteps);
  train.integer("log_every", out.log_every, 1, kMaxSteps);
  train.text("out", out.out);
  if (out.out.empty()) train.fail("out", "is missing; give it the folder that checkpoints and logs go to");
  out.out = resolve(base, out.out);
  return train.finish();
}

void check_start(ConfigReader& root, const Recipe& recipe) {
  if (!recipe.model.empty()) {
    for (const char* key : {"config", "tokenizer"}) {
      if (root.has(key))
        root.fail(key, "does not go together with 'model'; give either model, or config and tokenizer");
    }
  } else if (recipe.config.empty() && recipe.tokenizer.empty()) {
    root.fail("model",
              "is missing; give a Hugging Face directory to start from, or config and tokenizer for random weights");
  } else if (recipe.config.empty()) {
    root.fail("config", "is missing; tokenizer needs a config FILE beside it for random weights");
  } else if (recipe.tokenizer.empty()) {
    root.fail("tokenizer",
              "is missing; config needs the tokenizer DIR (tokenizer.json, chat template, preprocessor) beside it");
  }
}

}  // namespace

absl::StatusOr<Recipe> load_recipe(const std::string& path, const std::vector<std::string>& overrides) {
  PARVL_ASSIGN_OR_RETURN(const ConfigNode node, load_config(path, overrides));
  const std::string base = std::filesystem::absolute(path).parent_path().string();
  Recipe recipe;
  ConfigReader root(node);
  root.text("model", recipe.model);
  root.text("config", recipe.config);
  root.text("tokenizer", recipe.tokenizer);
  root.natural("seed", recipe.seed);
  check_start(root, recipe);
  for (const char* section : {"data", "optim", "train", "parallel"}) root.kind(section);  // known keys, read below
  PARVL_RETURN_IF_ERROR(root.finish());
  for (std::string* file : {&recipe.model, &recipe.config, &recipe.tokenizer}) *file = resolve(base, *file);
  PARVL_ASSIGN_OR_RETURN(recipe.parallel, read_parallel(root));
  PARVL_RETURN_IF_ERROR(read_data(root, base, recipe.parallel.llm.dp, recipe.data));
  PARVL_RETURN_IF_ERROR(read_optim(root, recipe.optim));
  PARVL_RETURN_IF_ERROR(read_train(root, base, recipe.train));
  return recipe;
}

absl::StatusOr<ParallelSpec> load_parallel(const std::string& path, const std::vector<std::string>& overrides) {
  PARVL_ASSIGN_OR_RETURN(const ConfigNode node, load_config(path, overrides));
  ConfigReader root(node);
  return read_parallel(root);
}

absl::StatusOr<int64_t> max_length_of(const DataRecipe& data, int64_t max_positions) {
  if (data.max_length <= 0) return max_positions;
  if (data.max_length <= max_positions) return data.max_length;
  return invalid("data.max_length is ", data.max_length, ", over the model's max_position_embeddings of ",
                 max_positions, "; lower it, or set it to 0 for the model's");
}

std::vector<std::pair<std::string, std::string>> recipe_sections(const Recipe& recipe) {
  const auto join = [](const auto&... values) { return ((absl::StrCat(values) + "|") + ...); };
  const DataRecipe& data = recipe.data;
  const OptimRecipe& optim = recipe.optim;
  const TrainRecipe& train = recipe.train;
  const ParallelSpec& parallel = recipe.parallel;
  const ModuleLayout none{.dp = 0};
  const auto layout = [&](const ModuleLayout& module) {
    return join(module.dp, module.tp, module.pp, module.sp, module.ep, module.ranks, module.virtual_stages,
                absl::StrJoin(module.stages, ","));
  };
  std::string groups;
  for (const OptimGroup& group : optim.groups) groups += join(group.match, group.lr, group.weight_decay);
  return {{"model", join(recipe.model, recipe.config, recipe.tokenizer, recipe.seed)},
          {"data", join(data.train, data.eval, data.micro_batch, data.global_batch, data.shuffle_seed, data.max_length,
                        data.augment)},
          {"optim", join(optim.name, optim.lr, optim.betas.first, optim.betas.second, optim.eps, optim.weight_decay,
                         optim.momentum, optim.schedule, optim.warmup_steps, optim.clip_norm, groups)},
          {"train", join(train.steps, train.dtype, absl::StrJoin(train.freeze, ","), train.recompute, train.resume,
                         train.checkpoint_every)},
          {"parallel", join(layout(parallel.llm), layout(parallel.vision_encoder.value_or(none)),
                            layout(parallel.audio_encoder.value_or(none)), layout(parallel.projector.value_or(none)),
                            parallel.zero, parallel.schedule)}};
}

double lr_factor(const OptimRecipe& optim, int64_t step, int64_t total_steps) {
  if (step < optim.warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(optim.warmup_steps);
  if (optim.schedule == "constant") return 1.0;
  const int64_t decay_steps = std::max<int64_t>(1, total_steps - 1 - optim.warmup_steps);
  const double progress =
      std::min(1.0, static_cast<double>(step - optim.warmup_steps) / static_cast<double>(decay_steps));
  if (optim.schedule == "linear") return 1.0 - progress;
  return 0.5 * (1.0 + std::cos(progress * 3.14159265358979323846));
}

bool matches_pattern(const std::string& pattern, const std::string& name) {
  // Greedy with one point to come back to: linear in practice, never exponential.
  size_t p = 0, n = 0, star = std::string::npos, resume_at = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume_at = n;
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p;
      ++n;
    } else if (star != std::string::npos) {
      p = star + 1;
      n = ++resume_at;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace parvl
