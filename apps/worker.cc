// parvl worker: the process of one instance, which `parvl serve --config` starts; it has no role until its gateway
// assigns it one.
#include "parvl/serve/pools/worker.h"

#include <cstdio>
#include <cstdlib>

#include "apps/commands.h"
#include "apps/rank_processes.h"
#include "parvl/base/env.h"
#include "parvl/base/log.h"
#include "parvl/base/startup.h"

namespace parvl {
namespace {

absl::Status run(WorkerOptions& options, const Context& context) {
  options.token = get_env("PARVL_RUN_TOKEN");
  if (options.token.empty()) {
    return invalid("PARVL_RUN_TOKEN must hold the run's token; `parvl serve --config` starts its workers with it");
  }
  options.on_gone = [](const absl::Status& why) {
    log_warning("an instance ends itself: ", why.message());
    std::fflush(nullptr);
    std::_Exit(1);
  };
  const std::string name = absl::StrCat("instance ", options.instance, ": ");
  // With the phases told as they pass.
  const auto told = [&](const EngineOptions& given, auto load, const std::string& dir) {
    const auto startup =
        std::make_shared<Startup>(context.clock, [name](const std::string& line) { log_info(name, line); });
    EngineOptions engine = given;
    engine.load.startup = startup;
    // The gateway moves what an instance had once its process has ended.
    const auto gone = options.on_gone;
    use_rank_processes(engine,
                       {.program = context.program_folder + "/parvl",
                        .on_lost = [gone](const absl::Status& why, bool /*loading*/) { gone(why); },
                        .watch_steps = false},  // the gateway does
                       context.clock);
    const Heartbeat heartbeat(startup);
    auto loaded = load(dir, engine, context.clock);
    if (loaded.ok()) startup->finish();
    return loaded;
  };
  WorkerLoaders loaders;
  loaders.engine = [&](const std::string& dir, const EngineOptions& given) { return told(given, load_engine, dir); };
  loaders.encoder = [&](const std::string& dir, const EngineOptions& given) {
    return told(given, load_encode_engine, dir);
  };
  return run_worker(options, loaders, context.clock);
}

}  // namespace

void add_worker_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<WorkerOptions>();
  CLI::App* command = app.add_subcommand("worker", "One instance of `parvl serve --config`, which starts it");
  command->add_option("--gateway", options->gateway, "HOST:PORT to attach to")->required();
  command->add_option("--instance", options->instance, "Which one of the gateway's instances this is")->required();
  command->add_option("--epoch", options->epoch, "Its how manieth process this is")->required();
  run_with(*command, context, [options, &context] { return run(*options, context); });
}

}  // namespace parvl
