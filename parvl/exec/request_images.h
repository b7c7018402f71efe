// What a request says of its images, against the model: images come from other processes, whose mistakes must not
// become ours.
#pragma once

#include <vector>

#include "parvl/exec/engine_request.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

// What an engine computes images with.
struct ImageModel {
  const ModelSpec& spec;
  DType dtype = DType::kFloat32;
  bool encodes = true;  // holds the encoder
};

// What the encoder makes of an image with this grid, which check_image accepted.
std::vector<TransferTensor> encoded_layout(const ImageModel& model, const ProcessedImage& image);

// OK, or InvalidArgument: a grid that the model cannot merge, or `patches` that are not as many as the grid says.
absl::Status check_image(const ImageModel& model, const ProcessedImage& image, bool patches);

// OK, or one sentence with the image's number. InvalidArgument: as above; placeholders that are not as many as the
// image has tokens; neither patches that could be encoded here nor encoder output; no key to know it by. Internal: the
// encoder output is not what this model would make of it.
absl::Status check_images(const ImageModel& model, const EngineRequest& request);

}  // namespace parvl
