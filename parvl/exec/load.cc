#include "parvl/exec/load.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <functional>

#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/base/log.h"
#include "parvl/base/shared_block.h"
#include "parvl/base/text.h"
#include "parvl/comm/nccl/nccl_communicator.h"
#include "parvl/exec/sampler.h"
#include "parvl/models/checkpoint.h"
#include "parvl/nn/device.h"
#include "parvl/nn/stage.h"

namespace parvl {
namespace {

absl::StatusOr<HeldModules> held_modules(const std::vector<std::string>& names, const ModelSpec& spec) {
  if (names.empty()) return HeldModules{};
  const std::string vision = to_string(Module::kVisionEncoder), projector = to_string(Module::kProjector),
                    backbone = to_string(Module::kBackbone);
  for (const std::string& name : names) {
    if (name == vision || name == projector || name == backbone) continue;
    return invalid("there is no module ", excerpt(name), " to hold; there are ", vision, " with ", projector, ", and ",
                   backbone);
  }
  const auto named = [&names](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  const HeldModules out{named(vision), named(backbone)};
  if (named(projector) != out.encoder) {
    return invalid(vision, " and ", projector, " must be held together: what passes between them is not sent");
  }
  if (out.encoder && !spec.vision) return invalid("a ", spec.model_type, " model has no ", vision, " to hold");
  return out;
}

absl::Status read_defaults(const std::string& dir, const ModelSpec& spec, LoadedFiles& out) {
  for (int64_t id : spec.eos_tokens) out.end_tokens.push_back(static_cast<TokenId>(id));
  auto config = read_json_file(dir + "/generation_config.json");
  if (absl::IsNotFound(config.status())) return absl::OkStatus();
  if (!config.ok()) return config.status();
  if (!config->is_object()) return invalid(dir, "/generation_config.json is not a JSON object");
  SamplingParams& s = out.sampling;
  const absl::Status status = [&]() -> absl::Status {
    PARVL_ASSIGN_OR_RETURN(s.temperature, json_value<double>(*config, "temperature", s.temperature));
    PARVL_ASSIGN_OR_RETURN(s.top_p, json_value<double>(*config, "top_p", s.top_p));
    PARVL_ASSIGN_OR_RETURN(s.top_k, json_value<int64_t>(*config, "top_k", s.top_k));
    PARVL_ASSIGN_OR_RETURN(s.min_p, json_value<double>(*config, "min_p", s.min_p));
    PARVL_ASSIGN_OR_RETURN(s.repetition_penalty,
                           json_value<double>(*config, "repetition_penalty", s.repetition_penalty));
    PARVL_ASSIGN_OR_RETURN(const bool sample, json_value<bool>(*config, "do_sample", true));
    if (!sample) s.temperature = 0;
    return absl::OkStatus();
  }();
  PARVL_RETURN_IF_ERROR(with_context(status, dir + "/generation_config.json"));
  const absl::Status sampling = validate_sampling(s, spec.backbone.vocab);
  if (!sampling.ok()) return with_context(sampling, dir + "/generation_config.json");
  if (!config->contains("eos_token_id") || (*config)["eos_token_id"].is_null()) return absl::OkStatus();
  const Json& eos = (*config)["eos_token_id"];
  out.end_tokens.clear();
  for (const Json& id : eos.is_array() ? eos : Json::array({eos})) {
    if (!id.is_number_integer() || id < 0 || id >= spec.backbone.vocab) {
      return invalid(dir, "/generation_config.json: 'eos_token_id' must be a token id or a list of them, from 0 to ",
                     spec.backbone.vocab - 1, ", found ", shown(id));
    }
    out.end_tokens.push_back(id.get<TokenId>());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LoadedFiles> read_files(const std::string& dir, const LoadOptions& options) {
  if (options.startup != nullptr) options.startup->begin("files");
  LoadedFiles out;
  PARVL_ASSIGN_OR_RETURN(const ModelSpec spec, load_model_spec(dir));
  PARVL_ASSIGN_OR_RETURN(out.held, held_modules(options.modules, spec));
  out.dtype = spec.dtype;
  if (options.dtype != "auto") {
    PARVL_ASSIGN_OR_RETURN(out.dtype, parse_dtype(options.dtype));
  }
  const auto share = options.memory_utilization;
  if (share.has_value() && !(*share > 0 && *share <= 1)) {
    return invalid("--gpu-memory-utilization must be above 0 and at most 1, found ", *share);
  }
  out.max_model_len = spec.backbone.max_positions;
  if (options.max_model_len < 0)
    return invalid("max-model-len ", options.max_model_len, " is negative (0: the model's)");
  if (options.max_model_len > out.max_model_len) {
    return invalid("max-model-len ", options.max_model_len, " is over the model's ", out.max_model_len, " positions");
  }
  if (options.max_model_len > 0) out.max_model_len = options.max_model_len;
  PARVL_ASSIGN_OR_RETURN(out.prompts, PromptBuilder::load(dir));
  if (out.prompts->has_images()) {
    const ImageProcessorConfig& images = out.prompts->image_processor().config();
    PARVL_RETURN_IF_ERROR(check_image_inputs(
        spec, {images.patch_size, images.temporal_patch_size, images.merge_size, 3, out.prompts->image_token()}, dir));
  }
  PARVL_RETURN_IF_ERROR(read_defaults(dir, spec, out));
  out.model = Model::create(spec);
  // Before a damaged configuration asks for absurd memory.
  PARVL_RETURN_IF_ERROR(match_weights(*out.model, dir).status());
  PARVL_ASSIGN_OR_RETURN(out.device, select_device(options.device, options.rank));
  return out;
}

MemoryThere memory_there(const LoadedFiles& files, const LoadOptions& options) {
  const bool cuda = files.device.is_cuda();
  const DeviceMemory memory = device_memory(files.device);
  const double share = options.memory_utilization.value_or(cuda ? 0.9 : 1.0);
  // What others hold counts against our share of a device.
  const auto kept = static_cast<int64_t>((1 - share) * static_cast<double>(memory.total));
  MemoryThere out;
  out.bytes = std::max<int64_t>(0, memory.free - kept);
  // Of all ranks, for whom the first one plans: they are there already, and count among the weights.
  if (!cuda) out.bytes += shared_bytes(options.shared_weights);
  if (options.memory_limit_bytes > 0) out.bytes = std::min(out.bytes, options.memory_limit_bytes);
  out.name = cuda ? absl::StrCat("of the memory of ", device_text(files.device)) : "of the CPU's memory";
  out.target = {cuda, at::get_num_threads()};
  return out;
}

absl::Status cut_backbone(LoadedFiles& files, Communicator& ranks, int64_t stages) {
  PARVL_ASSIGN_OR_RETURN(const auto parts, split_layers(files.model->spec().backbone.layers, stages));
  std::unique_ptr<Communicator> gpus;
  if (files.device.is_cuda()) {
    PARVL_ASSIGN_OR_RETURN(gpus, make_nccl_communicator(ranks));
  }
  PARVL_ASSIGN_OR_RETURN(files.ranks, BackboneRanks::connect(ranks, std::move(gpus), stages));
  const int64_t tensor = ranks.world() / stages;
  files.rank = {tensor, ranks.rank() % tensor, parts[static_cast<size_t>(files.ranks->stage())]};
  return files.model->params().split(Module::kBackbone, files.ranks->tensor());
}

namespace {

// What decides where each value of a part lies.
std::string layout_text(const LoadedFiles& files) {
  std::string out = to_string(files.dtype);
  for (const Param* param : files.model->params().owned()) {
    absl::StrAppend(&out, "\n", param->name, " part ", param->part.index, " of ", param->part.count, ":");
    for (const int64_t size : param->part_shape()) absl::StrAppend(&out, " ", size);
  }
  return out;
}

// Once for all processes of this machine that hold the same part.
absl::Status load_shared(LoadedFiles& files, const std::string& block, const std::function<absl::Status()>& load) {
  ParamTable& params = files.model->params();
  const auto options = at::TensorOptions().dtype(to_scalar_type(files.dtype));
  const int64_t count = params.allocated_numel();
  const auto fill = [&](absl::Span<std::byte> memory) {
    return catch_exceptions("the weights cannot be loaded", [&] {
      params.allocate_in(at::from_blob(memory.data(), {count}, options));
      return load();
    });
  };
  PARVL_ASSIGN_OR_RETURN(const auto content,
                         SharedContent::open(block, count * dtype_bytes(files.dtype), layout_text(files), fill));
  auto* const data = const_cast<std::byte*>(content->data());  // of which nobody writes: it is mapped to be read
  params.allocate_in(at::from_blob(
      data, {count}, [content](void*) {}, options));
  log_info(content->filled_here() ? "the weights lie in memory that other instances map too"
                                  : "the weights were there: another instance had loaded them");
  return absl::OkStatus();
}

}  // namespace

absl::Status load_weights(LoadedFiles& files, const std::string& dir, const LoadOptions& options) {
  Startup* startup = options.startup.get();
  if (startup != nullptr) startup->begin("weights");
  ParamTable& params = files.model->params();
  params.keep([&files](const Param& param) {
    if (param.module != Module::kBackbone) return files.held.encoder;
    const bool tied = files.model->spec().backbone.tied;
    return files.held.backbone && (!files.rank.stage || on_stage(param, tied, *files.rank.stage));
  });
  const auto load = [&] {
    return load_weights(*files.model, dir, [startup](int64_t done, int64_t total) {
      if (startup != nullptr) startup->progress(done, total);
    });
  };
  const std::string block = options.shared_block();
  if (!block.empty() && files.device.is_cpu()) return load_shared(files, block, load);
  params.allocate(to_scalar_type(files.dtype), files.device);
  return load();
}

}  // namespace parvl
