#include "parvl/train/recipe_parallel.h"

#include <optional>
#include <string>
#include <vector>

namespace parvl {
namespace {

constexpr int64_t kMaxDegree = 1 << 16;

struct ModuleLayout {
  int64_t dp = 1, tp = 1, pp = 1, sp = 1, ep = 1;
  int64_t ranks = 0;  // 0: shares the LLM's ranks
  int64_t virtual_stages = 1;
  std::vector<int64_t> stages;
  bool degrees_given = false;
  int64_t product() const { return dp * tp * pp * sp; }
};

struct Checker {
  // The first key that asks for more than one process, as a finished sentence.
  std::string unavailable;

  void note(const std::string& where, const std::string& found, const std::string& fix) {
    if (unavailable.empty()) unavailable = absl::StrCat(where, " ", found, " is not available yet; ", fix);
  }
};

absl::Status read_module(ConfigReader module, const ModuleLayout* llm, Checker& checker, ModuleLayout& out) {
  const std::pair<const char*, int64_t*> degrees[] = {
      {"dp", &out.dp}, {"tp", &out.tp}, {"pp", &out.pp}, {"sp", &out.sp}, {"ep", &out.ep}};
  for (const auto& [key, value] : degrees) {
    module.integer(key, *value, 1, kMaxDegree);
    out.degrees_given = out.degrees_given || module.has(key);
  }
  if (llm != nullptr) module.integer("ranks", out.ranks, 1, kMaxDegree);
  module.integer("virtual_stages", out.virtual_stages, 1, kMaxDegree);
  module.integer_list("stages", out.stages, 1);
  if (out.dp * out.sp % out.ep != 0) {
    module.fail("ep", absl::StrCat("(", out.ep, ") must divide dp · sp (", out.dp * out.sp, ")"));
  }
  if (!out.stages.empty() && static_cast<int64_t>(out.stages.size()) != out.pp * out.virtual_stages) {
    module.fail("stages", absl::StrCat("lists ", out.stages.size(), " stages; pp · virtual_stages is ",
                                       out.pp * out.virtual_stages));
  }
  const int64_t covered = out.ranks > 0 ? out.ranks : llm != nullptr ? llm->product() : out.product();
  if (out.degrees_given && out.product() != covered) {
    std::string first;
    for (const auto& [key, value] : degrees) {
      if (first.empty() && module.has(key)) first = key;
    }
    module.fail(first, absl::StrCat("does not fit: dp · tp · pp · sp is ", out.product(), ", but the module covers ",
                                    covered, out.ranks > 0 ? " ranks of its own" : " ranks of llm_backbone"));
  }
  PARVL_RETURN_IF_ERROR(module.finish());
  for (const auto& [key, value] : degrees) {
    if (*value != 1) checker.note(module.where(key), absl::StrCat("= ", *value), "leave it out or set it to 1");
  }
  if (out.ranks > 0) checker.note(module.where("ranks"), absl::StrCat("= ", out.ranks), "leave it out");
  if (out.virtual_stages != 1)
    checker.note(module.where("virtual_stages"), absl::StrCat("= ", out.virtual_stages), "leave it out");
  if (!out.stages.empty()) checker.note(module.where("stages"), "(pipeline stages)", "leave it out");
  return absl::OkStatus();
}

}  // namespace

absl::Status check_parallel(ConfigReader& recipe) {
  ConfigReader parallel = recipe.section("parallel");
  Checker checker;
  ModuleLayout llm;
  const bool alias = parallel.has("llm");
  if (alias && parallel.has("llm_backbone")) parallel.fail("llm", "is an alias of llm_backbone; give one of them");
  for (const char* key : {"llm_backbone", "vision_encoder", "audio_encoder", "projector"}) parallel.kind(key);
  int64_t zero = 0;
  std::string schedule = "1f1b";
  parallel.integer("zero", zero, 0, 3);
  parallel.choice("schedule", schedule, {"1f1b", "interleaved", "zero-bubble"});
  PARVL_RETURN_IF_ERROR(parallel.finish());
  PARVL_RETURN_IF_ERROR(read_module(parallel.section(alias ? "llm" : "llm_backbone"), nullptr, checker, llm));
  for (const char* key : {"vision_encoder", "audio_encoder", "projector"}) {
    ModuleLayout module;
    PARVL_RETURN_IF_ERROR(read_module(parallel.section(key), &llm, checker, module));
  }
  if (zero != 0) checker.note(parallel.where("zero"), absl::StrCat("= ", zero), "leave it out or set it to 0");
  if (schedule != "1f1b") checker.note(parallel.where("schedule"), "= " + schedule, "leave it out or set it to 1f1b");
  return checker.unavailable.empty() ? absl::OkStatus() : absl::UnimplementedError(checker.unavailable);
}

}  // namespace parvl
