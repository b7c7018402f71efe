#include "parvl/serve/pools/pixels.h"

#include <cstring>
#include <utility>

namespace parvl {
namespace {

constexpr double kLease_s = 600;  // whoever published them drops them long before

std::vector<TransferTensor> layout_of(const ProcessedImage& image) {
  return {{.name = "patches", .dtype = DType::kFloat32, .shape = {image.num_patches(), image.patch_floats}}};
}

}  // namespace

absl::StatusOr<TransferHandle> publish_pixels(TransferSource& source, const ProcessedImage& image, double wait_s) {
  PARVL_ASSIGN_OR_RETURN(TransferRegion region, source.reserve(layout_of(image), wait_s));
  std::memcpy(region.data(0), image.patches.data(), image.patches.size() * sizeof(float));
  return source.publish(std::move(region), {.seconds = kLease_s});
}

absl::Status pull_pixels(TransferSink& sink, std::string_view handle, double timeout_s, ProcessedImage& image) {
  PARVL_ASSIGN_OR_RETURN(const TransferHandle from, TransferHandle::decode(handle));
  const std::vector<TransferTensor> want = layout_of(image);
  const auto floats = static_cast<size_t>(image.num_patches()) * static_cast<size_t>(image.patch_floats);
  if (from.tensors.size() != 1 || from.tensors[0].name != want[0].name || from.tensors[0].dtype != want[0].dtype ||
      from.tensors[0].shape != want[0].shape) {
    return invalid("what lies there are not the patches of this image");
  }
  image.patches.resize(floats);
  const absl::Span<std::byte> out(reinterpret_cast<std::byte*>(image.patches.data()), floats * sizeof(float));
  return sink.pull_into(from, absl::MakeConstSpan(&out, 1), timeout_s).status();
}

}  // namespace parvl
