#include <cuda_runtime.h>

#include "parvl/kernels/launch.cuh"
#include "parvl/kernels/mma.cuh"
#include "parvl/kernels/prefill_attention.h"

namespace parvl::kernels {
namespace {

constexpr int kStoreThreads = 256;

// One block a row.
__global__ void __launch_bounds__(kStoreThreads) store_kernel(const StoreRows a) {
  wait_for_previous_kernel();
  start_next_kernel();
  const int dim = static_cast<int>(a.shape.dim), half = dim / 2, size = static_cast<int>(a.shape.block_size);
  const int heads = static_cast<int>(a.shape.heads), kv_heads = static_cast<int>(a.shape.kv_heads);
  const int64_t row = blockIdx.x;
  const auto* qkv = static_cast<const __nv_bfloat16*>(a.qkv) + row * (heads + 2 * kv_heads) * dim;
  const float *cos = a.cos + row * half, *sin = a.sin + row * half;
  const int64_t block = a.places[row] / size, offset = a.places[row] % size;
  auto* q = static_cast<__nv_bfloat16*>(a.q) + row * heads * dim;
  for (int i = threadIdx.x; i < (heads + 2 * kv_heads) * dim; i += kStoreThreads) {
    const int head = i / dim, d = i % dim;
    if (head < heads) {
      q[i] = __float2bfloat16(rotated(qkv + head * dim, cos, sin, d, half));
      continue;
    }
    const int kv = (head - heads) % kv_heads;
    const int64_t at = ((block * kv_heads + kv) * size + offset) * dim + d;
    if (head < heads + kv_heads) {
      static_cast<__nv_bfloat16*>(a.keys)[at] = __float2bfloat16(rotated(qkv + head * dim, cos, sin, d, half));
    } else {
      static_cast<__nv_bfloat16*>(a.values)[at] = qkv[i];
    }
  }
}

constexpr int kWarps = 4;
constexpr int kRows = kPrefillTile / kWarps;  // queries a warp takes
constexpr int kKeys = 16;                     // keys at a time
static_assert(kRows == 16);

// What a warp carries over the keys: 16 queries of one head. The products are Q Kᵀ (queries are rows, keys columns) and
// P V; what the first leaves in a thread's registers is what the second takes. As in decode_attention.cu, each thread
// uses the 16-byte pieces of rows as they come.
template <int D>
struct Queries {
  static constexpr int kPieces = D / 32;  // of a row: 8 dims a lane each
  static constexpr int kPlanes = D / 16;  // pairs of columns of the output
  uint4 q[2][kPieces];                    // rows `group` and `group` + 8
  float max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  float acc[2 * kPlanes][4] = {};

  // `k`, `v`: the first of 16 keys, at position `base`; `position`: of query row 0; `count`: keys that exist.
  __device__ void add_keys(const __nv_bfloat16* k, const __nv_bfloat16* v, int base, int position, int count,
                           float scale) {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    float score[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const uint4 key = *reinterpret_cast<const uint4*>(k + (half * 8 + group) * D + p * 32 + quad * 8);
        mma(score[half], q[0][p].x, q[1][p].x, q[0][p].y, q[1][p].y, key.x, key.y);
        mma(score[half], q[0][p].z, q[1][p].z, q[0][p].w, q[1][p].w, key.z, key.w);
      }
    }
    uint32_t values[4][kPlanes];
    load_values<D>(values, v, count);
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = base + half * 8 + quad * 2 + i % 2, query = position + group + i / 2 * 8;
        float& s = score[half][i];
        s = key <= query ? s * scale : -INFINITY;
        highest[i / 2] = fmaxf(highest[i / 2], s);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], 1));
      highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], 2));
      const float new_max = fmaxf(max[r], highest[r]);
      // A row that has seen no key yet keeps sums of zero.
      const float by = new_max == -INFINITY ? 1.0f : exp2f(max[r] - new_max);
      max[r] = new_max;
      sum[r] *= by;
#pragma unroll
      for (int n = 0; n < 2 * kPlanes; ++n) {
        acc[n][2 * r] *= by;
        acc[n][2 * r + 1] *= by;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = score[half][i];
        s = s == -INFINITY ? 0.0f : exp2f(s - max[i / 2]);
        sum[i / 2] += s;
      }
    }
    const uint32_t p0 = pack(score[0][0], score[0][1]), p1 = pack(score[0][2], score[0][3]),
                   p2 = pack(score[1][0], score[1][1]), p3 = pack(score[1][2], score[1][3]);
#pragma unroll
    for (int n = 0; n < kPlanes; ++n) {
      mma(acc[2 * n], p0, p1, p2, p3, low_halves(values[0][n], values[1][n]), low_halves(values[2][n], values[3][n]));
      mma(acc[2 * n + 1], p0, p1, p2, p3, high_halves(values[0][n], values[1][n]),
          high_halves(values[2][n], values[3][n]));
    }
  }

  // Row `group` + 8 · r, divided by its sum, to `out` (its D values).
  __device__ void write(int r, __nv_bfloat16* out) {
    const int quad = threadIdx.x % 4;
    float total = sum[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (out == nullptr) return;
    const float by = 1.0f / total;
#pragma unroll
    for (int column = 0; column < 2; ++column) {  // columns 2t and 2t + 1: D / 8 dims each
      uint32_t words[kPlanes];
#pragma unroll
      for (int n = 0; n < kPlanes; ++n) {
        words[n] = pack(acc[2 * n][2 * r + column] * by, acc[2 * n + 1][2 * r + column] * by);
      }
#pragma unroll
      for (int n = 0; n < kPlanes; n += 4) {
        *reinterpret_cast<uint4*>(out + (quad * 2 + column) * (D / 8) + n * 2) = {words[n], words[n + 1], words[n + 2],
                                                                                  words[n + 3]};
      }
    }
  }
};

template <int D>
__global__ void __launch_bounds__(kWarps * 32) prefill_kernel(const PrefillAttention a) {
  wait_for_previous_kernel();
  start_next_kernel();
  // The last queries of a sequence see the most keys: their blocks start first.
  const PrefillTile tile = a.tiles[gridDim.x - 1 - blockIdx.x];
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int first = warp * kRows;
  if (first >= tile.count) return;
  const int heads = static_cast<int>(a.shape.heads), kv_heads = static_cast<int>(a.shape.kv_heads);
  const int kv_head = head / (heads / kv_heads), size = static_cast<int>(a.shape.block_size);
  const auto row_of = [&](int r) { return (static_cast<int64_t>(tile.row + first + r) * heads + head) * D; };

  Queries<D> state;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool real = first + r * 8 + group < tile.count;
    const auto* q = static_cast<const __nv_bfloat16*>(a.q) + row_of(r * 8 + group);
#pragma unroll
    for (int p = 0; p < Queries<D>::kPieces; ++p) {
      state.q[r][p] = real ? *reinterpret_cast<const uint4*>(q + p * 32 + quad * 8) : uint4{0, 0, 0, 0};
    }
  }
  const int position = tile.position + first;
  const int keys = position + min(kRows, tile.count - first);  // that the last query sees
  const int32_t* table = a.block_table + tile.sequence * a.table_stride;
  const float scale = rsqrtf(static_cast<float>(D)) * 1.44269504f;  // softmax in base 2
  for (int base = 0; base < keys; base += kKeys) {
    const int64_t at = ((static_cast<int64_t>(table[base / size]) * kv_heads + kv_head) * size + base % size) * D;
    state.add_keys(static_cast<const __nv_bfloat16*>(a.keys) + at, static_cast<const __nv_bfloat16*>(a.values) + at,
                   base, position, keys - base, scale);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool real = first + r * 8 + group < tile.count;
    state.write(r, real ? static_cast<__nv_bfloat16*>(a.out) + row_of(r * 8 + group) : nullptr);
  }
}

bool is_valid(const DecodeAttentionShape& s) {
  return s.kv_heads >= 1 && s.heads % s.kv_heads == 0 &&
         has_decode_attention({s.kv_heads, s.kv_heads, s.dim, s.block_size});
}

}  // namespace

int store_rows(const StoreRows& a, void* stream) {
  if (!is_valid(a.shape) || a.rows < 1) return cudaErrorInvalidValue;
  return launch_dependent(store_kernel,
                          {dim3(static_cast<unsigned>(a.rows)), kStoreThreads, static_cast<cudaStream_t>(stream)}, a);
}

int prefill_attention(const PrefillAttention& a, void* stream) {
  if (!is_valid(a.shape) || a.num_tiles < 1) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(a.num_tiles), static_cast<unsigned>(a.shape.heads));
  const LaunchShape shape = {grid, kWarps * 32, static_cast<cudaStream_t>(stream)};
  return a.shape.dim == 64 ? launch_dependent(prefill_kernel<64>, shape, a)
                           : launch_dependent(prefill_kernel<128>, shape, a);
}

}  // namespace parvl::kernels
