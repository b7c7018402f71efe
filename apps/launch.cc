// parvl launch: the ranks of a command on this machine, with torchrun's flags and variables.
#include <absl/strings/numbers.h>

#include <memory>

#include "apps/commands.h"
#include "parvl/base/env.h"
#include "parvl/base/log.h"
#include "parvl/base/signal.h"
#include "parvl/base/text.h"
#include "parvl/launch/supervisor.h"

namespace parvl {
namespace {

constexpr int64_t kDefaultPort = 29500;  // torchrun's

struct LaunchFlags {
  LaunchOptions options;
  std::string endpoint;
};

absl::Status run_launch(LaunchFlags flags) {
  LaunchOptions& options = flags.options;
  if (options.command.empty()) {
    return invalid("no command given; write `parvl launch --nproc-per-node N -- parvl train --config recipe.yaml`");
  }
  if (!flags.endpoint.empty()) {
    const size_t colon = flags.endpoint.rfind(':');
    options.master_host = flags.endpoint.substr(0, colon);
    if (colon == std::string::npos || options.master_host.empty() ||
        !absl::SimpleAtoi(flags.endpoint.substr(colon + 1), &options.master_port)) {
      return invalid("--rdzv-endpoint must be HOST:PORT, found ", excerpt(flags.endpoint));
    }
  }
  if (options.node >= options.nodes) {
    return invalid("--node-rank ", options.node, " must be below --nnodes ", options.nodes);
  }
  if (options.nodes > 1 && options.master_port == 0) options.master_port = kDefaultPort;
  // Several processes with all cores each would wait for each other's threads.
  if (options.processes > 1) setenv("OMP_NUM_THREADS", "1", /*overwrite=*/0);
  const StopSignal signal;
  options.stop_descriptor = signal.descriptor();
  options.log = [](const std::string& line) { log_warning(line); };
  return supervise(options);
}

}  // namespace

void add_launch_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<LaunchFlags>();
  LaunchOptions& options = flags->options;
  CLI::App* command =
      app.add_subcommand("launch", "Starts a command on several ranks: parvl launch [flags] -- COMMAND");
  command->add_option("--nproc-per-node,--nproc_per_node", options.processes, "Processes on this machine")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--nnodes", options.nodes, "Machines")->check(CLI::Range(1, 4096))->capture_default_str();
  command->add_option("--node-rank,--node_rank", options.node, "Which of them this is, from 0")
      ->check(CLI::Range(0, 4095));
  command->add_option("--master-addr,--master_addr", options.master_host, "Host of rank 0")->capture_default_str();
  command
      ->add_option("--master-port,--master_port", options.master_port,
                   "Port at which the ranks meet; with one machine a free one, else 29500")
      ->check(CLI::Range(1, 65535));
  named(command->add_option("--rdzv-endpoint,--rdzv_endpoint", flags->endpoint, "HOST:PORT instead of the two above"));
  command
      ->add_option("--max-restarts,--max_restarts", options.max_restarts,
                   "How often all ranks start again after one died; training goes on from its last checkpoint")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  command->add_option("--grace-seconds", options.grace_s, "For ranks that were asked to end, to save and do so")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  command->add_option("command", options.command, "The command and its arguments, after --");
  run_with(*command, context, [flags] { return run_launch(*flags); });
}

}  // namespace parvl
