// A Hugging Face directory → a model with its weights on a device, its prompts and its defaults.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "parvl/exec/backbone_ranks.h"
#include "parvl/exec/load_options.h"
#include "parvl/media/prompt.h"
#include "parvl/models/model.h"
#include "parvl/plan/cost/fit.h"
#include "parvl/sched/sampling.h"

namespace parvl {

struct LoadedFiles {
  std::shared_ptr<BackboneRanks> ranks;  // null: the backbone is whole. The model computes with it
  BackboneRank rank;                     // among them: which part of the backbone is here
  std::shared_ptr<const PromptBuilder> prompts;
  std::unique_ptr<Model> model;
  SamplingParams sampling;  // generation_config.json over OpenAI's defaults
  std::vector<TokenId> end_tokens;
  at::Device device = at::kCPU;
  DType dtype = DType::kFloat32;
  int64_t max_model_len = 0;
  HeldModules held;
};

// All but the weights: the model's parameters have no tensors yet. Errors: exit_code(status) = 2 for a directory that
// is missing, incomplete or unsupported, also in a module that is not held here. Exceptions of libtorch pass through.
absl::StatusOr<LoadedFiles> read_files(const std::string& dir, const LoadOptions& options);
// What may be used of the device's memory, before the weights are there; of the CPU's, by all ranks together.
MemoryThere memory_there(const LoadedFiles& files, const LoadOptions& options);
// Before the weights: cuts the backbone over all ranks of the communicator, which all call it, and waits for them: into
// so many stages, and each of these over world / stages ranks. InvalidArgument where it cannot be cut so; the group's
// errors. The communicator outlives the files.
absl::Status cut_backbone(LoadedFiles& files, Communicator& ranks, int64_t stages = 1);
// Allocates the parameters of the modules that are held, and fills them; the others get no tensors.
// Of a backbone that is cut, this rank's part of each.
absl::Status load_weights(LoadedFiles& files, const std::string& dir, const LoadOptions& options);

}  // namespace parvl
