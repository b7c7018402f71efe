// The encoders' side of an executor: images wait here and are encoded, on a GPU several at once, on a thread of their
// own.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/exec/encoder_graphs.h"
#include "parvl/exec/job_thread.h"
#include "parvl/media/prompt.h"
#include "parvl/sched/executor.h"

namespace parvl {

// Patches of the images that a GPU encodes at once; an image alone may have more.
inline constexpr int64_t kEncodePatches = 16384;

// What an executor has computed.
struct Computed {
  Completion completion;
  at::Tensor visual;  // of an encoding: [tokens, hidden] on the device, ready
};

class EncodeQueue {
 public:
  struct Item {
    std::shared_ptr<const Prompt> prompt;
    EncodeWork work;
    const MediaSpan& span() const { return prompt->media[static_cast<size_t>(work.item)]; }
    const ProcessedImage& image() const { return *prompt->images[static_cast<size_t>(span().image_index)]; }
  };

  // `report` is called on the queue's thread, once for each item. Model and clock outlive the queue.
  EncodeQueue(const Model& model, at::Device device, const Clock& clock, std::function<void(Computed)> report)
      : model_(model), device_(device), clock_(clock), report_(std::move(report)) {}

  // On a GPU, before the first item: gives the thread its stream and makes its graphs (`record`: or the same without
  // recording). Waits for that; throws libtorch's exceptions.
  void start(bool record);
  // Any thread.
  void submit(Item item);

 private:
  struct Encoded {
    std::vector<at::Tensor> visual;  // of each image
    bool replayed = false;
  };
  void encode_waiting();
  void encode(const std::vector<Item>& batch);
  Encoded encode(const SequenceInput& images) const;

  const Model& model_;
  const at::Device device_;
  const Clock& clock_;
  const std::function<void(Computed)> report_;
  std::unique_ptr<EncoderGraphs> graphs_;  // the thread's
  std::mutex mutex_;
  std::deque<Item> items_;  // that no job has taken yet
  JobThread thread_;        // last: it uses all of the above until it is joined
};

}  // namespace parvl
