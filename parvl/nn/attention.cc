#include "parvl/nn/attention.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "parvl/base/check.h"
#include "parvl/kernels/paged_attention.h"
#include "parvl/nn/cuda_ops.h"
#include "parvl/nn/device.h"
#include "parvl/nn/functions.h"
#include "parvl/nn/kernel_types.h"

namespace parvl {
namespace {

// Keys and values repeated so that each query head has its own, for kernels without grouped heads.
at::Tensor repeat_heads(const at::Tensor& x_TKD, int64_t heads) {
  const int64_t times = heads / x_TKD.size(1);
  if (times == 1) return x_TKD;
  return x_TKD.unsqueeze(2).expand({-1, -1, times, -1}).reshape({x_TKD.size(0), heads, x_TKD.size(2)});
}

bool has_flash(const at::Tensor& q_TND) {
  const int64_t dim = q_TND.size(2);
  // The kernels that libparvl_cuda.so has want what PyTorch's flash attention wants of the GPU.
  return cuda::fits(q_TND) && q_TND.scalar_type() == at::kBFloat16 && dim % 8 == 0 && dim <= 256;
}

// `count` sequences of one length, starting at row `begin`.
at::Tensor attend_batch(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t begin, int64_t count,
                        int64_t length, bool causal) {
  const auto view = [&](const at::Tensor& x) {
    return x.narrow(0, begin, count * length).view({count, length, x.size(1), x.size(2)}).transpose(1, 2);
  };
  const at::Tensor out = at::scaled_dot_product_attention(view(q), view(k), view(v), {}, 0.0, causal && length > 1);
  return out.transpose(1, 2).reshape({count * length, q.size(1), q.size(2)});
}

}  // namespace

SeqLayout::SeqLayout(std::vector<int64_t> sequence_lengths, at::Device device) : lengths(std::move(sequence_lengths)) {
  std::vector<int32_t> sums = {0};
  for (int64_t length : lengths) {
    PARVL_CHECK(length > 0, "a packed sequence is empty");
    total += length;
    longest = std::max(longest, length);
    sums.push_back(static_cast<int32_t>(total));
  }
  if (device.is_cuda()) starts = upload(at::tensor(sums, at::kInt), device);
}

bool takes_any_layout(const at::Tensor& q_TND) { return has_flash(q_TND) && !at::GradMode::is_enabled(); }

at::Tensor packed_attention(const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD,
                            const SeqLayout& layout, bool causal) {
  PARVL_CHECK(q_TND.size(0) == layout.total, "the layout does not cover the packed rows");
  if (has_flash(q_TND)) {  // grouped heads as they are, also with a graph
    return std::get<0>(at::_flash_attention_forward(q_TND, k_TKD, v_TKD, layout.starts, layout.starts, layout.longest,
                                                    layout.longest, /*dropout_p=*/0.0, causal,
                                                    /*return_debug_mask=*/false));
  }
  const at::Tensor k_TND = repeat_heads(k_TKD, q_TND.size(1)), v_TND = repeat_heads(v_TKD, q_TND.size(1));
  if (q_TND.is_cuda() && q_TND.scalar_type() != at::kDouble && !layout.uniform()) {
    auto [out, lse, seed, offset, longest_q, longest_k] = at::_efficient_attention_forward(
        q_TND.unsqueeze(0), k_TND.unsqueeze(0), v_TND.unsqueeze(0), /*bias=*/{}, layout.starts, layout.starts,
        layout.longest, layout.longest, /*dropout_p=*/0.0, /*custom_mask_type=*/causal ? 1 : 0,
        /*compute_log_sumexp=*/at::GradMode::is_enabled());
    return out.squeeze(0);
  }
  // Runs of equal lengths go through one call each.
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (size_t i = 0; i < layout.lengths.size();) {
    size_t j = i;
    while (j < layout.lengths.size() && layout.lengths[j] == layout.lengths[i]) ++j;
    const int64_t count = static_cast<int64_t>(j - i), length = layout.lengths[i];
    parts.push_back(attend_batch(q_TND, k_TND, v_TND, begin, count, length, causal));
    begin += count * length;
    i = j;
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 0);
}

at::Tensor PackedBackend::attend(int64_t, const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD,
                                 const RotaryTable& rope) {
  return packed_attention(rotary(q_TND, rope.cos, rope.sin), rotary(k_TKD, rope.cos, rope.sin), v_TKD, layout_,
                          /*causal=*/true);
}

bool has_paged_kernel(const at::Tensor& q_TND) {
  return !q_TND.is_cuda() && q_TND.scalar_type() != at::kHalf && q_TND.size(2) <= kernels::kPagedMaxDim;
}

void paged_attention(const at::Tensor& q_TND, const at::Tensor& keys, const at::Tensor& values,
                     const std::vector<PagedRow>& rows, const at::Tensor& out_TND) {
  const int64_t heads = q_TND.size(1), dim = q_TND.size(2);
  const bool done = with_kernel_type(q_TND.scalar_type(), [&]<typename T>(T) {
    at::parallel_for(0, heads * static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const PagedRow& row = rows[static_cast<size_t>(begin / heads)];
        const int64_t first = begin % heads, last = std::min(heads, first + end - begin),
                      offset = row.row * heads * dim;
        const kernels::Pages<T> pages{kernel_data<const T>(keys),
                                      kernel_data<const T>(values),
                                      row.blocks,
                                      keys.size(2),
                                      keys.size(1),
                                      dim,
                                      row.length};
        kernels::paged_attention_decode<T>(kernel_data<const T>(q_TND) + offset, pages,
                                           kernel_data<T>(out_TND) + offset, heads, first, last);
        begin += last - first;
      }
    });
  });
  PARVL_CHECK(done, "pages of a type without a kernel");
}

void write_pages(const at::Tensor& rows_TKD, const std::vector<int32_t>& places, const at::Tensor& pages) {
  const at::Tensor rows = rows_TKD.contiguous();
  kernels::write_pages(kernel_data<const char>(rows), kernel_data<char>(pages), places.data(),
                       static_cast<int64_t>(places.size()),
                       {pages.size(2), pages.size(1), pages.size(3) * static_cast<int64_t>(pages.element_size())});
}

}  // namespace parvl
