// Keys and values in pages that many sequences share, and attention over them.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parvl/exec/gpu_attention.h"
#include "parvl/nn/attention.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

// The pages of all layers that are here. Per layer, keys and values are [blocks, kv_heads, block_size, head_dim]
// (head-major). Not thread-safe.
class KvPages {
 public:
  static constexpr int64_t kBlockSize = 16;
  // Of spec.layers layers, which count from `first_layer` on: those of a pipeline's stage.
  KvPages(const BackboneSpec& spec, at::ScalarType type, at::Device device, int64_t block_size = kBlockSize,
          int64_t first_layer = 0);

  // At least this many blocks; what is in them is kept. Growth doubles, so its cost is spread. On the CPU the system
  // gives a block's memory when it is first written.
  void reserve(int64_t blocks);
  int64_t blocks() const { return blocks_; }
  int64_t block_size() const { return block_size_; }
  const BackboneSpec& spec() const { return spec_; }
  int64_t first_layer() const { return first_layer_; }
  LayerPages layer(int64_t layer) const { return {keys(layer), values(layer)}; }
  const at::Tensor& keys(int64_t layer) const { return keys_[static_cast<size_t>(layer - first_layer_)]; }
  const at::Tensor& values(int64_t layer) const { return values_[static_cast<size_t>(layer - first_layer_)]; }

 private:
  BackboneSpec spec_;
  at::TensorOptions options_;
  int64_t block_size_, first_layer_;
  int64_t blocks_ = 0;
  std::vector<at::Tensor> keys_, values_;
};

// One sequence in a forward: its `count` new tokens follow `begin` that are in its blocks already.
struct PagedSequence {
  std::vector<int32_t> blocks;  // enough for begin + count tokens
  int64_t begin = 0;
  int64_t count = 0;
};

// The attention of a forward over several sequences, packed one after another. A sequence's result does not depend on
// which others are there.
class PagedAttention : public AttentionBackend {
 public:
  explicit PagedAttention(KvPages& pages) : pages_(pages) {}

  // The sequences of the coming forward; every layer's attend writes their new keys and values into the pages.
  void begin(std::vector<PagedSequence> sequences);
  at::Tensor attend(int64_t layer, const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD,
                    const RotaryTable& rope) override;

 private:
  void write(int64_t layer, const at::Tensor& k_TKD, const at::Tensor& v_TKD) const;
  at::Tensor attend_gathered(int64_t layer, const PagedSequence& sequence, const at::Tensor& q_TND) const;

  KvPages& pages_;
  std::vector<PagedSequence> sequences_;
  std::vector<int64_t> rows_;                // the first row of each sequence, and the number of rows
  std::vector<PagedRow> decoding_;           // of those with one new token and something before it
  std::vector<int32_t> places_;              // per row: block · block_size + offset
  at::Tensor write_blocks_, write_offsets_;  // the same on a GPU, int64 [T]
  std::optional<GpuAttention> gpu_;          // where there are kernels it does all
};

// The attention of one sequence that owns all pages.
class CachedAttention : public AttentionBackend {
 public:
  explicit CachedAttention(KvPages& pages) : pages_(pages), attention_(pages) {}

  // Makes room for the next `tokens` tokens; every layer's attend of the coming forward appends that many.
  void begin(int64_t tokens);
  // Counts them as present, after the forward.
  void commit() { length_ += pending_; }
  int64_t length() const { return length_; }

  at::Tensor attend(int64_t layer, const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD,
                    const RotaryTable& rope) override {
    return attention_.attend(layer, q_TND, k_TKD, v_TKD, rope);
  }

 private:
  KvPages& pages_;
  PagedAttention attention_;
  int64_t length_ = 0, pending_ = 0;
};

}  // namespace parvl
