#include <algorithm>

#include "parvl/kernels/gemm_amx.h"

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace parvl::kernels {
namespace {

constexpr int64_t kSide = 16;                // rows of a tile; a row has 64 bytes
constexpr int64_t kTile = kSide * kAmxStep;  // values in a tile of x or w
constexpr int64_t kOutputs = 2 * kSide;      // two tiles of w are in work, with two of x, and four of sums
constexpr int64_t kLineBytes = 64;
#define PARVL_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16"), optimize("O3")))

int64_t groups_of(int64_t rows) { return (rows + kSide - 1) / kSide; }

// What a tile holds: as the instruction reads it.
struct alignas(64) Shapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums of tile 4 with 6 and 7, then of tile 5 with both. 4 and 5: w. 6 and 7: x. `first` and `second`:
// rows of w in tiles 4 and 5; a tile without rows is not there.
PARVL_AMX void set_shapes(int64_t first, int64_t second) {
  Shapes shapes;
  const int64_t rows[8] = {first, first, second, second, first, second, kSide, kSide};
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
    shapes.row_bytes[tile] = rows[tile] > 0 ? kLineBytes : 0;
  }
  asm volatile("" ::"r"(&shapes) : "memory");  // the instruction tells the compiler of its first bytes only
  _tile_loadconfig(&shapes);
}

struct Sums {
  alignas(64) float tiles[4][kSide * kSide];
};

// All of k for one or two tiles of w and one or two of x. `First`: w comes from memory, where the processor's own
// prefetching does not follow so many short streams: the next rows of w are fetched meanwhile.
template <bool TwoOfW, bool TwoOfX, bool First>
PARVL_AMX inline void multiply(const BFloat16* x, const BFloat16* w, int64_t k, Sums& sums) {
  const int64_t stride = k * static_cast<int64_t>(sizeof(BFloat16));
  const BFloat16 *x2 = x + kSide * k, *w2 = w + kSide * k;
  const char* ahead = reinterpret_cast<const char*>(w + kOutputs * k);
  _tile_zero(0);
  if constexpr (TwoOfX) _tile_zero(1);
  if constexpr (TwoOfW) _tile_zero(2);
  if constexpr (TwoOfW && TwoOfX) _tile_zero(3);
  for (int64_t i = 0; i < k; i += kAmxStep, x += kTile, x2 += kTile) {
    if constexpr (First) {
      for (int64_t line = 0; line < kOutputs; ++line) __builtin_prefetch(ahead + line * kLineBytes, 0, 2);
      ahead += kOutputs * kLineBytes;
    }
    _tile_loadd(6, x, kLineBytes);
    _tile_loadd(4, w + i, stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (TwoOfX) {
      _tile_loadd(7, x2, kLineBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (TwoOfW) {
      _tile_loadd(5, w2 + i, stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (TwoOfW && TwoOfX) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums.tiles[0], kLineBytes);
  if constexpr (TwoOfX) _tile_stored(1, sums.tiles[1], kLineBytes);
  if constexpr (TwoOfW) _tile_stored(2, sums.tiles[2], kLineBytes);
  if constexpr (TwoOfW && TwoOfX) _tile_stored(3, sums.tiles[3], kLineBytes);
}

// A tile of sums has outputs as rows and rows of x as columns: `outputs` of them for each of `rows`, into y [rows, n].
PARVL_AMX void write(const float* tile, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n, int64_t outputs) {
  const __mmask16 mask = static_cast<__mmask16>((1u << outputs) - 1);
  const __m512i column = _mm512_set_epi32(240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16, 0);
  __m512 offsets = _mm512_setzero_ps();
  if (bias != nullptr) {
    const __m512i words = _mm512_maskz_cvtepu16_epi32(mask, _mm256_maskz_loadu_epi16(mask, bias));
    offsets = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(mask, words, 16));
  }
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 values = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, column, tile + r, sizeof(float));
    const __m256bh narrow = _mm512_cvtneps_pbh(_mm512_add_ps(values, offsets));
    __m256i words;
    __builtin_memcpy(&words, &narrow, sizeof words);
    _mm256_mask_storeu_epi16(y + r * n, mask, words);
  }
}

// Outputs [o, o + first + second) for every row.
template <bool TwoOfW>
PARVL_AMX void all_rows(const BFloat16* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows,
                        int64_t n, int64_t k, int64_t o, int64_t first, int64_t second) {
  Sums sums;
  const BFloat16* bias2 = bias != nullptr ? bias + o + kSide : nullptr;
  for (int64_t r = 0; r < rows; r += 2 * kSide) {
    const BFloat16 *from = x + r * k, *weights = w + o * k;
    const int64_t here = std::min(kSide, rows - r), more = std::min(kSide, rows - r - here);
    if (more > 0) {
      r == 0 ? multiply<TwoOfW, true, true>(from, weights, k, sums)
             : multiply<TwoOfW, true, false>(from, weights, k, sums);
    } else {
      r == 0 ? multiply<TwoOfW, false, true>(from, weights, k, sums)
             : multiply<TwoOfW, false, false>(from, weights, k, sums);
    }
    BFloat16 *out = y + r * n + o, *out2 = out + kSide * n;
    write(sums.tiles[0], bias != nullptr ? bias + o : nullptr, out, here, n, first);
    if (more > 0) write(sums.tiles[1], bias != nullptr ? bias + o : nullptr, out2, more, n, first);
    if constexpr (TwoOfW) {
      write(sums.tiles[2], bias2, out + kSide, here, n, second);
      if (more > 0) write(sums.tiles[3], bias2, out2 + kSide, more, n, second);
    }
  }
}

PARVL_AMX void run(const BFloat16* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n,
                   int64_t k, int64_t begin, int64_t end) {
  asm volatile("" ::: "memory");  // the loads of tiles do not tell the compiler that they read x
  set_shapes(kSide, kSide);
  int64_t o = begin;
  for (; o + kOutputs <= end; o += kOutputs) all_rows<true>(x, w, bias, y, rows, n, k, o, kSide, kSide);
  if (const int64_t left = end - o; left > kSide) {
    set_shapes(kSide, left - kSide);
    all_rows<true>(x, w, bias, y, rows, n, k, o, kSide, left - kSide);
  } else if (left > 0) {
    set_shapes(left, 0);
    all_rows<false>(x, w, bias, y, rows, n, k, o, left, 0);
  }
  _tile_release();
}

// A process must ask before its first use of the tiles, whose contents a thread's switch then saves.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM and the state's number
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool has_amx() {
  static const bool kHas = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && may_use_tiles();
  return kHas;
}

// Tiles of 16 rows side by side: a tile's row has two neighbouring values of each of them.
std::vector<BFloat16> pack_for_amx(const BFloat16* x, int64_t rows, int64_t k) {
  std::vector<BFloat16> packed(static_cast<size_t>(groups_of(rows) * kSide * k));
  for (int64_t first = 0; first < rows; first += kSide) {
    BFloat16* out = packed.data() + first * k;
    for (int64_t i = 0; i < k; i += 2, out += 2 * kSide) {
      for (int64_t r = first; r < std::min(rows, first + kSide); ++r)
        std::copy_n(x + r * k + i, 2, out + (r - first) * 2);
    }
  }
  return packed;
}

void gemm_amx(const BFloat16* packed_x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n,
              int64_t k, int64_t begin, int64_t end) {
  run(packed_x, w, bias, y, rows, n, k, begin, end);
}

}  // namespace parvl::kernels

#else

#include <cstdlib>

namespace parvl::kernels {

bool has_amx() { return false; }
std::vector<BFloat16> pack_for_amx(const BFloat16*, int64_t, int64_t) { std::abort(); }
void gemm_amx(const BFloat16*, const BFloat16*, const BFloat16*, BFloat16*, int64_t, int64_t, int64_t, int64_t,
              int64_t) {
  std::abort();  // never called: has_amx is false
}

}  // namespace parvl::kernels

#endif
