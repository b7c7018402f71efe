// The encoders of all ranks of an engine, data-parallel: each encodes other images. The first rank deals them out and
// gets what comes out of them; the ranks' steps know nothing of it.
#pragma once

#include <absl/types/span.h>

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

class EncoderRanks {
 public:
  // `links` null: this rank alone. `on_broken`, on any thread: a link to another rank broke, or what it says makes no
  // sense; gives what its images end with. Files, with their weights, and clock outlive this.
  EncoderRanks(const LoadedFiles& files, const Clock& clock, std::shared_ptr<EncoderLinks> links,
               std::function<absl::Status(const absl::Status&)> on_broken);
  ~EncoderRanks();  // closes the links

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
  const std::shared_ptr<EncoderLinks> links_;
  const std::function<absl::Status(const absl::Status&)> on_broken_;
  std::mutex mutex_;
  std::vector<int64_t> load_;  // patches of each rank that are not done yet
  EncodeQueue own_;
  std::vector<std::unique_ptr<JobThread>> lanes_;  // of each link; they use all of the above until they are joined
};

struct EncodedCount {
  int64_t images = 0, patches = 0;
};
// What every other rank does: encodes what comes through its link, until that is closed. The files, with their weights,
// outlive this. On a GPU `record` as for EncodeQueue::start.
EncodedCount run_encoder_rank(const LoadedFiles& files, const Clock& clock, EncoderLinks& link, bool record);

}  // namespace parvl
