// parvl train: a recipe on one process.
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "commands.h"
#include "parvl/base/signal.h"
#include "parvl/train/trainer.h"

namespace parvl {
namespace {

struct TrainOptions {
  std::string config;
  std::vector<std::string> overrides;
  bool dry_run = false;
};

absl::Status run_train(const TrainOptions& options, const Context& context) {
  PARVL_ASSIGN_OR_RETURN(const Recipe recipe, load_recipe(options.config, options.overrides));
  if (options.dry_run) return not_available_yet("train --dry-run (it comes with parallel training)");
  StopSignal signal;
  TrainerEnvironment environment;
  environment.clock = &context.clock;
  environment.base_dir = std::filesystem::absolute(options.config).parent_path().string();
  environment.stop_requested = [&signal] { return signal.requested(); };
  environment.write = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  winsize size{};
  environment.terminal = isatty(STDOUT_FILENO) != 0;
  if (environment.terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) environment.columns = size.ws_col;
  PARVL_ASSIGN_OR_RETURN(auto trainer, Trainer::create(recipe, environment));
  return trainer->run();
}

}  // namespace

void add_train_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Trains a model by a recipe");
  command->add_option("--config", options->config, "recipe.yaml")->required();
  command->add_option("--set", options->overrides, "key=value over the recipe, e.g. train.steps=100; may be repeated");
  command->add_flag("--dry-run", options->dry_run, "Print the rank table, bytes a rank and messages; load nothing");
  run_with(*command, context, [options, &context] { return run_train(*options, context); });
}

}  // namespace parvl
