// What a media worker and its pool say to each other over a stream socket, on one machine: fixed headers, then bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"

namespace parvl {

struct WorkerRequest {
  uint64_t file_bytes = 0;  // follow
  uint64_t max_bytes = 0;
  int64_t max_pixels = 0;
  // The image processor's settings, as ImageProcessorConfig.
  int32_t patch_size = 0, temporal_patch_size = 0, merge_size = 0, resample = 0;
  int64_t processor_min_pixels = 0, processor_max_pixels = 0;
  int32_t do_resize = 0, do_rescale = 0, do_normalize = 0;
  double rescale_factor = 0, mean[3] = {}, std[3] = {};
};

// First of what the file's header says, then of its patches. Not OK: a reason of text_bytes follows, and then the next
// request.
struct WorkerReply {
  int32_t code = 0;  // absl::StatusCode
  uint32_t text_bytes = 0;
  // First:
  int32_t grid_t = 0, grid_h = 0, grid_w = 0, patch_floats = 0, merge_size = 0;
  uint8_t key[32] = {};
  // Then:
  uint64_t checksum = 0;  // of the patches, in the memory that was given
};

// Between the two: where the patches go.
struct WorkerMemory {
  uint64_t bytes = 0;  // a descriptor comes along; 0: there is none, and the next request follows
};

// A point in time to be done by; without a clock: never.
struct Until {
  const Clock* clock = nullptr;
  int64_t ns = 0;
};

// All of the bytes. Unavailable when the other side is gone, DeadlineExceeded when the time is up. The socket may be
// blocking or not.
absl::Status send_all(int socket, const void* data, size_t bytes, const Until& until);
absl::Status receive_all(int socket, void* data, size_t bytes, const Until& until);

// With the descriptor, unless there are no bytes. Errors likewise.
absl::Status send_memory(int socket, const WorkerMemory& memory, int descriptor, const Until& until);
// `descriptor`: the receiver's to close; -1: none came.
absl::Status receive_memory(int socket, WorkerMemory& memory, int& descriptor);

}  // namespace parvl
