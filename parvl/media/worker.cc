// The worker's side: a process that can do nothing but answer.
#include <signal.h>

#include <cstring>
#include <utility>

#include "parvl/media/sandbox.h"
#include "parvl/media/worker_pool.h"
#include "parvl/media/worker_protocol.h"

namespace parvl {
namespace {

ImageProcessor processor_of(const WorkerRequest& request) {
  ImageProcessorConfig config;
  config.patch_size = request.patch_size;
  config.temporal_patch_size = request.temporal_patch_size;
  config.merge_size = request.merge_size;
  config.resample = request.resample;
  config.min_pixels = request.processor_min_pixels;
  config.max_pixels = request.processor_max_pixels;
  config.do_resize = request.do_resize != 0;
  config.do_rescale = request.do_rescale != 0;
  config.do_normalize = request.do_normalize != 0;
  config.rescale_factor = request.rescale_factor;
  config.mean.assign(request.mean, request.mean + 3);
  config.std.assign(request.std, request.std + 3);
  return ImageProcessor(std::move(config));
}

absl::StatusOr<ProcessedImage> answer(int socket, const WorkerRequest& request) {
  std::string file(request.file_bytes, '\0');
  PARVL_RETURN_IF_ERROR(receive_all(socket, file.data(), file.size(), {}));
  ImageLimits limits;
  limits.max_bytes = request.max_bytes;
  limits.max_pixels = request.max_pixels;
  absl::StatusOr<ProcessedImage> out = invalid("no answer");
  const absl::Status status = catch_exceptions("it needs too much memory", [&] {
    out = LocalImages().prepare(file, limits, processor_of(request));
    return absl::OkStatus();
  });
  if (!status.ok()) return invalid(status.message());
  return out;
}

absl::Status reply(int socket, const absl::StatusOr<ProcessedImage>& image) {
  WorkerReply header;
  if (!image.ok()) {
    const std::string text(image.status().message().substr(0, 2000));
    header.code = static_cast<int32_t>(image.status().code());
    header.text_bytes = static_cast<uint32_t>(text.size());
    PARVL_RETURN_IF_ERROR(send_all(socket, &header, sizeof header, {}));
    return send_all(socket, text.data(), text.size(), {});
  }
  header.grid_t = image->grid_t;
  header.grid_h = image->grid_h;
  header.grid_w = image->grid_w;
  header.patch_floats = image->patch_floats;
  header.merge_size = image->merge_size;
  std::memcpy(header.key, image->key.data(), sizeof header.key);
  header.floats = image->patches.size();
  PARVL_RETURN_IF_ERROR(send_all(socket, &header, sizeof header, {}));
  return send_all(socket, image->patches.data(), image->patches.size() * sizeof(float), {});
}

}  // namespace

absl::Status run_media_worker(int socket, int64_t memory_bytes) {
  // Ctrl-C goes to all processes of a terminal; the pool says when it is time.
  ::signal(SIGINT, SIG_IGN);
  ::signal(SIGTERM, SIG_IGN);
  PARVL_RETURN_IF_ERROR(give_up_rights(memory_bytes, socket));
  const char ready = 1;
  PARVL_RETURN_IF_ERROR(send_all(socket, &ready, 1, {}));
  for (;;) {
    WorkerRequest request;
    if (!receive_all(socket, &request, sizeof request, {}).ok()) return absl::OkStatus();  // the pool is gone
    const absl::StatusOr<ProcessedImage> image = answer(socket, request);
    if (absl::IsUnavailable(image.status())) return absl::OkStatus();
    PARVL_RETURN_IF_ERROR(reply(socket, image));
  }
}

}  // namespace parvl
