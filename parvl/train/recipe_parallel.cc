#include "parvl/train/recipe_parallel.h"

#include <optional>
#include <string>
#include <vector>

namespace parvl {
namespace {

constexpr int64_t kMaxDegree = 1 << 16;

struct Checker {
  // The first key that asks for what is not built yet, as a finished sentence.
  std::string unavailable;

  void note(const std::string& where, const std::string& found, const std::string& fix) {
    if (unavailable.empty()) unavailable = absl::StrCat(where, " ", found, " is not available yet; ", fix);
  }
};

// nullopt when the section gives no degree and no ranks.
absl::StatusOr<std::optional<ModuleLayout>> read_module(ConfigReader& parallel, const std::string& name,
                                                        const ModuleLayout* llm, Checker& checker) {
  ConfigReader module = parallel.section(name);
  ModuleLayout out;
  bool degrees_given = false;
  const std::pair<const char*, int64_t*> degrees[] = {
      {"dp", &out.dp}, {"tp", &out.tp}, {"pp", &out.pp}, {"sp", &out.sp}, {"ep", &out.ep}};
  for (const auto& [key, value] : degrees) {
    module.integer(key, *value, 1, kMaxDegree);
    degrees_given = degrees_given || module.has(key);
  }
  if (llm != nullptr) module.integer("ranks", out.ranks, 1, kMaxDegree);
  module.integer("virtual_stages", out.virtual_stages, 1, kMaxDegree);
  module.integer_list("stages", out.stages, 0);
  if (out.dp * out.sp % out.ep != 0) {
    module.fail("ep", absl::StrCat("(", out.ep, ") must divide dp · sp (", out.dp * out.sp, ")"));
  }
  if (!out.stages.empty() && static_cast<int64_t>(out.stages.size()) != out.pp * out.virtual_stages) {
    module.fail("stages", absl::StrCat("lists ", out.stages.size(), " stages; pp · virtual_stages is ",
                                       out.pp * out.virtual_stages));
  }
  const int64_t covered = out.ranks > 0 ? out.ranks : llm != nullptr ? llm->product() : out.product();
  if (degrees_given && out.product() != covered) {
    std::string first;
    for (const auto& [key, value] : degrees) {
      if (first.empty() && module.has(key)) first = key;
    }
    module.fail(first, absl::StrCat("does not fit: dp · tp · pp · sp is ", out.product(), ", but the module covers ",
                                    covered, out.ranks > 0 ? " ranks of its own" : " ranks of llm_backbone"));
  }
  PARVL_RETURN_IF_ERROR(module.finish());
  for (const auto& [key, value] : degrees) {
    if (*value != 1 && std::string(key) != "dp" && std::string(key) != "tp" &&
        !(llm == nullptr && std::string(key) == "pp"))
      checker.note(module.where(key), absl::StrCat("= ", *value), "leave it out or set it to 1");
  }
  if (out.ranks > 0 && name != "vision_encoder") {
    checker.note(module.where("ranks"), absl::StrCat("= ", out.ranks), "leave it out");
  }
  if (out.virtual_stages != 1)
    checker.note(module.where("virtual_stages"), absl::StrCat("= ", out.virtual_stages), "leave it out");
  if (!out.stages.empty() && llm != nullptr) checker.note(module.where("stages"), "(pipeline stages)", "leave it out");
  if (!degrees_given && out.ranks == 0) return std::optional<ModuleLayout>();
  if (!degrees_given) out.dp = out.ranks;
  return std::optional<ModuleLayout>(out);
}

}  // namespace

absl::StatusOr<ParallelSpec> read_parallel(ConfigReader& recipe) {
  ConfigReader parallel = recipe.section("parallel");
  Checker checker;
  ParallelSpec out;
  const bool alias = parallel.has("llm");
  if (alias && parallel.has("llm_backbone")) parallel.fail("llm", "is an alias of llm_backbone; give one of them");
  for (const char* key : {"llm_backbone", "vision_encoder", "audio_encoder", "projector"}) parallel.kind(key);
  parallel.integer("zero", out.zero, 0, 3);
  parallel.choice("schedule", out.schedule, {"1f1b", "interleaved", "zero-bubble"});
  PARVL_RETURN_IF_ERROR(parallel.finish());
  PARVL_ASSIGN_OR_RETURN(const auto llm, read_module(parallel, alias ? "llm" : "llm_backbone", nullptr, checker));
  if (llm.has_value()) out.llm = *llm;
  PARVL_ASSIGN_OR_RETURN(out.vision_encoder, read_module(parallel, "vision_encoder", &out.llm, checker));
  PARVL_ASSIGN_OR_RETURN(out.audio_encoder, read_module(parallel, "audio_encoder", &out.llm, checker));
  PARVL_ASSIGN_OR_RETURN(out.projector, read_module(parallel, "projector", &out.llm, checker));
  // The ranks of an encoder's or projector's matrices must have the same samples.
  const std::pair<const char*, const std::optional<ModuleLayout>*> covering[] = {
      {"vision_encoder", &out.vision_encoder}, {"audio_encoder", &out.audio_encoder}, {"projector", &out.projector}};
  for (const auto& [name, layout] : covering) {
    if (!layout->has_value() || (*layout)->ranks > 0 || out.llm.tp % (*layout)->tp == 0) continue;
    ConfigReader module = parallel.section(name);
    return invalid(module.where("tp"), " (", (*layout)->tp, ") must divide llm_backbone.tp (", out.llm.tp,
                   "): the ranks that it is cut over must have the same samples");
  }
  if (out.projector && out.vision_encoder && out.vision_encoder->ranks > 0) {
    checker.note(parallel.where("projector"), "apart from a vision_encoder on its own ranks",
                 "leave projector out, and it lies there too");
  }
  if (out.zero > 1) checker.note(parallel.where("zero"), absl::StrCat("= ", out.zero), "set it to 0 or 1");
  if (out.schedule != "1f1b")
    checker.note(parallel.where("schedule"), "= " + out.schedule, "leave it out or set it to 1f1b");
  if (!checker.unavailable.empty()) return absl::UnimplementedError(checker.unavailable);
  return out;
}

}  // namespace parvl
