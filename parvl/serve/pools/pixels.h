// Images' patches where the instances pull them from: decoding processes write them there, and nobody in between reads
// or copies them.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "parvl/comm/transfer/transfer_sink.h"
#include "parvl/comm/transfer/transfer_source.h"
#include "parvl/media/patch_memory.h"

namespace parvl {

// The gateway's memory for them; its size bounds what all requests that have not ended hold together. Any thread.
class PixelStore : public PatchStore {
 public:
  // `token`: the run's. `clock` must outlive the store and all images in it. Errors as TransferSource::start.
  static absl::StatusOr<std::shared_ptr<PixelStore>> start(const std::string& token, int64_t bytes, const Clock& clock);

  const std::string& token() const { return token_; }
  // ProcessedImage::place of what is filled here is an encoded TransferHandle.
  absl::StatusOr<std::unique_ptr<PatchMemory>> reserve(const ProcessedImage& outline) override;
  // As TransferSource::fence.
  void fence(const std::string& reader, int64_t epoch) { source_->fence(reader, epoch); }
  TransferSourceCounters counters() const { return source_->counters(); }

 private:
  PixelStore(std::string token, std::unique_ptr<TransferSource> source)
      : token_(std::move(token)), source_(std::move(source)) {}

  const std::string token_;
  const std::shared_ptr<TransferSource> source_;
};

// Fills `image.patches`, of which the grid is there already. `handle`: an encoded TransferHandle. Errors as
// TransferSink::pull_into; InvalidArgument when it is of something else than this image's patches.
absl::Status pull_pixels(TransferSink& sink, std::string_view handle, double timeout_s, ProcessedImage& image);

}  // namespace parvl
