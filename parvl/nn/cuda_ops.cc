#include "parvl/nn/cuda_ops.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "parvl/base/check.h"
#include "parvl/kernels/cuda_library.h"
#include "parvl/nn/cuda_graph.h"

namespace parvl::cuda {
namespace {

std::atomic<const kernels::CudaLibrary*> g_library{nullptr};
std::atomic<CudaGraphPool* (*)()> g_new_graph_pool{nullptr};

const kernels::CudaLibrary& library() { return *g_library.load(); }

kernels::Element element(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return kernels::Element::kFloat64;
    case at::kBFloat16:
      return kernels::Element::kBFloat16;
    default:
      return kernels::Element::kFloat32;
  }
}

void* stream(const at::Tensor& x) {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(x.device()).native_handle();
}

void check(int error) { TORCH_CHECK(error == 0, "a fused CUDA kernel did not launch: CUDA error ", error); }

}  // namespace

absl::Status load_kernels() {
  if (g_library.load() != nullptr) return absl::OkStatus();
  void* file = dlopen("libparvl_cuda.so", RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr)
    return absl::NotFoundError("libparvl_cuda.so (built when nvcc is there) is not beside the program");
  const void* symbol = dlsym(file, kernels::kCudaLibrarySymbol);
  g_new_graph_pool = reinterpret_cast<CudaGraphPool* (*)()>(dlsym(file, kCudaGraphPoolSymbol));
  if (symbol == nullptr || g_new_graph_pool.load() == nullptr)
    return failed("libparvl_cuda.so is of another version than this program");
  g_library = static_cast<const kernels::CudaLibrary*>(symbol);
  return absl::OkStatus();
}

bool fits(const at::Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  return x.is_cuda() && g_library.load() != nullptr &&
         (type == at::kFloat || type == at::kDouble || type == at::kBFloat16);
}

at::Tensor rotary(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF, bool inverse) {
  const int64_t rows = x_TND.size(0), heads = x_TND.size(1), dim = x_TND.size(2);
  const at::Tensor x = x_TND.stride(2) == 1 && (heads == 1 || x_TND.stride(1) == dim) ? x_TND : x_TND.contiguous();
  const at::Tensor y = at::empty({rows, heads, dim}, x.options());
  check(library().elementwise.rotary(element(x), x.data_ptr(), x.stride(0), cos_TF.data_ptr(), sin_TF.data_ptr(),
                                     y.data_ptr(), rows, heads, dim, inverse, stream(x)));
  return y;
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const auto rows_of = [](const at::Tensor& x) { return x.dim() == 2 && x.stride(1) == 1 ? x : x.contiguous(); };
  at::Tensor g = rows_of(gate), u = rows_of(up);
  if (g.dim() != 2 || g.stride(0) != u.stride(0)) {
    g = g.contiguous();
    u = u.contiguous();
  }
  const at::Tensor y = at::empty(g.sizes(), g.options());
  const int64_t columns = g.size(-1), rows = columns == 0 ? 0 : g.numel() / columns;
  const int64_t stride = g.dim() == 2 ? g.stride(0) : columns;
  check(library().elementwise.swiglu(element(g), g.data_ptr(), u.data_ptr(), stride, y.data_ptr(), rows, columns,
                                     stream(g)));
  return y;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor d = dy.contiguous(), g = gate.contiguous(), u = up.contiguous();
  const at::Tensor dgate = at::empty_like(g), dup = at::empty_like(u);
  check(library().elementwise.swiglu_backward(element(g), d.data_ptr(), g.data_ptr(), u.data_ptr(), dgate.data_ptr(),
                                              dup.data_ptr(), g.numel(), stream(g)));
  return {dgate, dup};
}

at::Tensor quick_gelu(const at::Tensor& x) {
  const at::Tensor in = x.contiguous(), y = at::empty_like(in);
  check(library().elementwise.quick_gelu(element(in), in.data_ptr(), y.data_ptr(), in.numel(), stream(in)));
  return y;
}

at::Tensor quick_gelu_backward(const at::Tensor& dy, const at::Tensor& x) {
  const at::Tensor d = dy.contiguous(), in = x.contiguous(), dx = at::empty_like(in);
  check(library().elementwise.quick_gelu_backward(element(in), d.data_ptr(), in.data_ptr(), dx.data_ptr(), in.numel(),
                                                  stream(in)));
  return dx;
}

bool fits_decode(const at::Tensor& x, absl::Span<const LinearWeights> weights) {
  if (!fits(x) || x.scalar_type() != at::kBFloat16 || x.dim() != 2 || !x.is_contiguous()) return false;
  if (x.size(0) < 1 || x.size(0) > kernels::kDecodeLinearTokens || x.size(1) % 16 != 0) return false;
  return weights.size() <= kernels::kDecodeLinearMatrices &&
         std::all_of(weights.begin(), weights.end(),
                     [](const LinearWeights& w) { return w.weight->value.size(0) % 16 == 0; });
}

at::Tensor decode_linear(const at::Tensor& x, absl::Span<const LinearWeights> weights, const LinearFusion& fusion) {
  kernels::DecodeLinear a;
  a.matrices = static_cast<int>(weights.size());
  int64_t total = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    a.weight[i] = weights[i].weight->value.data_ptr();
    a.bias[i] = weights[i].bias == nullptr ? nullptr : weights[i].bias->value.data_ptr();
    a.rows[i] = weights[i].weight->value.size(0);
    total += a.rows[i];
  }
  const at::Tensor y = fusion.residual.defined()
                           ? fusion.residual
                           : at::empty({x.size(0), fusion.swiglu ? a.rows[0] : total}, x.options());
  a.x = x.data_ptr();
  a.tokens = x.size(0);
  a.in = x.size(1);
  if (fusion.norm != nullptr) a.norm = fusion.norm->value.data_ptr();
  a.eps = static_cast<float>(fusion.eps);
  if (fusion.residual.defined()) a.residual = fusion.residual.data_ptr();
  a.swiglu = fusion.swiglu;
  a.y = y.data_ptr();
  check(library().linear(a, stream(x)));
  return y;
}

void DecodeRows::allocate_scratch(int64_t sequences, int64_t kv_heads, int64_t dim, at::Device device) {
  constexpr int64_t kBlocks = 264, kMaxSplits = 16;  // two blocks for each processor of a large GPU
  splits = std::clamp<int64_t>(kBlocks / (sequences * kv_heads), 1, kMaxSplits);
  const at::TensorOptions options = at::TensorOptions().device(device);
  partial = at::empty({library().attention_partial_bytes(sequences, kv_heads, dim, splits)}, options.dtype(at::kByte));
  finished = at::zeros({sequences * kv_heads}, options.dtype(at::kInt));
}

bool has_decode_attention(const at::Tensor& pages, int64_t heads) {
  return fits(pages) && pages.scalar_type() == at::kBFloat16 &&
         library().has_attention({heads, pages.size(1), pages.size(3), pages.size(2)});
}

at::Tensor joined_qkv(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const int64_t width = (q.size(1) + 2 * k.size(1)) * q.size(2);
  const auto follows = [&](const at::Tensor& a, const at::Tensor& b) {
    return static_cast<const char*>(a.data_ptr()) + a.size(1) * a.size(2) * static_cast<int64_t>(a.element_size()) ==
           b.data_ptr();
  };
  const auto is_part = [&](const at::Tensor& x) {
    return (x.size(0) == 1 || x.stride(0) == width) && x.stride(1) == x.size(2) && x.stride(2) == 1 &&
           x.storage().is_alias_of(q.storage());
  };
  if (is_part(q) && is_part(k) && is_part(v) && follows(q, k) && follows(k, v)) {
    return q.as_strided({q.size(0), width}, {width, 1});
  }
  return at::cat({q.flatten(1), k.flatten(1), v.flatten(1)}, 1);
}

void decode_attention(const at::Tensor& qkv, const RotaryTable& rope, const at::Tensor& keys, const at::Tensor& values,
                      const DecodeRows& rows, const at::Tensor& out) {
  PARVL_CHECK(qkv.is_contiguous() && out.is_contiguous() && rows.table.is_contiguous(), "attention over strided rows");
  kernels::DecodeAttention a;
  a.qkv = qkv.data_ptr();
  a.cos = rope.cos.data_ptr<float>();
  a.sin = rope.sin.data_ptr<float>();
  a.keys = keys.data_ptr();
  a.values = values.data_ptr();
  a.block_table = rows.table.data_ptr<int32_t>();
  a.table_stride = rows.table.size(1);
  a.lengths = rows.lengths.data_ptr<int32_t>();
  if (rows.rows.defined()) a.rows = rows.rows.data_ptr<int32_t>();
  a.sequences = rows.lengths.size(0);
  a.kv_heads = keys.size(1);
  a.block_size = keys.size(2);
  a.dim = keys.size(3);
  a.heads = qkv.size(1) / a.dim - 2 * a.kv_heads;
  a.splits = rows.splits;
  a.partial = rows.partial.data_ptr();
  a.finished = rows.finished.data_ptr<int32_t>();
  a.out = out.data_ptr();
  check(library().attention(a, stream(qkv)));
}

bool fits_sample(const at::Tensor& logits) {
  return fits(logits) && logits.scalar_type() == at::kBFloat16 && logits.is_contiguous() && logits.size(1) % 8 == 0;
}

std::vector<kernels::SampledRow> decode_sample(const at::Tensor& logits_TV,
                                               const std::vector<kernels::SampleRow>& rows) {
  const int64_t count = logits_TV.size(0);
  const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte);
  const auto size_of = [&](size_t each) { return static_cast<int64_t>(each) * count; };
  at::Tensor params = at::empty({size_of(sizeof(kernels::SampleRow))}, bytes);
  std::memcpy(params.data_ptr(), rows.data(), params.nbytes());
  const at::Tensor out = at::empty({size_of(sizeof(kernels::SampledRow))}, bytes.device(logits_TV.device()));
  decode_sample(logits_TV, params.to(logits_TV.device()), out,
                at::zeros({count}, bytes.device(logits_TV.device()).dtype(at::kInt)));
  std::vector<kernels::SampledRow> result(static_cast<size_t>(count));
  const at::Tensor host = out.cpu();
  std::memcpy(result.data(), host.data_ptr(), host.nbytes());
  return result;
}

at::Tensor store_rows(const at::Tensor& qkv, const RotaryTable& rope, const at::Tensor& places, const at::Tensor& keys,
                      const at::Tensor& values) {
  kernels::StoreRows a;
  a.shape = {qkv.size(1) / keys.size(3) - 2 * keys.size(1), keys.size(1), keys.size(3), keys.size(2)};
  a.rows = qkv.size(0);
  const at::Tensor q = at::empty({a.rows, a.shape.heads * a.shape.dim}, qkv.options());
  a.qkv = qkv.data_ptr();
  a.cos = rope.cos.data_ptr<float>();
  a.sin = rope.sin.data_ptr<float>();
  a.places = places.data_ptr<int32_t>();
  a.keys = keys.data_ptr();
  a.values = values.data_ptr();
  a.q = q.data_ptr();
  check(library().store(a, stream(qkv)));
  return q;
}

void prefill_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& table,
                       const at::Tensor& tiles, const at::Tensor& out) {
  kernels::PrefillAttention a;
  a.shape = {q.size(1) / keys.size(3), keys.size(1), keys.size(3), keys.size(2)};
  a.q = q.data_ptr();
  a.keys = keys.data_ptr();
  a.values = values.data_ptr();
  a.block_table = table.data_ptr<int32_t>();
  a.table_stride = table.size(1);
  a.tiles = reinterpret_cast<const kernels::PrefillTile*>(tiles.data_ptr());
  a.num_tiles = tiles.numel() / 4;
  a.out = out.data_ptr();
  check(library().prefill(a, stream(q)));
}

void decode_sample(const at::Tensor& logits_TV, const at::Tensor& params, const at::Tensor& out,
                   const at::Tensor& finished) {
  const int64_t rows = logits_TV.size(0);
  const at::Tensor partial = at::empty({kernels::decode_sample_partial_bytes(rows)}, params.options());
  check(library().sample(logits_TV.data_ptr(), rows, logits_TV.size(1),
                         reinterpret_cast<const kernels::SampleRow*>(params.data_ptr()),
                         reinterpret_cast<kernels::SampledRow*>(out.data_ptr()), partial.data_ptr(),
                         finished.data_ptr<int32_t>(), stream(logits_TV)));
}

}  // namespace parvl::cuda

namespace parvl {
std::unique_ptr<CudaGraphPool> make_cuda_graph_pool() {
  const auto make = cuda::g_new_graph_pool.load();
  return std::unique_ptr<CudaGraphPool>(make == nullptr ? nullptr : make());
}
}  // namespace parvl
