// parvl serve: the OpenAI-compatible server.
#include <absl/strings/numbers.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>

#include "apps/commands.h"
#include "apps/rank_processes.h"
#include "apps/serve_pools.h"
#include "parvl/base/json.h"
#include "parvl/base/log.h"
#include "parvl/base/signal.h"
#include "parvl/base/text.h"
#include "parvl/exec/engine_load.h"
#include "parvl/media/worker_pool.h"
#include "parvl/plan/placement_text.h"
#include "parvl/serve/media_fetch.h"
#include "parvl/serve/pools/pixels.h"
#include "parvl/serve/server.h"
#include "parvl/serve/warm_up.h"

namespace parvl {
namespace {

constexpr int64_t kMinTraceBytes = 4096, kMinRecordBytes = 4096;

struct ServeFlags {
  ServeOptions serve;
  EngineOptions engine;
  double shutdown_timeout_s = 30, queue_timeout_s = 300, request_timeout_s = 3600;
  std::string limit_mm_per_prompt;
  std::vector<std::string> media_domains, private_media_hosts;
  Timeline::Options trace;
  bool trace_wait = false;
  std::string log_format = "text";
  std::vector<std::string> short_tp, short_pp;  // what follows -t in "-tp N", and -p in "-pp N"
  std::string config, device_map;
  bool print_config = false;
};

// "image=4" or {"image": 4, ...}, as vLLM reads it.
absl::Status read_media_limits(const std::string& text, int64_t& max_images) {
  if (text.empty()) return absl::OkStatus();
  Json limits = Json::object();
  if (text.find('{') != std::string::npos) {
    PARVL_ASSIGN_OR_RETURN(limits, parse_json(text, "--limit-mm-per-prompt"));
  } else {
    const size_t equals = text.find('=');
    int64_t count = -1;
    if (equals == std::string::npos || !absl::SimpleAtoi(text.substr(equals + 1), &count)) count = -1;
    limits[text.substr(0, equals)] = count;
  }
  for (const auto& [modality, count] : limits.items()) {
    const bool valid = count.is_number_integer() && count >= 0 && count <= 1000;
    if (!valid)
      return invalid("--limit-mm-per-prompt ", excerpt(text), " must be like image=4, with a count up to 1000");
    if (modality == "image") {
      max_images = count.get<int64_t>();
    } else if (modality != "audio" && modality != "video") {
      return invalid("--limit-mm-per-prompt names ", excerpt(modality), "; image, audio and video are known");
    } else if (count > 0) {
      return not_available_yet("--limit-mm-per-prompt " + modality);
    }
  }
  return absl::OkStatus();
}

absl::Status check_body_limit(const HttpLimits& http) {
  const size_t most = http.bodies_in_flight_bytes / 2;  // one alone must not be turned away for want of room
  if (http.body_bytes >= 1 && http.body_bytes <= most) return absl::OkStatus();
  return invalid("--max-body-bytes must be between 1 and ", most, ", found ", http.body_bytes);
}

absl::StatusOr<std::chrono::milliseconds> read_seconds(const char* flag, double seconds) {
  if (seconds >= 0 && seconds <= 86'400) return std::chrono::milliseconds(std::llround(std::ceil(seconds * 1000)));
  return invalid(flag, " must be between 0 and 86400 seconds, found ", seconds);
}

// A size by which the LLM is cut, with what an allocation calls it.
struct SizeFlag {
  std::string name, short_name;          // "--tensor-parallel-size", "-tp"
  std::vector<std::string> given_short;  // what follows -t in "-tp N"
  std::string in_allocation;             // "parallel: tensor, tp_size"
};

absl::Status read_size(const SizeFlag& flag, const std::string& config, int64_t& size) {
  if (!flag.given_short.empty()) {
    std::string value = flag.given_short.back();
    if (flag.given_short.size() == 1 && value.rfind("p=", 0) == 0) value = value.substr(2);
    if (flag.given_short.front()[0] != 'p' || !absl::SimpleAtoi(value, &size)) {
      return invalid(flag.short_name, " needs a whole number");
    }
  }
  if (size < 1) return invalid(flag.name, " must be at least 1, found ", size);
  if (size > 1 && !config.empty()) {
    return invalid(flag.name, " is of a server without --config; an allocation says it for each pool: llm_backbone: {",
                   flag.in_allocation, ": ", size, "}");
  }
  return absl::OkStatus();
}

absl::Status read_sizes(ServeFlags& flags) {
  PARVL_RETURN_IF_ERROR(read_size({"--tensor-parallel-size", "-tp", flags.short_tp, "parallel: tensor, tp_size"},
                                  flags.config, flags.engine.tensor_ranks));
  return read_size({"--pipeline-parallel-size", "-pp", flags.short_pp, "parallel: pipeline, pp_size"}, flags.config,
                   flags.engine.pipeline_stages);
}

// What an allocation says of its own is not taken from a flag as well, of which nobody could tell which one counts.
absl::Status check_given_twice(const ServeFlags& flags) {
  if (flags.config.empty()) return absl::OkStatus();
  if (flags.engine.load.device != EngineOptions().load.device) {
    return invalid("--device is of a server without --config; give --device-map CLASS=", flags.engine.load.device,
                   " for each class of the allocation");
  }
  if (flags.serve.max_queue == ServeOptions().max_queue) return absl::OkStatus();
  return invalid("--max-queue is of a server without --config; an allocation says it for each queue: queues: {text: ",
                 "{limit: ", flags.serve.max_queue, "}}");
}

// None without an allocation file. Prints what became of it where that is asked for: then it is `done`.
absl::StatusOr<std::optional<PoolServing>> read_placement(const ServeFlags& flags, bool& done) {
  if (flags.config.empty()) {
    for (const auto& [name, given] :
         {std::pair("--print-config", flags.print_config), std::pair("--device-map", !flags.device_map.empty())}) {
      if (given) return invalid(name, " is about an allocation; give its file with --config");
    }
    return std::nullopt;
  }
  PARVL_ASSIGN_OR_RETURN(PoolServing pools,
                         read_pools(flags.config, flags.device_map, flags.serve.model_dir, flags.engine.load.dtype));
  if (!flags.print_config) {
    PARVL_RETURN_IF_ERROR(check_servable(pools.allocation, pools.plan));
    return pools;
  }
  std::printf("%s\n", placement_json(pools.allocation, pools.plan, pools.device_map).dump(2).c_str());
  done = true;
  return pools;
}

// A line to copy: asks about a small red square, or for a text where the model takes no images.
std::string example_request(const ServeFlags& flags, const std::string& url, bool takes_images) {
  constexpr char kRedSquare[] =
      "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKklEQVR4nGM4ISdHU8QwasGoBaMWjFowasGoBaMWjF"
      "owasGoBaMWDBULACXLED3NSh4NAAAAAElFTkSuQmCC";
  Json content = Json::array();
  if (takes_images) content.push_back({{"type", "image_url"}, {"image_url", {{"url", kRedSquare}}}});
  content.push_back({{"type", "text"}, {"text", takes_images ? "What color is this?" : "Hello"}});
  const Json body = {{"messages", {{{"role", "user"}, {"content", content}}}}, {"max_tokens", 32}};
  const std::string key = flags.serve.api_keys.empty() ? "" : " -H 'Authorization: Bearer '\"$API_KEY\"";
  return absl::StrCat("try: curl ", url, "/v1/chat/completions", key, " -d '", body.dump(), "'");
}

// What the server needs for showing and operating its instances.
std::shared_ptr<PoolsView> open_admin(const PoolServing& pools, ServeOptions& serve) {
  auto view = std::make_shared<PoolsView>(pools.plan);
  const Allocation& allocation = pools.allocation;
  serve.fleet = view;
  serve.admin = AdminOptions{.host = allocation.admin_host,
                             .port = static_cast<int>(allocation.admin_port),
                             .tokens = allocation.admin_tokens,
                             .host_where = allocation.admin_where.at("host"),
                             .port_where = allocation.admin_where.at("port"),
                             .window_s = allocation.scheduler.window_seconds};
  return view;
}

absl::Status start_trace(ServeFlags& flags, const Clock& clock) {
  if (flags.trace.path.empty()) {
    return flags.trace_wait ? invalid("--trace-wait says when --trace FILE begins; give that too") : absl::OkStatus();
  }
  if (flags.trace.max_bytes < kMinTraceBytes) {
    return invalid("--trace-max-bytes must be at least ", kMinTraceBytes, ", found ", flags.trace.max_bytes);
  }
  flags.serve.timeline = flags.engine.timeline = std::make_shared<Timeline>(flags.trace, clock);
  return flags.trace_wait ? absl::OkStatus() : flags.serve.timeline->start().status();
}

absl::Status check_record(const ServeFlags& flags) {
  if (flags.engine.record_max_bytes >= kMinRecordBytes) return absl::OkStatus();
  return invalid("--record-max-bytes must be at least ", kMinRecordBytes, ", found ", flags.engine.record_max_bytes);
}

// Later the server still says to whoever asks that it cannot answer.
void tell_lost(const absl::Status& why, bool loading) {
  log_error(why.message(), loading ? "" : "; nothing can be computed any more: start the server again");
  if (!loading) return;
  std::fflush(nullptr);
  std::_Exit(exit_code(why));
}

// In this process, and those of its other ranks.
absl::StatusOr<std::unique_ptr<Engine>> load_here(EngineOptions engine, const std::string& dir,
                                                  const Context& context) {
  use_rank_processes(engine, {.program = context.program_folder + "/parvl", .on_lost = tell_lost}, context.clock);
  PARVL_ASSIGN_OR_RETURN(auto out, load_engine(dir, engine, context.clock));
  engine.load.startup->begin("warm-up");
  PARVL_RETURN_IF_ERROR(warm_up(*out));
  return out;
}

// Who decodes pictures: with pools, into the store that is returned.
absl::StatusOr<std::shared_ptr<PixelStore>> start_decoders(ServeOptions& serve, bool pools, const Context& context) {
  std::shared_ptr<PixelStore> store;
  if (pools) {
    PARVL_ASSIGN_OR_RETURN(store, start_pixels(context));
  }
  // A text-only directory has no pictures.
  if (!std::filesystem::exists(serve.model_dir + "/preprocessor_config.json")) return store;
  MediaWorkerOptions workers;
  workers.program = context.program_folder + "/parvl-media-worker";
  if (store != nullptr) workers.store = store;
  PARVL_ASSIGN_OR_RETURN(serve.media.images, MediaWorkerPool::start(workers, context.clock));
  return store;
}

absl::Status run_serve(ServeFlags& flags, const Context& context) {
  const StopSignal signal;
  set_log_format(flags.log_format == "json" ? LogFormat::kJson : LogFormat::kText);
  PARVL_RETURN_IF_ERROR(read_sizes(flags));
  PARVL_RETURN_IF_ERROR(check_given_twice(flags));
  bool done = false;
  PARVL_ASSIGN_OR_RETURN(const std::optional<PoolServing> pools, read_placement(flags, done));
  if (done) return absl::OkStatus();
  if (pools.has_value()) set_queues(pools->allocation, flags.serve);
  PARVL_RETURN_IF_ERROR(check_body_limit(flags.serve.http));
  PARVL_RETURN_IF_ERROR(read_media_limits(flags.limit_mm_per_prompt, flags.serve.media.max_images));
  PARVL_ASSIGN_OR_RETURN(flags.serve.shutdown_timeout, read_seconds("--shutdown-timeout", flags.shutdown_timeout_s));
  PARVL_ASSIGN_OR_RETURN(flags.serve.queue_timeout, read_seconds("--queue-timeout", flags.queue_timeout_s));
  PARVL_ASSIGN_OR_RETURN(flags.serve.request_timeout, read_seconds("--request-timeout", flags.request_timeout_s));
  if (flags.serve.served_names.empty()) flags.serve.served_names = {flags.serve.model_dir};
  flags.serve.version = context.version;
  FetchPolicy& fetch = flags.serve.media.fetch;
  fetch.user_agent = "parvl/" + context.version;
  PARVL_ASSIGN_OR_RETURN(fetch.domains, parse_media_hosts("--allowed-media-domains", flags.media_domains));
  PARVL_ASSIGN_OR_RETURN(fetch.private_hosts,
                         parse_media_hosts("--allowed-private-media-hosts", flags.private_media_hosts));
  std::random_device entropy;
  flags.serve.seed = static_cast<uint64_t>(entropy()) << 32 | entropy();
  flags.serve.stop_descriptor = signal.descriptor();
  PARVL_RETURN_IF_ERROR(check_record(flags));
  PARVL_RETURN_IF_ERROR(start_trace(flags, context.clock));

  PARVL_ASSIGN_OR_RETURN(const auto pixels, start_decoders(flags.serve, pools.has_value(), context));
  const auto view = pools.has_value() ? open_admin(*pools, flags.serve) : nullptr;
  PARVL_ASSIGN_OR_RETURN(const auto server, Server::listen(flags.serve, context.clock));
  const std::string admin_url = server->admin_url();
  if (!admin_url.empty()) log_info("admin port: ", admin_url, " (also the dashboard)");
  const auto startup = std::make_shared<Startup>(context.clock, [](const std::string& line) { log_info(line); });
  flags.engine.load.startup = startup;
  flags.engine.load.memory_limit_bytes = context.memory_limit_bytes;
  auto heartbeat = std::make_unique<Heartbeat>(startup);
  bool takes_images = false;
  const auto load = [&]() -> absl::StatusOr<std::unique_ptr<Engine>> {
    if (pools.has_value()) {
      startup->begin("instances");
      PARVL_ASSIGN_OR_RETURN(auto fleet,
                             start_pools(*pools, {flags.serve.model_dir, flags.engine, view, pixels}, context));
      startup->begin("listening");
      takes_images = fleet->prompts().has_images();
      return fleet;
    }
    PARVL_ASSIGN_OR_RETURN(auto engine, load_here(flags.engine, flags.serve.model_dir, context));
    startup->begin("listening");
    takes_images = engine->prompts().has_images();
    return engine;
  };
  const absl::Status status = server->run(load, [&] {
    startup->finish();
    heartbeat.reset();
    const std::string admin = admin_url.empty() ? "" : " admin " + admin_url;
    std::printf("parvl ready %s%s\n", server->url().c_str(), admin.c_str());
    std::fflush(stdout);
    log_info(example_request(flags, server->url(), takes_images));
  });
  if (server->loader_abandoned()) {
    std::fflush(nullptr);
    std::_Exit(exit_code(status));
  }
  return status;
}

void add_placement_options(CLI::App& command, ServeFlags& flags) {
  named(command.add_option("--config", flags.config, "Allocation file: which modules run on which pools of devices"));
  command.add_option("--device-map", flags.device_map, "What to compute on instead: CLASS=cpu|cuda,...");
  command.add_flag("--print-config", flags.print_config,
                   "Print what became of --config for this model, every default filled in, and end");
}

void add_size_options(CLI::App& command, ServeFlags& flags) {
  command.add_option("--tensor-parallel-size", flags.engine.tensor_ranks,
                     "Processes that the LLM's matrices are cut over; also -tp");
  command.add_option("-t", flags.short_tp)->expected(1, 2)->group("");  // -tp N reads as -t with "p" and N
  command.add_option("--pipeline-parallel-size", flags.engine.pipeline_stages,
                     "Stages that the LLM's layers are cut into, each in processes of its own; also -pp");
  command.add_option("-p", flags.short_pp)->expected(1, 2)->group("");
}

// What it tells of what it does.
void add_telling_options(CLI::App& command, ServeFlags& flags) {
  command.add_option("--record", flags.engine.record_path,
                     "File to write every scheduling event and decision to, for `parvl replay`; it holds token ids");
  command.add_option("--record-max-bytes", flags.engine.record_max_bytes, "Where a record ends")->capture_default_str();
  named(
      command.add_option("--trace", flags.trace.path,
                         "File for a trace of requests and steps, without content, for Perfetto or chrome://tracing"));
  command.add_option("--trace-max-bytes", flags.trace.max_bytes, "Where a trace ends")->capture_default_str();
  command.add_flag("--trace-wait", flags.trace_wait, "Trace only from POST /start_profile to /stop_profile");
  command.add_option("--log-format", flags.log_format, "text, or json: an object a line, with times and request ids")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command.add_flag("--log-requests", flags.serve.log_requests,
                   "A line a request on standard error, without its content");
}

}  // namespace

void add_serve_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* command = app.add_subcommand("serve", "Serves a model over the OpenAI API");
  ServeOptions& serve = flags->serve;
  named(command->add_option("--model", serve.model_dir, "Model directory"))->required();
  command->add_option("--host", serve.host, "Address to listen on")->capture_default_str();
  command->add_option("--port", serve.port, "Port to listen on; 0: any free one")->capture_default_str();
  command->add_option("--served-model-name", serve.served_names, "Names that requests may use (default: --model)");
  command
      ->add_option("--dtype", flags->engine.load.dtype, "auto (the directory's), float32, bfloat16, float16 or float64")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16", "float64"}));
  command->add_option("--device", flags->engine.load.device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  command->add_option("--max-model-len", flags->engine.load.max_model_len,
                      "Context in tokens; 0, the default: the model's");
  EngineOptions& engine = flags->engine;
  command->add_option("--max-num-seqs", engine.max_seqs, "Requests that run at once")->capture_default_str();
  command->add_option("--max-num-batched-tokens", engine.max_batched_tokens, "Tokens a step; longer prompts are cut")
      ->capture_default_str();
  command->add_option("--kv-cache-memory-bytes", engine.kv_cache_bytes,
                      "Memory for keys and values; 0, the default: a quarter of what is left, at most 8 GiB; all that "
                      "is left of a GPU's");
  command->add_option("--encoder-cache-bytes", engine.encoder_cache_bytes,
                      "Memory for encoded images; 0, the default: an eighth of what is left, at most 1 GiB");
  command->add_option("--gpu-memory-utilization", engine.load.memory_utilization,
                      "Share of a GPU's memory to use (default 0.9); of the CPU's free memory (default 1)");
  command->add_flag("--enforce-eager", engine.enforce_eager, "On a GPU: do not record decode steps as CUDA graphs");
  command->add_flag("--enable-prefix-caching,!--no-enable-prefix-caching", engine.prefix_caching,
                    "Keep the keys and values of prompts for requests that begin alike (default: on)");
  command
      ->add_option("--max-queue", serve.max_queue,
                   "Choices that may wait, of text requests and of requests with images each; one more gets 429")
      ->capture_default_str();
  command->add_option("--max-queue-tokens", serve.max_queue_tokens,
                      "Prompt tokens of all requests past the queue; one with more gets 429; 0, the default: 16 times "
                      "what the KV memory holds");
  command
      ->add_option("--queue-timeout", flags->queue_timeout_s,
                   "Seconds that a request may wait for its turn, then 503; 0: without end")
      ->capture_default_str();
  command
      ->add_option("--request-timeout", flags->request_timeout_s,
                   "Seconds that a request may take in all, then 504 or the end of its stream; 0: without end")
      ->capture_default_str();
  command
      ->add_option("--max-connections", serve.http.connections,
                   "Connections open at once; one more is answered 503 and closed")
      ->capture_default_str();
  command->add_option("--api-key", serve.api_keys, "Keys, one of which every request but the probes must carry");
  command
      ->add_option("--shutdown-timeout", flags->shutdown_timeout_s,
                   "Seconds from SIGTERM to the end; what still runs one second before (at most half of it) is cut")
      ->capture_default_str();
  command->add_option(
      "--limit-mm-per-prompt", flags->limit_mm_per_prompt,
      "Items a request may hold, as image=4 (default: image=" + std::to_string(serve.media.max_images) + ")");
  command->add_option("--allowed-local-media-path", serve.media.local_path,
                      "Folder that file:// URLs may name files in");
  command->add_option("--allowed-media-domains", flags->media_domains,
                      "HOST,...: the only hosts that http and https URLs may name (default: any)");
  command->add_option("--allowed-private-media-hosts", flags->private_media_hosts,
                      "HOST,...: hosts whose address need not be public");
  command->add_option("--max-body-bytes", serve.http.body_bytes, "Largest request body")->capture_default_str();
  add_size_options(*command, *flags);
  add_telling_options(*command, *flags);
  add_placement_options(*command, *flags);
  run_with(*command, context, [flags, &context] { return run_serve(*flags, context); });
}

}  // namespace parvl
