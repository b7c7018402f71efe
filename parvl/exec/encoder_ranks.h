// The encoders of all ranks of an engine, data-parallel: each encodes other images. The first rank deals them out and
// gets what comes out of them; the ranks' steps know nothing of it.
#pragma once

#include <absl/types/span.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "parvl/exec/encode_queue.h"
#include "parvl/exec/encoder_links.h"

namespace parvl {

// Which rank encodes each of some images, by their patches: the largest first, each to the rank that has the fewest
// patches before it, the earlier of equals. `load`: the patches that each rank has already; they grow. Pure.
std::vector<size_t> deal_images(absl::Span<const int64_t> patches, std::vector<int64_t>& load);

// The other ranks', as the first one has them.
struct OtherEncoders {
  std::shared_ptr<EncoderLinks> links;  // null: there are none
  // On any thread: a link broke, or what it says makes no sense. Gives what its images end with.
  std::function<absl::Status(const absl::Status&)> on_broken;
  std::function<std::function<void()>(int64_t patches)> watch;  // EngineOptions::watch_image
};

class EncoderRanks {
 public:
  // Files, with their weights, and clock outlive this. `hooks`: of what is encoded on this rank.
  EncoderRanks(const LoadedFiles& files, const Clock& clock, OtherEncoders others, EngineHooks hooks = {});
  // Closes the links. What is encoded on another rank then ends with Unavailable; nothing is told to be broken.
  ~EncoderRanks();

  // As EncodeQueue::start.
  void start(bool record) { own_.start(record); }
  // One thread. Images that are to be encoded are dealt out; what lies elsewhere is fetched here. `on_done` comes on
  // any thread.
  void submit(std::vector<EncodeQueue::Item> items);

 private:
  void hand_over(size_t rank, EncodeQueue::Item item);
  void encode_there(size_t link, const EncodeQueue::Item& item);
  absl::StatusOr<at::Tensor> ask(size_t link, const EncodeQueue::Item& item, absl::Status& failure);

  const LoadedFiles& files_;
  const Clock& clock_;
  const OtherEncoders others_;
  std::atomic<bool> closing_ = false;
  std::mutex mutex_;
  std::vector<int64_t> load_;  // patches of each rank that are not done yet
  EncodeQueue own_;
  std::vector<std::unique_ptr<JobThread>> lanes_;  // of each link; they use all of the above until they are joined
};

struct EncodedCount {
  int64_t images = 0, patches = 0;
};
// What every other rank does: encodes what comes through its link, until that is closed.
EncodedCount run_encoder_rank(EncodeQueue& queue, EncoderLinks& link);

}  // namespace parvl
