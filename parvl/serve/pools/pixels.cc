#include "parvl/serve/pools/pixels.h"

#include <cstring>
#include <utility>

namespace parvl {
namespace {

constexpr double kLease_s = 1e9;       // they go with the image
constexpr int64_t kMostImages = 1024;  // each has a descriptor

std::vector<TransferTensor> layout_of(const ProcessedImage& image) {
  return {{.name = "patches", .dtype = DType::kFloat32, .shape = {image.num_patches(), image.patch_floats}}};
}

class SharedPlace : public PatchPlace {
 public:
  SharedPlace(std::shared_ptr<TransferSource> source, const TransferHandle& handle)
      : source_(std::move(source)), item_(handle.item), handle_(handle.encode()) {}
  ~SharedPlace() override { source_->drop(item_); }
  const std::string& handle() const override { return handle_; }

 private:
  const std::shared_ptr<TransferSource> source_;
  const TransferId item_;
  const std::string handle_;
};

class SharedMemory : public PatchMemory {
 public:
  SharedMemory(std::shared_ptr<TransferSource> source, TransferRegion region, FileDescriptor descriptor)
      : source_(std::move(source)), region_(std::move(region)), descriptor_(std::move(descriptor)) {}
  int descriptor() const override { return descriptor_.get(); }
  absl::Status finish(uint64_t checksum, ProcessedImage& image) override {
    const TransferHandle handle = source_->publish(std::move(region_), {.seconds = kLease_s}, checksum);
    image.place = std::make_shared<SharedPlace>(source_, handle);
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<TransferSource> source_;
  TransferRegion region_;
  const FileDescriptor descriptor_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<PixelStore>> PixelStore::start(const std::string& token, int64_t bytes,
                                                              const Clock& clock) {
  TransferSourceOptions options;
  options.name = "gateway";
  options.epoch = 1;
  options.token = token;
  options.clock = &clock;
  options.arena_bytes = bytes;
  options.max_items = kMostImages;
  PARVL_ASSIGN_OR_RETURN(auto source, TransferSource::start(options));
  return std::shared_ptr<PixelStore>(new PixelStore(token, std::move(source)));
}

absl::StatusOr<std::unique_ptr<PatchMemory>> PixelStore::reserve(const ProcessedImage& outline) {
  const auto no_room = [](const absl::Status& why) {
    return absl::AbortedError(absl::StrCat(
        "there is no room for its pixels beside those of other requests; try again (", why.message(), ")"));
  };
  auto region = source_->reserve(layout_of(outline));
  if (!region.ok()) return no_room(region.status());
  auto descriptor = region->open_to_write();
  if (!descriptor.ok()) return no_room(descriptor.status());
  return std::make_unique<SharedMemory>(source_, *std::move(region), *std::move(descriptor));
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
