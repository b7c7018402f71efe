#include "parvl/exec/encode_queue.h"

#include <algorithm>
#include <utility>

#include "parvl/nn/device.h"

namespace parvl {

void EncodeQueue::start(bool record) {
  const auto make = [this, record] {
    use_own_stream(files_.device);
    if (!files_.held.encoder) return;
    EncoderGraphsOptions options;
    options.record = record;
    graphs_ = EncoderGraphs::create(*files_.model, files_.device, options);
  };
  thread_.run(make).get();
}

void EncodeQueue::submit(Item item) {
  {
    std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
  }
  thread_.submit([this] { work(); });
}

void EncodeQueue::cancel(int64_t id) {
  {
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(items_.begin(), items_.end(), [id](const Item& item) { return item.id == id; });
    if (found == items_.end()) return;
    cancelled_.push_back(std::move(*found));
    items_.erase(found);
  }
  thread_.submit([this] { work(); });
}

int64_t EncodeQueue::waiting() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(items_.size());
}

// Those that wait, as many as belong into one batch.
void EncodeQueue::work() {
  std::vector<Item> cancelled, batch;
  {
    std::lock_guard lock(mutex_);
    cancelled.swap(cancelled_);
    for (int64_t patches = 0; !items_.empty(); items_.pop_front()) {
      const Item& next = items_.front();
      patches += next.image->num_patches();
      const bool alone = !files_.device.is_cuda() || next.source != nullptr;
      if (!batch.empty() && (alone || batch.front().source != nullptr || patches > kEncodePatches)) break;
      batch.push_back(std::move(items_.front()));
    }
  }
  for (const Item& item : cancelled) item.on_done({.status = absl::CancelledError("the image was cancelled")});
  if (!batch.empty()) run(batch);  // else an earlier turn took this one's
  if (hooks_.on_turn) hooks_.on_turn();
}

void EncodeQueue::run(const std::vector<Item>& batch) {
  if (batch.front().source != nullptr) return fetch(batch.front());  // which ends by itself, whoever hangs
  int64_t patches = 0;
  for (const Item& item : batch) patches += item.image->num_patches();
  if (hooks_.on_encode) hooks_.on_encode(patches);
  const double start = clock_.now_seconds();
  encode(batch);
  if (hooks_.on_encoded) hooks_.on_encoded(patches, clock_.now_seconds() - start);
}

void EncodeQueue::encode(const std::vector<Item>& batch) {
  at::NoGradGuard no_grad;
  Encoded encoded;
  const double start = clock_.now_seconds();
  const absl::Status status = catch_exceptions("encoding an image failed", [&] {
    SequenceInput images;
    for (const Item& item : batch) {
      const ProcessedImage& image = *item.image;
      images.images.push_back({0, {image.grid_t, image.grid_h, image.grid_w}});
      images.pixels.push_back(image.patches.data());
    }
    encoded = encode(images);
    synchronize(files_.device);
    return absl::OkStatus();
  });
  if (!status.ok() && batch.size() > 1) {  // a bad one harms only itself
    for (const Item& one : batch) encode(std::vector<Item>{one});
    return;
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    Done done{.status = status, .start_s = start, .end_s = clock_.now_seconds(), .replayed = encoded.replayed};
    if (status.ok()) done.visual = std::move(encoded.visual[i]);
    batch[i].on_done(std::move(done));
  }
}

EncodeQueue::Encoded EncodeQueue::encode(const SequenceInput& images) const {
  const Model& model = *files_.model;
  Encoded out;
  if (graphs_ != nullptr) {
    out.visual = graphs_->run(images);
    out.replayed = !out.visual.empty() && graphs_->recorded();
    if (!out.visual.empty()) return out;
  }
  const at::Tensor visual = encode_images(model, pack_images(model, {images}, files_.device), files_.device);
  out.visual = images.images.size() == 1 ? std::vector<at::Tensor>{visual} : each_image(model, images.images, visual);
  return out;
}

// Straight into the tensor that stays, or into memory that a GPU copies from at full speed.
void EncodeQueue::fetch(const Item& item) {
  Done done{.start_s = clock_.now_seconds(), .fetched = true};
  const std::string failure = "fetching the encoder output of an image failed";
  done.status = catch_exceptions(failure, [&]() -> absl::Status {
    const TransferTensor& visual = item.source->tensors().front();
    const auto options = at::TensorOptions().dtype(to_scalar_type(visual.dtype));
    const at::Tensor host = at::empty(visual.shape, options.pinned_memory(files_.device.is_cuda()));
    const absl::Span<std::byte> memory(static_cast<std::byte*>(host.data_ptr()), host.nbytes());
    const absl::Status fetched = item.source->fetch({memory});
    // Whatever the reason: it is not there, and the image can be encoded elsewhere.
    if (!fetched.ok()) return absl::UnavailableError(absl::StrCat(failure, ": ", fetched.message()));
    const at::Tensor here = host.to(files_.device);
    synchronize(files_.device);
    done.visual = here;
    return absl::OkStatus();
  });
  done.end_s = clock_.now_seconds();
  item.on_done(std::move(done));
}

}  // namespace parvl
