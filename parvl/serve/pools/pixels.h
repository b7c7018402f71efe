// An image's patches as an item that another process can pull.
#pragma once

#include <string_view>

#include "parvl/comm/transfer/transfer_sink.h"
#include "parvl/comm/transfer/transfer_source.h"
#include "parvl/media/image_processor.h"

namespace parvl {

// Copies the patches into the source's memory; errors as TransferSource::reserve with `wait_s`.
absl::StatusOr<TransferHandle> publish_pixels(TransferSource& source, const ProcessedImage& image, double wait_s);

// Fills `image.patches`, of which the grid is there already. `handle`: an encoded TransferHandle. Errors as
// TransferSink::pull_into; InvalidArgument when it is of something else than this image's patches.
absl::Status pull_pixels(TransferSink& sink, std::string_view handle, double timeout_s, ProcessedImage& image);

}  // namespace parvl
