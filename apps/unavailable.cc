// Commands that are known but not built yet.
#include <string>

#include "apps/commands.h"

namespace parvl {
namespace {

struct UnavailableCommand {
  const char* name;
  const char* does;
};

// Commands of the contract that are not built yet. A line goes when its file comes.
constexpr UnavailableCommand kUnavailable[] = {
    {"profile", "Measures each module's time, memory and communication"},
    {"plan", "Chooses parallelism, pool sizes and placement"},
    {"simulate", "Runs a trace through the scheduler without devices"},
    {"doctor", "Checks this machine"},
};

}  // namespace

void add_unavailable_command(CLI::App& app, Context& context) {
  for (const UnavailableCommand& command : kUnavailable) {
    CLI::App* sub = app.add_subcommand(command.name, std::string(command.does) + " (not available yet)");
    sub->allow_extras();
    sub->prefix_command();  // whatever follows is not ours to judge
    run_with(*sub, context, [name = command.name] { return not_available_yet(std::string("'parvl ") + name + "'"); });
  }
}

}  // namespace parvl
