// The worker's side: a process that can do nothing but answer.
#include <signal.h>

#include <cstring>

#include "parvl/media/sandbox.h"
#include "parvl/media/worker_pool.h"
#include "parvl/media/worker_protocol.h"

namespace parvl {
namespace {

absl::StatusOr<ProcessedImage> answer(int socket, const WorkerRequest& request, const ImageProcessor& processor) {
  std::string file(request.file_bytes, '\0');
  PARVL_RETURN_IF_ERROR(receive_all(socket, file.data(), file.size(), {}));
  ImageLimits limits;
  limits.max_bytes = request.max_bytes;
  limits.max_pixels = request.max_pixels;
  absl::StatusOr<ProcessedImage> out = invalid("no answer");
  const absl::Status status = catch_exceptions("it needs too much memory", [&] {
    out = prepare_image(file, limits, processor);
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

absl::Status run_media_worker(const std::string& model_dir, int socket, int64_t memory_bytes) {
  PARVL_ASSIGN_OR_RETURN(const ImageProcessor processor, ImageProcessor::load(model_dir));
  // Ctrl-C goes to all processes of a terminal; the pool says when it is time.
  ::signal(SIGINT, SIG_IGN);
  ::signal(SIGTERM, SIG_IGN);
  PARVL_RETURN_IF_ERROR(give_up_rights(memory_bytes, socket));
  const char ready = 1;
  PARVL_RETURN_IF_ERROR(send_all(socket, &ready, 1, {}));
  for (;;) {
    WorkerRequest request;
    if (!receive_all(socket, &request, sizeof request, {}).ok()) return absl::OkStatus();  // the pool is gone
    const absl::StatusOr<ProcessedImage> image = answer(socket, request, processor);
    if (absl::IsUnavailable(image.status())) return absl::OkStatus();
    PARVL_RETURN_IF_ERROR(reply(socket, image));
  }
}

}  // namespace parvl
