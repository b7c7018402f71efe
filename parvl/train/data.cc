#include "parvl/train/data.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <unordered_map>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/file.h"
#include "parvl/base/rng.h"
#include "parvl/media/image.h"
#include "parvl/plan/balance.h"
#include "parvl/train/data_image_cache.h"

namespace parvl {
namespace {

// Streams of chance, apart from each other and from those of other parts that use the same seed.
constexpr uint64_t kShuffleStream = uint64_t{0x7368756666} << 24;  // + epoch
constexpr uint64_t kAugmentStream = uint64_t{0x6469686564} << 24;

// What processing an image would give, but its patches.
absl::StatusOr<ProcessedImage> read_outline(const std::string& path, const PromptBuilder& prompts, int symmetry) {
  PARVL_ASSIGN_OR_RETURN(const auto file, MappedFile::open(path));
  const auto header = read_image_size(file->bytes());
  if (!header.ok()) return with_context(header.status(), path);
  // As dihedral: a transposition exchanges the sides, and so does each quarter turn.
  const bool exchanged = (symmetry >= 4) != (symmetry % 2 == 1);
  const auto size = exchanged ? prompts.image_processor().target_size(header->height, header->width)
                              : prompts.image_processor().target_size(header->width, header->height);
  if (!size.ok()) return with_context(size.status(), path);
  const ImageProcessorConfig& config = prompts.image_processor().config();
  ProcessedImage out;
  out.grid_t = 1;
  out.grid_h = size->height / config.patch_size;
  out.grid_w = size->width / config.patch_size;
  out.merge_size = config.merge_size;
  return out;
}

absl::StatusOr<Prompt> prepare(const RawSample& sample, const PromptBuilder& prompts, const PrepareOptions& options,
                               int64_t position, ImageCache& cache) {
  if (!sample.image_paths.empty() && !prompts.has_images()) {
    return invalid("holds an image, but ", prompts.why_no_images());
  }
  int symmetry = 0;
  if (options.augment == "dihedral") {
    symmetry = static_cast<int>(philox(options.seed, kAugmentStream, static_cast<uint64_t>(position))[0] & 7u);
  }
  std::vector<std::shared_ptr<const ProcessedImage>> images;
  for (const std::string& path : sample.image_paths) {
    if (!options.decode.empty() && !options.decode[images.size()]) {
      PARVL_ASSIGN_OR_RETURN(ProcessedImage outline, read_outline(path, prompts, symmetry));
      images.push_back(std::make_shared<const ProcessedImage>(std::move(outline)));
      continue;
    }
    PARVL_ASSIGN_OR_RETURN(const std::shared_ptr<const Image> image, cache.get(path));
    auto processed = symmetry == 0 ? prompts.image_processor().process(*image)
                                   : prompts.image_processor().process(dihedral(*image, symmetry));
    if (!processed.ok()) return with_context(processed.status(), path);
    images.push_back(std::make_shared<const ProcessedImage>(*std::move(processed)));
  }
  PromptOptions build;
  build.add_generation_prompt = false;
  build.mark_targets = true;
  PARVL_ASSIGN_OR_RETURN(Prompt prompt, prompts.build(sample.messages, std::move(images), build));
  if (static_cast<int64_t>(prompt.ids.size()) > options.max_length) {
    return invalid("has ", prompt.ids.size(), " tokens, over the maximum length of ", options.max_length,
                   "; shorten it or raise data.max_length");
  }
  return prompt;
}

}  // namespace

int64_t SampleOrder::at(int64_t position) {
  const int64_t epoch = position / size_;
  if (epoch != cached_epoch_) {
    permutation_.resize(static_cast<size_t>(size_));
    std::iota(permutation_.begin(), permutation_.end(), 0u);
    Rng rng(seed_, kShuffleStream + static_cast<uint64_t>(epoch));
    for (size_t i = permutation_.size(); i > 1; --i) std::swap(permutation_[i - 1], permutation_[rng.below(i)]);
    cached_epoch_ = epoch;
  }
  return permutation_[static_cast<size_t>(position % size_)];
}

absl::StatusOr<Prompt> prepare_sample(const RawSample& sample, const PromptBuilder& prompts,
                                      const PrepareOptions& options, int64_t position, ImageCache* images) {
  ImageCache none(0);
  auto prompt = prepare(sample, prompts, options, position, images ? *images : none);
  return prompt.ok() ? std::move(prompt) : with_context(prompt.status(), sample.name);
}

absl::StatusOr<SampleCost> estimate_cost(const RawSample& sample, const PromptBuilder& prompts) {
  constexpr double kBytesAToken = 4;
  SampleCost out;
  for (const Message& message : sample.messages) {
    for (const ContentPart& part : message.content) out.tokens += static_cast<double>(part.text.size()) / kBytesAToken;
  }
  if (!prompts.has_images()) return out;
  for (const std::string& path : sample.image_paths) {
    PARVL_ASSIGN_OR_RETURN(const ProcessedImage outline, read_outline(path, prompts, /*symmetry=*/0));
    out.tokens += static_cast<double>(outline.num_tokens());
    out.patches.push_back(static_cast<double>(outline.num_patches()));
  }
  return out;
}

std::vector<bool> EncoderShare::decode(const std::vector<int64_t>& encoders) const {
  std::vector<bool> out;
  for (const int64_t encoder : encoders) out.push_back(encoder == group);
  return out;
}

std::vector<std::vector<int64_t>> deal_images(const std::vector<SampleCost>& samples, std::vector<double>& load) {
  std::vector<double> patches;
  for (const SampleCost& sample : samples) patches.insert(patches.end(), sample.patches.begin(), sample.patches.end());
  const std::vector<int64_t> groups = spread_onto(patches, load);
  std::vector<std::vector<int64_t>> out;
  auto next = groups.begin();
  for (const SampleCost& sample : samples) {
    const auto end = next + static_cast<int64_t>(sample.patches.size());
    out.emplace_back(next, end);
    next = end;
  }
  return out;
}

struct BatchLoader::Impl {
  // A step that is being filled or waits to be taken.
  struct Slot {
    std::vector<Prompt> samples;
    std::vector<int64_t> indices;
    std::vector<std::vector<int64_t>> encoders;  // as GlobalBatch
    int64_t missing = 0;
    int64_t error_place = 0;  // place in the batch of `error`; the lowest counts, whoever finds it first
    absl::Status error;
  };

  Impl(std::shared_ptr<const Dataset> data, std::shared_ptr<const PromptBuilder> builder, LoaderOptions loader_options)
      : dataset(std::move(data)),
        prompts(std::move(builder)),
        options(std::move(loader_options)),
        cache(options.image_cache_bytes),
        order(dataset->size(), options.shuffle_seed),
        take_step(options.first_step),
        fill_position(options.first_step * options.global_batch) {}

  // A sample to prepare.
  struct Task {
    int64_t position = 0, place = 0, index = 0;  // in the run, in its batch, in the data set
    std::vector<bool> decode;                    // as PrepareOptions
  };

  // The next one, or false when the threads are to end. Waits while enough steps are prepared.
  bool claim(Task& task) {
    std::unique_lock<std::mutex> lock(mutex);
    const int64_t end = options.last_step * options.global_batch;
    // Another replica's samples are passed over.
    const auto next = [&] {
      while (fill_position < end && !options.share.has(fill_position % options.global_batch)) ++fill_position;
      return fill_position;
    };
    may_fill.wait(lock, [&] {
      return stop || next() >= end || next() / options.global_batch < take_step + options.prefetch_steps;
    });
    if (stop || fill_position >= end) return false;
    const int64_t step = fill_position / options.global_batch;
    task.place = fill_position++ % options.global_batch;
    if (step != placed_step) place_samples(step);
    const Placed& here = placed[static_cast<size_t>(task.place)];
    task.position = step * options.global_batch + here.sample;
    task.index = here.index;
    task.decode = options.encoders.decode(here.encoders);
    Slot& slot = slots[step];
    if (slot.samples.empty()) {
      slot.missing = options.share.own_samples(options.global_batch);
      slot.samples.resize(static_cast<size_t>(slot.missing));
      for (const Placed& one : placed) slot.indices.push_back(one.index);
      slot.encoders.resize(static_cast<size_t>(slot.missing));
    }
    slot.encoders[static_cast<size_t>(options.share.own_place(task.place))] = here.encoders;
    return true;
  }

  // What stands at each place of a step's batch: `sample` of the step in the order of the run, `index` in the data set.
  struct Placed {
    int64_t sample = 0, index = 0;
    std::vector<int64_t> encoders;  // of its images
  };
  void place_samples(int64_t step) {
    placed_step = step;
    placed.clear();
    for (int64_t i = 0; i < options.global_batch; ++i) {
      placed.push_back({i, order.at(step * options.global_batch + i), {}});
    }
    if (options.balance) balance(slots[step]);
    if (options.encoders.groups > 0 && slots[step].error.ok()) deal_out_images(slots[step]);
  }

  // By the sample's index; null after an error, which ends the step, so that the order in it does not matter.
  const SampleCost* cost_of(const Placed& one, Slot& slot) {
    const auto [known, is_new] = costs_of.try_emplace(one.index);
    if (!is_new) return &known->second;
    const RawSample& sample = dataset->sample(one.index);
    absl::StatusOr<SampleCost> cost = estimate_cost(sample, *prompts);
    if (cost.ok()) {
      if (options.encoders.groups == 0) cost->patches = {};  // a data set may have many images
      return &(known->second = *std::move(cost));
    }
    slot.error = with_context(cost.status(), sample.name);
    slot.error_place = one.sample;
    costs_of.erase(known);
    return nullptr;
  }

  void balance(Slot& slot) {
    std::vector<double> costs;
    for (const Placed& one : placed) {
      const SampleCost* cost = cost_of(one, slot);
      if (cost == nullptr) return;
      costs.push_back(cost->tokens);
    }
    const auto balanced = balanced_order(costs, options.share.micro_batch, options.share.replicas);
    PARVL_CHECK(balanced.ok(), "a global batch that cannot be dealt out");
    const std::vector<Placed> before = placed;
    for (size_t i = 0; i < placed.size(); ++i) placed[i] = before[static_cast<size_t>((*balanced)[i])];
  }

  // Micro batch by micro batch, as encoders come to them. (Those without a token to learn count too, though nobody
  // encodes their images: which these are, only who has their tokens knows.)
  void deal_out_images(Slot& slot) {
    std::vector<double> load(static_cast<size_t>(options.encoders.groups), 0);
    const auto micro = static_cast<size_t>(options.share.micro_batch);
    for (size_t begin = 0; begin < placed.size(); begin += micro) {
      const size_t end = std::min(begin + micro, placed.size());
      std::vector<SampleCost> costs;
      for (size_t i = begin; i < end; ++i) {
        const SampleCost* cost = cost_of(placed[i], slot);
        if (cost == nullptr) return;
        costs.push_back(*cost);
      }
      const auto groups = deal_images(costs, load);
      for (size_t i = begin; i < end; ++i) placed[i].encoders = groups[i - begin];
    }
  }

  void deliver(const Task& task, absl::StatusOr<Prompt> prompt) {
    const std::lock_guard<std::mutex> lock(mutex);
    Slot& slot = slots[task.position / options.global_batch];
    if (prompt.ok()) {
      slot.samples[static_cast<size_t>(options.share.own_place(task.place))] = *std::move(prompt);
    } else if (slot.error.ok() || task.place < slot.error_place) {
      slot.error = prompt.status();
      slot.error_place = task.place;
    }
    if (--slot.missing == 0) may_take.notify_all();
  }

  void work() {
    Task task;
    while (claim(task)) {
      const RawSample& sample = dataset->sample(task.index);
      PrepareOptions how = options.prepare;
      how.decode = task.decode;
      absl::StatusOr<Prompt> prompt = Prompt{};
      const absl::Status status = catch_exceptions("preparing a sample", [&] {
        prompt = prepare(sample, *prompts, how, task.position, cache);
        return prompt.status();
      });
      if (!status.ok()) prompt = with_context(status, sample.name);
      deliver(task, std::move(prompt));
    }
  }

  std::shared_ptr<const Dataset> dataset;
  std::shared_ptr<const PromptBuilder> prompts;
  const LoaderOptions options;
  ImageCache cache;

  std::mutex mutex;
  std::condition_variable may_fill;                  // a step was taken, or stop
  std::condition_variable may_take;                  // a step is whole
  SampleOrder order;                                 // this and below: under `mutex`
  std::unordered_map<int64_t, SampleCost> costs_of;  // of samples, by index
  std::vector<Placed> placed;                        // of step `placed_step`
  int64_t placed_step = -1;
  std::map<int64_t, Slot> slots;
  int64_t take_step;
  int64_t fill_position;
  bool stop = false;
  absl::Status failed_with;  // a step's error; the loader has nothing to say after it
  std::vector<std::thread> threads;
};

BatchLoader::BatchLoader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<const PromptBuilder> prompts,
                         LoaderOptions options) {
  PARVL_CHECK(options.global_batch > 0 && options.prefetch_steps > 0 && options.threads > 0, "loader options");
  impl_ = std::make_unique<Impl>(std::move(dataset), std::move(prompts), std::move(options));
  for (int i = 0; i < impl_->options.threads; ++i) impl_->threads.emplace_back([impl = impl_.get()] { impl->work(); });
}

BatchLoader::~BatchLoader() {
  {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->may_fill.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
}

absl::StatusOr<GlobalBatch> BatchLoader::next() {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  if (!impl_->failed_with.ok()) return impl_->failed_with;
  const int64_t step = impl_->take_step;
  if (step >= impl_->options.last_step) return absl::OutOfRangeError(absl::StrCat("no batch after step ", step));
  impl_->may_take.wait(lock, [&] {
    const auto slot = impl_->slots.find(step);
    return slot != impl_->slots.end() && slot->second.missing == 0;
  });
  Impl::Slot slot = std::move(impl_->slots.extract(step).mapped());
  ++impl_->take_step;
  if (!slot.error.ok()) {
    impl_->failed_with = slot.error;
    impl_->stop = true;  // nothing after it will be asked for
  }
  lock.unlock();
  impl_->may_fill.notify_all();
  if (!slot.error.ok()) return slot.error;
  return GlobalBatch{step, std::move(slot.samples), std::move(slot.indices), std::move(slot.encoders)};
}

size_t BatchLoader::steps_ahead() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->slots.size();
}

}  // namespace parvl
