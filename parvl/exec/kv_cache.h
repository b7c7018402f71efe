// Keys and values of one sequence in pages, ready to be shared by many sequences later: head-major blocks and a block
// table.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "parvl/nn/attention.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

// The pages of all layers. Per layer, keys and values are [blocks, kv_heads, block_size, head_dim]. Not thread-safe.
class KvPages {
 public:
  static constexpr int64_t kBlockSize = 16;
  KvPages(const BackboneSpec& spec, at::ScalarType type, at::Device device);

  // At least this many blocks; what is in them is kept. Growth doubles, so its cost is spread.
  void reserve(int64_t blocks);
  int64_t blocks() const { return blocks_; }
  const at::Tensor& keys(int64_t layer) const { return keys_[static_cast<size_t>(layer)]; }
  const at::Tensor& values(int64_t layer) const { return values_[static_cast<size_t>(layer)]; }

 private:
  BackboneSpec spec_;
  at::TensorOptions options_;
  int64_t blocks_ = 0;
  std::vector<at::Tensor> keys_, values_;
};

// A sequence's view of the pages, and the attention over it.
class CachedAttention : public AttentionBackend {
 public:
  explicit CachedAttention(KvPages& pages) : pages_(pages) {}

  // Makes room for the next `tokens` tokens; every layer's attend of the coming forward appends that many.
  void begin(int64_t tokens);
  // Counts them as present, after the forward.
  void commit() { length_ += pending_; }
  int64_t length() const { return length_; }

  at::Tensor attend(int64_t layer, const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD) override;

 private:
  void write(int64_t layer, const at::Tensor& k_TKD, const at::Tensor& v_TKD);
  at::Tensor decode_on_cpu(int64_t layer, const at::Tensor& q_1ND) const;
  at::Tensor attend_gathered(int64_t layer, const at::Tensor& q_TND) const;

  KvPages& pages_;
  std::vector<int32_t> block_table_;
  at::Tensor block_table_tensor_;            // int64, on the device
  at::Tensor write_blocks_, write_offsets_;  // int64 [pending], on the device
  SeqLayout layout_;
  int64_t length_ = 0, pending_ = 0;
};

}  // namespace parvl
