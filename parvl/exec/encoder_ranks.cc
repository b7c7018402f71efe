#include "parvl/exec/encoder_ranks.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <numeric>
#include <utility>

#include "parvl/models/packing.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

// Before the patches of an image.
struct ImageHead {
  int64_t grid_t = 0, grid_h = 0, grid_w = 0, patch_floats = 0, merge_size = 1;
};
// Before the features of one, or the words of why there are none.
struct FeaturesHead {
  int64_t code = 0;  // of an absl::Status
};

template <typename T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <typename T>
absl::StatusOr<T> read_head(RingReader& from) {
  PARVL_ASSIGN_OR_RETURN(const std::string message, from.read());
  T out;
  if (message.size() != sizeof out) return absl::InternalError("a message between encoders has another size");
  std::memcpy(&out, message.data(), sizeof out);
  return out;
}

absl::StatusOr<ProcessedImage> read_image(RingReader& from) {
  PARVL_ASSIGN_OR_RETURN(const auto head, read_head<ImageHead>(from));
  PARVL_ASSIGN_OR_RETURN(const std::string patches, from.read());
  ProcessedImage out;
  out.grid_t = static_cast<int>(head.grid_t);
  out.grid_h = static_cast<int>(head.grid_h);
  out.grid_w = static_cast<int>(head.grid_w);
  out.patch_floats = static_cast<int>(head.patch_floats);
  out.merge_size = static_cast<int>(head.merge_size);
  out.patches.resize(patches.size() / sizeof(float));
  std::memcpy(out.patches.data(), patches.data(), out.patches.size() * sizeof(float));
  return out;
}

}  // namespace

std::vector<size_t> deal_images(absl::Span<const int64_t> patches, std::vector<int64_t>& load) {
  std::vector<size_t> order(patches.size()), out(patches.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return patches[a] > patches[b]; });
  for (const size_t image : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += patches[image];
    out[image] = static_cast<size_t>(least - load.begin());
  }
  return out;
}

EncoderRanks::EncoderRanks(const LoadedFiles& files, const Clock& clock, OtherEncoders others, EngineHooks hooks)
    : files_(files),
      clock_(clock),
      others_(std::move(others)),
      load_(1 + (others_.links == nullptr ? 0 : others_.links->size())),
      own_(files, clock, std::move(hooks)) {
  while (lanes_.size() + 1 < load_.size()) lanes_.push_back(std::make_unique<JobThread>());
}

EncoderRanks::~EncoderRanks() {
  closing_ = true;
  if (others_.links != nullptr) others_.links->close();
}

void EncoderRanks::submit(std::vector<EncodeQueue::Item> items) {
  std::vector<int64_t> patches;  // what is fetched costs no encoder anything
  for (const auto& item : items) patches.push_back(item.source == nullptr ? item.image->num_patches() : 0);
  std::vector<size_t> ranks;
  {
    std::lock_guard lock(mutex_);
    ranks = deal_images(patches, load_);
  }
  for (size_t i = 0; i < items.size(); ++i) {
    hand_over(items[i].source == nullptr ? ranks[i] : 0, std::move(items[i]));
  }
}

void EncoderRanks::hand_over(size_t rank, EncodeQueue::Item item) {
  if (item.source == nullptr) {
    item.on_done = [this, rank, patches = item.image->num_patches(),
                    told = std::move(item.on_done)](EncodeQueue::Done done) {
      {
        std::lock_guard lock(mutex_);
        load_[rank] -= patches;
      }
      told(std::move(done));
    };
  }
  if (rank == 0) return own_.submit(std::move(item));
  auto held = std::make_shared<const EncodeQueue::Item>(std::move(item));
  lanes_[rank - 1]->submit([this, rank, held] { encode_there(rank - 1, *held); });
}

// On the link's lane.
void EncoderRanks::encode_there(size_t link, const EncodeQueue::Item& item) {
  EncodeQueue::Done done{.start_s = clock_.now_seconds()};
  const auto over = others_.watch ? others_.watch(item.image->num_patches()) : std::function<void()>();
  const absl::Status status = catch_exceptions("an image could not be encoded on another rank", [&]() -> absl::Status {
    PARVL_ASSIGN_OR_RETURN(done.visual, ask(link, item, done.status));
    return absl::OkStatus();
  });
  if (!status.ok()) {
    const absl::Status named(status.code(), absl::StrCat("the encoder of rank ", link + 1, ": ", status.message()));
    done.status = closing_ ? named : others_.on_broken(named);
  }
  if (over) over();
  done.end_s = clock_.now_seconds();
  item.on_done(std::move(done));
}

// An error is the link's; `failure` that of this image alone.
absl::StatusOr<at::Tensor> EncoderRanks::ask(size_t link, const EncodeQueue::Item& item, absl::Status& failure) {
  const ProcessedImage& image = *item.image;
  const ImageHead head{image.grid_t, image.grid_h, image.grid_w, image.patch_floats, image.merge_size};
  RingWriter& to = others_.links->to(link);
  RingReader& from = others_.links->from(link);
  PARVL_RETURN_IF_ERROR(to.write(bytes_of(head)));
  PARVL_RETURN_IF_ERROR(
      to.write({reinterpret_cast<const char*>(image.patches.data()), image.patches.size() * sizeof(float)}));
  PARVL_ASSIGN_OR_RETURN(const auto answer, read_head<FeaturesHead>(from));
  PARVL_ASSIGN_OR_RETURN(const std::string features, from.read());
  if (answer.code != 0) {
    failure = absl::Status(static_cast<absl::StatusCode>(answer.code), features);
    return at::Tensor();
  }
  const int64_t tokens = image.num_tokens(), hidden = files_.model->spec().backbone.hidden;
  const at::ScalarType type = pixel_type(*files_.model);
  if (features.size() != static_cast<size_t>(tokens * hidden) * c10::elementSize(type)) {
    return absl::InternalError("features of another size came back");
  }
  // The answer is whole, so the link goes on whatever happens here.
  at::Tensor here;
  failure = catch_exceptions("the features of an image could not be taken from another rank", [&] {
    const at::Tensor host =
        at::empty({tokens, hidden}, at::TensorOptions().dtype(type).pinned_memory(files_.device.is_cuda()));
    std::memcpy(host.data_ptr(), features.data(), features.size());
    here = host.to(files_.device);
    synchronize(files_.device);
    return absl::OkStatus();
  });
  return failure.ok() ? here : at::Tensor();
}

EncodedCount run_encoder_rank(EncodeQueue& queue, EncoderLinks& link) {
  EncodedCount out;
  const absl::Status ended = catch_exceptions("a rank's encoder failed", [&]() -> absl::Status {
    for (;;) {
      PARVL_ASSIGN_OR_RETURN(ProcessedImage image, read_image(link.from(0)));
      std::promise<EncodeQueue::Done> promise;
      const int64_t patches = image.num_patches();
      EncodeQueue::Item item;
      item.image = std::make_shared<const ProcessedImage>(std::move(image));
      item.on_done = [&promise](EncodeQueue::Done done) { promise.set_value(std::move(done)); };
      queue.submit(std::move(item));
      const EncodeQueue::Done done = promise.get_future().get();
      out.images += 1;
      out.patches += patches;
      const FeaturesHead head{static_cast<int64_t>(done.status.code())};
      PARVL_RETURN_IF_ERROR(link.to(0).write(bytes_of(head)));
      if (!done.status.ok()) {
        PARVL_RETURN_IF_ERROR(link.to(0).write(std::string(done.status.message())));
        continue;
      }
      const at::Tensor host = done.visual.to(at::kCPU).contiguous();
      PARVL_RETURN_IF_ERROR(link.to(0).write({static_cast<const char*>(host.data_ptr()), host.nbytes()}));
    }
  });
  link.close();  // the first rank gets no more answers
  return out;
}

}  // namespace parvl
