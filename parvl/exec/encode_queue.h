// Images wait here for their features: they are encoded, on a GPU several at once, or brought from where they were
// encoded; on a thread of its own.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/job_thread.h"
#include "parvl/exec/encoded_source.h"
#include "parvl/exec/encoder_graphs.h"
#include "parvl/exec/engine_trace.h"
#include "parvl/exec/load.h"
#include "parvl/media/image_processor.h"

namespace parvl {

// Patches of the images that a GPU encodes at once; an image alone may have more.
inline constexpr int64_t kEncodePatches = 16384;

class EncodeQueue {
 public:
  // What became of one image.
  struct Done {
    absl::Status status;
    at::Tensor visual;              // [tokens, hidden] on the device, ready
    double start_s = 0, end_s = 0;  // by the clock; of images that were encoded together the same start
    bool replayed = false;          // by one launch of work that was recorded before
    bool fetched = false;           // it was not encoded here
  };
  struct Item {
    int64_t id = 0;  // for cancel
    std::shared_ptr<const ProcessedImage> image;
    std::shared_ptr<EncodedSource> source;  // where its features lie; null: it is encoded here
    std::function<void(Done)> on_done;      // on the queue's thread, once; never when the queue ends before
  };

  // Files, with their weights, and clock outlive the queue. `hooks`: of a batch that is encoded, and
  // of each turn of the queue's thread, on which all come.
  EncodeQueue(const LoadedFiles& files, const Clock& clock, EngineHooks hooks = {})
      : files_(files), clock_(clock), hooks_(std::move(hooks)) {}

  // On a GPU, before the first item: gives the thread its stream and makes its graphs (`record`: or the same without
  // recording). Waits for that; throws libtorch's exceptions.
  void start(bool record);
  // Any thread.
  void submit(Item item);
  // Any thread. One that waits ends with Cancelled, before the next ones begin; no effect on others.
  void cancel(int64_t id);
  // Any thread. Items that no batch has taken yet.
  int64_t waiting() const;

 private:
  struct Encoded {
    std::vector<at::Tensor> visual;  // of each image
    bool replayed = false;
  };
  void work();
  void run(const std::vector<Item>& batch);
  void encode(const std::vector<Item>& batch);
  Encoded encode(const SequenceInput& images) const;
  void fetch(const Item& item);

  const LoadedFiles& files_;
  const Clock& clock_;
  const EngineHooks hooks_;
  std::unique_ptr<EncoderGraphs> graphs_;  // the thread's
  mutable std::mutex mutex_;
  std::deque<Item> items_;  // that no job has taken yet
  std::vector<Item> cancelled_;
  JobThread thread_;  // last: it uses all of the above until it is joined
};

}  // namespace parvl
