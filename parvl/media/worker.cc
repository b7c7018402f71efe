// The worker's side: a process that can do nothing but answer.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "parvl/base/checksum.h"
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

// What stands in the way of `work`, memory included, as the picture's fault.
template <typename Work>
absl::Status attempt(Work work) {
  absl::Status out;
  const absl::Status status = catch_exceptions("it needs too much memory", [&] {
    out = work();
    return absl::OkStatus();
  });
  return status.ok() ? out : invalid(status.message());
}

absl::Status reply(int socket, WorkerReply header, const absl::Status& status) {
  const std::string text(status.message().substr(0, 2000));
  header.code = static_cast<int32_t>(status.code());
  header.text_bytes = static_cast<uint32_t>(text.size());
  PARVL_RETURN_IF_ERROR(send_all(socket, &header, sizeof header, {}));
  return send_all(socket, text.data(), text.size(), {});
}

WorkerReply describe(const ProcessedImage& image) {
  WorkerReply out;
  out.grid_t = image.grid_t;
  out.grid_h = image.grid_h;
  out.grid_w = image.grid_w;
  out.patch_floats = image.patch_floats;
  out.merge_size = image.merge_size;
  std::memcpy(out.key, image.key.data(), sizeof out.key);
  return out;
}

// Decodes into the memory behind `descriptor`, and lets go of it.
absl::Status fill(int descriptor, const WorkerMemory& memory, const std::string& file, const ImageLimits& limits,
                  const ImageProcessor& processor, uint64_t& checksum) {
  void* const at = ::mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  if (at == MAP_FAILED) return invalid("it needs too much memory");
  const absl::Status status = attempt([&] {
    return fill_patches(file, limits, processor, {static_cast<float*>(at), memory.bytes / sizeof(float)});
  });
  if (status.ok()) checksum = tensor_checksum(at, memory.bytes, 0);
  ::munmap(at, memory.bytes);
  return status;
}

// An error: the pool is gone.
absl::Status answer(int socket, const WorkerRequest& request) {
  std::string file(request.file_bytes, '\0');
  PARVL_RETURN_IF_ERROR(receive_all(socket, file.data(), file.size(), {}));
  ImageLimits limits;
  limits.max_bytes = request.max_bytes;
  limits.max_pixels = request.max_pixels;
  const ImageProcessor processor = processor_of(request);
  ProcessedImage outline;
  absl::Status status = attempt([&]() -> absl::Status {
    PARVL_ASSIGN_OR_RETURN(outline, outline_image(file, limits, processor));
    return absl::OkStatus();
  });
  PARVL_RETURN_IF_ERROR(reply(socket, describe(outline), status));
  if (!status.ok()) return absl::OkStatus();
  WorkerMemory memory;
  int descriptor = -1;
  PARVL_RETURN_IF_ERROR(receive_memory(socket, memory, descriptor));
  if (memory.bytes == 0) return absl::OkStatus();
  WorkerReply filled;
  status = fill(descriptor, memory, file, limits, processor, filled.checksum);
  return reply(socket, filled, status);
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
    if (!answer(socket, request).ok()) return absl::OkStatus();
  }
}

}  // namespace parvl
