#include "apps/communicator.h"

#include <absl/strings/numbers.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

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

absl::StatusOr<int64_t> local_rank_from_environment() {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  return number("LOCAL_RANK", 0);
}

namespace {

FailureExplainer explainer;
std::terminate_handler handler_before = nullptr;

[[noreturn]] void leave(const absl::Status& status) {
  std::fprintf(stderr, PARVL_PROGRAM ": %s\n", one_line(std::string(status.message())).c_str());
  std::fflush(stderr);
  std::_Exit(exit_code(status));
}

void explain_and_terminate() {
  const absl::Status failure = catch_exceptions("a call of the ranks' groups failed", [] {
    if (std::exception_ptr current = std::current_exception()) std::rethrow_exception(current);
    return absl::OkStatus();
  });
  const absl::Status why = explainer.explain(failure);
  if (why != failure) leave(why);
  handler_before();
}

}  // namespace

absl::StatusOr<CheckOptions> checks_from_environment() {
  CheckOptions out;
  for (const auto& [name, seconds] : {std::pair("PARVL_RANK_DEADLINE_SECONDS", &out.deadline_s),
                                      std::pair("PARVL_RANK_SILENCE_SECONDS", &out.silent_s)}) {
    const std::string text = get_env(name);
    if (text.empty() || (absl::SimpleAtod(text, seconds) && *seconds >= 1 && *seconds <= 1e6)) continue;
    return invalid(name, " must be a number of seconds from 1 to 1000000, found ", excerpt(text));
  }
  out.on_finding = [](const absl::Status& status, const std::string& calls) {
    std::fprintf(stderr, "%s\n%s", one_line(std::string(status.message())).c_str(), calls.c_str());
  };
  // Only the thread of the call knows more, and it does not come back.
  out.on_stuck = leave;
  out.explainer = &explainer;
  if (handler_before == nullptr) handler_before = std::set_terminate(explain_and_terminate);
  return out;
}

}  // namespace parvl
