// A vision encoder and its projector by themselves: images in, features out into memory of the caller. What a process
// runs that holds no llm_backbone. Torch-free, so serving includes it.
#pragma once

#include <absl/types/span.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/ids.h"
#include "parvl/base/status.h"
#include "parvl/comm/transfer/transfer_handle.h"
#include "parvl/exec/engine_stats.h"
#include "parvl/media/image_processor.h"

namespace parvl {

using EncodeId = StrongId<struct EncodeTag, int64_t>;

struct EncodedImage {
  double start_s = 0, end_s = 0;  // by the engine's clock; images that were encoded at once have the same
};

struct EncodeRequest {
  std::shared_ptr<const ProcessedImage> image;
  // Where the features go: one piece for each tensor of layout_of(*image), of its bytes and aligned to 64, as a
  // TransferRegion has them. The engine's to write until on_done.
  std::vector<absl::Span<std::byte>> destination;
  // On the engine's thread, or on the one that ends the engine; must not block. Exactly once: the features lie in
  // `destination`, or the encoder failed, or Cancelled, also when the engine stops.
  std::function<void(const absl::StatusOr<EncodedImage>&)> on_done;
};

struct EncodeStats {
  int64_t images = 0, patches = 0;  // that are here and not done yet
  int64_t waiting = 0;              // images, of these, that are not being encoded yet
  int64_t encoded = 0;              // since the start
  double busy_s = 0;
  WorkCount work;  // images whose encoding was replayed or launched
};

// All methods from any thread.
class EncodeEngine {
 public:
  virtual ~EncodeEngine() = default;  // ends all requests

  virtual std::string device_name() const = 0;
  virtual int64_t max_images() const = 0;  // that may be here at once

  // What the image will become, without encoding it: names, types, shapes and bytes. Only its grid is read;
  // InvalidArgument for one that the model or the memory set aside for encoding does not take.
  virtual absl::StatusOr<std::vector<TransferTensor>> layout_of(const ProcessedImage& image) const = 0;

  // Takes an image, unless it says why not; then on_done does not come. InvalidArgument as layout_of, and for patches
  // that do not fill the grid, or a destination of other sizes. ResourceExhausted when max_images() are here: nothing
  // waits inside for room, neither here nor in the destination, since the gateway's queues are where requests wait, by
  // their deadlines and priorities. on_done may come before this returns.
  virtual absl::StatusOr<EncodeId> submit(EncodeRequest request) = 0;
  // The image ends soon with Cancelled, unless it has ended; unknown ids are ignored.
  virtual void cancel(EncodeId id) = 0;
  virtual EncodeStats stats() const = 0;
};

}  // namespace parvl
