#include "parvl/serve/pools/encode_service.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "parvl/elastic/instance_id.h"
#include "parvl/serve/pools/pixels.h"
#include "parvl/serve/pools/wire.h"

namespace parvl {
namespace {

constexpr double kPull_s = 10;
constexpr double kRoom_s = 30;     // that an image waits for memory which others' features lie in
constexpr double kLease_s = 1e9;   // the gateway says when it is not needed; without a gateway this process ends
constexpr double kBreath_s = 0.2;  // between two looks at whether an image that waits is still wanted

// Equal for equal images. One whose source nobody knows is equal to none.
OutputCache::Key key_of(const ProcessedImage& image, const std::tuple<int64_t, int32_t, int32_t>& of) {
  OutputCache::Key key = image.key;
  if (std::any_of(key.begin(), key.end(), [](uint8_t byte) { return byte != 0; })) return key;
  const int64_t name[] = {std::get<0>(of), std::get<1>(of), std::get<2>(of)};
  std::memcpy(key.data(), name, sizeof name);
  return key;
}

}  // namespace

EncodeService::EncodeService(std::unique_ptr<EncodeEngine> engine, std::unique_ptr<TransferSource> source,
                             TransferSink& sink, StreamClient& stream)
    : sink_(sink), stream_(stream), source_(std::move(source)), engine_(std::move(engine)) {}

EncodeService::~EncodeService() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  one_done_.notify_all();
}

void EncodeService::encode(const wire::Encode& message) {
  const Item of{message.request(), message.item(), message.attempt()};
  auto image = read_image(message.image());
  if (!image.ok()) return fail(of, image.status());
  {
    std::lock_guard lock(mutex_);
    live_[of] = {};
  }
  thread_.submit([this, job = Job{of, std::make_shared<ProcessedImage>(*std::move(image)),
                                  message.image().pixels_at()}] { run(job); });
}

bool EncodeService::given_up(const Item& of) {
  std::lock_guard lock(mutex_);
  return stopping_ || live_.at(of).given_up;
}

void EncodeService::run(const Job& job) {
  {
    std::unique_lock lock(mutex_);
    std::optional<OutputCache::Use> there;
    if (!live_.at(job.of).given_up) there = outputs_.use(key_of(*job.image, job.of));
    if (there.has_value()) {
      live_.erase(job.of);
      holds_.emplace(job.of, there->item);
      lock.unlock();
      return say(job.of, there->handle, 0);
    }
  }
  if (given_up(job.of)) return fail(job.of, absl::CancelledError("cancelled"));
  // Whoever published them is the gateway's host, which is there; what fails may succeed elsewhere.
  if (const absl::Status status = pull_pixels(sink_, job.pixels, kPull_s, *job.image); !status.ok()) {
    return fail(job.of, absl::UnavailableError(absl::StrCat("its pixels did not come: ", status.message())));
  }
  auto region = make_room(*job.image, job.of);
  if (!region.ok()) return fail(job.of, region.status());
  if (const absl::Status status = submit(job, *std::move(region)); !status.ok()) fail(job.of, status);
}

// Outputs that nobody uses give way; after that one waits until a reader has taken its own over. So a slow reader stops
// the encoding, and nothing grows.
absl::StatusOr<TransferRegion> EncodeService::make_room(const ProcessedImage& image, const Item& of) {
  PARVL_ASSIGN_OR_RETURN(const std::vector<TransferTensor> layout, engine_->layout_of(image));
  for (double waited_s = 0;; waited_s += kBreath_s) {
    auto region = source_->reserve(layout);
    if (!absl::IsResourceExhausted(region.status())) return region;
    if (given_up(of)) return absl::CancelledError("cancelled");
    std::optional<TransferId> victim;
    {
      std::lock_guard lock(mutex_);
      victim = outputs_.evict();
    }
    if (victim.has_value()) {
      source_->drop(*victim);
      continue;
    }
    if (waited_s >= kRoom_s) return absl::UnavailableError("the features of other images did not leave room in time");
    region = source_->reserve(layout, kBreath_s);
    if (!absl::IsResourceExhausted(region.status())) return region;
  }
}

absl::Status EncodeService::submit(const Job& job, TransferRegion region) {
  const auto room = std::make_shared<TransferRegion>(std::move(region));
  EncodeRequest request;
  request.image = job.image;
  for (size_t i = 0; i < room->tensors().size(); ++i) {
    request.destination.emplace_back(room->data(i), static_cast<size_t>(room->tensors()[i].bytes));
  }
  request.on_done = [this, of = job.of, key = key_of(*job.image, job.of), room](const auto& result) {
    {
      std::lock_guard lock(mutex_);
      --in_engine_;
    }
    done(of, key, std::move(*room), result);
  };
  {
    std::unique_lock lock(mutex_);
    const auto over = [&] { return stopping_ || live_.at(job.of).given_up; };
    one_done_.wait(lock, [&] { return over() || in_engine_ < engine_->max_images(); });
    if (over()) return absl::CancelledError("cancelled");
    ++in_engine_;
  }
  const auto id = engine_->submit(std::move(request));  // on_done may come before this returns
  std::lock_guard lock(mutex_);
  if (!id.ok()) {
    --in_engine_;
    return id.status();
  }
  if (const auto live = live_.find(job.of); live != live_.end()) live->second.id = *id;
  return absl::OkStatus();
}

void EncodeService::done(const Item& of, const OutputCache::Key& key, TransferRegion region,
                         const absl::StatusOr<EncodedImage>& result) {
  if (!result.ok()) return fail(of, result.status());
  const TransferHandle handle = source_->publish(std::move(region), {.seconds = kLease_s});
  OutputCache::Use at = {handle.item, handle.encode()};
  bool wanted, kept = false;
  {
    std::lock_guard lock(mutex_);
    wanted = !live_.extract(of).mapped().given_up;
    if (wanted) {
      kept = outputs_.add(key, at.item, at.handle);
      if (!kept) at = *outputs_.use(key);  // another request had the same image
      holds_.emplace(of, at.item);
    }
  }
  one_done_.notify_all();
  if (!kept) source_->drop(handle.item);
  if (wanted) say(of, at.handle, result->end_s - result->start_s);
}

void EncodeService::say(const Item& of, const std::string& handle, double seconds) {
  wire::Encoded encoded;
  encoded.set_output(handle);
  encoded.set_seconds(seconds);
  say(of, std::move(encoded));
}

void EncodeService::fail(const Item& of, const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    live_.erase(of);
  }
  one_done_.notify_all();
  wire::Encoded encoded;
  write_failure(status, *encoded.mutable_failure());
  say(of, std::move(encoded));
}

void EncodeService::say(const Item& of, wire::Encoded encoded) {
  encoded.set_request(std::get<0>(of));
  encoded.set_item(std::get<1>(of));
  encoded.set_attempt(std::get<2>(of));
  wire::Said said;
  *said.mutable_encoded() = std::move(encoded);
  stream_.add(std::move(said));
  stream_.flush();
}

void EncodeService::let_go(const wire::ItemOf& message) {
  const Item of{message.request(), message.item(), message.attempt()};
  std::optional<EncodeId> id;
  {
    std::lock_guard lock(mutex_);
    if (const auto held = holds_.extract(of); !held.empty()) {
      if (outputs_.let_go(held.mapped(), message.lost())) source_->drop(held.mapped());
    } else if (const auto live = live_.find(of); live != live_.end()) {
      live->second.given_up = true;
      id = live->second.id;
    }
  }
  one_done_.notify_all();
  if (id.has_value()) engine_->cancel(*id);
}

void EncodeService::fence(const wire::Fence& message) {
  source_->fence(instance_name(InstanceId{message.instance()}), message.epoch());
}

}  // namespace parvl
