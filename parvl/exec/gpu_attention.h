// Attention over pages on a GPU by the kernels of kernels/: any mix of prompts and single new tokens in one forward.
#pragma once

#include <vector>

#include "parvl/nn/cuda_ops.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

struct PagedSequence;

// One layer's pages as the kernels take them.
struct LayerPages {
  const at::Tensor& keys;  // [blocks, K, block_size, D]
  const at::Tensor& values;
};

class GpuAttention {
 public:
  // Whether there are kernels for this model's heads in such pages.
  static bool fits(const BackboneSpec& spec, const at::Tensor& pages) {
    return cuda::has_decode_attention(pages, spec.heads);
  }

  // The sequences of the coming forward, packed; uploads what its layers share. `places`: of every row.
  void begin(const std::vector<PagedSequence>& sequences, const std::vector<int32_t>& places, const LayerPages& pages);
  // Writes the new keys and values and gives [T, N, D]; arguments as AttentionBackend::attend.
  at::Tensor attend(const LayerPages& pages, const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD,
                    const RotaryTable& rope) const;

 private:
  int64_t decode_count_ = 0, prefill_count_ = 0;  // sequences
  cuda::DecodeRows decode_;
  at::Tensor places_;         // int32 [T]
  at::Tensor tiles_, table_;  // int32 [tiles, 4], [prefill sequences, blocks]
};

}  // namespace parvl
