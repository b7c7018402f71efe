// parvl verify: a recipe's layout against one process.
#include "parvl/train/verify.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_split.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "apps/commands.h"
#include "apps/communicator.h"
#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/base/log.h"
#include "parvl/base/signal.h"
#include "parvl/comm/local/local_group.h"
#include "parvl/launch/supervisor.h"
#include "parvl/train/made_up_data.h"

namespace parvl {
namespace {

// In float64. AdamW divides by the square root of a moment, which makes more of a rounding where gradients are near
// zero.
constexpr double kGradientBound = 1e-10, kLossBound = 1e-12, kWeightBound = 1e-6;

struct VerifyFlags {
  std::string config, model, layout, dtype = "float64";
  std::vector<std::string> overrides;
  int64_t steps = 2;
  bool ranks_as_threads = false, json = false;
};

// Where runs that save nothing put what they must; gone with the object.
class ScratchFolder {
 public:
  ScratchFolder() : path_(std::filesystem::temp_directory_path() / absl::StrCat("parvl-verify-", ::getpid())) {}
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

// "dp=2,tp=2;vision_encoder:dp=4" as overrides of a recipe: the backbone's degrees first, then each module's; `zero`
// stands among the backbone's.
absl::StatusOr<std::vector<std::string>> layout_overrides(const std::string& layout) {
  std::vector<std::string> out;
  for (const std::string& text : std::vector<std::string>(absl::StrSplit(layout, ';', absl::SkipWhitespace()))) {
    const size_t colon = text.find(':');
    const std::string module = colon == std::string::npos ? "llm_backbone" : text.substr(0, colon);
    const std::string degrees = colon == std::string::npos ? text : text.substr(colon + 1);
    for (const std::string& setting : std::vector<std::string>(absl::StrSplit(degrees, ','))) {
      const std::pair<std::string, std::string> entry = absl::StrSplit(setting, absl::MaxSplits('=', 1));
      int64_t degree = 0;
      if (!absl::SimpleAtoi(entry.second, &degree)) {
        return invalid("--layout '", layout, "': '", setting,
                       "' is no degree; write dp=2,tp=2;vision_encoder:dp=4 (the backbone first, then other modules)");
      }
      const bool of_all = entry.first == "zero";
      out.push_back(absl::StrCat("parallel.", of_all ? "" : module + ".", entry.first, "=", degree));
    }
  }
  return out;
}

// A recipe over a model's directory with made-up samples, in `folder`.
absl::StatusOr<std::string> made_up_recipe(const std::string& model, const std::string& folder,
                                           const ParallelSpec& layout) {
  PARVL_ASSIGN_OR_RETURN(const ModelSpec spec, load_model_spec(model));
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return failed("cannot make ", folder, ": ", error.message());
  const int64_t micro = 2, global = micro * layout.llm.dp * (layout.llm.pp + 1);
  PARVL_RETURN_IF_ERROR(write_made_up_data(folder, 3 * global, spec.vision.has_value()));
  const std::string path = folder + "/recipe.yaml";
  const std::string absolute = std::filesystem::absolute(model).string();
  PARVL_RETURN_IF_ERROR(write_file_atomically(
      path, absl::StrCat("model: ", Json(absolute).dump(), "\ndata: {train: data.jsonl, micro_batch: ", micro,
                         ", global_batch: ", global, "}\noptim: {name: sgd, lr: 1.0e-3, clip_norm: 1.0}\n",
                         "train: {device: cpu, out: out}\n")));
  return path;
}

TrainerEnvironment quiet_environment(const VerifyFlags& flags, const Context& context) {
  TrainerEnvironment out;
  out.clock = &context.clock;
  out.base_dir = std::filesystem::absolute(flags.config).parent_path().string();
  out.write = [](std::string_view) {};
  return out;
}

absl::StatusOr<VerifyRun> run_as_threads(const Recipe& recipe, const VerifyFlags& flags, const Context& context) {
  std::vector<absl::StatusOr<VerifyRun>> runs(static_cast<size_t>(recipe.parallel.world()));
  constexpr double kDay_s = 24 * 3600;  // the checks are stricter
  run_local_world(recipe.parallel.world(), {.deadline_s = kDay_s}, [&](Communicator& rank) {
    TrainerEnvironment environment = quiet_environment(flags, context);
    environment.communicator = &rank;
    environment.loader_threads = 1;
    runs[static_cast<size_t>(rank.rank())] = run_steps(recipe, environment, flags.steps);
  });
  for (const auto& run : runs) {
    // The rank that failed, not those that heard of it.
    if (!run.ok() && !absl::IsAborted(run.status()) && !absl::IsInternal(run.status())) return run.status();
  }
  for (const auto& run : runs) PARVL_RETURN_IF_ERROR(run.status());
  return std::move(runs[0]);
}

absl::Status report(const VerifyResult& result, const Recipe& recipe, const VerifyFlags& flags) {
  if (flags.json) {
    const Json out = {{"max_relative_error", result.max_relative_error},
                      {"parameter", result.parameter},
                      {"loss_error", result.loss_error},
                      {"grad_norm_error", result.grad_norm_error},
                      {"weight_error", result.weight_error},
                      {"ranks", recipe.parallel.world()},
                      {"steps", flags.steps},
                      {"dtype", recipe.train.dtype}};
    std::printf("%s\n", out.dump().c_str());
  } else {
    std::printf("%ld ranks against one process, %s, %ld steps\n", static_cast<long>(recipe.parallel.world()),
                recipe.train.dtype.c_str(), static_cast<long>(flags.steps));
    std::printf("gradients      %.3g, the largest relative error: %s\n", result.max_relative_error,
                result.parameter.c_str());
    std::printf("gradient norm  %.3g\nloss           %.3g\nweights after  %.3g\n", result.grad_norm_error,
                result.loss_error, result.weight_error);
  }
  if (recipe.train.dtype != "float64") return absl::OkStatus();
  // A comparison with NaN is false.
  if (!(result.max_relative_error <= kGradientBound)) {
    return failed("the gradient of ", result.parameter, " differs by ", result.max_relative_error, ", more than ",
                  kGradientBound);
  }
  if (!(result.loss_error <= kLossBound))
    return failed("the loss differs by ", result.loss_error, ", more than ", kLossBound);
  if (!(result.grad_norm_error <= kGradientBound))
    return failed("the gradient norm differs by ", result.grad_norm_error, ", more than ", kGradientBound);
  if (!(result.weight_error <= kWeightBound))
    return failed("the weights after the steps differ by ", result.weight_error, ", more than ", kWeightBound);
  return absl::OkStatus();
}

absl::Status run_verify(const VerifyFlags& given, const Context& context) {
  const ScratchFolder scratch;
  VerifyFlags flags = given;
  if (flags.config.empty() == flags.model.empty()) return invalid("give either --config or --model");
  PARVL_ASSIGN_OR_RETURN(const std::vector<std::string> layout, layout_overrides(flags.layout));
  flags.overrides.insert(flags.overrides.end(), layout.begin(), layout.end());
  if (!flags.model.empty()) {
    PARVL_ASSIGN_OR_RETURN(flags.config, made_up_recipe(flags.model, scratch.path(), {}));
    // How many samples a step has depends on the layout, which only a recipe can be read for.
    PARVL_ASSIGN_OR_RETURN(const ParallelSpec spec, load_parallel(flags.config, flags.overrides));
    PARVL_ASSIGN_OR_RETURN(flags.config, made_up_recipe(flags.model, scratch.path(), spec));
  }
  PARVL_ASSIGN_OR_RETURN(Recipe recipe, load_recipe(flags.config, flags.overrides));
  recipe.train.out = scratch.path() + "/out";
  recipe.train.dtype = flags.dtype;
  PARVL_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> communicator, communicator_from_environment());
  if (recipe.parallel.world() > 1 && communicator == nullptr && !flags.ranks_as_threads) {
    LaunchOptions launch;
    launch.processes = recipe.parallel.world();
    launch.command = {std::filesystem::read_symlink("/proc/self/exe").string(),
                      "verify",
                      "--config",
                      flags.config,
                      "--steps",
                      absl::StrCat(flags.steps),
                      "--dtype",
                      flags.dtype};
    for (const std::string& text : flags.overrides) launch.command.insert(launch.command.end(), {"--set", text});
    if (flags.json) launch.command.push_back("--json");
    setenv("OMP_NUM_THREADS", "1", /*overwrite=*/0);
    const StopSignal signal;
    launch.stop_descriptor = signal.descriptor();
    PARVL_RETURN_IF_ERROR(supervise(launch));
    return signal.requested() ? failed("interrupted before there was a result") : absl::OkStatus();
  }
  PARVL_ASSIGN_OR_RETURN(const int64_t local_rank, local_rank_from_environment());
  absl::StatusOr<VerifyRun> run;
  if (flags.ranks_as_threads && communicator == nullptr) {
    if (recipe.train.device == "cuda") {
      return invalid(
          "ranks as threads share the CPU; leave out --ranks-as-threads for a process a GPU, or set "
          "train.device to cpu");
    }
    recipe.train.device = "cpu";
    run = run_as_threads(recipe, flags, context);
  } else {
    TrainerEnvironment environment = quiet_environment(flags, context);
    environment.communicator = communicator.get();
    environment.local_rank = local_rank;
    PARVL_ASSIGN_OR_RETURN(environment.checks, checks_from_environment());
    run = run_steps(recipe, environment, flags.steps);
  }
  PARVL_RETURN_IF_ERROR(run.status());
  if (communicator != nullptr && communicator->rank() > 0) return absl::OkStatus();
  Recipe alone = recipe;
  alone.parallel = {};
  PARVL_ASSIGN_OR_RETURN(const VerifyRun reference, run_steps(alone, quiet_environment(flags, context), flags.steps));
  PARVL_RETURN_IF_ERROR(report(compare(*run, reference), recipe, flags));
  return run->replicas;
}

}  // namespace

void add_verify_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* command = app.add_subcommand("verify", "Compares a layout's gradients, loss and steps with one process");
  named(command->add_option("--config", flags->config, "recipe.yaml"));
  named(
      command->add_option("--model", flags->model, "In place of a recipe: a model's directory, with made-up samples"));
  command->add_option("--layout", flags->layout,
                      "Degrees, the backbone's first: \"dp=2,tp=2;vision_encoder:dp=4\"; also zero=1");
  command->add_option("--set", flags->overrides, "key=value over the recipe, e.g. parallel.llm_backbone.dp=2");
  command->add_option("--steps", flags->steps, "Optimizer steps")->check(CLI::Range(1, 100000))->capture_default_str();
  command->add_option("--dtype", flags->dtype, "float64, float32 or bfloat16; only float64 has a bound")
      ->check(CLI::IsMember({"float64", "float32", "bfloat16"}))
      ->capture_default_str();
  command->add_flag("--ranks-as-threads", flags->ranks_as_threads, "All ranks in this process");
  command->add_flag("--json", flags->json, "One JSON object");
  run_with(*command, context, [flags, &context] { return run_verify(*flags, context); });
}

}  // namespace parvl
