// Fused GPU operations from libparvl_cuda.so: tensors around the kernels of kernels/. No autograd. They run on the
// current stream.
//
// Shapes: T rows, I and O features in and out, N query heads, K key heads, D head size, V vocabulary.
#pragma once

#include <ATen/ATen.h>

#include <tuple>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/kernels/decode_sample.h"
#include "parvl/nn/attention.h"
#include "parvl/nn/functions.h"

namespace parvl::cuda {

// Loads the library from beside the program. Without it the operations below run as several of PyTorch's.
absl::Status load_kernels();
// Whether the kernels take this tensor: loaded, on a GPU, of a type they have.
bool fits(const at::Tensor& x);

at::Tensor rotary(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF, bool inverse);
// Rows may lie apart: gate and up as halves of one tensor are read as they are.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up);
at::Tensor quick_gelu(const at::Tensor& x);
at::Tensor quick_gelu_backward(const at::Tensor& dy, const at::Tensor& x);

// What stands around the products of decode_linear; see kernels/decode_linear.h.
struct LinearFusion {
  const Param* norm = nullptr;  // RMSNorm of x before it
  double eps = 0;
  at::Tensor residual;  // [T, ΣO], added; overwritten with the result
  bool swiglu = false;  // the two weights are gate and up
};
// Whether decode_linear takes x: bfloat16 on a GPU, at most kernels::kDecodeLinearTokens rows, `in` and each weight's
// rows multiples of 16.
bool fits_decode(const at::Tensor& x_TI, absl::Span<const LinearWeights> weights);
// [T, ΣO] (with SwiGLU [T, O]).
at::Tensor decode_linear(const at::Tensor& x_TI, absl::Span<const LinearWeights> weights, const LinearFusion& fusion);

// The sequences of a decode_attention and its scratch memory, all on the device. Made once, used for every layer.
struct DecodeRows {
  at::Tensor rows;     // int32 [S]: the rows of qkv that they have; undefined: S = T, in order
  at::Tensor table;    // int32 [S, blocks]
  at::Tensor lengths;  // int32 [S], the new token included; 0: none
  at::Tensor partial, finished;
  int64_t splits = 1;

  void allocate_scratch(int64_t sequences, int64_t kv_heads, int64_t dim, at::Device device);
};
// Whether there is a kernel for `heads` query heads over pages [blocks, K, block_size, D].
bool has_decode_attention(const at::Tensor& pages, int64_t heads);
// [T, (N + 2K) · D]: without a copy when they are columns of one tensor.
at::Tensor joined_qkv(const at::Tensor& q_TND, const at::Tensor& k_TKD, const at::Tensor& v_TKD);
// Writes the rows' keys and values into the pages [blocks, K, block_size, D] and their attention into the same rows of
// out [T, N, D]. qkv [T, (N + 2K) · D] without rotary positions; rope float32.
void decode_attention(const at::Tensor& qkv, const RotaryTable& rope, const at::Tensor& keys, const at::Tensor& values,
                      const DecodeRows& rows, const at::Tensor& out);
// The same for many tokens a sequence, in two steps: all rows' keys and values into the pages and the queries after
// rotary [T, N · D]; then their attention, tile by tile (int32 [tiles, 4] of kernels::PrefillTile). places int32 [T].
at::Tensor store_rows(const at::Tensor& qkv, const RotaryTable& rope, const at::Tensor& places, const at::Tensor& keys,
                      const at::Tensor& values);
void prefill_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& table,
                       const at::Tensor& tiles, const at::Tensor& out);

// kernels::decode_sample on bfloat16 logits: params and out are bytes of SampleRow and SampledRow [T]; `finished` int32
// [T] zeros.
void decode_sample(const at::Tensor& logits_TV, const at::Tensor& params, const at::Tensor& out,
                   const at::Tensor& finished);
// The same from and to the host; waits. Only where fits_sample.
std::vector<kernels::SampledRow> decode_sample(const at::Tensor& logits_TV,
                                               const std::vector<kernels::SampleRow>& rows);
bool fits_sample(const at::Tensor& logits_TV);

}  // namespace parvl::cuda
