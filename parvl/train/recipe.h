// recipe.yaml as plain data. Every field's default is the contract's.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/parallel_spec.h"
#include "parvl/base/status.h"

namespace parvl {

struct DataRecipe {
  std::string train;  // FILE.jsonl (absolute, or relative to the recipe's folder) | easy-vqa:train[:...]
  std::string eval;   // "" = none
  int64_t micro_batch = 4;
  int64_t global_batch = 16;
  uint64_t shuffle_seed = 0;
  int64_t max_length = 0;  // 0: the model's
  std::string augment = "none";
};

struct OptimGroup {
  std::string match;         // a pattern over ParVL's parameter names, `*` matches any run of characters
  double lr = -1;            // < 0: the recipe's
  double weight_decay = -1;  // < 0: the recipe's
};

struct OptimRecipe {
  std::string name = "adamw";  // adamw | sgd
  double lr = 1.0e-3;
  std::pair<double, double> betas = {0.9, 0.95};
  double eps = 1.0e-8;
  double weight_decay = 0;
  double momentum = 0;
  std::string schedule = "constant";  // constant | cosine | linear
  int64_t warmup_steps = 0;
  double clip_norm = 0;  // 0: off
  std::vector<OptimGroup> groups;
};

struct TrainRecipe {
  int64_t steps = 1000;
  std::string device = "auto";    // auto | cpu | cuda
  std::string dtype = "float32";  // float32 | bfloat16 | float64
  std::vector<std::string> freeze;
  std::string recompute = "none";  // none | full
  std::string resume = "auto";     // auto | never | must | PATH
  int64_t checkpoint_every = 0;    // 0: only the last step
  int64_t log_every = 10;
  std::string out;
};

struct Recipe {
  std::string model;      // a Hugging Face directory; or
  std::string config;     // a config.json for random weights, with
  std::string tokenizer;  // the directory of tokenizer, template and preprocessor
  uint64_t seed = 0;
  DataRecipe data;
  OptimRecipe optim;
  TrainRecipe train;
  ParallelSpec parallel;
};

// Reads FILE and applies `--set key=value` overrides (dotted keys, YAML values) in order. Errors name file, line and
// key, and say what would be valid. A layout that is not built yet is Unimplemented.
absl::StatusOr<Recipe> load_recipe(const std::string& path, const std::vector<std::string>& overrides);
// Its `parallel` section alone, whatever the rest says.
absl::StatusOr<ParallelSpec> load_parallel(const std::string& path, const std::vector<std::string>& overrides);

// The longest sample in tokens: data.max_length, or the model's own limit. InvalidArgument where it is over that.
absl::StatusOr<int64_t> max_length_of(const DataRecipe& data, int64_t max_positions);

// The recipe's sections as text, for comparing: what must be equal on all ranks of a run (not where it writes).
std::vector<std::pair<std::string, std::string>> recipe_sections(const Recipe& recipe);

// The learning rate at `step` (0-based) as a share of the group's lr: linear warm-up over warmup_steps, then constant,
// or cosine / linear decay to 0 at the last step.
double lr_factor(const OptimRecipe& optim, int64_t step, int64_t total_steps);

// Whether `name` matches `pattern`, where `*` stands for any run of characters (also none).
bool matches_pattern(const std::string& pattern, const std::string& name);

}  // namespace parvl
