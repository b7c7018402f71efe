#include "parvl/plan/cost/fit.h"

#include <absl/strings/match.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include <algorithm>
#include <functional>

#include "parvl/plan/cost/values.h"

namespace parvl {
namespace {

constexpr int64_t kMaxDefaultKvBytes = int64_t{8} << 30, kMaxDefaultEncoderCache = int64_t{1} << 30;
constexpr int64_t kPrefixShare = 4;  // how much more than what runs at once is of use, to keep prefixes

constexpr int64_t kMaxSeqs = 1 << 16, kMaxBatchedTokens = 1 << 24, kMaxBytes = int64_t{1} << 50;

// Blocks that there must be, whatever else is there: those of one sequence.
int64_t blocks_needed(const ServingSettings& s) {
  return s.held.backbone ? (s.max_model_len + s.block_size - 1) / s.block_size : 0;
}

// Of one rank.
int64_t block_bytes(const ModelSpec& spec, const ServingSettings& s) {
  return s.block_size * kv_bytes_a_token(rank_backbone(spec.backbone, s.rank), s.dtype);
}

// All that does not depend on how much there is.
ServingMemory fixed_memory(const ModelSpec& spec, const ServingSettings& s, const Target& target) {
  ServingMemory out;
  out.weights = weight_bytes(spec, s.dtype).of({s.held.encoder, false});
  if (s.held.backbone) out.weights += backbone_bytes(spec, s.dtype, s.rank);
  if (s.held.encoder) out.encode = encode_bytes(spec, s.dtype, std::max(s.max_patches, s.encode_patches), target);
  if (!s.held.backbone) return out;
  StepShape shape;
  shape.tokens = s.max_batched_tokens;
  shape.longest_piece = std::min(s.max_batched_tokens, s.max_model_len);
  shape.longest_context = s.max_model_len;
  const StagePart all{0, spec.backbone.layers, true, true}, part = s.rank.stage.value_or(all);
  shape.visual_tokens = spec.vision && part.embedding ? shape.tokens : 0;
  shape.sampled = part.head || s.samples ? s.max_seqs : 0;  // the last stage makes their logits, the first gets them
  shape.ranks = s.rank.ranks;
  out.step = step_bytes(spec.backbone, s.dtype, shape, target);
  if (!target.cuda && s.samples) out.step += sampling_bytes(spec.backbone, s.max_seqs);
  return out;
}

ServingMemory plan(const ModelSpec& spec, const ServingSettings& s, const MemoryThere& there) {
  ServingMemory out = fixed_memory(spec, s, there.target);
  if (!s.held.backbone) return out;  // features go where the caller wants them, and are not kept
  const int64_t left = std::max<int64_t>(0, there.bytes - out.total());
  const int64_t one_image = visual_bytes(spec, s.dtype, s.max_patches);
  const int64_t by_itself = spec.vision ? std::max(one_image, std::min(left / 8, kMaxDefaultEncoderCache)) : 0;
  out.encoder_cache = !s.samples ? 0 : s.encoder_cache_bytes > 0 ? s.encoder_cache_bytes : by_itself;
  const int64_t block = block_bytes(spec, s), needed = blocks_needed(s);
  const int64_t free = std::max<int64_t>(0, there.bytes - out.total());
  const int64_t useful = std::max<int64_t>(1, s.max_seqs) * needed * (s.prefix_caching ? kPrefixShare : 1);
  const int64_t by_default = there.target.cuda ? free : std::min(free / 4, kMaxDefaultKvBytes);
  out.num_blocks = s.kv_cache_bytes > 0 ? s.kv_cache_bytes / block : std::max(needed, by_default / block);
  out.num_blocks = std::min(out.num_blocks, useful);
  out.kv = out.num_blocks * block;
  return out;
}

bool fits(const ModelSpec& spec, const ServingSettings& s, const MemoryThere& there) {
  const ServingMemory memory = plan(spec, s, there);
  return memory.total() <= there.bytes && memory.num_blocks >= blocks_needed(s);
}

// The largest value in [low, high], a multiple of `step`, for which `ok` holds; 0: none. `ok` holds up to some value.
int64_t largest(int64_t low, int64_t high, int64_t step, const std::function<bool(int64_t)>& ok) {
  low = (low + step - 1) / step;
  high /= step;
  if (low > high || !ok(low * step)) return 0;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (ok(middle * step)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low * step;
}

// One flag with the largest value that makes it fit, or "".
std::string one_flag(const ModelSpec& spec, const ServingSettings& s, const MemoryThere& there) {
  struct Knob {
    const char* flag;
    int64_t ServingSettings::*value;
    int64_t low, step;
    bool given;
  };
  constexpr int64_t kMiB = 1 << 20;
  const Knob knobs[] = {
      {"--kv-cache-memory-bytes", &ServingSettings::kv_cache_bytes, kMiB, kMiB, s.kv_cache_bytes > 0},
      {"--encoder-cache-bytes", &ServingSettings::encoder_cache_bytes, kMiB, kMiB, s.encoder_cache_bytes > 0},
      {"--max-model-len", &ServingSettings::max_model_len, std::min<int64_t>(256, s.max_model_len), 16, true},
      {"--max-num-batched-tokens", &ServingSettings::max_batched_tokens, std::max<int64_t>(s.max_seqs, 64), 1, true},
      {"--max-num-seqs", &ServingSettings::max_seqs, 1, 1, true}};
  for (const Knob& knob : knobs) {
    if (!knob.given) continue;
    const int64_t best = largest(knob.low, s.*knob.value, knob.step, [&](int64_t value) {
      ServingSettings changed = s;
      changed.*knob.value = value;
      return fits(spec, changed, there);
    });
    if (best > 0) return absl::StrCat(knob.flag, " ", best);
  }
  return "";
}

std::string advice(const ModelSpec& spec, const ServingSettings& s, const MemoryThere& there) {
  if (const std::string flag = one_flag(spec, s, there); !flag.empty()) return "start with " + flag;
  // Several together: everything small but the context, then the largest context.
  ServingSettings small = s;
  small.kv_cache_bytes = small.encoder_cache_bytes = 0;
  small.max_seqs = std::min<int64_t>(s.max_seqs, 4);
  small.max_batched_tokens = std::min<int64_t>(s.max_batched_tokens, 256);
  const auto context = [&](int64_t value) {
    ServingSettings changed = small;
    changed.max_model_len = value;
    return fits(spec, changed, there);
  };
  const int64_t best = largest(std::min<int64_t>(64, s.max_model_len), s.max_model_len, 1, context);
  if (best > 0) {
    return absl::StrCat("start with --max-num-seqs ", small.max_seqs, " --max-num-batched-tokens ",
                        small.max_batched_tokens, " --max-model-len ", best,
                        s.kv_cache_bytes > 0 ? " and without --kv-cache-memory-bytes" : "",
                        s.encoder_cache_bytes > 0 ? " and without --encoder-cache-bytes" : "");
  }
  if (dtype_bytes(s.dtype) > 2 && weight_bytes(spec, DType::kBFloat16).of(s.held) < there.bytes) {
    return "start with --dtype bfloat16";
  }
  return "take a smaller model, or a machine with more memory";
}

std::string what_it_needs(const ServingMemory& m, const MemoryThere& there) {
  std::string out = absl::StrCat("the model does not fit: weights ", bytes_text(m.weights));
  if (m.kv > 0) absl::StrAppend(&out, " + KV memory ", bytes_text(m.kv));
  if (m.step > 0) absl::StrAppend(&out, " + a step ", bytes_text(m.step));
  if (m.encode > 0) absl::StrAppend(&out, " + encoding an image ", bytes_text(m.encode));
  if (m.encoder_cache > 0) absl::StrAppend(&out, " + encoded images ", bytes_text(m.encoder_cache));
  return absl::StrCat(out, " = ", bytes_text(m.total()), ", and ", bytes_text(there.bytes), " ", there.name,
                      " may be used; ");
}

}  // namespace

std::string bytes_text(int64_t bytes) {
  const double mebibytes = static_cast<double>(bytes) / (1 << 20);
  return mebibytes >= 1024 ? absl::StrFormat("%.1f GiB", mebibytes / 1024) : absl::StrFormat("%.1f MiB", mebibytes);
}

absl::Status validate(const ServingSettings& s) {
  const auto between = [](const char* flag, int64_t low, int64_t high, int64_t value) {
    if (value >= low && value <= high) return absl::OkStatus();
    return invalid(flag, " must be between ", low, " and ", high, ", found ", value);
  };
  PARVL_RETURN_IF_ERROR(between("--max-num-seqs", 1, kMaxSeqs, s.max_seqs));
  PARVL_RETURN_IF_ERROR(between("--max-num-batched-tokens", 1, kMaxBatchedTokens, s.max_batched_tokens));
  PARVL_RETURN_IF_ERROR(between("--kv-cache-memory-bytes", 0, kMaxBytes, s.kv_cache_bytes));
  return between("--encoder-cache-bytes", 0, kMaxBytes, s.encoder_cache_bytes);
}

absl::StatusOr<ServingMemory> plan_serving_memory(const ModelSpec& spec, const ServingSettings& settings,
                                                  const MemoryThere& there) {
  PARVL_RETURN_IF_ERROR(validate(settings));
  const ServingMemory memory = plan(spec, settings, there);
  const int64_t needed = blocks_needed(settings);
  if (memory.num_blocks < needed) {
    const int64_t block = block_bytes(spec, settings);
    return invalid("--max-model-len ", settings.max_model_len, " needs ", bytes_text(needed * block),
                   " of KV memory for one sequence, and --kv-cache-memory-bytes gives ",
                   bytes_text(settings.kv_cache_bytes), "; lower --max-model-len, or raise --kv-cache-memory-bytes to ",
                   needed * block);
  }
  if (memory.total() <= there.bytes) return memory;
  return invalid(what_it_needs(memory, there), advice(spec, settings, there));
}

absl::Status check_tensor_ranks(const ModelSpec& spec, const std::vector<std::string>& modules, int64_t ranks,
                                const std::string& name) {
  constexpr int64_t kListed = 64;  // sizes above are not offered
  const std::vector<ParamSpec> params = list_params(spec);
  const auto uncuttable = [&](int64_t over) {  // the first of these parameters, or the end
    return std::find_if(params.begin(), params.end(), [&](const ParamSpec& param) {
      return std::find(modules.begin(), modules.end(), param.module) != modules.end() &&
             !held_part(param, over, 0).ok();
    });
  };
  const auto param = uncuttable(ranks);
  if (param == params.end()) return absl::OkStatus();
  std::vector<int64_t> valid;
  for (int64_t over = 1; over <= kListed; ++over) {
    if (uncuttable(over) == params.end()) valid.push_back(over);
  }
  const char* const units = param->copies                              ? " key heads"
                            : absl::StrContains(param->name, ".attn.") ? " attention heads"
                                                                       : " columns of the MLP";
  return invalid(name, " (", ranks, ") must divide the ", param->units, units, " of ", param->module,
                 param->copies ? ", or be a multiple of them" : "", "; valid here: ", absl::StrJoin(valid, ", "));
}

absl::Status check_stages(int64_t layers, const std::string& module, int64_t stages, const std::string& name) {
  if (stages <= layers) return absl::OkStatus();
  return invalid(name, " (", stages, ") must not be above the ", layers, " layers of ", module);
}

absl::Status check_one_request(const ModelSpec& spec, const OneRequest& request, const MemoryThere& there) {
  ServingMemory m;
  m.weights = weight_bytes(spec, request.dtype).total();
  m.kv = 2 * request.tokens * kv_bytes_a_token(spec.backbone, request.dtype);  // its pages grow by doubling
  StepShape shape{request.prompt_tokens, request.prompt_tokens, request.prompt_tokens, 0, 1};
  if (request.max_patches > 0) shape.visual_tokens = request.prompt_tokens;
  m.step = step_bytes(spec.backbone, request.dtype, shape, there.target);
  m.encode = encode_bytes(spec, request.dtype, request.max_patches, there.target);
  if (m.total() <= there.bytes) return absl::OkStatus();
  std::string fix = "take a smaller model, or a machine with more memory";
  const int64_t without_answer =
      m.total() - 2 * (request.tokens - request.prompt_tokens - 1) * kv_bytes_a_token(spec.backbone, request.dtype);
  if (without_answer <= there.bytes) {
    const int64_t a_token = 2 * kv_bytes_a_token(spec.backbone, request.dtype);
    fix = absl::StrCat("ask with --max-tokens ", 1 + (there.bytes - without_answer) / a_token);
  } else if (m.weights < there.bytes) {
    fix = "shorten the prompt, or send fewer or smaller images";
  } else if (dtype_bytes(request.dtype) > 2 && weight_bytes(spec, DType::kBFloat16).total() < there.bytes) {
    fix = "ask with --dtype bfloat16";
  }
  return invalid(what_it_needs(m, there), fix);
}

}  // namespace parvl
