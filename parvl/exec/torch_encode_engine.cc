#include "parvl/exec/torch_encode_engine.h"

#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/exec/encode_queue.h"
#include "parvl/exec/request_images.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

constexpr uintptr_t kAlign = 64;

absl::Status cancelled() { return absl::CancelledError("the image was cancelled"); }

class TorchEncodeEngine : public EncodeEngine {
 public:
  TorchEncodeEngine(LoadedFiles files, const EncodeEngineConfig& config, const Clock& clock)
      : files_(std::move(files)), config_(config) {
    queue_.emplace(files_, clock, config_.hooks);
    if (!files_.device.is_cuda()) return;
    if (config.startup != nullptr) config.startup->begin("graphs");
    queue_->start(config.graphs);
  }

  ~TorchEncodeEngine() override {
    queue_.reset();  // what is being encoded is done; nothing else will be
    for (auto& [id, live] : std::exchange(live_, {})) live.request.on_done(cancelled());
  }

  std::string device_name() const override { return device_text(files_.device); }
  int64_t max_images() const override { return config_.max_images; }
  absl::StatusOr<std::vector<TransferTensor>> layout_of(const ProcessedImage& image) const override {
    PARVL_RETURN_IF_ERROR(check(image, /*patches=*/false));
    return encoded_layout(model(), image);
  }

  absl::StatusOr<EncodeId> submit(EncodeRequest request) override {
    PARVL_CHECK(request.image != nullptr && request.on_done, "an incomplete request");
    PARVL_RETURN_IF_ERROR(check(*request.image, /*patches=*/true));
    PARVL_RETURN_IF_ERROR(check_destination(request));
    EncodeQueue::Item item;
    item.image = request.image;
    EncodeId id;
    {
      std::lock_guard lock(mutex_);
      if (stats_.images >= config_.max_images) {
        return absl::ResourceExhaustedError(
            absl::StrCat("the encoder has ", stats_.images, " images, as many as it takes at once (--max-num-seqs)"));
      }
      id = EncodeId{next_id_++};
      ++stats_.images;
      stats_.patches += request.image->num_patches();
      live_.emplace(id, Live{std::move(request)});
    }
    item.id = id.value;
    item.on_done = [this, id](EncodeQueue::Done done) { finish(id, std::move(done)); };
    queue_->submit(std::move(item));
    return id;
  }

  void cancel(EncodeId id) override {
    {
      std::lock_guard lock(mutex_);
      const auto found = live_.find(id);
      if (found == live_.end()) return;
      found->second.cancelled = true;
    }
    queue_->cancel(id.value);
  }

  EncodeStats stats() const override {
    std::lock_guard lock(mutex_);
    EncodeStats stats = stats_;
    stats.waiting = std::min(stats.images, queue_->waiting());
    return stats;
  }

 private:
  struct Live {
    EncodeRequest request;
    bool cancelled = false;
  };

  ImageModel model() const { return {files_.model->spec(), files_.dtype, files_.held.encoder}; }

  absl::Status check(const ProcessedImage& image, bool patches) const {
    PARVL_RETURN_IF_ERROR(with_context(check_image(model(), image, patches), "an image"));
    if (image.num_patches() <= config_.max_patches) return absl::OkStatus();
    return invalid("an image of ", image.num_patches(), " patches is larger than any that this model's processor ",
                   "makes, ", config_.max_patches, " patches");
  }

  absl::Status check_destination(const EncodeRequest& request) const {
    const TransferTensor visual = encoded_layout(model(), *request.image).front();
    if (request.destination.size() != 1 || static_cast<int64_t>(request.destination[0].size()) != visual.bytes) {
      return invalid("an image's encoder output is one tensor of ", visual.bytes, " bytes, and its destination is not");
    }
    const auto address = reinterpret_cast<uintptr_t>(request.destination[0].data());
    PARVL_CHECK(address % kAlign == 0, "an unaligned destination");
    return absl::OkStatus();
  }

  // On the queue's thread.
  void finish(EncodeId id, EncodeQueue::Done done) {
    absl::Span<std::byte> destination;
    {
      std::lock_guard lock(mutex_);
      const Live& live = live_.at(id);
      destination = live.request.destination[0];
      if (live.cancelled) done.status = cancelled();
    }
    const bool computed = done.visual.defined();
    if (done.status.ok()) done.status = copy(done.visual, destination);
    Live live;
    {
      std::lock_guard lock(mutex_);
      live = std::move(live_.extract(id).mapped());
      --stats_.images;
      stats_.patches -= live.request.image->num_patches();
      if (computed) {
        busy_.add(done.start_s, done.end_s);
        stats_.busy_s = busy_.total_s();
        ++(done.replayed ? stats_.work.replayed : stats_.work.launched);
      }
      stats_.encoded += done.status.ok();
    }
    if (!done.status.ok()) return live.request.on_done(done.status);
    live.request.on_done(EncodedImage{done.start_s, done.end_s});
  }

  absl::Status copy(const at::Tensor& visual, absl::Span<std::byte> destination) const {
    return catch_exceptions("copying an image's encoder output failed", [&] {
      at::from_blob(destination.data(), visual.sizes(), visual.options().device(at::kCPU)).copy_(visual);
      return absl::OkStatus();
    });
  }

  const LoadedFiles files_;
  const EncodeEngineConfig config_;
  mutable std::mutex mutex_;
  absl::flat_hash_map<EncodeId, Live> live_;
  int64_t next_id_ = 1;
  BusyTime busy_;
  EncodeStats stats_;
  std::optional<EncodeQueue> queue_;  // its thread uses all of the above
};

}  // namespace

std::unique_ptr<EncodeEngine> make_torch_encode_engine(LoadedFiles files, const EncodeEngineConfig& config,
                                                       const Clock& clock) {
  return std::make_unique<TorchEncodeEngine>(std::move(files), config, clock);
}

}  // namespace parvl
