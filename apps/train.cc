// parvl train: a recipe, on one process or as one rank of several.
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "apps/communicator.h"
#include "commands.h"
#include "parvl/base/env.h"
#include "parvl/base/signal.h"
#include "parvl/base/text.h"
#include "parvl/train/dry_run.h"
#include "parvl/train/trainer.h"

namespace parvl {
namespace {

struct TrainOptions {
  std::string config;
  std::vector<std::string> overrides;
  bool dry_run = false;
  bool json = false;
};

void print(FILE* stream, std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stream);
  std::fflush(stream);
}

absl::Status run_train(const TrainOptions& options, const Context& context) {
  PARVL_ASSIGN_OR_RETURN(const Recipe recipe, load_recipe(options.config, options.overrides));
  if (options.dry_run) {
    PARVL_ASSIGN_OR_RETURN(const DryRun result, dry_run(recipe));
    print(stdout, options.json ? result.json.dump() + "\n" : result.text);
    return absl::OkStatus();
  }
  PARVL_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> communicator, communicator_from_environment());
  // From here on a stop is heeded between steps; before, while the ranks wait for each other, it ends the process.
  const StopSignal signal;
  TrainerEnvironment environment;
  environment.communicator = communicator.get();
  PARVL_ASSIGN_OR_RETURN(environment.local_rank, local_rank_from_environment());
  PARVL_ASSIGN_OR_RETURN(environment.checks, checks_from_environment());
  environment.clock = &context.clock;
  environment.base_dir = std::filesystem::absolute(options.config).parent_path().string();
  environment.stop_requested = [&signal] { return signal.requested(); };
  FILE* const text = options.json ? stderr : stdout;
  environment.write = [text](std::string_view progress) { print(text, progress); };
  // Every number with all its digits: a reader can compare two runs to the bit.
  if (options.json) environment.record = [](const Json& event) { print(stdout, event.dump() + "\n"); };
  winsize size{};
  environment.terminal = isatty(fileno(text)) != 0;
  if (environment.terminal && ioctl(fileno(text), TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    environment.columns = size.ws_col;
  PARVL_ASSIGN_OR_RETURN(auto trainer, Trainer::create(recipe, environment));
  return trainer->run();
}

}  // namespace

void add_train_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Trains a model by a recipe");
  named(command->add_option("--config", options->config, "recipe.yaml"))->required();
  command->add_option("--set", options->overrides, "key=value over the recipe, e.g. train.steps=100; may be repeated");
  command->add_flag(
      "--dry-run", options->dry_run,
      "Prints the rank table, bytes a rank and what the ranks say to each other in a step, from the recipe "
      "and the model's config.json alone; loads nothing and starts nothing");
  command->add_flag(
      "--json", options->json,
      "One JSON object a line on standard output for each logged step, save and evaluation; one with --dry-run");
  run_with(*command, context, [options, &context] { return run_train(*options, context); });
}

}  // namespace parvl
