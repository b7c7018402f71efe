#include <cuda_runtime.h>

#include "parvl/kernels/decode_attention.h"
#include "parvl/kernels/launch.cuh"
#include "parvl/kernels/mma.cuh"

namespace parvl::kernels {
namespace {

// One block of threads takes one sequence's tokens [begin, end) against the G query heads of one key head; each of its
// warps takes tiles of 16 tokens. Scores are Q Kᵀ (query heads are the 16 rows of mma.m16n8k16, tokens its columns),
// outputs Vᵀ Pᵀ (dims are rows, heads columns), so that what one product leaves in a thread's registers is what the
// other takes. Which dim of the head stands at which place of an operand does not matter as long as both agree, so each
// thread loads 16 bytes of a row and uses them as they come.
constexpr int kWarps = 8;
constexpr int kTile = 16;
constexpr int kHeads = 8;       // columns of the second product
constexpr int kMinSplit = 256;  // tokens that are worth a block of threads
constexpr int kThreads = kWarps * 32;

// Softmax-weighted sums of several parts of a sequence's tokens: what the parts of a block, or the blocks, leave.
// A part is, for each head, its maximum score, its sum of 2^(score − maximum), and that sum over the values.
template <int D>
struct Part {
  float max[kHeads];
  float sum[kHeads];
  float acc[kHeads][D];
};

// Dim d of head h over `count` parts; the common maximum and sum too.
template <int D>
__device__ float combine(const Part<D>* parts, int count, int h, int d, float& max, float& sum) {
  max = -INFINITY;
  for (int i = 0; i < count; ++i) max = fmaxf(max, parts[i].max[h]);
  float acc = 0;
  sum = 0;
  for (int i = 0; i < count; ++i) {
    const float w = exp2f(parts[i].max[h] - max);
    acc += w * parts[i].acc[h][d];
    sum += w * parts[i].sum[h];
  }
  return acc;
}

// What a warp carries over its tiles. Lane (group g, quad t) holds the scores of head g, and sums of dims of group g
// for heads 2t and 2t + 1.
template <int D>
struct Warp {
  static constexpr int kPieces = D / 32;  // of a key row: 8 dims a lane each
  static constexpr int kPlanes = D / 16;  // pairs of dims a lane holds
  float max = -INFINITY, sum = 0;
  float acc[kPlanes][4] = {};

  // `k`, `v`: the tile's first rows; `count`: how many of its 16 tokens there are.
  __device__ void add_tile(const uint4 (&q)[kPieces], const __nv_bfloat16* k, const __nv_bfloat16* v, int count,
                           float scale) {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    uint4 keys[2][kPieces];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        keys[half][p] = *reinterpret_cast<const uint4*>(k + (half * 8 + group) * D + p * 32 + quad * 8);
      }
    }
    uint32_t values[4][kPlanes];
    load_values<D>(values, v, count);
    float score[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        mma(score[half], q[p].x, 0, q[p].y, 0, keys[half][p].x, keys[half][p].y);
        mma(score[half], q[p].z, 0, q[p].w, 0, keys[half][p].z, keys[half][p].w);
      }
    }
    float highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& s = score[i / 2][i % 2];
      s = quad * 2 + i % 2 + i / 2 * 8 < count ? s * scale : -INFINITY;
      highest = fmaxf(highest, s);
    }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    if (__any_sync(~0u, highest > max)) rescale(fmaxf(max, highest), quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& s = score[i / 2][i % 2];
      s = exp2f(s - max);
      sum += s;
    }
    const uint32_t low = pack(score[0][0], score[0][1]), high = pack(score[1][0], score[1][1]);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      mma(acc[p], low_halves(values[0][p], values[1][p]), high_halves(values[0][p], values[1][p]),
          low_halves(values[2][p], values[3][p]), high_halves(values[2][p], values[3][p]), low, high);
    }
  }

  __device__ void rescale(float new_max, int quad) {
    const float by = exp2f(max - new_max);
    max = new_max;
    sum *= by;
    const float even = __shfl_sync(~0u, by, quad * 8), odd = __shfl_sync(~0u, by, quad * 8 + 4);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      acc[p][0] *= even;
      acc[p][1] *= odd;
      acc[p][2] *= even;
      acc[p][3] *= odd;
    }
  }

  __device__ void leave(Part<D>& part) {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (quad == 0) {
      part.max[group] = max;
      part.sum[group] = sum;
    }
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) part.acc[quad * 2 + i % 2][group * (D / 8) + p * 2 + i / 2] = acc[p][i];
    }
  }
};

// A block's share of one sequence and key head.
struct Share {
  int begin, end, length;  // tokens [begin, end) of `length`
  int parts;               // blocks that have a share
};
__device__ Share find_share(const DecodeAttention& a, int t) {
  const int length = a.lengths[t], splits = static_cast<int>(a.splits);
  int each = (length + splits - 1) / splits;
  each = max((each + kTile - 1) / kTile * kTile, kMinSplit);
  const int begin = static_cast<int>(blockIdx.x) * each;
  return {begin, min(begin + each, length), length, (length + each - 1) / each};
}

// The group's queries after rotary, rounded as a rotated tensor would be so that this equals the unfused path; and, by
// the block that has the last token, its key and value into the pages (at `newest`).
template <int D>
__device__ void prepare(const DecodeAttention& a, int64_t r, bool has_newest, int64_t newest,
                        __nv_bfloat16 (&queries)[kHeads][D]) {
  const int heads = static_cast<int>(a.heads), kv_heads = static_cast<int>(a.kv_heads), group_size = heads / kv_heads;
  const int kv_head = blockIdx.y;
  const auto* row = static_cast<const __nv_bfloat16*>(a.qkv) + r * (heads + 2 * kv_heads) * D;
  const float *cos = a.cos + r * (D / 2), *sin = a.sin + r * (D / 2);
  for (int i = threadIdx.x; i < kHeads * D; i += kThreads) {
    const int h = i / D;
    queries[h][i % D] =
        __float2bfloat16(h < group_size ? rotated(row + (kv_head * group_size + h) * D, cos, sin, i % D, D / 2) : 0.0f);
  }
  if (!has_newest) return;
  const auto* k = row + (heads + kv_head) * D;
  const auto* v = row + (heads + kv_heads + kv_head) * D;
  for (int i = threadIdx.x; i < D; i += kThreads) {
    static_cast<__nv_bfloat16*>(a.keys)[newest + i] = __float2bfloat16(rotated(k, cos, sin, i, D / 2));
    static_cast<__nv_bfloat16*>(a.values)[newest + i] = v[i];
  }
}

// Whether this block is the last of `parts` to come here. All threads get the answer.
__device__ bool is_last(int32_t* finished, int parts) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(finished, 1) == parts - 1;
    if (last) *finished = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

template <int D>
__global__ void __launch_bounds__(kThreads) decode_attention_kernel(const DecodeAttention a) {
  __shared__ Part<D> parts[kWarps];
  __shared__ alignas(16) __nv_bfloat16 queries[kHeads][D];
  const int kv_head = blockIdx.y, t = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kv_heads = static_cast<int>(a.kv_heads), group_size = static_cast<int>(a.heads) / kv_heads;
  wait_for_previous_kernel();
  start_next_kernel();
  const Share share = find_share(a, t);
  if (share.begin >= share.end) return;

  const int64_t r = a.rows == nullptr ? t : a.rows[t];
  const int32_t* table = a.block_table + t * a.table_stride;
  const int size = static_cast<int>(a.block_size);
  const auto place = [&](int position) {  // of a token's key in the pages
    return ((static_cast<int64_t>(table[position / size]) * kv_heads + kv_head) * size + position % size) * D;
  };
  prepare<D>(a, r, share.end == share.length, place(share.length - 1), queries);
  __syncthreads();

  uint4 q[Warp<D>::kPieces];
#pragma unroll
  for (int p = 0; p < Warp<D>::kPieces; ++p) {
    q[p] = *reinterpret_cast<const uint4*>(&queries[lane / 4][p * 32 + lane % 4 * 8]);
  }
  const float scale = rsqrtf(static_cast<float>(D)) * 1.44269504f;  // softmax in base 2
  Warp<D> state;
  for (int base = share.begin + warp * kTile; base < share.end; base += kWarps * kTile) {
    const int64_t at = place(base);
    state.add_tile(q, static_cast<const __nv_bfloat16*>(a.keys) + at, static_cast<const __nv_bfloat16*>(a.values) + at,
                   min(share.end - base, kTile), scale);
  }
  state.leave(parts[warp]);
  __syncthreads();

  auto* out = static_cast<__nv_bfloat16*>(a.out) + (r * a.heads + kv_head * group_size) * D;
  Part<D>* all = static_cast<Part<D>*>(a.partial) + (static_cast<int64_t>(t) * kv_heads + kv_head) * a.splits;
  float max, sum;
  for (int i = threadIdx.x; i < group_size * D; i += kThreads) {
    const int h = i / D, d = i % D;
    const float acc = combine(parts, kWarps, h, d, max, sum);
    if (share.parts == 1) {
      out[i] = __float2bfloat16(acc / sum);
      continue;
    }
    Part<D>& mine = all[blockIdx.x];
    mine.acc[h][d] = acc;
    if (d == 0) {
      mine.max[h] = max;
      mine.sum[h] = sum;
    }
  }
  if (share.parts == 1 || !is_last(a.finished + t * kv_heads + kv_head, share.parts)) return;
  for (int i = threadIdx.x; i < group_size * D; i += kThreads) {
    const float acc = combine(all, share.parts, i / D, i % D, max, sum);
    out[i] = __float2bfloat16(acc / sum);
  }
}

template <int D>
int launch(const DecodeAttention& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.splits), static_cast<unsigned>(a.kv_heads),
                  static_cast<unsigned>(a.sequences));
  return launch_dependent(decode_attention_kernel<D>, {grid, kThreads, stream}, a);
}

}  // namespace

int64_t decode_attention_partial_bytes(int64_t sequences, int64_t kv_heads, int64_t dim, int64_t splits) {
  return sequences * kv_heads * splits * static_cast<int64_t>(sizeof(float)) * kHeads * (dim + 2);
}

bool has_decode_attention(const DecodeAttentionShape& s) {
  return s.kv_heads >= 1 && s.heads % s.kv_heads == 0 && s.heads / s.kv_heads <= kHeads &&
         (s.dim == 64 || s.dim == 128) && s.block_size >= kTile && s.block_size % kTile == 0;
}

int decode_attention(const DecodeAttention& a, void* stream) {
  if (!has_decode_attention({a.heads, a.kv_heads, a.dim, a.block_size}) || a.splits < 1 || a.sequences < 1) {
    return cudaErrorInvalidValue;
  }
  const auto s = static_cast<cudaStream_t>(stream);
  return a.dim == 64 ? launch<64>(a, s) : launch<128>(a, s);
}

}  // namespace parvl::kernels
