// parvl ctl: operations on a running server, through its admin port.
#include <boost/asio/detached.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "apps/commands.h"
#include "parvl/base/env.h"
#include "parvl/base/json.h"
#include "parvl/base/text.h"
#include "parvl/serve/fleet_status.h"
#include "parvl/serve/http_client.h"

namespace parvl {
namespace {

constexpr double kTimeout_s = 15;
constexpr const char* kNotBuilt[] = {"scale", "lend", "resize", "apply", "approve", "reject", "rollback", "audit"};

struct CtlFlags {
  std::string target, token;
  int64_t instance = -1;
  bool json = false;
};

// What the server says of an error, or "".
std::string error_text(const Json& answer, const char* member) {
  const Json error = answer.is_object() && answer.contains("error") ? answer["error"] : Json();
  const bool told = error.is_object() && error.contains(member) && error[member].is_string();
  return told ? one_line(error[member].get<std::string>()) : "";
}

// `path`: POST where `body` is not empty. The answer, when it is a 200 of an admin port.
absl::StatusOr<Json> ask(const CtlFlags& flags, const std::string& path, const std::string& body,
                         const Context& context) {
  const std::string url = excerpt(flags.target, 200);
  HttpClient::Options options;
  PARVL_ASSIGN_OR_RETURN(options.target, parse_target(flags.target));
  options.api_key = flags.token;
  options.timeout_s = kTimeout_s;
  asio::io_context io(1);
  HttpClient client(io, std::move(options), context.clock);
  PARVL_RETURN_IF_ERROR(client.resolve());
  HttpAnswer answer;
  asio::co_spawn(
      io, [&]() -> asio::awaitable<void> { answer = co_await client.exchange(path, body, nullptr); }, asio::detached);
  io.run();
  if (answer.failure == "connect") {
    return failed("nothing answers at ", url, " (", answer.detail, "); `parvl serve --config` prints its admin port");
  }
  if (!answer.failure.empty() || answer.status == 0) {
    return failed(url, " gave no whole answer within ", kTimeout_s, " s (", answer.failure, ")");
  }
  const Json json = parse_json(answer.body, "the answer").value_or(Json());
  if (answer.status == 200 && json.is_object()) return json;
  const std::string message = error_text(json, "message"), code = error_text(json, "code");
  if (code == "invalid_admin_token") return failed(url, ": ", message, "; give --token, or set PARVL_ADMIN_TOKEN");
  // Other servers have other routes and other keys.
  if (message.empty() || answer.status == 401 || code == "route_not_found") {
    return failed(url, " is no admin port of parvl; `parvl serve --config` prints which one it has");
  }
  return failed(url, ": ", message);
}

absl::Status check_flags(const CtlFlags& flags) {
  if (flags.target.empty()) {
    return invalid(
        "--target is missing: the admin port's URL, which `parvl serve --config` prints; or set PARVL_ADMIN");
  }
  return absl::OkStatus();
}

absl::Status show_status(const CtlFlags& flags, const Context& context) {
  PARVL_RETURN_IF_ERROR(check_flags(flags));
  PARVL_ASSIGN_OR_RETURN(const Json status, ask(flags, "/status", "", context));
  if (!status.contains("pools") || !status.contains("instances")) {
    return failed(excerpt(flags.target, 200), " is no admin port of parvl");
  }
  const std::string text =
      flags.json ? status.dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : status_table(status);
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

absl::Status drain(const CtlFlags& flags, const Context& context) {
  PARVL_RETURN_IF_ERROR(check_flags(flags));
  if (flags.instance < 0) return invalid("--instance must be a number from `parvl ctl status`");
  PARVL_ASSIGN_OR_RETURN(const Json reply,
                         ask(flags, "/drain?instance=" + std::to_string(flags.instance), "{}", context));
  if (flags.json) {
    std::printf("%s\n", reply.dump().c_str());
  } else {
    std::printf("instance %lld takes no new requests, and ends when those it has are done\n",
                static_cast<long long>(flags.instance));
  }
  return absl::OkStatus();
}

}  // namespace

void add_ctl_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<CtlFlags>();
  flags->target = get_env("PARVL_ADMIN");
  flags->token = get_env("PARVL_ADMIN_TOKEN");
  CLI::App* command = app.add_subcommand("ctl", "Operates a running server, through its admin port");
  command->require_subcommand(1);
  command->add_option("--target", flags->target, "The admin port, as http://127.0.0.1:9000 (default: PARVL_ADMIN)");
  command->add_option("--token", flags->token,
                      "Where the server has admin.tokens (better set PARVL_ADMIN_TOKEN: others can read arguments)");
  CLI::App* status = command->add_subcommand("status", "Shows pools and instances");
  status->fallthrough();
  status->add_flag("--json", flags->json, "One JSON object");
  run_with(*status, context, [flags, &context] { return show_status(*flags, context); });
  CLI::App* draining = command->add_subcommand("drain", "Lets an instance finish its requests and end");
  draining->fallthrough();
  draining->add_option("--instance", flags->instance, "Its number in the status")->required();
  draining->add_flag("--json", flags->json, "One JSON object");
  run_with(*draining, context, [flags, &context] { return drain(*flags, context); });
  for (const char* name : kNotBuilt) {
    CLI::App* later = command->add_subcommand(name, "Not available yet");
    later->allow_extras();
    later->fallthrough(false);
    later->prefix_command();  // whatever follows is not ours to judge
    run_with(*later, context, [name] { return not_available_yet(std::string("'parvl ctl ") + name + "'"); });
  }
}

}  // namespace parvl
