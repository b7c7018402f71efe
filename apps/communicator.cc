#include "apps/communicator.h"

#include <absl/strings/numbers.h>

#include "parvl/base/env.h"
#include "parvl/base/text.h"
#include "parvl/comm/gloo/gloo_communicator.h"

namespace parvl {
namespace {

absl::StatusOr<int64_t> number(const char* name, int64_t fallback) {
  const std::string text = get_env(name);
  int64_t value = fallback;
  if (text.empty()) return value;
  if (!absl::SimpleAtoi(text, &value) || value < 0) {
    return invalid(name, " must be a whole number, found ", excerpt(text));
  }
  return value;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> communicator_from_environment() {
  GlooOptions options;
  PARVL_ASSIGN_OR_RETURN(options.world, number("WORLD_SIZE", 1));
  PARVL_ASSIGN_OR_RETURN(options.rank, number("RANK", 0));
  PARVL_ASSIGN_OR_RETURN(options.port, number("MASTER_PORT", 0));
  options.host = get_env("MASTER_ADDR", options.host);
  if (options.world < 1 || options.rank >= options.world) {
    return invalid("RANK is ", options.rank, ", but WORLD_SIZE is ", options.world,
                   "; ranks go from 0 to WORLD_SIZE - 1");
  }
  if (options.world == 1) return std::unique_ptr<Communicator>();
  if (options.port > 65535) return invalid("MASTER_PORT must be a port from 1 to 65535, found ", options.port);
  if (options.port == 0) {
    return invalid("WORLD_SIZE is ", options.world, ", but MASTER_PORT is not set; `parvl launch` and torchrun set it");
  }
  // torchrun's own agent may hold the store; each attempt has names of its own.
  options.serve_store = get_env("TORCHELASTIC_USE_AGENT_STORE") != "True";
  options.prefix =
      absl::StrCat("parvl/", get_env("TORCHELASTIC_RUN_ID", "run"), "/", get_env("TORCHELASTIC_RESTART_COUNT", "0"));
  return make_gloo_communicator(options);
}

}  // namespace parvl
