// Pipeline shapes for tests: by hand, all of them up to a size, and chosen by rapidcheck.
#pragma once

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <rapidcheck.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "parvl/plan/pipeline/schedule.h"

namespace parvl {

inline std::ostream& operator<<(std::ostream& out, const PipelineShape& s) {
  out << s.stages << " stages, " << s.replicas << " replicas, encoder "
      << (s.encoder == EncoderPlace::kNone       ? "none"
          : s.encoder == EncoderPlace::kAllRanks ? "over all"
                                                 : absl::StrCat("on ", s.encoder_ranks))
      << (s.encoder_trained ? " trained" : " frozen") << (s.tied ? ", tied" : "") << ", stages trained ";
  for (const bool trained : s.stage_trained) out << trained;
  out << ", images";
  for (const Microbatch& m : s.microbatches) out << " " << m.replica << ":" << absl::StrJoin(m.encoders, "+");
  return out;
}

inline PipelineShape plain_shape(int64_t stages, int64_t microbatches) {
  PipelineShape out;
  out.stages = stages;
  out.microbatches.resize(static_cast<size_t>(microbatches));
  return out;
}

// Images of micro batch m: on one encoder, on another, on all.
inline std::vector<int64_t> some_encoders(int64_t m, int64_t encoders) {
  std::vector<int64_t> out;
  for (int64_t e = 0; e < encoders; ++e) {
    if (m % 3 == 2 || e == m % encoders) out.push_back(e);
  }
  return out;
}

// Every place of the encoder × every set of micro batches with images × encoder frozen or not × the first stages
// frozen, from none to all × tied where it can be.
inline void for_each_shape(int64_t stages, int64_t microbatches, const std::function<void(const PipelineShape&)>& use) {
  const std::pair<EncoderPlace, int64_t> places[] = {{EncoderPlace::kNone, 0},
                                                     {EncoderPlace::kOwnRanks, 1},
                                                     {EncoderPlace::kOwnRanks, 2},
                                                     {EncoderPlace::kAllRanks, 0}};
  for (const auto& [place, own] : places) {
    const int64_t encoders = place == EncoderPlace::kAllRanks ? stages : own;
    for (int64_t images = 0; images < (encoders > 0 ? int64_t{1} << microbatches : 1); ++images) {
      for (int64_t choice = 0; choice < 2 * (stages + 2); ++choice) {
        const int64_t frozen = choice / 2;  // stages + 1: none, and tied
        PipelineShape shape = plain_shape(stages, microbatches);
        shape.encoder = place;
        shape.encoder_ranks = own;
        shape.encoder_trained = choice % 2 == 1;
        shape.tied = frozen > stages;
        if (encoders == 0 && shape.encoder_trained) continue;
        for (int64_t s = 0; s < stages; ++s) shape.stage_trained.push_back(shape.tied || s >= frozen);
        for (int64_t m = 0; m < microbatches; ++m) {
          if (images >> m & 1) shape.microbatches[static_cast<size_t>(m)].encoders = some_encoders(m, encoders);
        }
        use(shape);
      }
    }
  }
}

// Up to `stages` × `microbatches` of each replica.
inline PipelineShape any_shape(int64_t stages, int64_t microbatches, int64_t replicas) {
  using rc::gen::inRange;
  PipelineShape shape = plain_shape(*inRange<int64_t>(1, stages + 1), 0);
  shape.replicas = *inRange<int64_t>(1, replicas + 1);
  shape.encoder = static_cast<EncoderPlace>(*inRange(0, 3));
  if (shape.encoder == EncoderPlace::kOwnRanks) shape.encoder_ranks = *inRange<int64_t>(1, 4);
  shape.encoder_trained = shape.encoder != EncoderPlace::kNone && *inRange(0, 3) > 0;
  shape.tied = *inRange(0, 3) == 0;
  for (int64_t s = 0; s < shape.stages; ++s) {
    const bool end = s == 0 || s == shape.stages - 1;
    shape.stage_trained.push_back((shape.tied && end) || *inRange(0, 3) > 0);
  }
  const int64_t encoders = shape.encoder == EncoderPlace::kAllRanks ? shape.stages : shape.encoder_ranks;
  const int64_t count = *inRange<int64_t>(0, microbatches * shape.replicas + 1);
  for (int64_t m = 0; m < count; ++m) {
    Microbatch microbatch{*inRange<int64_t>(0, shape.replicas), {}};
    for (int64_t e = 0; e < encoders; ++e) {
      if (*inRange(0, 2) == 1) microbatch.encoders.push_back(e);
    }
    shape.microbatches.push_back(microbatch);
  }
  return shape;
}

}  // namespace parvl
