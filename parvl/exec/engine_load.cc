#include "parvl/exec/engine_load.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "parvl/base/log.h"
#include "parvl/exec/encode_queue.h"
#include "parvl/exec/kv_cache.h"
#include "parvl/exec/load.h"
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

// Before the weights are there: says what does not fit.
absl::StatusOr<ServingMemory> plan_memory(const LoadedFiles& files, const EngineOptions& options) {
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
  return plan_serving_memory(files.model->spec(), settings, memory_there(files, options.load));
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
  config.encoder_cache_bytes = memory.encoder_cache;
  config.prefix_caching = options.prefix_caching;
  config.num_blocks = memory.num_blocks;
  PARVL_RETURN_IF_ERROR(check_encoder_cache(files, options.encoder_cache_bytes));
  PARVL_RETURN_IF_ERROR(validate(config));
  return config;
}

void log_plan(const LoadedFiles& files, const SchedulerConfig& config, const ServingMemory& memory) {
  log_info("weights: ", bytes_text(memory.weights), " on ", device_text(files.device));
  log_info("KV memory: ", config.num_blocks * config.block_size, " tokens in ", config.num_blocks, " blocks (",
           bytes_text(memory.kv), "); up to ", config.max_seqs, " requests of up to ", config.max_model_len,
           " tokens at once; a step takes up to ", bytes_text(memory.step + memory.encode), " more, encoded images ",
           bytes_text(memory.encoder_cache));
}

}  // namespace

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
    PARVL_ASSIGN_OR_RETURN(const ServingMemory memory, plan_memory(files, options));
    PARVL_ASSIGN_OR_RETURN(config.scheduler, scheduler_config(files, options, memory));
    PARVL_RETURN_IF_ERROR(load_weights(files, dir, options.load));
    config.prompts = files.prompts;
    config.default_sampling = files.sampling;
    config.timeline = options.timeline;
    config.hooks = options.hooks;
    config.end_tokens = files.end_tokens;
    config.device_name = device_text(files.device);
    config.encoder_bytes_a_token = files.model->spec().backbone.hidden * dtype_bytes(files.dtype);
    log_plan(files, config.scheduler, memory);
    if (options.load.startup != nullptr) options.load.startup->begin("KV memory");
    auto executor = make_torch_executor(std::move(files), config.scheduler, clock,
                                        {.graphs = !options.enforce_eager, .startup = options.load.startup});
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
