#include "parvl/exec/engine_load.h"

#include <absl/strings/str_format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <utility>

#include "parvl/base/log.h"
#include "parvl/base/memory.h"
#include "parvl/exec/kv_cache.h"
#include "parvl/exec/load.h"
#include "parvl/exec/torch_executor.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

constexpr int64_t kPrefixShare = 4;
constexpr int64_t kMaxDefaultKvBytes = int64_t{8} << 30;

// Keys and values of one block in all layers.
int64_t block_bytes(const BackboneSpec& spec, int64_t block_size, int64_t value_bytes) {
  return 2 * spec.layers * spec.kv_heads * spec.head_dim * block_size * value_bytes;
}

std::string mebibytes(int64_t bytes) { return absl::StrFormat("%.1f", static_cast<double>(bytes) / (1 << 20)); }

absl::StatusOr<SchedulerConfig> plan_memory(const LoadedFiles& files, const EngineOptions& options,
                                            int64_t value_bytes) {
  SchedulerConfig config;
  config.block_size = KvPages::kBlockSize;
  config.max_model_len = files.max_model_len;
  config.max_seqs = options.max_seqs;
  config.max_batched_tokens = options.max_batched_tokens;
  config.encoder_cache_bytes = options.encoder_cache_bytes;
  config.prefix_caching = options.prefix_caching;
  const int64_t bytes = block_bytes(files.model->spec().backbone, config.block_size, value_bytes);
  const int64_t blocks_a_sequence = (config.max_model_len + config.block_size - 1) / config.block_size;
  // Beyond what can run at once, memory only helps to keep prefixes.
  const int64_t useful =
      std::max<int64_t>(1, options.max_seqs) * blocks_a_sequence * (options.prefix_caching ? kPrefixShare : 1);
  const int64_t budget =
      options.kv_cache_bytes > 0 ? options.kv_cache_bytes : std::min(available_bytes() / 4, kMaxDefaultKvBytes);
  config.num_blocks = std::min(budget / bytes, useful);
  if (config.num_blocks < blocks_a_sequence) {
    return invalid("--max-model-len ", config.max_model_len, " needs ", blocks_a_sequence * bytes >> 20,
                   " MiB of KV memory for one sequence, and there are ", budget >> 20,
                   "; lower --max-model-len, or raise --kv-cache-memory-bytes");
  }
  PARVL_RETURN_IF_ERROR(validate(config));
  return config;
}

void log_plan(const LoadedFiles& files, const SchedulerConfig& config, double seconds) {
  int64_t weights = 0;
  for (const Param* param : files.model->params().owned()) weights += static_cast<int64_t>(param->value.nbytes());
  log_info("weights: ", mebibytes(weights), " MiB on ", device_text(files.device), ", loaded in ",
           absl::StrFormat("%.1f", seconds), " s");
  const int64_t value_bytes = static_cast<int64_t>(files.model->params().owned().front()->value.element_size());
  const int64_t bytes = block_bytes(files.model->spec().backbone, config.block_size, value_bytes);
  log_info("KV memory: ", config.num_blocks * config.block_size, " tokens in ", config.num_blocks, " blocks (",
           mebibytes(config.num_blocks * bytes), " MiB); up to ", config.max_seqs, " requests of up to ",
           config.max_model_len, " tokens at once");
}

absl::StatusOr<RecordedScheduler::Write> open_record(const std::string& path) {
  if (path.empty()) return RecordedScheduler::Write();
  auto file = std::make_shared<std::ofstream>(path, std::ios::binary | std::ios::trunc);
  if (!*file) return invalid("cannot write the record ", path, ": ", std::strerror(errno));
  // A line at a time, so that the record of a process that dies ends with the event that it died of.
  return RecordedScheduler::Write([file](std::string_view line) { file->write(line.data(), line.size()).flush(); });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> load_engine(const std::string& dir, const EngineOptions& options,
                                                    const Clock& clock) {
  std::unique_ptr<Engine> out;
  PARVL_RETURN_IF_ERROR(catch_exceptions("cannot load " + dir, [&]() -> absl::Status {
    EngineConfig config;
    PARVL_ASSIGN_OR_RETURN(config.record, open_record(options.record_path));
    const double start = clock.now_seconds();
    PARVL_ASSIGN_OR_RETURN(LoadedFiles files, load_files(dir, options.load));
    const double loaded = clock.now_seconds();
    const int64_t value_bytes = static_cast<int64_t>(files.model->params().owned().front()->value.element_size());
    PARVL_ASSIGN_OR_RETURN(config.scheduler, plan_memory(files, options, value_bytes));
    config.prompts = files.prompts;
    config.default_sampling = files.sampling;
    config.timeline = options.timeline;
    config.end_tokens = files.end_tokens;
    config.device_name = device_text(files.device);
    config.encoder_bytes_a_token = files.model->spec().backbone.hidden * value_bytes;
    log_plan(files, config.scheduler, loaded - start);
    auto executor = make_torch_executor(std::move(files), config.scheduler, clock);
    out = std::make_unique<EngineLoop>(std::move(config), std::move(executor), clock);
    return absl::OkStatus();
  }));
  return out;
}

}  // namespace parvl
