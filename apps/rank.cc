// parvl rank: one of the ranks of an engine whose LLM is cut, but the first, which starts it.
#include "apps/commands.h"
#include "parvl/comm/gloo/gloo_communicator.h"
#include "parvl/comm/ring/shared_ring.h"
#include "parvl/exec/engine_load.h"

namespace parvl {
namespace {

struct RankFlags {
  GlooOptions gloo;
  std::string ring;
};

absl::Status run(const RankFlags& flags, const Clock& clock) {
  PARVL_ASSIGN_OR_RETURN(const auto steps, RingReader::open(flags.ring, flags.gloo.rank - 1));
  PARVL_ASSIGN_OR_RETURN(const auto communicator, make_gloo_communicator(flags.gloo));
  return run_engine_rank(*communicator, *steps, clock);
}

}  // namespace

void add_rank_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<RankFlags>();
  CLI::App* command = app.add_subcommand("rank", "A rank of an engine whose LLM is cut, whose first rank starts it");
  command->group("");  // nobody starts it by hand
  command->add_option("--rank", flags->gloo.rank, "Which one this is")->required();
  command->add_option("--ranks", flags->gloo.world, "How many there are")->required();
  command->add_option("--ring", flags->ring, "Where the first rank's steps are")->required();
  command->add_option("--port", flags->gloo.port, "Where the ranks meet")->required();
  run_with(*command, context, [flags, &context] { return run(*flags, context.clock); });
}

}  // namespace parvl
