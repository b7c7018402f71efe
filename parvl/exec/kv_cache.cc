#include "parvl/exec/kv_cache.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/kernels/paged_attention.h"
#include "parvl/models/packing.h"
#include "parvl/nn/functions.h"

namespace parvl {
KvPages::KvPages(const BackboneSpec& spec, at::ScalarType type, at::Device device, int64_t block_size,
                 int64_t first_layer)
    : spec_(spec),
      options_(at::TensorOptions().dtype(type).device(device)),
      block_size_(block_size),
      first_layer_(first_layer) {
  PARVL_CHECK(block_size >= 1 && block_size <= kernels::kPagedMaxBlock, "a KV block size that the kernel cannot take");
}

void KvPages::reserve(int64_t blocks) {
  if (blocks <= blocks_) return;
  blocks = std::max(blocks, 2 * blocks_);
  const auto grow = [&](std::vector<at::Tensor>& tensors, size_t layer) {
    at::Tensor bigger = at::empty({blocks, spec_.kv_heads, block_size_, spec_.head_dim}, options_);
    if (blocks_ > 0) bigger.narrow(0, 0, blocks_).copy_(tensors[layer]);
    tensors[layer] = bigger;
  };
  keys_.resize(static_cast<size_t>(spec_.layers));
  values_.resize(static_cast<size_t>(spec_.layers));
  for (size_t layer = 0; layer < keys_.size(); ++layer) {
    grow(keys_, layer);
    grow(values_, layer);
  }
  blocks_ = blocks;
}

void PagedAttention::begin(std::vector<PagedSequence> sequences) {
  sequences_ = std::move(sequences);
  rows_ = {0};
  decoding_.clear();
  places_.clear();
  const int64_t size = pages_.block_size();
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const PagedSequence& s = sequences_[i];
    PARVL_CHECK(s.count > 0 && s.begin + s.count <= static_cast<int64_t>(s.blocks.size()) * size,
                "a sequence has too few blocks");
    for (int64_t position = s.begin; position < s.begin + s.count; ++position) {
      places_.push_back(static_cast<int32_t>(s.blocks[static_cast<size_t>(position / size)] * size + position % size));
    }
    rows_.push_back(rows_.back() + s.count);
    if (s.count == 1 && s.begin > 0) decoding_.push_back({rows_[i], s.blocks.data(), s.begin + 1});
  }
  const int64_t layer = pages_.first_layer();
  const at::Device device = pages_.keys(layer).device();
  if (!device.is_cuda()) return;
  if (!gpu_ && GpuAttention::fits(pages_.spec(), pages_.keys(layer))) gpu_.emplace();
  if (gpu_) return gpu_->begin(sequences_, places_, pages_.layer(layer));
  const at::Tensor places = to_device(std::vector<int64_t>(places_.begin(), places_.end()), device);
  write_blocks_ = places.floor_divide(size);
  write_offsets_ = places.remainder(size);
}

void PagedAttention::write(int64_t layer, const at::Tensor& k_TKD, const at::Tensor& v_TKD) const {
  at::Tensor keys = pages_.keys(layer), values = pages_.values(layer);
  if (keys.is_cuda()) {
    using at::indexing::Slice;
    const at::indexing::TensorIndex where[] = {write_blocks_, Slice(), write_offsets_};
    keys.index_put_(where, k_TKD);
    values.index_put_(where, v_TKD);
    return;
  }
  write_pages(k_TKD, places_, keys);
  write_pages(v_TKD, places_, values);
}

at::Tensor PagedAttention::attend(int64_t layer, const at::Tensor& q_TND, const at::Tensor& k_TKD,
                                  const at::Tensor& v_TKD, const RotaryTable& rope) {
  PARVL_CHECK(q_TND.size(0) == rows_.back(), "the cache was prepared for another number of tokens");
  if (gpu_) return gpu_->attend(pages_.layer(layer), q_TND, k_TKD, v_TKD, rope);
  const at::Tensor q = rotary(q_TND, rope.cos, rope.sin).contiguous(), k = rotary(k_TKD, rope.cos, rope.sin);
  write(layer, k, v_TKD);
  const bool kernel = has_paged_kernel(q);
  if (sequences_.size() == 1 && sequences_[0].begin == 0) {
    return packed_attention(q, k, v_TKD, SeqLayout({sequences_[0].count}, q.device()), /*causal=*/true);
  }
  const at::Tensor out = at::empty_like(q);
  if (kernel && !decoding_.empty()) paged_attention(q, pages_.keys(layer), pages_.values(layer), decoding_, out);
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const PagedSequence& s = sequences_[i];
    if (kernel && s.count == 1 && s.begin > 0) continue;
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, rows_[i], s.count); };
    part(out).copy_(s.begin == 0 ? packed_attention(part(q), part(k), part(v_TKD), SeqLayout({s.count}, q.device()),
                                                    /*causal=*/true)
                                 : attend_gathered(layer, s, part(q)));
  }
  return out;
}

at::Tensor PagedAttention::attend_gathered(int64_t layer, const PagedSequence& s, const at::Tensor& q_TND) const {
  const int64_t total = s.begin + s.count, heads = q_TND.size(1), size = pages_.block_size();
  const auto options = at::TensorOptions().dtype(at::kLong).device(q_TND.device());
  const at::Tensor table =
      to_device(std::vector<int64_t>(s.blocks.begin(), s.blocks.begin() + (total + size - 1) / size), q_TND.device());
  // [blocks, K, size, D] → [1, N, total, D]
  const auto gather = [&](const at::Tensor& pages) {
    const at::Tensor rows = pages.index_select(0, table).transpose(0, 1);
    const at::Tensor flat = rows.reshape({rows.size(0), -1, rows.size(3)}).narrow(1, 0, total);
    return flat.repeat_interleave(heads / flat.size(0), 0).unsqueeze(0);
  };
  at::Tensor mask;  // query i sees keys up to its own position
  if (s.count > 1) {
    mask = at::arange(total, options).unsqueeze(0).le(at::arange(s.begin, total, options).unsqueeze(1));
  }
  const at::Tensor out = at::scaled_dot_product_attention(
      q_TND.transpose(0, 1).unsqueeze(0), gather(pages_.keys(layer)), gather(pages_.values(layer)),
      mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt);
  return out.squeeze(0).transpose(0, 1);
}

void CachedAttention::begin(int64_t tokens) {
  pending_ = tokens;
  const int64_t blocks = (length_ + tokens + pages_.block_size() - 1) / pages_.block_size();
  pages_.reserve(blocks);
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);  // its logical blocks are the physical ones
  attention_.begin({{std::move(table), length_, tokens}});
}

}  // namespace parvl
