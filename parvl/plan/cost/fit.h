// What a server allocates, from the model and its settings, and whether that fits the memory there is. Pure.
#pragma once

#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/plan/cost/memory.h"

namespace parvl {

struct ServingSettings {
  DType dtype = DType::kFloat32;
  int64_t max_model_len = 0;
  int64_t max_seqs = 64;
  int64_t max_batched_tokens = 2048;
  int64_t block_size = 16;
  int64_t kv_cache_bytes = 0;       // 0: by default_kv_share
  int64_t encoder_cache_bytes = 0;  // 0: an eighth of what weights and steps leave, at most 1 GiB
  int64_t max_patches = 0;          // of one image
  int64_t encode_patches = 0;       // of the images that are encoded at once, when that is more
  bool prefix_caching = true;
  // Without the backbone there are neither steps nor KV memory; without the encoder nothing is encoded, but features
  // come from elsewhere, and the encoder cache keeps them.
  HeldModules held;
  BackboneRank rank;  // which part of the backbone
  // It chooses the tokens, and keeps encoded images: the first of the backbone's ranks.
  bool samples = true;
};

// The memory that the model lies in.
struct MemoryThere {
  int64_t bytes = 0;
  std::string name;  // "of the CPU's memory"
  Target target;
};

// OK, or InvalidArgument naming the first flag whose value is outside its range, and the range. Within these the bytes
// of any model stay far from what int64_t holds.
absl::Status validate(const ServingSettings& settings);

struct ServingMemory {
  int64_t weights = 0, kv = 0, step = 0, encode = 0, encoder_cache = 0;
  int64_t num_blocks = 0;  // of KV memory
  int64_t total() const { return weights + kv + step + encode + encoder_cache; }
};

// KV memory by default: on the CPU a quarter of what the rest leaves, at most 8 GiB, though never less than one
// sequence needs; on a GPU all of it. Never more than is of use. InvalidArgument, in one sentence with every figure and
// the flags that would make it fit, when it does not; as validate() too.
absl::StatusOr<ServingMemory> plan_serving_memory(const ModelSpec& spec, const ServingSettings& settings,
                                                  const MemoryThere& there);

// OK when these modules of the model can be cut over so many ranks; else InvalidArgument that begins with `name` and
// ends with the numbers that are valid.
absl::Status check_tensor_ranks(const ModelSpec& spec, const std::vector<std::string>& modules, int64_t ranks,
                                const std::string& name);

// OK when a pipeline of so many stages has a layer for each; else InvalidArgument that begins with `name`.
absl::Status check_stages(int64_t layers, const std::string& module, int64_t stages, const std::string& name);

// For one request without a server: its tokens (prompt and answer) and the patches of its largest image.
struct OneRequest {
  DType dtype = DType::kFloat32;
  int64_t prompt_tokens = 1, tokens = 1, max_patches = 0;
};
// OK, or InvalidArgument as above.
absl::Status check_one_request(const ModelSpec& spec, const OneRequest& request, const MemoryThere& there);

// "1.5 GiB", "12.0 MiB"
std::string bytes_text(int64_t bytes);

}  // namespace parvl
