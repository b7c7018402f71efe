#include "parvl/exec/kv_cache.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>

#include "parvl/base/check.h"
#include "parvl/kernels/paged_attention.h"

namespace parvl {
namespace {

at::Tensor to_device(const std::vector<int64_t>& values, at::Device device) {
  return at::tensor(values, at::kLong).to(device);
}

template <typename T>
void decode_heads(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                  const std::vector<int32_t>& table, int64_t length, const at::Tensor& out) {
  kernels::Pages<T> pages;
  pages.keys = static_cast<const T*>(keys.data_ptr());
  pages.values = static_cast<const T*>(values.data_ptr());
  pages.block_table = table.data();
  pages.block_size = KvPages::kBlockSize;
  pages.kv_heads = keys.size(1);
  pages.dim = keys.size(3);
  pages.length = length;
  const int64_t heads = q.size(1), grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, length * pages.dim));
  at::parallel_for(0, heads, grain, [&](int64_t begin, int64_t end) {
    kernels::paged_attention_decode<T>(static_cast<const T*>(q.data_ptr()), pages, static_cast<T*>(out.data_ptr()),
                                       heads, begin, end);
  });
}

}  // namespace

KvPages::KvPages(const BackboneSpec& spec, at::ScalarType type, at::Device device)
    : spec_(spec), options_(at::TensorOptions().dtype(type).device(device)) {}

void KvPages::reserve(int64_t blocks) {
  if (blocks <= blocks_) return;
  blocks = std::max(blocks, 2 * blocks_);
  const auto grow = [&](std::vector<at::Tensor>& tensors, size_t layer) {
    at::Tensor bigger = at::empty({blocks, spec_.kv_heads, kBlockSize, spec_.head_dim}, options_);
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

void CachedAttention::begin(int64_t tokens) {
  pending_ = tokens;
  const int64_t end = length_ + tokens, size = KvPages::kBlockSize;
  pages_.reserve((end + size - 1) / size);
  // One sequence owns all pages for now, so its logical blocks are the physical ones.
  while (static_cast<int64_t>(block_table_.size()) * size < end)
    block_table_.push_back(static_cast<int32_t>(block_table_.size()));
  std::vector<int64_t> blocks, offsets;
  for (int64_t position = length_; position < end; ++position) {
    blocks.push_back(block_table_[static_cast<size_t>(position / size)]);
    offsets.push_back(position % size);
  }
  const at::Device device = pages_.keys(0).device();
  write_blocks_ = to_device(blocks, device);
  write_offsets_ = to_device(offsets, device);
  layout_ = SeqLayout({tokens}, device);
  block_table_tensor_ = to_device(std::vector<int64_t>(block_table_.begin(), block_table_.end()), device);
}

void CachedAttention::write(int64_t layer, const at::Tensor& k_TKD, const at::Tensor& v_TKD) {
  using at::indexing::Slice;
  const at::indexing::TensorIndex where[] = {write_blocks_, Slice(), write_offsets_};
  at::Tensor keys = pages_.keys(layer), values = pages_.values(layer);
  keys.index_put_(where, k_TKD);
  values.index_put_(where, v_TKD);
}

at::Tensor CachedAttention::attend(int64_t layer, const at::Tensor& q_TND, const at::Tensor& k_TKD,
                                   const at::Tensor& v_TKD) {
  PARVL_CHECK(q_TND.size(0) == pending_, "the cache was prepared for another number of tokens");
  write(layer, k_TKD, v_TKD);
  if (length_ == 0) return packed_attention(q_TND, k_TKD, v_TKD, layout_, /*causal=*/true);
  const bool kernel = !q_TND.is_cuda() && q_TND.scalar_type() != at::kHalf && q_TND.size(2) <= kernels::kPagedMaxDim;
  if (pending_ == 1 && kernel) return decode_on_cpu(layer, q_TND.contiguous());
  return attend_gathered(layer, q_TND);
}

at::Tensor CachedAttention::decode_on_cpu(int64_t layer, const at::Tensor& q_1ND) const {
  const at::Tensor out = at::empty_like(q_1ND);
  const at::Tensor &keys = pages_.keys(layer), &values = pages_.values(layer);
  const int64_t length = length_ + pending_;
  if (q_1ND.scalar_type() == at::kFloat) {
    decode_heads<float>(q_1ND, keys, values, block_table_, length, out);
  } else if (q_1ND.scalar_type() == at::kDouble) {
    decode_heads<double>(q_1ND, keys, values, block_table_, length, out);
  } else {
    decode_heads<kernels::BFloat16>(q_1ND, keys, values, block_table_, length, out);
  }
  return out;
}

at::Tensor CachedAttention::attend_gathered(int64_t layer, const at::Tensor& q_TND) const {
  const int64_t total = length_ + pending_, heads = q_TND.size(1);
  // [blocks, K, size, D] → [N, total, D]
  const auto gather = [&](const at::Tensor& pages) {
    const at::Tensor rows = pages.index_select(0, block_table_tensor_).transpose(0, 1);
    const at::Tensor flat = rows.reshape({rows.size(0), -1, rows.size(3)}).narrow(1, 0, total);
    return flat.repeat_interleave(heads / flat.size(0), 0).unsqueeze(0);
  };
  at::Tensor mask;  // query i sees keys up to its own position
  if (pending_ > 1) {
    const auto options = block_table_tensor_.options();
    mask = at::arange(total, options).unsqueeze(0).le(at::arange(length_, total, options).unsqueeze(1));
  }
  const at::Tensor out = at::scaled_dot_product_attention(
      q_TND.transpose(0, 1).unsqueeze(0), gather(pages_.keys(layer)), gather(pages_.values(layer)),
      mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt);
  return out.squeeze(0).transpose(0, 1).contiguous();
}

}  // namespace parvl
