#include "parvl/plan/pipeline/stages.h"

#include <absl/strings/str_join.h>

#include <numeric>

namespace parvl {
namespace {

absl::StatusOr<std::vector<int64_t>> even(int64_t layers, int64_t stages) {
  if (layers < stages) {
    return invalid("pp = ", stages, " is more stages than the model's ", layers, layers == 1 ? " layer" : " layers",
                   "; lower pp, or list the layers of each stage in `stages`");
  }
  std::vector<int64_t> out(static_cast<size_t>(stages), layers / stages);
  const int64_t more = layers % stages;
  for (int64_t s = stages - 1 - more; s < stages - 1; ++s) ++out[static_cast<size_t>(s)];
  return out;
}

absl::Status check_given(int64_t layers, int64_t stages, const std::vector<int64_t>& given) {
  const std::string list = absl::StrCat("stages: [", absl::StrJoin(given, ", "), "]");
  if (static_cast<int64_t>(given.size()) != stages) {
    return invalid(list, " lists ", given.size(), " stages, but there are ", stages);
  }
  for (size_t s = 0; s < given.size(); ++s) {
    const bool inner = s > 0 && s + 1 < given.size();
    if (given[s] < 0 || (given[s] == 0 && inner)) {
      return invalid(list, " gives stage ", s, " ", given[s], " layers; a stage needs one at least",
                     given[s] == 0 ? " unless it is the first or the last" : "");
    }
  }
  const int64_t sum = std::accumulate(given.begin(), given.end(), int64_t{0});
  if (sum != layers) return invalid(list, " has ", sum, " layers together, but the model has ", layers);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<StagePart>> split_layers(int64_t layers, int64_t stages, const std::vector<int64_t>& given) {
  if (stages < 1) return invalid("a pipeline needs one stage at least, found ", stages);
  std::vector<int64_t> counts = given;
  if (given.empty()) {
    PARVL_ASSIGN_OR_RETURN(counts, even(layers, stages));
  } else {
    PARVL_RETURN_IF_ERROR(check_given(layers, stages, given));
  }
  std::vector<StagePart> out;
  int64_t first = 0;
  for (const int64_t count : counts) {
    out.push_back({first, count, false, false});
    first += count;
  }
  out.front().embedding = true;
  out.back().head = true;
  return out;
}

std::vector<PieceBackward> plan_backward(const std::vector<bool>& trained) {
  std::vector<PieceBackward> out;
  bool before = false;
  for (const bool here : trained) {
    out.push_back({before, here});
    before = before || here;
  }
  return out;
}

}  // namespace parvl
