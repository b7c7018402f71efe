// Attention over packed sequences, and where its keys come from.
//
// Shapes: T tokens packed, N query heads, K key heads (K divides N), D head size.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace parvl {

// Lengths of the sequences packed into T rows; attention never crosses a border.
struct SeqLayout {
  std::vector<int64_t> lengths;  // each > 0
  int64_t total = 0;             // T
  int64_t longest = 0;
  at::Tensor starts;  // int32 [sequences + 1] on the device, the running sum; only made for CUDA
  // Work that is recorded for any lengths has no `lengths`, knows `longest` as a bound, and has room in `starts` for
  // more sequences: those beyond the last are empty. Rows that no sequence has come out undefined. Only where
  // takes_any_layout.

  SeqLayout() = default;
  SeqLayout(std::vector<int64_t> lengths, at::Device device);
  bool uniform() const { return !lengths.empty() && total == longest * static_cast<int64_t>(lengths.size()); }
};

// Whether packed_attention reads a layout's borders on the device alone: without a graph in 16 bits on a GPU.
bool takes_any_layout(const at::Tensor& q_TND);
// softmax(q kᵀ / √D) v inside each sequence. q_TND, k_TKD, v_TKD → [T, N, D]. Differentiable.
at::Tensor packed_attention(const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD,
                            const SeqLayout& layout, bool causal);

// A sequence whose one new token is row `row` of a packed batch: its keys and values are in `blocks` already.
struct PagedRow {
  int64_t row = 0;
  const int32_t* blocks = nullptr;  // borrowed
  int64_t length = 0;               // tokens, the new one included
};
// Whether there is a kernel for attention over pages: on the CPU, but for float16 and very large heads.
bool has_paged_kernel(const at::Tensor& q_TND);
// softmax(q kᵀ / √D) v of those rows over pages [blocks, K, block_size, D], into the same rows of `out_TND`.
// Contiguous; only where has_paged_kernel. No autograd.
void paged_attention(const at::Tensor& q_TND, const at::Tensor& keys, const at::Tensor& values,
                     const std::vector<PagedRow>& rows, const at::Tensor& out_TND);
// Rows [T, K, D] to their places in pages on the CPU; places[t] = block · block_size + offset.
void write_pages(const at::Tensor& rows_TKD, const std::vector<int32_t>& places, const at::Tensor& pages);

// Angles of every row of a packed batch: cos and sin [T, D/2], float32 (float64 in a float64 model).
struct RotaryTable {
  at::Tensor cos;
  at::Tensor sin;
};

// Where a decoder layer's keys and values come from: only this call's (training), or a cache (serving).
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;
  // Causal attention of queries and keys after their rotary positions: q_TND, k_TKD, v_TKD (rows may lie apart) →
  // [T, N, D]. `layer` counts from 0 over the whole backbone.
  virtual at::Tensor attend(int64_t layer, const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD,
                            const RotaryTable& rope) = 0;
};

class PackedBackend : public AttentionBackend {
 public:
  explicit PackedBackend(SeqLayout layout) : layout_(std::move(layout)) {}
  at::Tensor attend(int64_t layer, const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD,
                    const RotaryTable& rope) override;

 private:
  SeqLayout layout_;
};

}  // namespace parvl
