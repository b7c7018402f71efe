#include "parvl/exec/encoder_graphs.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "parvl/nn/cuda_ops.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

// Whether attention over a layout that only the device knows has a kernel for these heads.
bool has_kernels(const Model& model, at::Device device) {
  if (model.vision_encoder() == nullptr) return false;
  const VisionSpec& spec = *model.spec().vision;
  return takes_any_layout(
      at::empty({1, spec.heads, spec.head_dim()}, at::TensorOptions().dtype(pixel_type(model)).device(device)));
}

}  // namespace

std::vector<int64_t> encoder_buckets(int64_t max_patches, int64_t merged) {
  std::vector<int64_t> out;
  const int64_t most = max_patches / merged * merged;
  for (int64_t size = 256; size < most; size += size < 512 ? 128 : size < 2048 ? 256 : 512) {
    const int64_t rounded = (size + merged - 1) / merged * merged;
    if (rounded < most && (out.empty() || rounded > out.back())) out.push_back(rounded);
  }
  if (most > 0) out.push_back(most);
  return out;
}

std::optional<size_t> pick_encoder_bucket(const std::vector<int64_t>& buckets, int64_t patches,
                                          absl::FunctionRef<bool(int64_t)> has_room) {
  const auto enough = std::lower_bound(buckets.begin(), buckets.end(), patches);
  const auto picked = std::find_if(enough, buckets.end(), has_room);
  if (picked == buckets.end() || *picked > 2 * *enough) return std::nullopt;
  return static_cast<size_t>(picked - buckets.begin());
}

EncoderGraphs::Mirror::Mirror(std::vector<int64_t> sizes, at::ScalarType type, at::Device target)
    : host(at::zeros(sizes, at::TensorOptions().dtype(type).pinned_memory(true))),
      device(at::zeros(sizes, at::TensorOptions().dtype(type).device(target))) {}

void EncoderGraphs::Mirror::upload(int64_t rows) const {
  device.narrow(0, 0, rows).copy_(host.narrow(0, 0, rows), /*non_blocking=*/true);
}

void EncoderGraphs::Mirror::put(int64_t begin, const at::Tensor& values) const {
  host.narrow(0, begin, values.size(0)).copy_(values);
}

bool EncoderGraphs::Borders::takes(const SeqLayout& layout, int64_t rows) const {
  return static_cast<int64_t>(layout.lengths.size()) <= room(rows) && layout.longest <= longest;
}

void EncoderGraphs::Borders::put(const SeqLayout& layout, int64_t rows) const {
  auto* starts_of = starts.host.data_ptr<int32_t>();
  std::partial_sum(layout.lengths.begin(), layout.lengths.end(), starts_of + 1);
  std::fill(starts_of + 1 + layout.lengths.size(), starts_of + 1 + room(rows), static_cast<int32_t>(layout.total));
}

SeqLayout EncoderGraphs::Borders::upload(int64_t rows) const {
  starts.upload(room(rows) + 1);
  SeqLayout out;
  out.total = rows;
  out.longest = std::min(longest, rows);
  out.starts = starts.device.narrow(0, 0, room(rows) + 1);
  return out;
}

std::unique_ptr<EncoderGraphs> EncoderGraphs::create(const Model& model, at::Device device,
                                                     const EncoderGraphsOptions& options) {
  at::NoGradGuard no_grad;
  if (!has_kernels(model, device)) return nullptr;
  const VisionSpec& spec = *model.spec().vision;
  std::vector<int64_t> buckets = encoder_buckets(options.max_patches, spec.merge * spec.merge);
  if (buckets.empty()) return nullptr;
  std::unique_ptr<EncoderGraphs> out(new EncoderGraphs(model, device, options, std::move(buckets)));
  if (options.record && out->pool_ == nullptr) return nullptr;
  for (Graph& graph : out->graphs_) out->record(graph);
  return out;
}

EncoderGraphs::EncoderGraphs(const Model& model, at::Device device, const EncoderGraphsOptions& options,
                             std::vector<int64_t> buckets)
    : model_(model), device_(device), options_(options), pool_(make_cuda_graph_pool()), buckets_(std::move(buckets)) {
  const VisionSpec& spec = *model.spec().vision;
  merged_ = spec.merge * spec.merge;
  for (const int64_t size : buckets_) graphs_.push_back({.patches = size});
  const int64_t most = graphs_.back().patches, half = spec.head_dim() / 2;
  pixels_ = Mirror({most, spec.patch_values()}, pixel_type(model), device);
  cos_ = Mirror({most, half}, at::kFloat, device);
  sin_ = Mirror({most, half}, at::kFloat, device);
  const auto borders = [&](int64_t spacing, int64_t longest) {
    return Borders{Mirror({most / spacing + 2}, at::kInt, device), spacing, longest};
  };
  frames_ = borders(256, most);
  if (spec.window == 0) return;
  const int64_t side = spec.window / spec.patch;
  windows_ = borders(std::max<int64_t>(1, side * side / 2), side * side);
  order_ = Mirror({most}, at::kLong, device);
  raster_ = Mirror({most / merged_}, at::kLong, device);
}

void EncoderGraphs::fill(const SequenceInput& images, const VisionBatch& batch, int64_t padded) {
  int64_t row = 0;
  for (size_t i = 0; i < images.images.size(); ++i) {
    const int64_t count = images.images[i].grid.patches();
    put_pixels(images.pixels[i], pixels_.host.narrow(0, row, count));
    row += count;
  }
  cos_.put(0, batch.rope.cos);
  sin_.put(0, batch.rope.sin);
  frames_.put(batch.frames, padded);
  if (!batch.order.defined()) return;
  windows_.put(batch.windows, padded);
  // What is padded stays where it is. Its values are of no use to anybody, and reach no other row.
  order_.put(0, batch.order);
  order_.put(row, at::arange(row, padded, at::kLong));
  raster_.put(0, batch.raster);
  raster_.put(row / merged_, at::arange(row / merged_, padded / merged_, at::kLong));
}

// What is recorded.
void EncoderGraphs::step(Graph& graph) {
  const int64_t rows = graph.patches;
  const auto on_device = [](const Mirror& mirror, int64_t count) {
    mirror.upload(count);
    return mirror.device.narrow(0, 0, count);
  };
  VisionBatch batch;
  batch.rope = {on_device(cos_, rows), on_device(sin_, rows)};
  batch.frames = frames_.upload(rows);
  if (windows_.spacing > 0) {
    batch.windows = windows_.upload(rows);
    batch.order = on_device(order_, rows);
    batch.raster = on_device(raster_, rows / merged_);
  }
  graph.visual = encode_images(model_, batch, on_device(pixels_, rows));
}

void EncoderGraphs::record(Graph& graph) {
  // Once without recording: libraries choose their kernels and set memory aside. One image of one column.
  SequenceInput image;
  const int64_t side = model_.spec().vision->merge;
  const std::vector<float> pixels(static_cast<size_t>(merged_ * model_.spec().vision->patch_values()));
  image.images.push_back({0, {1, side, side}});
  image.pixels.push_back(pixels.data());
  fill(image, model_.vision_encoder()->batch({image.images[0].grid}, at::kCPU), graph.patches);
  step(graph);
  synchronize(device_);
  if (options_.record) graph.graph = pool_->capture([&] { step(graph); });
}

std::vector<at::Tensor> EncoderGraphs::run(const SequenceInput& images) {
  at::NoGradGuard no_grad;
  std::vector<Grid> grids;
  int64_t patches = 0;
  for (const ImageSpan& image : images.images) {
    grids.push_back(image.grid);
    patches += image.grid.patches();
  }
  const VisionBatch batch = model_.vision_encoder()->batch(grids, at::kCPU);
  const std::optional<size_t> bucket = pick_encoder_bucket(buckets_, patches, [&](int64_t room) {
    return frames_.takes(batch.frames, room) && (windows_.spacing == 0 || windows_.takes(batch.windows, room));
  });
  if (!bucket.has_value()) return {};
  Graph& graph = graphs_[*bucket];
  synchronize(device_);  // what was last copied from the host's side has arrived
  fill(images, batch, graph.patches);
  if (graph.graph != nullptr) {
    graph.graph->replay();
  } else {
    step(graph);
  }
  return each_image(model_, images.images, graph.visual);
}

}  // namespace parvl
