#include "parvl/exec/encode_queue.h"

#include <utility>

#include "parvl/nn/device.h"

namespace parvl {

void EncodeQueue::start(bool record) {
  const auto make = [this, record] {
    use_own_stream(device_);
    EncoderGraphsOptions options;
    options.record = record;
    graphs_ = EncoderGraphs::create(model_, device_, options);
  };
  thread_.run(make).get();
}

void EncodeQueue::submit(Item item) {
  {
    std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
  }
  thread_.submit([this] { encode_waiting(); });
}

// Those that wait, as many as belong into one batch.
void EncodeQueue::encode_waiting() {
  std::vector<Item> batch;
  {
    std::lock_guard lock(mutex_);
    for (int64_t patches = 0; !items_.empty(); items_.pop_front()) {
      patches += items_.front().image().num_patches();
      if (!batch.empty() && (!device_.is_cuda() || patches > kEncodePatches)) break;
      batch.push_back(std::move(items_.front()));
    }
  }
  if (!batch.empty()) encode(batch);  // else an earlier turn took this one's
}

void EncodeQueue::encode(const std::vector<Item>& batch) {
  at::NoGradGuard no_grad;
  Encoded encoded;
  const double start = clock_.now_seconds();
  const absl::Status status = catch_exceptions("encoding an image failed", [&] {
    SequenceInput images;
    for (const Item& item : batch) {
      const ProcessedImage& image = item.image();
      images.images.push_back({0, {image.grid_t, image.grid_h, image.grid_w}});
      images.pixels.push_back(image.patches.data());
    }
    encoded = encode(images);
    synchronize(device_);
    return absl::OkStatus();
  });
  if (!status.ok() && batch.size() > 1) {  // a bad one harms only itself
    for (const Item& one : batch) encode(std::vector<Item>{one});
    return;
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    Computed done;
    if (status.ok()) done.visual = std::move(encoded.visual[i]);
    Completion& completion = done.completion;
    completion.kind = Completion::Kind::kEncode;
    completion.slot = batch[i].work.slot;
    completion.status = status;
    completion.start_s = start;
    completion.end_s = clock_.now_seconds();
    completion.replayed = encoded.replayed;
    report_(std::move(done));
  }
}

EncodeQueue::Encoded EncodeQueue::encode(const SequenceInput& images) const {
  Encoded out;
  if (graphs_ != nullptr) {
    out.visual = graphs_->run(images);
    out.replayed = !out.visual.empty() && graphs_->recorded();
    if (!out.visual.empty()) return out;
  }
  const at::Tensor visual = encode_images(model_, pack_images(model_, {images}, device_), device_);
  out.visual = images.images.size() == 1 ? std::vector<at::Tensor>{visual} : each_image(model_, images.images, visual);
  return out;
}

}  // namespace parvl
