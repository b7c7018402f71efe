#include "parvl/exec/engine_load.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/gpu_driver.h"
#include "parvl/base/log.h"
#include "parvl/exec/backbone_step.h"
#include "parvl/exec/encode_queue.h"
#include "parvl/exec/encoder_ranks.h"
#include "parvl/exec/engine_loop.h"
#include "parvl/exec/engine_ranks.h"
#include "parvl/exec/kv_transfer.h"
#include "parvl/exec/rank_setup.h"
#include "parvl/exec/record_file.h"
#include "parvl/exec/torch_encode_engine.h"
#include "parvl/exec/torch_executor.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

// Patches of the largest image that the processor makes, and that a prompt has room for.
int64_t largest_image(const LoadedFiles& files) {
  if (!files.prompts->has_images()) return 0;
  const ImageProcessorConfig& images = files.prompts->image_processor().config();
  const int64_t merge = images.merge_size, patch = images.patch_size;
  return std::min(images.max_pixels / (patch * patch), files.max_model_len * merge * merge);
}

// Of one rank.
int64_t kv_bytes(const LoadedFiles& files, const BackboneRank& rank, int64_t blocks) {
  const BackboneSpec part = rank_backbone(files.model->spec().backbone, rank);
  return blocks * KvPages::kBlockSize * kv_bytes_a_token(part, files.dtype);
}

// Before the weights are there: says what does not fit of what one rank holds.
absl::StatusOr<ServingMemory> plan_memory(const LoadedFiles& files, const EngineOptions& options,
                                          const BackboneRank& rank = {}) {
  ServingSettings settings;
  settings.dtype = files.dtype;
  settings.max_model_len = files.max_model_len;
  settings.max_seqs = options.max_seqs;
  settings.max_batched_tokens = options.max_batched_tokens;
  settings.block_size = KvPages::kBlockSize;
  settings.kv_cache_bytes = options.kv_cache_bytes;
  settings.encoder_cache_bytes = options.encoder_cache_bytes;
  settings.max_patches = largest_image(files);
  if (files.device.is_cuda() && settings.max_patches > 0) settings.encode_patches = kEncodePatches;
  settings.prefix_caching = options.prefix_caching;
  settings.held = files.held;
  settings.rank = rank;
  settings.samples = !rank.stage || (rank.rank == 0 && rank.stage->embedding);
  MemoryThere there = memory_there(files, options.load);
  if (!files.device.is_cuda() && options.ranks() > 1) {
    there.bytes /= options.ranks();
    there.name = absl::StrCat("of the CPU's memory for each of ", options.ranks(), " ranks");
  }
  return plan_serving_memory(files.model->spec(), settings, there);
}

absl::Status check_gpus(const EngineOptions& options) {
  PARVL_ASSIGN_OR_RETURN(const int64_t count, count_gpus());
  if (options.ranks() <= count) return absl::OkStatus();
  return invalid("--tensor-parallel-size ", options.tensor_ranks, " and --pipeline-parallel-size ",
                 options.pipeline_stages, " need ", options.ranks(), " GPUs, and this machine has ", count,
                 "; ask for fewer, or compute on the CPU: --device cpu");
}

// Of the first rank, with as many blocks as all have room for. The ranks of a stage hold as much, but that the first of
// all keeps what was encoded and chooses the tokens.
absl::StatusOr<ServingMemory> plan_ranks(const LoadedFiles& files, const EngineOptions& options) {
  const ModelSpec& spec = files.model->spec();
  PARVL_RETURN_IF_ERROR(check_tensor_ranks(spec, {"llm_backbone"}, options.tensor_ranks, "--tensor-parallel-size"));
  PARVL_RETURN_IF_ERROR(
      check_stages(spec.backbone.layers, "llm_backbone", options.pipeline_stages, "--pipeline-parallel-size"));
  if (options.ranks() > kMaxRingReaders + 1) return invalid("more than ", kMaxRingReaders + 1, " ranks");
  if (options.ranks() == 1) return plan_memory(files, options);
  if (files.device.is_cuda()) PARVL_RETURN_IF_ERROR(check_gpus(options));
  PARVL_ASSIGN_OR_RETURN(const auto stages, split_layers(spec.backbone.layers, options.pipeline_stages));
  ServingMemory out;
  for (const StagePart& stage : stages) {
    const BackboneRank rank{options.tensor_ranks, 0, stage};
    PARVL_ASSIGN_OR_RETURN(const ServingMemory memory, plan_memory(files, options, rank));
    if (stage.embedding) out = memory;
    out.num_blocks = std::min(out.num_blocks, memory.num_blocks);
  }
  out.kv = kv_bytes(files, {options.tensor_ranks, 0, stages.front()}, out.num_blocks);
  return out;
}

// A cache that no image fits into would turn every image away, each at its request.
absl::Status check_encoder_cache(const LoadedFiles& files, int64_t cache_bytes) {
  if (cache_bytes == 0 || !files.prompts->has_images()) return absl::OkStatus();
  const ImageProcessorConfig& images = files.prompts->image_processor().config();
  const int64_t side = int64_t{images.patch_size} * images.merge_size;
  const int64_t tokens = images.do_resize ? (images.min_pixels + side * side - 1) / (side * side) : 1;
  const int64_t merged = int64_t{images.merge_size} * images.merge_size;
  const int64_t least = visual_bytes(files.model->spec(), files.dtype, tokens * merged);
  if (cache_bytes >= least) return absl::OkStatus();
  return invalid("--encoder-cache-bytes ", cache_bytes, " holds no image: the smallest takes ", least,
                 " bytes; give it at least that, or leave it out");
}

absl::StatusOr<SchedulerConfig> scheduler_config(const LoadedFiles& files, const EngineOptions& options,
                                                 const ServingMemory& memory) {
  SchedulerConfig config;
  config.block_size = KvPages::kBlockSize;
  config.max_model_len = files.max_model_len;
  config.max_seqs = options.max_seqs;
  config.max_batched_tokens = options.max_batched_tokens;
  config.step_s = options.step_s;
  config.encoder_cache_bytes = memory.encoder_cache;
  config.prefix_caching = options.prefix_caching;
  config.num_blocks = memory.num_blocks;
  for (int64_t& budget : config.encode_budget) budget *= options.ranks();  // each encodes
  PARVL_RETURN_IF_ERROR(check_encoder_cache(files, options.encoder_cache_bytes));
  PARVL_RETURN_IF_ERROR(validate(config));
  return config;
}

void log_plan(const LoadedFiles& files, const SchedulerConfig& config, const ServingMemory& memory) {
  const int64_t ranks = files.ranks == nullptr ? 1 : files.ranks->size();
  const int64_t stages = files.ranks == nullptr ? 1 : files.ranks->stages();
  std::string each = ranks == 1 ? "" : absl::StrCat(", and likewise on each of ", ranks, " ranks");
  if (stages > 1) each = absl::StrCat(" of rank 0; the layers are in ", stages, " stages on ", ranks, " ranks");
  log_info("weights: ", bytes_text(memory.weights), " on ", device_text(files.device), each);
  if (stages > 1 && files.device.is_cuda()) log_info("decode steps are not recorded: the LLM is a pipeline");
  log_info("KV memory: ", config.num_blocks * config.block_size, " tokens in ", config.num_blocks, " blocks (",
           bytes_text(memory.kv), "); up to ", config.max_seqs, " requests of up to ", config.max_model_len,
           " tokens at once; a step takes up to ", bytes_text(memory.step + memory.encode), " more, encoded images ",
           bytes_text(memory.encoder_cache));
}

// The other ranks of a backbone that is cut: all load their parts at once. Null: it is whole.
absl::StatusOr<std::unique_ptr<EngineRanks>> start_ranks(LoadedFiles& files, const EngineOptions& options,
                                                         const RankSetup& setup) {
  std::unique_ptr<EngineRanks> out;
  if (options.ranks() == 1) return out;
  if (options.load.startup != nullptr) options.load.startup->begin("ranks");
  PARVL_CHECK(options.start_ranks != nullptr, "an engine of several ranks, and nothing to start them with");
  // What one of them computes all others wait for: a thread each, or they would wait for each other's.
  if (files.device.is_cpu()) at::set_num_threads(1);
  PARVL_ASSIGN_OR_RETURN(out, options.start_ranks());
  PARVL_CHECK(out->size() == options.ranks(), "another number of ranks was started");
  const absl::Status status = catch_exceptions("the other ranks cannot be told what to load", [&] {
    out->send(to_message(setup));
    PARVL_RETURN_IF_ERROR(cut_backbone(files, out->communicator(), options.pipeline_stages));
    if (!setup.encodes) return absl::OkStatus();
    PARVL_ASSIGN_OR_RETURN(auto encoders, EncoderLinks::connect(out->communicator()));
    out->set_encoders(std::move(encoders));
    return absl::OkStatus();
  });
  PARVL_RETURN_IF_ERROR(status);
  out->set_groups(files.ranks);
  return out;
}

// Encodes what comes through the link (null: nothing does) beside the steps.
class EncoderThread {
 public:
  EncoderThread(const LoadedFiles& files, const Clock& clock, std::shared_ptr<EncoderLinks> link, bool record)
      : queue_(files, clock), link_(std::move(link)) {
    if (link_ == nullptr) return;
    if (files.device.is_cuda()) queue_.start(record);
    thread_ = std::thread([this] { run_encoder_rank(queue_, *link_); });
  }
  ~EncoderThread() {
    if (link_ == nullptr) return;
    link_->close();
    thread_.join();
  }

 private:
  EncodeQueue queue_;
  const std::shared_ptr<EncoderLinks> link_;
  std::thread thread_;
};

}  // namespace

absl::Status run_engine_rank(Communicator& communicator, RingReader& steps, const Clock& clock) {
  PARVL_ASSIGN_OR_RETURN(const std::string message, steps.read());
  PARVL_ASSIGN_OR_RETURN(RankSetup setup, read_setup(message));
  setup.options.load.modules = {"llm_backbone"};
  if (setup.encodes) setup.options.load.modules = {"vision_encoder", "projector", "llm_backbone"};
  setup.options.load.rank = communicator.rank();
  return catch_exceptions("a rank of the engine failed", [&]() -> absl::Status {
    PARVL_ASSIGN_OR_RETURN(LoadedFiles files, read_files(setup.dir, setup.options.load));
    if (files.device.is_cpu()) at::set_num_threads(1);
    PARVL_RETURN_IF_ERROR(cut_backbone(files, communicator, setup.options.pipeline_stages));
    if (files.device.is_cuda()) {  // of the CPU's memory the first rank has found enough for all
      setup.options.kv_cache_bytes = kv_bytes(files, files.rank, setup.num_blocks);
      PARVL_RETURN_IF_ERROR(plan_memory(files, setup.options, files.rank).status());
    }
    std::shared_ptr<EncoderLinks> link;
    if (setup.encodes) {
      PARVL_ASSIGN_OR_RETURN(link, EncoderLinks::connect(communicator));
    }
    PARVL_RETURN_IF_ERROR(load_weights(files, setup.dir, setup.options.load));
    BackboneRunner runner(files, setup.num_blocks, KvPages::kBlockSize);
    use_own_stream(files.device);
    const bool record = !setup.options.enforce_eager;
    const EncoderThread encoder(files, clock, link, record);
    const auto graphs = make_decode_graphs(files, runner, setup.options.max_seqs, files.max_model_len, record);
    for (;;) {
      const auto next = steps.read();
      if (!next.ok()) return absl::OkStatus();
      PARVL_ASSIGN_OR_RETURN(const BackboneStep step, read_step(*next));
      if (step.recorded && graphs == nullptr) return absl::InternalError("a recorded step, and this rank has none");
      if (step.recorded) {
        graphs->run(decode_rows(step));
      } else {
        runner.run(step, {});
      }
    }
  });
}

absl::StatusOr<std::unique_ptr<Engine>> load_engine(const std::string& dir, const EngineOptions& options,
                                                    const Clock& clock) {
  std::unique_ptr<Engine> out;
  PARVL_RETURN_IF_ERROR(catch_exceptions("cannot load " + dir, [&]() -> absl::Status {
    EngineConfig config;
    if (!options.record_path.empty()) {
      PARVL_ASSIGN_OR_RETURN(config.record, record_to(options.record_path, options.record_max_bytes));
    }
    PARVL_ASSIGN_OR_RETURN(LoadedFiles files, read_files(dir, options.load));
    if (!files.held.backbone) return invalid("an engine that answers requests must hold the llm_backbone");
    PARVL_ASSIGN_OR_RETURN(const ServingMemory memory, plan_ranks(files, options));
    PARVL_ASSIGN_OR_RETURN(config.scheduler, scheduler_config(files, options, memory));
    RankSetup setup{dir, options, memory.num_blocks, files.held.encoder && files.prompts->has_images()};
    setup.options.load.device = files.device.is_cuda() ? "cuda" : "cpu";
    PARVL_ASSIGN_OR_RETURN(auto ranks, start_ranks(files, options, setup));
    PARVL_RETURN_IF_ERROR(load_weights(files, dir, options.load));
    if (ranks != nullptr) config.pids = ranks->pids();
    config.memory_bytes = memory.total() * (files.device.is_cuda() ? 1 : options.ranks());
    config.prompts = files.prompts;
    config.default_sampling = files.sampling;
    config.timeline = options.timeline;
    config.hooks = options.hooks;
    config.end_tokens = files.end_tokens;
    config.device_name = device_text(files.device);
    config.encoder_bytes_a_token = files.model->spec().backbone.hidden * dtype_bytes(files.dtype);
    if (options.ranks() == 1) {
      config.kv_layout = [spec = files.model->spec().backbone, dtype = files.dtype](int64_t tokens) {
        return kv_layout(spec, dtype, KvPages::kBlockSize, tokens);
      };
    }
    log_plan(files, config.scheduler, memory);
    if (options.load.startup != nullptr) options.load.startup->begin("KV memory");
    ExecutorOptions executing{.graphs = !options.enforce_eager, .startup = options.load.startup};
    executing.ranks = std::move(ranks);
    executing.micro_batch_tokens = options.micro_batch_tokens;
    executing.hooks = options.hooks;
    executing.watch_image = options.watch_image;
    auto executor = make_torch_executor(std::move(files), config.scheduler, clock, std::move(executing));
    out = std::make_unique<EngineLoop>(std::move(config), std::move(executor), clock);
    return absl::OkStatus();
  }));
  return out;
}

absl::StatusOr<std::unique_ptr<EncodeEngine>> load_encode_engine(const std::string& dir, const EngineOptions& options,
                                                                 const Clock& clock) {
  std::unique_ptr<EncodeEngine> out;
  PARVL_RETURN_IF_ERROR(catch_exceptions("cannot load " + dir, [&]() -> absl::Status {
    LoadOptions load = options.load;
    if (load.modules.empty()) load.modules = {"vision_encoder", "projector"};
    PARVL_ASSIGN_OR_RETURN(LoadedFiles files, read_files(dir, load));
    if (files.held.backbone) return invalid("an engine that only encodes must not hold the llm_backbone");
    if (!files.prompts->has_images()) return invalid("there are no images to encode: ", files.prompts->why_no_images());
    PARVL_ASSIGN_OR_RETURN(const ServingMemory memory, plan_memory(files, options));
    PARVL_RETURN_IF_ERROR(load_weights(files, dir, load));
    log_info("weights of the encoder: ", bytes_text(memory.weights), " on ", device_text(files.device),
             "; encoding takes up to ", bytes_text(memory.encode), " more");
    const EncodeEngineConfig config{options.max_seqs, largest_image(files), !options.enforce_eager, load.startup,
                                    options.hooks};
    out = make_torch_encode_engine(std::move(files), config, clock);
    return absl::OkStatus();
  }));
  return out;
}

absl::StatusOr<EngineFront> load_front(const std::string& dir, const LoadOptions& options) {
  EngineFront out;
  PARVL_RETURN_IF_ERROR(catch_exceptions("cannot load " + dir, [&]() -> absl::Status {
    LoadOptions without_device = options;
    without_device.device = "cpu";
    PARVL_ASSIGN_OR_RETURN(const LoadedFiles files, read_files(dir, without_device));
    out = {files.prompts, files.sampling, files.end_tokens, files.max_model_len};
    return absl::OkStatus();
  }));
  return out;
}

}  // namespace parvl
