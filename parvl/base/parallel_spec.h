// How the modules of a model are spread over ranks. Plain data: recipes and allocations are read into it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace parvl {

// Degrees of one module. `ep` divides dp · sp and adds no rank.
struct ModuleLayout {
  int64_t dp = 1, tp = 1, pp = 1, sp = 1, ep = 1;
  int64_t ranks = 0;            // of its own; 0: it covers the LLM's
  int64_t virtual_stages = 1;   // a rank
  std::vector<int64_t> stages;  // layers of each stage, in order; empty: as even as they go
  int64_t product() const { return dp * tp * pp * sp; }
};

struct ParallelSpec {
  ModuleLayout llm;
  std::optional<ModuleLayout> vision_encoder, audio_encoder, projector;  // left out: dp over all ranks of the LLM
  int64_t zero = 0;
  std::string schedule = "1f1b";  // 1f1b | interleaved | zero-bubble

  int64_t world() const {
    int64_t out = llm.product();
    for (const auto* module : {&vision_encoder, &audio_encoder, &projector}) {
      if (module->has_value()) out += (*module)->ranks;
    }
    return out;
  }
};

}  // namespace parvl
