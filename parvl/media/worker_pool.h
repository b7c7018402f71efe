// Decoding in processes of their own, which have no network, no files and little memory: a decoder that a picture
// breaks harms that picture's request alone.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/media/image_source.h"
#include "parvl/media/patch_memory.h"
#include "parvl/media/worker_protocol.h"

namespace parvl {

struct MediaWorkerOptions {
  std::string program;                        // the worker's executable
  int workers = 2;                            // pictures decoded at once; further callers wait
  int64_t memory_bytes = int64_t{2} << 30;    // of one worker's address space
  std::chrono::milliseconds timeout{30'000};  // for one picture; then the worker is killed
  std::shared_ptr<PatchStore> store = std::make_shared<LocalPatches>();  // where workers write patches; never null
};

// What went between the pool and its workers, which is no more for a picture of more pixels: those are written once,
// by the worker, where they stay.
struct MediaWorkerCounters {
  int64_t sent_bytes = 0, received_bytes = 0;
};

// Starts workers as they are needed and again after one has died.
class MediaWorkerPool : public ImageSource {
 public:
  // Starts the first worker, so that a missing program or a kernel without seccomp is known at once.
  // `clock` must outlive the pool.
  static absl::StatusOr<std::unique_ptr<MediaWorkerPool>> start(MediaWorkerOptions options, const Clock& clock);
  ~MediaWorkerPool() override;

  // InvalidArgument too when the worker broke or took too long over this picture; Unavailable when it was killed from
  // outside, Aborted when the store has no room.
  absl::StatusOr<ProcessedImage> prepare(std::string_view file, const ImageLimits& limits,
                                         const ImageProcessor& processor) override;

  std::vector<pid_t> pids() const;  // of the workers that live
  MediaWorkerCounters counters() const { return {sent_, received_}; }

 private:
  struct Worker {
    pid_t pid = -1;  // -1: not started
    int socket = -1;
    bool busy = false;
  };
  MediaWorkerPool(MediaWorkerOptions options, const Clock& clock) : options_(std::move(options)), clock_(clock) {}
  size_t borrow();
  void give_back(size_t index, Worker worker);
  absl::Status spawn(Worker& worker) const;
  static int kill(Worker& worker);  // how it ended, as waitpid tells; -1: there was none
  // A conversation with one worker about one picture.
  struct Talk {
    const Worker& worker;
    Until until;
    ProcessedImage image = {};
    std::unique_ptr<PatchMemory> memory = {};  // which the worker may write to until it has answered, or is dead
  };
  absl::StatusOr<WorkerReply> read_reply(const Talk& talk);
  absl::Status ask(Talk& talk, const WorkerRequest& request, std::string_view file);
  absl::Status fill(Talk& talk);

  MediaWorkerOptions options_;
  const Clock& clock_;
  std::atomic<int64_t> sent_ = 0, received_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<Worker> workers_;
};

// The worker's side: answers requests on descriptor `socket` until the other side closes it. Gives up all rights but
// reading and writing open descriptors and managing its memory before it reads the first request.
absl::Status run_media_worker(int socket, int64_t memory_bytes);

}  // namespace parvl
