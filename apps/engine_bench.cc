// parvl-engine bench: the engine under load without HTTP. Prompt and answer lengths are mixed, the same for every run
// and for the peer (bench/serve/peer_batch.py).
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "apps/commands.h"
#include "apps/mixed_lengths.h"
#include "apps/rank_processes.h"
#include "parvl/base/json.h"
#include "parvl/base/log.h"
#include "parvl/base/memory.h"
#include "parvl/base/rng.h"
#include "parvl/exec/engine_load.h"

namespace parvl {
namespace {

struct BenchFlags {
  std::string model;
  EngineOptions engine;
  int64_t clients = 1, requests = 8, max_prompt = 256, max_new = 64;
  std::vector<int64_t> image;  // patches across and down
  int64_t images = 1;          // a request
  int64_t long_prompt = 0;     // tokens of one more request that comes when half of the others have ended
};

// Sums and quantiles of some times in milliseconds.
Json quantiles(std::vector<double> ms) {
  if (ms.empty()) return Json();
  std::sort(ms.begin(), ms.end());
  const auto at = [&](double q) { return ms[static_cast<size_t>(q * static_cast<double>(ms.size() - 1))]; };
  return {{"p50", at(0.5)}, {"p90", at(0.9)}, {"p99", at(0.99)}, {"max", ms.back()}};
}

// What the engine's thread says of each step: how long those took in which every sequence had one token, and those that
// (also) held a part of a prompt.
class StepTimes {
 public:
  // The engine must end before this.
  std::function<void(const EngineStep&)> listener() {
    return [this](const EngineStep& step) {
      std::lock_guard lock(mutex_);
      (step.is_decode() ? decode_ms_ : prefill_ms_).push_back(step.seconds * 1e3);
    };
  }
  void forget() {
    std::lock_guard lock(mutex_);
    decode_ms_.clear();
    prefill_ms_.clear();
  }
  void add_to(Json& report) const {
    std::lock_guard lock(mutex_);
    report["steps"] = decode_ms_.size() + prefill_ms_.size();
    report["decode_step_ms"] = quantiles(decode_ms_);
    report["prefill_step_ms"] = quantiles(prefill_ms_);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<double> decode_ms_, prefill_ms_;
};

// Each client sends its next request when its last one has ended.
class ClosedLoop {
 public:
  ClosedLoop(Engine& engine, const Clock& clock, const BenchFlags& flags, int64_t requests)
      : engine_(engine), clock_(clock), flags_(flags), work_(mixed_lengths(requests, flags.max_prompt, flags.max_new)) {
    if (flags.long_prompt > 0) work_.insert(work_.begin() + requests / 2, {flags.long_prompt, 4});
  }

  // Returns when all requests have ended.
  void run() {
    for (int64_t i = 0; i < flags_.clients; ++i) send_next();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ == work_.size(); });
  }

  Json report(double seconds) const {
    return {{"requests", ended_},
            {"failed", failed_},
            {"tokens", tokens_},
            {"tokens_s", static_cast<double>(tokens_) / seconds},
            {"ttft_ms", quantiles(ttft_ms_)},
            {"itl_ms", quantiles(itl_ms_)}};
  }

 private:
  // Random patches, another picture each time.
  std::shared_ptr<const ProcessedImage> make_image(int64_t seed) const {
    auto image = std::make_shared<ProcessedImage>();
    const ImageProcessorConfig& config = engine_.prompts().image_processor().config();
    image->grid_t = 1;
    image->grid_w = flags_.image[0];
    image->grid_h = flags_.image[1];
    image->merge_size = config.merge_size;
    // As a server knows it, from the source's bytes; else the engine would hash the patches.
    for (size_t i = 0; i < sizeof seed; ++i) image->key[i] = static_cast<uint8_t>((seed + 1) >> (8 * i));
    Rng rng(static_cast<uint64_t>(seed));
    const int64_t values = config.patch_size * config.patch_size * config.temporal_patch_size * 3;
    image->patches.resize(static_cast<size_t>(image->num_patches() * values));
    for (float& x : image->patches) x = static_cast<float>(rng.uniform() * 2 - 1);
    return image;
  }

  std::shared_ptr<const Prompt> make_prompt(size_t index) const {
    auto prompt = std::make_shared<Prompt>();
    for (int64_t i = 0; !flags_.image.empty() && i < flags_.images; ++i) {
      prompt->images.push_back(make_image(static_cast<int64_t>(index) * flags_.images + i));
      const int64_t tokens = prompt->images.back()->num_tokens();
      prompt->media.push_back({static_cast<int>(i), static_cast<int64_t>(prompt->ids.size()), tokens});
      prompt->ids.resize(prompt->ids.size() + static_cast<size_t>(tokens), engine_.prompts().image_token());
    }
    for (int64_t i = 0; i < work_[index].prompt; ++i)
      prompt->ids.push_back(mixed_token(static_cast<int64_t>(index), i));
    return prompt;
  }

  void send_next() {
    size_t index = 0;
    {
      std::lock_guard lock(mutex_);
      if (sent_ == work_.size()) return;
      index = sent_++;
    }
    EngineRequest request;
    request.prompt = make_prompt(index);
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = work_[index].output;
    auto last = std::make_shared<double>(0);
    request.on_token = [this, last](const TokenEvent&) {
      const double now = clock_.now_seconds();
      std::lock_guard lock(mutex_);
      if (*last > 0) itl_ms_.push_back((now - *last) * 1e3);
      *last = now;
    };
    request.on_end = [this](const absl::StatusOr<GenerateResult>& result) { on_end(result); };
    engine_.submit(std::move(request));
  }

  void on_end(const absl::StatusOr<GenerateResult>& result) {
    {
      std::lock_guard lock(mutex_);
      ++ended_;
      if (result.ok()) {
        tokens_ += static_cast<int64_t>(result->token_ids.size());
        ttft_ms_.push_back(result->ttft_ms);
      } else {
        ++failed_;
        std::fprintf(stderr, "%s\n", std::string(result.status().message()).c_str());
      }
    }
    changed_.notify_all();
    send_next();
  }

  Engine& engine_;
  const Clock& clock_;
  const BenchFlags& flags_;
  std::vector<MixedLength> work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t sent_ = 0, ended_ = 0, failed_ = 0;
  int64_t tokens_ = 0;
  std::vector<double> ttft_ms_, itl_ms_;
};

absl::Status run_bench(const BenchFlags& flags, const Context& context) {
  if (!flags.image.empty() && flags.image.size() != 2)
    return invalid("--image takes two numbers: patches across, down");
  EngineOptions options = flags.engine;
  options.max_seqs = std::max(options.max_seqs, flags.clients);
  StepTimes steps;
  options.hooks.on_step = steps.listener();
  const auto startup = std::make_shared<Startup>(context.clock, [](const std::string& line) { log_info(line); });
  options.load.startup = startup;
  const auto lost = [](const absl::Status& why, bool /*loading*/) {
    log_error(why.message());
    std::fflush(nullptr);
    std::_Exit(exit_code(why));
  };
  use_rank_processes(options, {.program = context.program_folder + "/" PARVL_PROGRAM, .on_lost = lost}, context.clock);
  PARVL_ASSIGN_OR_RETURN(auto engine, load_engine(flags.model, options, context.clock));
  if (!flags.image.empty() && !engine->prompts().has_images()) return invalid(flags.model, " takes no images");
  startup->begin("warm-up");
  BenchFlags warm = flags;
  warm.long_prompt = 0;
  ClosedLoop(*engine, context.clock, warm, std::min<int64_t>(2, flags.requests)).run();
  steps.forget();
  startup->finish();
  ClosedLoop loop(*engine, context.clock, flags, flags.requests);
  const double start = context.clock.now_seconds();
  loop.run();
  Json out = loop.report(context.clock.now_seconds() - start);
  steps.add_to(out);
  out["preemptions"] = engine->stats().preemptions;
  out["peak_bytes"] = peak_resident_bytes();
  std::printf("%s\n", out.dump().c_str());
  return absl::OkStatus();
}

}  // namespace

void add_engine_bench_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = app.add_subcommand("bench", "Times the engine under a closed loop of clients; one JSON object");
  named(command->add_option("--model", flags->model, "Model directory"))->required();
  command->add_option("--device", flags->engine.load.device, "auto, cpu or cuda")->capture_default_str();
  command->add_option("--dtype", flags->engine.load.dtype, "auto, float32, bfloat16 or float16")->capture_default_str();
  command->add_option("--max-model-len", flags->engine.load.max_model_len, "Longest sequence; 0: the model's");
  command->add_option("--max-num-batched-tokens", flags->engine.max_batched_tokens, "Tokens a step")
      ->capture_default_str();
  command->add_option("--kv-cache-memory-bytes", flags->engine.kv_cache_bytes,
                      "Memory for keys and values; 0: a share");
  command
      ->add_option("--tensor-parallel-size", flags->engine.tensor_ranks,
                   "Processes that the LLM's matrices are cut over")
      ->check(CLI::Range(1, 64));
  command->add_option("--pipeline-parallel-size", flags->engine.pipeline_stages, "Stages that its layers are cut into")
      ->check(CLI::Range(1, 64));
  command->add_flag("--enforce-eager", flags->engine.enforce_eager, "On a GPU: do not record decode steps");
  named(command->add_option("--record", flags->engine.record_path, "File for `replay`"));
  command->add_option("--clients", flags->clients, "At once")->check(CLI::Range(1, 1024))->capture_default_str();
  command->add_option("--requests", flags->requests, "In all")->check(CLI::Range(1, 1000000))->capture_default_str();
  command->add_option("--max-prompt", flags->max_prompt, "Longest prompt in tokens; the shortest has 8")
      ->check(CLI::Range(8, 1000000))
      ->capture_default_str();
  command->add_option("--max-new", flags->max_new, "Longest answer in tokens; the shortest has 4")
      ->check(CLI::Range(4, 1000000))
      ->capture_default_str();
  command->add_option("--image", flags->image, "An image in front of each prompt: patches across and down")
      ->expected(2);
  command->add_option("--images", flags->images, "So many of them")->check(CLI::Range(1, 64))->capture_default_str();
  command->add_option("--long-prompt", flags->long_prompt, "One more request in the middle, of so many tokens")
      ->check(CLI::Range(0, 1000000));
  run_with(*command, context, [flags, &context] { return run_bench(*flags, context); });
}

}  // namespace parvl
