#include "parvl/exec/request_images.h"

#include <absl/strings/str_join.h>

#include <algorithm>

namespace parvl {
namespace {

constexpr int kMaxSide = 1 << 15;  // patches; the values of three such sides are far from what int64_t holds

// "visual: float32 [12, 896]"
std::string text_of(const std::vector<TransferTensor>& tensors) {
  return absl::StrJoin(tensors, ", ", [](std::string* out, const TransferTensor& tensor) {
    absl::StrAppend(out, tensor.name, ": ", to_string(tensor.dtype), " [", absl::StrJoin(tensor.shape, ", "), "] of ",
                    tensor.bytes, " bytes");
  });
}

absl::Status check_output(const std::vector<TransferTensor>& wanted, const std::vector<TransferTensor>& given) {
  const auto equal = [](const TransferTensor& a, const TransferTensor& b) {
    return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes;
  };
  if (std::equal(wanted.begin(), wanted.end(), given.begin(), given.end(), equal)) return absl::OkStatus();
  return failed("its encoder output is ", text_of(given), ", and this model takes ", text_of(wanted));
}

// One that is to be fetched, or encoded here, or that is in the keys and values that are given.
absl::Status check_source(const ImageModel& model, const ProcessedImage& image, const EncodedSource* source,
                          bool given) {
  PARVL_RETURN_IF_ERROR(check_image(model, image, !image.patches.empty()));
  if ((source != nullptr || given) && image.patches.empty() && image.key == decltype(image.key){}) {
    return invalid("it has neither patches nor a key to know it by");
  }
  if (source != nullptr) return check_output(encoded_layout(model, image), source->tensors());
  if (given) return absl::OkStatus();
  if (!model.encodes) return invalid("it has no encoder output, and this engine holds no vision encoder");
  if (image.patches.empty()) return invalid("it has neither patches nor encoder output");
  return absl::OkStatus();
}

absl::Status check_span(const Prompt& prompt, const MediaSpan& span, int64_t from) {
  const int64_t tokens = static_cast<int64_t>(prompt.ids.size());
  const ProcessedImage& image = *prompt.images[static_cast<size_t>(span.image_index)];
  if (span.length != image.num_tokens()) {
    return invalid("it has ", image.num_tokens(), " tokens and stands on ", span.length, " placeholders");
  }
  if (span.begin >= from && span.begin <= tokens - span.length) return absl::OkStatus();
  return invalid("its placeholders are not in the prompt behind those of the image before it");
}

}  // namespace

std::vector<TransferTensor> encoded_layout(const ImageModel& model, const ProcessedImage& image) {
  TransferTensor visual{"visual", model.dtype, {image.num_tokens(), model.spec.backbone.hidden}};
  visual.bytes = image.num_tokens() * model.spec.backbone.hidden * dtype_bytes(model.dtype);
  return {visual};
}

absl::Status check_image(const ImageModel& model, const ProcessedImage& image, bool patches) {
  if (!model.spec.vision) return invalid("this model takes no images");
  const VisionSpec& vision = *model.spec.vision;
  for (const int side : {image.grid_t, image.grid_h, image.grid_w}) {
    if (side < 1 || side > kMaxSide) return invalid("a side of its grid has ", side, " patches");
  }
  if (image.merge_size != vision.merge || image.grid_h % vision.merge != 0 || image.grid_w % vision.merge != 0) {
    return invalid("its ", image.grid_h, " × ", image.grid_w, " patches cannot be joined ", vision.merge, " × ",
                   vision.merge, " each");
  }
  if (!patches) return absl::OkStatus();
  const int64_t values = image.num_patches() * vision.patch_values();
  if (image.patch_floats == vision.patch_values() && static_cast<int64_t>(image.patches.size()) == values) {
    return absl::OkStatus();
  }
  return invalid("its ", image.num_patches(), " patches have ", image.patches.size(), " values instead of ", values);
}

absl::Status check_images(const ImageModel& model, const EngineRequest& request) {
  const Prompt& prompt = *request.prompt;
  int64_t end = 0;
  for (const MediaSpan& span : prompt.media) {
    const std::string name = absl::StrCat("image ", span.image_index + 1);
    if (span.image_index < 0 || static_cast<size_t>(span.image_index) >= prompt.images.size() ||
        prompt.images[static_cast<size_t>(span.image_index)] == nullptr) {
      return invalid(name, ": it is not there");
    }
    const ProcessedImage& image = *prompt.images[static_cast<size_t>(span.image_index)];
    PARVL_RETURN_IF_ERROR(with_context(
        check_source(model, image, request.source_of(span.image_index).get(), request.kv != nullptr), name));
    PARVL_RETURN_IF_ERROR(with_context(check_span(prompt, span, end), name));
    end = span.begin + span.length;
  }
  return absl::OkStatus();
}

}  // namespace parvl
