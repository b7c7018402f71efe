// One forward of the backbone over the sequences of a step: what goes in as plain data, which can be sent to the other
// ranks of a cut backbone, and its computation on one rank.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/exec/decode_graphs.h"
#include "parvl/exec/kv_cache.h"
#include "parvl/exec/load.h"
#include "parvl/models/model.h"

namespace parvl {

// All that a rank cannot know by itself. T tokens of all sequences, one sequence after another.
struct BackboneStep {
  std::vector<int64_t> ids;                       // [T]
  std::vector<std::array<int64_t, 3>> positions;  // [T], on the rotary axes
  std::vector<PagedSequence> sequences;
  std::vector<int64_t> visual_rows;  // of T, which the encoder's output takes, in order
  std::vector<int64_t> sample_rows;  // of T, whose logits are asked for; ascending, as visual_rows
  // Into how many it is cut, which go through the stages of a pipeline one behind the other: a stage computes one while
  // the next stage computes the one before.
  int64_t micro_batches = 1;
  bool recorded = false;  // one token of each sequence, all of which sample: by the graphs that all ranks have
  bool is_decode() const { return ids.size() == sequences.size(); }
};

// How many for so many tokens: as many as there are stages, but none with fewer than `least` tokens, since each reads
// all weights of a stage, and with few tokens that reading is what takes the time. Pure.
int64_t count_micro_batches(int64_t tokens, int64_t stages, int64_t least);
// Micro batch `index` of a step's, with even numbers of tokens: a sequence that lies across a border is in both, since
// every stage computes its beginning first. Pure.
BackboneStep micro_batch_of(const BackboneStep& step, int64_t index);

std::string to_message(const BackboneStep& step);
// InvalidArgument when it is not what to_message made.
absl::StatusOr<BackboneStep> read_step(std::string_view message);

// A step that is `recorded`, as the graphs take it; without what the first rank alone knows, how tokens are chosen.
// Borrows the blocks.
std::vector<DecodeRow> decode_rows(const BackboneStep& step);

// A rank's part of the backbone with its pages. One thread; all ranks run the same steps in the same order.
class BackboneRunner {
 public:
  // Sets the pages' memory aside: of this rank's key heads. The files, with their weights, outlive it.
  BackboneRunner(const LoadedFiles& files, int64_t blocks, int64_t block_size);

  KvPages& pages() { return pages_; }
  // Whether other ranks take part in every step.
  bool is_cut() const { return others_ != nullptr; }
  int64_t stages() const { return others_ == nullptr ? 1 : others_->stages(); }
  // Logits [S, V] of the rows that are asked for, on the device, on the first rank; others have them, or an undefined
  // tensor, as does everybody without such rows. `visual`: the encoder's output [rows, hidden] for the step's
  // visual_rows. Only the first rank needs to have it: it gives it to those that want it. Throws libtorch's exceptions
  // and the group's errors.
  at::Tensor run(const BackboneStep& step, const at::Tensor& visual);

 private:
  struct Sent {
    at::Tensor values;
    std::unique_ptr<Work> work;
  };
  const TensorParallel& ranks() const { return model_.params().ranks(Module::kBackbone); }
  at::Tensor run_stage(const BackboneStep& micro_batch, const at::Tensor& visual);
  at::Tensor share_visual(const at::Tensor& visual, int64_t rows) const;
  at::Tensor empty_rows(int64_t rows) const;
  at::Tensor from_stage_before(int64_t tokens) const;
  at::Tensor share_logits(const at::Tensor& hidden_SH, int64_t rows) const;

  Model& model_;
  const at::Device device_;
  const std::shared_ptr<BackboneRanks> others_;  // null: it is alone
  const StagePart part_;
  KvPages pages_;
  std::shared_ptr<PagedAttention> attention_;
};

// The recorded decode steps of an engine with so many sequences of so many tokens: all its ranks call it, on the thread
// of their steps. Null where there are none: on the CPU, and with a pipeline, whose messages no graph holds.
std::unique_ptr<DecodeGraphs> make_decode_graphs(const LoadedFiles& files, BackboneRunner& runner, int64_t max_seqs,
                                                 int64_t max_model_len, bool record);

}  // namespace parvl
