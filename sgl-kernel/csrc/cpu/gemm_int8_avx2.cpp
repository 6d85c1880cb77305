// The int8 kernel for AVX2: bytes of even and of odd k become 16 bits wide, whose products are added up in pairs.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#include <immintrin.h>

#include "gemm_int8_rows.h"

namespace sgl_batch {
namespace {

constexpr int kRows = 4;
constexpr int kVectors = 2;  // of eight columns: what the registers hold the sums of
constexpr int kColumns = 8;

// Signed bytes of even and odd k, 16 bits wide.
struct Halves {
  explicit Halves(__m256i bytes)
      : even(_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8)), odd(_mm256_srai_epi16(bytes, 8)) {}
  __m256i even, odd;
};

template <int M>
struct TileHalves {
  static void run(const Int8Tile& tile) {
    for (int column = 0; column < kPanel; column += kVectors * kColumns) run_columns(tile, column);
  }

  static void run_columns(const Int8Tile& tile, int column) {
    __m256i sums[M][kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) sums[i][0] = sums[i][1] = _mm256_setzero_si256();
    const uint8_t* b = tile.panel + column * kQuad;
    QuadRows<M> rows(tile);
    QuadPrefetch<> prefetch(column == 0 ? tile.ahead : Ahead{b, 0});
    for (int64_t step = 0; step < tile.steps; ++step, b += kStepBytes, rows.advance(), prefetch.advance()) {
      __m256i even[kVectors], odd[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + v * kColumns * kQuad));
        even[v] = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
        odd[v] = _mm256_srli_epi16(bytes, 8);
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const Halves row(_mm256_set1_epi32(rows.quad(i)));
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(even[v], row.even), _mm256_madd_epi16(odd[v], row.odd));
          sums[i][v] = _mm256_add_epi32(sums[i][v], both);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile.c + i * kPanel + column + v * kColumns), sums[i][v]);
  }
};

}  // namespace

constinit const Int8Kernel kAvx2Int8{
    .name = "avx2", .run = by_rows<TileHalves, kRows>, .divide = divide_plainly, .cut = {.max_rows = kRows}};
}  // namespace sgl_batch
#endif
