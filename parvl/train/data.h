// Training samples in an order that depends on the seed and the step alone, decoded in the background.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/media/prompt.h"

namespace parvl {

// One conversation of a data set, not decoded yet.
struct RawSample {
  std::string name;  // "FILE.jsonl:12" or "easy-vqa:train #12", for messages
  std::vector<Message> messages;
  std::vector<std::string> image_paths;  // by image_index; absolute
};

// A list of samples, read once at the start. Immutable; thread-safe.
class Dataset {
 public:
  // `source`: FILE.jsonl (relative to `base_dir` unless absolute), `easy-vqa:train`, `easy-vqa:test`, and for choosing
  // a checkpoint without the test split `easy-vqa:fit` / `easy-vqa:holdout` (train images without / with an id
  // divisible by 10). Every line is checked here: a bad one is refused with its number and the reason. An empty set is
  // refused.
  static absl::StatusOr<std::shared_ptr<const Dataset>> load(const std::string& source, const std::string& base_dir);
  int64_t size() const { return static_cast<int64_t>(samples_.size()); }
  const RawSample& sample(int64_t index) const { return samples_[static_cast<size_t>(index)]; }

 private:
  std::vector<RawSample> samples_;
};

// Index into the data set of the `position`-th sample of the whole run (position = step · global_batch + place in the
// batch): each epoch is a permutation that depends on (seed, epoch).
class SampleOrder {
 public:
  SampleOrder(int64_t dataset_size, uint64_t seed) : size_(dataset_size), seed_(seed) {}
  int64_t at(int64_t position);  // caches the current epoch's permutation; not thread-safe

 private:
  int64_t size_;
  uint64_t seed_;
  int64_t cached_epoch_ = -1;
  std::vector<uint32_t> permutation_;
};

class ImageCache;

// Reads, decodes, augments and tokenises one sample; decoded images come from `images` where it is given. `augment`:
// none | dihedral; the symmetry is a function of (seed, position), one for all images of the sample. Errors name the
// sample (and the image). A sample longer than max_length is refused.
struct PrepareOptions {
  std::string augment = "none";
  uint64_t seed = 0;
  int64_t max_length = 0;  // tokens; must be > 0
  // Which images are decoded; of the others only the headers are read, and they have their grid but no patches. Empty:
  // all.
  std::vector<bool> decode = {};
};
absl::StatusOr<Prompt> prepare_sample(const RawSample& sample, const PromptBuilder& prompts,
                                      const PrepareOptions& options, int64_t position, ImageCache* images = nullptr);

// What ranks deal samples and images out by. Of the images only the headers are read; one that cannot be read is an
// error: ranks that see other costs would deal out otherwise.
struct SampleCost {
  double tokens = 0;            // about: of the text by its length, and of the images
  std::vector<double> patches;  // of each image
};
absl::StatusOr<SampleCost> estimate_cost(const RawSample& sample, const PromptBuilder& prompts);

// Where the vision encoder has ranks of its own: these encode in `groups` (each its tensor ranks, 1 or more), of which
// `group` is this rank's; −1: it encodes nothing. groups 0: there are none.
struct EncoderShare {
  int64_t groups = 0, group = -1;
  // What a rank decodes of a sample whose images these groups encode: PrepareOptions::decode.
  std::vector<bool> decode(const std::vector<int64_t>& encoders) const;
};
// The encoder group of each sample's images, so that patches are even: of a micro batch's samples, onto the `load`
// that earlier ones have put on the groups.
std::vector<std::vector<int64_t>> deal_images(const std::vector<SampleCost>& samples, std::vector<double>& load);

// The samples of one step that a rank has, in order; a micro batch is a run of `micro_batch` of them.
struct GlobalBatch {
  int64_t step = 0;
  std::vector<Prompt> samples;
  std::vector<int64_t> indices;  // in the data set, of all replicas' samples, in the order of their places
  std::vector<std::vector<int64_t>> encoders = {};  // of each: the group of encoder ranks of each image, by image_index
};

// Which samples of a global batch are a replica's: micro batches are dealt out in turn, so that micro batch m of the
// whole batch is the same samples whatever the number of replicas.
struct BatchShare {
  int64_t micro_batch = 1;
  int64_t replica = 0, replicas = 1;  // replica −1: all samples, for an encoder rank that serves all replicas
  bool has(int64_t place) const { return replica < 0 || place / micro_batch % replicas == replica; }
  // The place among its own.
  int64_t own_place(int64_t place) const {
    return replica < 0 ? place : place / (micro_batch * replicas) * micro_batch + place % micro_batch;
  }
  // Whose the sample at a place among its own is.
  int64_t replica_of(int64_t own) const { return replica < 0 ? own / micro_batch % replicas : replica; }
  int64_t own_samples(int64_t global_batch) const { return replica < 0 ? global_batch : global_batch / replicas; }
};

struct LoaderOptions {
  PrepareOptions prepare;
  int64_t global_batch = 16;  // with more than one replica a multiple of micro_batch · replicas
  BatchShare share;           // only these are prepared
  EncoderShare encoders;      // with groups, images are dealt out over these, and only this rank's decoded
  // Samples change places inside a global batch so that replicas and micro batches have about the same to compute.
  // Which samples a step has, and how each is augmented, stays.
  bool balance = false;
  uint64_t shuffle_seed = 0;
  int64_t first_step = 0;  // where a resumed run goes on
  int64_t last_step = 0;   // one past the last
  int threads = 2;
  int prefetch_steps = 4;                        // bound on decoded steps that wait
  size_t image_cache_bytes = size_t{256} << 20;  // bound on decoded pixels kept for later epochs
};

// Background threads fill a bounded queue of whole steps. The result of next() does not depend on the number of
// threads.
class BatchLoader {
 public:
  BatchLoader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<const PromptBuilder> prompts,
              LoaderOptions options);
  ~BatchLoader();  // stops and joins the threads
  // The next step's batch; OutOfRange past the last step. A sample's error is returned at its step.
  absl::StatusOr<GlobalBatch> next();
  // Steps that are being filled or wait; at most prefetch_steps. Any thread.
  size_t steps_ahead() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace parvl
